"""``hysteresis``: levels of trees, with a dead band between going up and coming down.

The paper's EntMTP-tau (arXiv 2606.27550, phase 2) has two trees and the pair (tau_on, tau_off).
This is the same rule for any number of levels on a free signal, read so that a *low* value means
predictable text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from entmtp.bank import Bank
from entmtp.errors import InputError
from entmtp.scheduler.base import SchedulerDecision
from entmtp.scheduler.signals import Signal

__all__ = ["HysteresisParams", "HysteresisScheduler"]


@dataclass(frozen=True)
class HysteresisParams:
    """Thresholds on the moving average of the root's entropy, in nats.

    Attributes:
        levels: bank entries, smallest first.
        up_at: entry i: go from level i to i + 1 where the signal is at or below it.
        down_above: entry i: come back from level i + 1 to i where the signal is above it;
            larger than ``up_at[i]``.
        min_dwell: steps at a level before the next change.
        start_level: level of the first step.
    """

    levels: Sequence[str] = ("none", "chain4", "tree16")
    up_at: Sequence[float] = (3.0, 2.2)
    down_above: Sequence[float] = (3.6, 2.7)
    min_dwell: int = 2
    start_level: int = 2

    def __post_init__(self) -> None:
        """Check that the thresholds fit the levels and leave a dead band.

        Raises:
            InputError: says which rule is broken.
        """
        if not len(self.levels) - 1 == len(self.up_at) == len(self.down_above):
            raise InputError(
                f"{len(self.levels)} levels need {len(self.levels) - 1} pairs of thresholds, "
                f"not {len(self.up_at)} and {len(self.down_above)}"
            )
        if any(not up < down for up, down in zip(self.up_at, self.down_above, strict=True)):
            raise InputError("each threshold in up_at must be below its partner in down_above")
        if not 0 <= self.start_level < len(self.levels) or self.min_dwell < 1:
            raise InputError("start_level must name a level, and min_dwell must be at least 1")


@dataclass
class _State:
    level: int
    num_steps_here: int = 0


class HysteresisScheduler:
    """Moves at most one level a step; deterministic in the signal."""

    policy = "hysteresis"

    def __init__(self, bank: Bank, params: HysteresisParams | None = None) -> None:
        """Take the trees of ``params.levels`` from the bank.

        Raises:
            BankError: the bank lacks one of the levels.
        """
        self._params = params or HysteresisParams()
        self._decisions = [
            SchedulerDecision(name, bank.get(name), bin=level)
            for level, name in enumerate(self._params.levels)
        ]

    def start(self) -> _State:
        """At the start level, free to move at once."""
        return _State(self._params.start_level, self._params.min_dwell)

    def choose(self, state: _State, signal: Signal) -> SchedulerDecision:
        """Up at or below ``up_at``, down above ``down_above``, else stay."""
        params, level = self._params, state.level
        if state.num_steps_here >= params.min_dwell:
            if level + 1 < len(params.levels) and signal.entropy_ema <= params.up_at[level]:
                level += 1
            elif level > 0 and signal.entropy_ema > params.down_above[level - 1]:
                level -= 1
        state.num_steps_here = state.num_steps_here + 1 if level == state.level else 1
        state.level = level
        return self._decisions[level]
