"""The topology scheduler's contract: a signal in, a decision out."""

from dataclasses import dataclass
from typing import Any, Protocol

from entmtp.drafters.base import DraftPlan
from entmtp.growth import GrowthPlan
from entmtp.kernels.growth import plan_shape
from entmtp.kernels.trees import tree_shape
from entmtp.scheduler.signals import Signal
from entmtp.topology import Topology

__all__ = ["SchedulerDecision", "SchedulerState", "TopologyScheduler", "prepared", "prepared_plan"]

_MAX_CUTS = 16  # depths of a tree that is also prepared as it is cut near the end of a text

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


def prepared(topology: Topology) -> Topology:
    """The same tree, of which a step makes nothing any more: neither in Python nor for the core.

    So are the trees that it is cut to near the end of a text, unless there are many.
    """
    shortest = 0 if topology.max_depth <= _MAX_CUTS else topology.max_depth
    for depth in range(shortest, topology.max_depth + 1):
        tree = topology.truncate(depth)
        tree.prepare()
        tree_shape(tree)
    return topology


def prepared_plan(plan: GrowthPlan) -> GrowthPlan:
    """The same plan; the envelope's arrays are made, and what the core reads of both."""
    plan.rule.envelope.prepare()
    plan_shape(plan)
    plan.bare(None)
    return plan
