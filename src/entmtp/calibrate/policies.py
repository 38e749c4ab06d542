"""Replay of policies: what each would have chosen on the traced texts, step by step."""

from dataclasses import dataclass

import numpy as np

from entmtp.calibrate.growing import GrowthReplay, Prices
from entmtp.calibrate.replay import Cost, Counts, accepted_lengths
from entmtp.calibrate.trace import Trace
from entmtp.drafters.base import DraftPlan
from entmtp.growth import GrowthPlan
from entmtp.scheduler import SignalTracker, TopologyScheduler
from entmtp.topology import Topology

__all__ = ["PolicyReplay", "ReplayedStep", "replay_policy"]


@dataclass(frozen=True)
class ReplayedStep:
    """One step of a policy.

    Attributes:
        name: of the decision.
        tree: that is checked.
        accepted: draft tokens kept.
        cost_ms: under the cost given, or of the plan by which the tree was grown; else 0.
    """

    name: str
    tree: Topology
    accepted: int
    cost_ms: float


@dataclass(frozen=True)
class PolicyReplay:
    """What a policy did on the texts.

    Attributes:
        counts: one a text, without the step that reached its end.
        steps: of each text, that one included.
        num_tokens: tokens after the first, of all texts.
    """

    counts: tuple[Counts, ...]
    steps: tuple[tuple[ReplayedStep, ...], ...]
    num_tokens: int

    @property
    def total(self) -> Counts:
        """Over all texts."""
        return Counts(
            sum(count.num_tokens for count in self.counts),
            sum(count.num_steps for count in self.counts),
        )

    @property
    def text_ms(self) -> tuple[float, ...]:
        """Milliseconds of the steps of each text."""
        return tuple(sum(step.cost_ms for step in steps) for steps in self.steps)

    @property
    def cost_ms(self) -> float:
        """Milliseconds of all steps."""
        return sum(self.text_ms)

    @property
    def plans(self) -> tuple[tuple[str, ...], ...]:
        """Names of the decisions."""
        return tuple(tuple(step.name for step in steps) for steps in self.steps)


def replay_policy(
    trace: Trace,
    scheduler: TopologyScheduler,
    cost: Cost | None = None,
    prices: Prices | None = None,
) -> PolicyReplay:
    """Let a policy choose at every step, with the signals that it had when decoding.

    Trees are cut where no more tokens may be emitted, as the engine does.

    Args:
        trace: the texts.
        scheduler: a fresh state is started for every text.
        cost: of a step with a fixed tree.
        prices: of steps with grown trees; without, those of the plans.

    Raises:
        TraceError: the policy grows trees in an envelope that is not part of the trace's.
    """
    replay = _Replay(trace, cost, prices)
    counts: list[Counts] = []
    steps: list[tuple[ReplayedStep, ...]] = []
    for text in range(trace.num_texts):
        found = replay.text(text, scheduler)
        inner = found[:-1]
        counts.append(Counts(sum(step.accepted + 1 for step in inner), len(inner)))
        steps.append(tuple(found))
    emitted = sum(max(int(n) - 1, 0) for n in np.diff(trace.offsets))
    return PolicyReplay(tuple(counts), tuple(steps), emitted)


class _Replay:
    """One trace, and what was already looked up in it."""

    def __init__(self, trace: Trace, cost: Cost | None, prices: Prices | None) -> None:
        self._trace, self._cost, self._prices = trace, cost, prices
        self._growth: GrowthReplay | None = None
        self._lengths: dict[Topology, list[int]] = {}
        self._depth_left = trace.depth_left().tolist()
        self._first_hits = (trace.ranks[:, 0] == 0).tolist()

    def text(self, text: int, scheduler: TopologyScheduler) -> list[ReplayedStep]:
        """The steps of one text."""
        trace, steps = self._trace, []
        start, end = int(trace.offsets[text]), int(trace.offsets[text + 1]) - 1
        if start >= end:
            return []
        state, tracker, at = scheduler.start(), SignalTracker(), start
        tracker.start(float(trace.entropy[at]), float(trace.p0[at]))
        while True:
            context = int(trace.prompt_lengths[text]) + at - start
            decision = scheduler.choose(state, tracker.signal(context))
            plan = decision.plan.truncate(self._depth_left[at])
            step, is_hit = self._step(decision.name, plan, at)
            steps.append(step)
            at += step.accepted + 1
            if at >= end:
                return steps
            accepted = step.accepted if step.tree.num_nodes else None
            tracker.step(float(trace.entropy[at]), float(trace.p0[at]), accepted, is_hit)

    def _step(self, name: str, plan: DraftPlan, root: int) -> tuple[ReplayedStep, bool | None]:
        if isinstance(plan, GrowthPlan):
            if self._growth is None:
                self._growth = GrowthReplay(self._trace, self._prices)
            grown = self._growth.step(plan, root)
            tree = plan.rule.subtree(grown.kept, grown.attach).topology
            return ReplayedStep(name, tree, grown.accepted, grown.cost_ms), grown.is_hit
        lengths = self._lengths.get(plan)
        if lengths is None:
            lengths = self._lengths[plan] = accepted_lengths(self._trace, plan).tolist()
        has_best = plan.num_nodes > 0 and plan.paths[0] == (0,)
        is_hit = self._first_hits[root] if has_best else None
        ms = 0.0 if self._cost is None else self._cost(plan)
        return ReplayedStep(name, plan, lengths[root], ms), is_hit
