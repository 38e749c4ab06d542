"""The topology scheduler's contract: a signal in, a decision out."""

from dataclasses import dataclass
from typing import Any, Protocol

from entmtp.drafters.base import DraftPlan
from entmtp.scheduler.signals import Signal

__all__ = ["SchedulerDecision", "SchedulerState", "TopologyScheduler"]

SchedulerState = Any
"""Private to each scheduler: made by ``start``, one a request, bounded."""


@dataclass(frozen=True)
class SchedulerDecision:
    """What was chosen and on what grounds, so that it can be logged and replayed.

    Attributes:
        name: of the bank entry.
        plan: its topology, or how to grow one.
        bin: which interval of the signal it was; 0 where a policy has none.
    """

    name: str
    plan: DraftPlan
    bin: int = 0


class TopologyScheduler(Protocol):
    """Chooses a topology before every step. It never touches the cache or the model.

    One whose plans may hold copies says so by an attribute ``can_copy`` that is true: prompts are
    then read for copies with their first tokens, not in the first step that asks for one.
    """

    @property
    def policy(self) -> str:
        """Name of the rule, for reports."""

    def start(self) -> SchedulerState:
        """State of a new request."""

    def choose(self, state: SchedulerState, signal: Signal) -> SchedulerDecision:
        """Pick the plan of the next step; may change ``state`` and nothing else."""
