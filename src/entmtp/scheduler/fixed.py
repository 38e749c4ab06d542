"""``fixed``: one tree for every step."""

from entmtp.scheduler.base import SchedulerDecision, prepared
from entmtp.scheduler.signals import Signal
from entmtp.topology import Topology

__all__ = ["FixedScheduler"]


class FixedScheduler:
    """The static baseline, and plain decoding with the empty tree."""

    policy = "fixed"

    def __init__(self, name: str, topology: Topology) -> None:
        """Always choose ``topology``, reported as ``name``."""
        self.name = name
        self._decision = SchedulerDecision(name, prepared(topology))

    @classmethod
    def plain(cls) -> "FixedScheduler":
        """Plain decoding: the empty tree at every step, reported as ``none``."""
        return cls("none", Topology(()))

    def start(self) -> None:
        """No state."""

    def choose(self, state: None, signal: Signal) -> SchedulerDecision:
        """The one decision."""
        return self._decision
