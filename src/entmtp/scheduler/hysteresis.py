"""``hysteresis``: levels of trees, with a dead band between going up and coming down.

The paper's EntMTP-tau (arXiv 2606.27550, phase 2) has two trees and the pair (tau_on, tau_off).
This is the same rule for any number of levels on any free signal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from entmtp.bank import Bank
from entmtp.errors import InputError
from entmtp.scheduler.bands import Bands, LevelState, check_rising
from entmtp.scheduler.base import SchedulerDecision, prepared
from entmtp.scheduler.signals import Signal
from entmtp.scheduler.values import check_levels, signal_value

__all__ = ["HysteresisParams", "HysteresisScheduler"]


@dataclass(frozen=True)
class HysteresisParams:
    """Thresholds on a signal, which is larger where text is more predictable.

    The defaults are on the moving average of the root's entropy, in nats, with its sign changed.

    Attributes:
        levels: bank entries, that of the least predictable text first.
        up_at: rising; entry i: go from level i to i + 1 where the signal is at or above it.
        down_below: rising; entry i: come back from level i + 1 to i where the signal is below it;
            smaller than ``up_at[i]``.
        min_dwell: steps at a level before the next change.
        start_level: level of the first step.
        signal: one of :data:`entmtp.scheduler.SIGNALS`.
    """

    levels: Sequence[str] = ("none", "chain4", "tree16")
    up_at: Sequence[float] = (-3.0, -2.2)
    down_below: Sequence[float] = (-3.6, -2.7)
    min_dwell: int = 2
    start_level: int = 2
    signal: str = "entropy_ema"

    def __post_init__(self) -> None:
        """Check that the thresholds fit the levels and leave a dead band.

        Raises:
            InputError: says which rule is broken.
        """
        check_levels(self.signal, self.levels)
        if not len(self.levels) - 1 == len(self.up_at) == len(self.down_below):
            raise InputError(
                f"{len(self.levels)} levels need {len(self.levels) - 1} pairs of thresholds, "
                f"not {len(self.up_at)} and {len(self.down_below)}"
            )
        if any(not down < up for up, down in zip(self.up_at, self.down_below, strict=True)):
            raise InputError("each threshold in down_below must be below its partner in up_at")
        check_rising("up_at", self.up_at)
        check_rising("down_below", self.down_below)
        if not 0 <= self.start_level < len(self.levels) or self.min_dwell < 1:
            raise InputError("start_level must name a level, and min_dwell must be at least 1")


class HysteresisScheduler:
    """Moves at most one level a step; deterministic in the signal."""

    policy = "hysteresis"

    def __init__(self, bank: Bank, params: HysteresisParams | None = None) -> None:
        """Take the trees of ``params.levels`` from the bank.

        Raises:
            BankError: the bank lacks one of the levels.
        """
        self._params = params = params or HysteresisParams()
        self._bands = Bands(
            tuple(params.up_at), tuple(params.down_below), params.min_dwell, jumps=False
        )
        self._decisions = [
            SchedulerDecision(name, prepared(bank.get(name)), bin=level)
            for level, name in enumerate(params.levels)
        ]

    def start(self) -> LevelState:
        """At the start level, free to move at once."""
        return self._bands.start(self._params.start_level)

    def choose(self, state: LevelState, signal: Signal) -> SchedulerDecision:
        """Up at or above ``up_at``, down below ``down_below``, else stay."""
        value = signal_value(signal, self._params.signal)
        return self._decisions[self._bands.move(state, value)]
