"""``ladder``: thresholds on a signal pick one of several trees.

The paper's EntMTP-l (arXiv 2606.27550, phase 2): K - 1 thresholds, K trees, no memory.
"""

from dataclasses import dataclass

from entmtp.bank import Bank
from entmtp.errors import InputError
from entmtp.scheduler.bands import Bands, LevelState, check_rising
from entmtp.scheduler.base import SchedulerDecision, prepared
from entmtp.scheduler.signals import Signal
from entmtp.scheduler.values import check_levels, signal_value

__all__ = ["LadderParams", "LadderScheduler"]


@dataclass(frozen=True)
class LadderParams:
    """Thresholds on a signal, which is larger where text is more predictable.

    Attributes:
        levels: bank entries, that of the least predictable text first.
        thresholds: one less, rising; entry i: level i + 1 from there on.
        signal: one of :data:`entmtp.scheduler.SIGNALS`.
    """

    levels: tuple[str, ...]
    thresholds: tuple[float, ...]
    signal: str = "p0"

    def __post_init__(self) -> None:
        """Check that the thresholds fit the levels.

        Raises:
            InputError: says which rule is broken.
        """
        check_levels(self.signal, self.levels)
        if len(self.levels) - 1 != len(self.thresholds):
            raise InputError(
                f"{len(self.levels)} levels need {len(self.levels) - 1} thresholds, not "
                f"{len(self.thresholds)}"
            )
        check_rising("thresholds", self.thresholds)


class LadderScheduler:
    """A tree for each interval of a signal; deterministic in it."""

    policy = "ladder"

    def __init__(self, bank: Bank, params: LadderParams) -> None:
        """Take the trees of the levels from the bank.

        Raises:
            BankError: the bank lacks one of them.
        """
        self._signal = params.signal
        self._bands = Bands(params.thresholds, params.thresholds)
        self._decisions = [
            SchedulerDecision(name, prepared(bank.get(name)), bin=level)
            for level, name in enumerate(params.levels)
        ]

    def start(self) -> LevelState:
        """Nothing is remembered but the level of the last step."""
        return self._bands.start()

    def choose(self, state: LevelState, signal: Signal) -> SchedulerDecision:
        """The tree of the interval."""
        return self._decisions[self._bands.move(state, signal_value(signal, self._signal))]
