"""A guard against drafts that do not pay: a ledger of them, and a policy that keeps to it.

What a policy knows was learned on some text, at some temperature; its lowest class is the worst of
that text, not text in which drafts are never right. The ledger adds up what drafts bring and what
they cost, a cumulative sum (Page, 1954) with a ceiling: below zero, nothing is drafted. Policies
over fixed trees then draft a single token now and then, ever more rarely, and once one is kept
they have their way again. ``dynamic`` keeps a ledger of its own.
"""

from dataclasses import dataclass, field

from entmtp.costs import CostTable
from entmtp.drafters.base import DraftPlan
from entmtp.scheduler.bands import CONTEXTS, LevelState, Places, is_probe
from entmtp.scheduler.base import (
    SchedulerDecision,
    SchedulerState,
    TopologyScheduler,
    prepared,
)
from entmtp.scheduler.signals import Signal
from entmtp.topology import Topology

__all__ = ["GuardedScheduler", "Ledger"]

_CREDIT = 1.5  # tokens that drafts may lose before they are stopped, at the start
_CEILING = 3.0  # the same, after they have gained more
_SECOND_CREDIT = 0.75  # the same, after a probe was kept

_PLAIN = SchedulerDecision("none", prepared(Topology(())))
_PROBE = SchedulerDecision("chain1", prepared(Topology.chain(1)))


@dataclass(slots=True)
class Ledger:
    """What the drafts of a request bring and cost.

    Attributes:
        credit: tokens that they have brought beyond their price, at most the ceiling.
        is_stopped: whether they have lost their credit.
    """

    credit: float = _CREDIT
    is_stopped: bool = False

    def add(self, net: float) -> None:
        """Take a draft: tokens that it brought less those that its time was worth."""
        if not self.is_stopped:
            self.credit = min(self.credit + net, _CEILING)
            self.is_stopped = self.credit < 0

    def resume(self) -> None:
        """Let drafts go on, with little credit."""
        self.is_stopped, self.credit = False, _SECOND_CREDIT


@dataclass(slots=True)
class _State:
    """Of one request.

    Attributes:
        inner: of the guarded policy.
        price: tokens that plain decoding would have emitted in the time that the last step cost
            more.
        ledger: of its drafts.
        pauses: counts plain steps between probes.
    """

    inner: SchedulerState
    price: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    pauses: LevelState = field(default_factory=lambda: LevelState(0, 0))


@dataclass(slots=True)
class _Prices:
    """Of decisions by name, for a class of contexts and a batch."""

    context: int
    batch: int
    of: dict[str, float] = field(default_factory=dict)


class GuardedScheduler:
    """Another policy until its drafts lose time; deterministic in the signal."""

    def __init__(self, inner: TopologyScheduler, costs: CostTable) -> None:
        """Guard a policy over fixed trees.

        Args:
            inner: the policy.
            costs: of steps on this machine.
        """
        self._inner, self._costs = inner, costs
        self.policy = inner.policy
        self._prices = Places(_Prices)

    def start(self) -> _State:
        """Nothing is known of the request."""
        return _State(self._inner.start())

    def choose(self, state: _State, signal: Signal) -> SchedulerDecision:
        """What the policy chooses, nothing, or a probe."""
        decision = self._inner.choose(state.inner, signal)
        _account(state, signal)
        if state.ledger.is_stopped:
            decision = _PROBE if is_probe(state.pauses, is_plain=True) else _PLAIN
        state.price = self._price(decision, signal)
        return decision

    def _price(self, decision: SchedulerDecision, signal: Signal) -> float:
        prices = self._prices.at(signal.context, signal.batch)
        found = prices.of.get(decision.name)
        if found is None:
            found = prices.of[decision.name] = self._priced(decision.plan, prices)
        return found

    def _priced(self, plan: DraftPlan, place: _Prices) -> float:
        if not isinstance(plan, Topology) or not plan.num_nodes:
            return 0.0
        context, batch = float(CONTEXTS[place.context]), place.batch
        plain = self._costs.step_ms(Topology(()), context, batch)
        return self._costs.step_ms(plan, context, batch) / plain - 1


def _account(state: _State, signal: Signal) -> None:
    """Add what the last step brought."""
    if signal.last_accepted >= 0:
        if state.ledger.is_stopped and signal.last_accepted > 0:
            state.ledger.resume()
        else:
            state.ledger.add(signal.last_accepted - state.price)
