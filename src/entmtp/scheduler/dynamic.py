"""``dynamic``: the tree of every step is grown, node by node, as far as it pays.

What a node is worth is read from tables that were fitted to traced texts: the drafter's own
probability of it, how often the drafter was right lately (trust), and what followed the same words
earlier in the text. Where nothing pays the step is plain decoding; then the drafter is asked again
now and then, so that the policy recovers.

The tables are those of the traced texts. On others, or at another temperature, asking the drafter
can cost more than it brings, so a ledger is kept of that: once it is overdrawn the drafter is asked
as rarely as where it is never right, until a draft of its is kept.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.costs import CostTable
from entmtp.drafters.copying import NUM_MATCHES
from entmtp.errors import BankError, TopologyError
from entmtp.growth import (
    CODES_PER_NAT,
    NUM_CODES,
    CopyTable,
    GrowthCosts,
    GrowthPlan,
    GrowthRule,
)
from entmtp.scheduler.bands import CONTEXTS, MAX_PROBE_EVERY, PROBE_EVERY, Places
from entmtp.scheduler.base import SchedulerDecision, prepared_plan
from entmtp.scheduler.guard import Ledger
from entmtp.scheduler.reading import read_params
from entmtp.scheduler.signals import Signal
from entmtp.topology import Topology

__all__ = ["DynamicParams", "DynamicScheduler", "growth_costs", "odds_features", "trust_of"]

FloatArray = npt.NDArray[np.float64]

_KNOWN = 40  # steps after which an average over recent ones is taken as it is, nearly
_FORCED = 1e6  # gain under which a root is opened whatever it costs


def odds_features(codes: npt.NDArray[Any]) -> FloatArray:
    """``(n, 4)`` of codes: 1, x, sqrt(x) and x^2 of the nats x that a code stands for."""
    nats = (np.asarray(codes, dtype=np.float64) + 0.5) / CODES_PER_NAT
    return np.stack((np.ones_like(nats), nats, np.sqrt(nats), nats * nats), axis=-1)


@dataclass(frozen=True)
class DynamicParams:
    """Fitted parameters; S classes of trust, E nodes of the envelope, D depths.

    Attributes:
        envelope: its paths.
        odds: ``(E, 4)`` weights of :func:`odds_features` in the log-odds that a node is right
            where its parent is.
        trust_bounds: ``(S - 1,)`` shares of right first tokens, rising: between classes.
        trust_odds: ``(S, D)`` added to the log-odds at each depth.
        prior: share of right first tokens before there is any.
        prior_steps: steps that it is worth.
        gains: ``(S, D)`` of :class:`entmtp.growth.GrowthRule`.
        hits: ``(C, M)`` of :class:`entmtp.growth.CopyTable`; empty: no copies.
        mixes: the same.
        rate: tokens that a millisecond is worth, one sequence at ``context``.
        context: committed tokens.
        mean_nodes: of a tree, from which the rate elsewhere follows.
    """

    envelope: tuple[tuple[int, ...], ...]
    odds: tuple[tuple[float, ...], ...]
    trust_bounds: tuple[float, ...]
    trust_odds: tuple[tuple[float, ...], ...]
    prior: float
    prior_steps: float
    gains: tuple[tuple[float, ...], ...]
    hits: tuple[tuple[float, ...], ...]
    mixes: tuple[tuple[float, ...], ...]
    rate: float
    context: float
    mean_nodes: float

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return dict(self.__dict__)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "DynamicParams":
        """Read what :meth:`as_dict` gave.

        Raises:
            BankError: not that.
        """
        return read_params(cls, "dynamic", document)

    def rule(self) -> GrowthRule:
        """The tables; the last class is that of a step in which the drafter is asked anyway.

        Raises:
            BankError: the parameters do not fit together.
        """
        try:
            envelope = Topology.from_paths(self.envelope)
            table, gains = self._table(envelope), np.array(self.gains, dtype=np.float64)
            if len(self.trust_bounds) != len(table) - 1:
                raise ValueError(f"{len(self.trust_bounds)} bounds between {len(table)} classes")
            forced = gains[:1].copy()
            forced[:, 0] = _FORCED
            copies = None
            if self.hits:
                copies = CopyTable(np.array(self.hits), np.array(self.mixes))
            rule = GrowthRule(
                envelope,
                np.concatenate((table, table[:1])),
                np.concatenate((gains, forced)),
                copies,
            )
            if copies is not None and len(copies.hits) != NUM_MATCHES:
                raise ValueError(
                    f"{len(copies.hits)} classes of copies, where this version has {NUM_MATCHES}: "
                    "calibrate again"
                )
            if not 0 <= self.mean_nodes <= rule.max_nodes:
                raise ValueError(f"{self.mean_nodes} nodes on average, of {rule.max_nodes}")
            return rule
        except (TopologyError, ValueError, IndexError) as error:
            raise BankError(
                f"policy dynamic: its parameters do not fit together ({error})"
            ) from error

    def _table(self, envelope: Topology) -> npt.NDArray[np.float32]:
        """``(S, E, NUM_CODES)``, not rising with the code."""
        own = np.array(self.odds) @ odds_features(np.arange(NUM_CODES)).T
        by_class = np.array(self.trust_odds)[:, envelope.depths[1:] - 1]
        odds = np.minimum.accumulate(own, axis=1)[None] + by_class[:, :, None]
        table: npt.NDArray[np.float32] = (1 / (1 + np.exp(-odds.clip(-30, 30)))).astype(np.float32)
        return table


@dataclass(slots=True)
class _State:
    num_hits: int = 0
    num_idle: int = 0
    probe_at: int = PROBE_EVERY
    was_probe: bool = False
    ledger: Ledger = field(default_factory=Ledger)


@dataclass(frozen=True, slots=True)
class _Place:
    """A class of contexts and a size of the batch.

    Attributes:
        decisions: by class of trust.
        asking: price of asking the drafter, in tokens that plain decoding emits in that time.
        node: the same of checking a node.
    """

    decisions: list[SchedulerDecision]
    asking: float
    node: float


class DynamicScheduler:
    """Gives plans by which drafters grow trees; deterministic in the signal."""

    policy = "dynamic"

    def __init__(self, params: DynamicParams, costs: CostTable) -> None:
        """Compile the tables.

        Args:
            params: fitted to traced texts.
            costs: of steps on this machine.

        Raises:
            BankError: the parameters do not fit together.
        """
        self._params, self._costs = params, costs
        self._rule = params.rule()
        self.can_copy = self._rule.copies is not None
        self._bounds = list(params.trust_bounds)
        self._prior = params.prior, params.prior_steps
        typical, there = round(params.mean_nodes), params.context
        self._typical_ms = float(growth_costs(costs, 1, typical, there, 1).rows[typical])
        self._places = Places(self._place)

    def start(self) -> _State:
        """Nothing is known of the request."""
        return _State()

    def choose(self, state: _State, signal: Signal) -> SchedulerDecision:
        """The plan for the class of trust, the context and the batch."""
        place = self._places.at(signal.context, signal.batch)
        if signal.num_hits != state.num_hits:
            _learn(state, signal, place)
        else:
            state.num_idle += 1
        state.was_probe = state.num_idle >= state.probe_at
        if state.was_probe:
            state.num_idle, state.probe_at = 0, min(2 * state.probe_at, MAX_PROBE_EVERY)
            at = self._rule.num_classes - 1
        elif state.ledger.is_stopped:
            at = 0
        else:
            trust = trust_of(signal.hit_ema, signal.num_hits, *self._prior)
            at = bisect_right(self._bounds, trust)
        return place.decisions[at]

    def _place(self, context: int, batch: int) -> _Place:
        """What steps cost does not depend on the class of trust."""
        rule, params = self._rule, self._params
        costs = growth_costs(
            self._costs, rule.envelope.max_depth, rule.max_nodes, float(CONTEXTS[context]), batch
        )
        rate = params.rate * self._typical_ms / float(costs.rows[round(params.mean_nodes)])
        depth = max(rule.envelope.max_depth, rule.copies.length if rule.copies else 0)
        plans = [GrowthPlan(rule, costs, at, rate, depth) for at in range(rule.num_classes)]
        decisions = [
            SchedulerDecision("dynamic", prepared_plan(plan), bin=at)
            for at, plan in enumerate(plans)
        ]
        plain, one = float(costs.rows[0]), float(costs.rows[1])
        return _Place(decisions, float(costs.draft[0]) / plain, one / plain - 1)


def _learn(state: _State, signal: Signal, place: _Place) -> None:
    """Take the outcome of a step in which the drafter was asked.

    A tree costs at least the nodes that were kept; how large it was is not told.
    """
    kept = signal.last_accepted
    is_back = state.ledger.is_stopped and kept > 0
    if is_back:
        state.ledger.resume()
    else:
        brought = kept - max(kept, 1) * place.node if kept >= 0 else 0.0
        state.ledger.add(brought - place.asking)
    state.num_hits, state.num_idle = signal.num_hits, 0
    if is_back or not state.was_probe:
        state.probe_at = PROBE_EVERY


def trust_of(hit_ema: float, num_hits: int, prior: float, prior_steps: float) -> float:
    """Share of right first tokens lately, drawn to the prior where little is known.

    Args:
        hit_ema: of the signal.
        num_hits: of the signal.
        prior: share before there is any.
        prior_steps: steps that it is worth.
    """
    known = min(num_hits, _KNOWN)
    return (known * hit_ema + prior_steps * prior) / (known + prior_steps)


def growth_costs(
    costs: CostTable, depth: int, max_nodes: int, context: float, batch: int
) -> GrowthCosts:
    """What steps cost one sequence of a batch whose trees are alike."""
    rows = [
        (costs.forward(n + 1, context, batch) + costs.rest(n + 1, batch)) / batch
        for n in range(max_nodes + 1)
    ]
    levels = [min(level, len(costs.draft_ms) - 1) for level in range(depth)]
    further = np.array([costs.draft_row_ms[level] for level in levels])
    first = np.array([costs.draft_ms[level] for level in levels])
    return GrowthCosts(np.array(rows), (first + (batch - 1) * further) / batch, further)
