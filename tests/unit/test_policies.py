"""Replay of policies, with fixed and with grown trees, against the same walk written out."""

import random
from dataclasses import replace

import numpy as np
import pytest

from entmtp.calibrate.growing import GrowthReplay
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import (
    Counts,
    clairvoyant_cost,
    rollout_cost,
    self_rollout,
    text_counts,
)
from entmtp.calibrate.trace import NO_COPY, Trace
from entmtp.drafters.base import DraftPlan
from entmtp.errors import TraceError
from entmtp.growth import MAX_COPY, Copy, GrowthPlan
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal, SignalTracker
from entmtp.topology import Topology
from exactness import RandomScheduler
from growing import SignalScheduler, grow_slowly, random_envelope, random_plan
from traces import cut_texts, kept, random_trace, small_tree, with_growth

SEEDS = range(8)

Step = tuple[str, Topology, int, bool | None, float]
"""Name, tree, tokens kept, whether the best first token was right, milliseconds."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fixed_policy_is_a_rollout(seed: int) -> None:
    """Through signals and state it comes to the same."""
    trace, tree = random_trace(seed), small_tree(random.Random(200 + seed))
    replayed = replay_policy(trace, FixedScheduler("it", tree))
    assert list(replayed.counts) == text_counts(trace, tree)
    assert replayed.total == self_rollout(trace, tree)
    assert replayed.num_tokens == sum(np.diff(trace.offsets) - 1)


def test_a_policy_sees_the_signals_of_its_own_steps() -> None:
    """Entropy and top-1 probability of the new root, and what the step before kept."""
    trace = random_trace(3)
    trees = [small_tree(random.Random(seed)) for seed in range(5)]
    seen: list[Signal] = []

    class Watching(RandomScheduler):
        def choose(self, state: random.Random, signal: Signal) -> SchedulerDecision:
            seen.append(signal)
            return super().choose(state, signal)

    replayed = replay_policy(trace, Watching(7, trees))
    expected, names = [], []
    for text in range(trace.num_texts):
        rng, tracker = random.Random(7), SignalTracker()
        at, end = int(trace.offsets[text]), int(trace.offsets[text + 1]) - 1
        tracker.start(float(trace.entropy[at]), float(trace.p0[at]))
        names.append([])
        while at < end:
            context = int(trace.prompt_lengths[text]) + at - int(trace.offsets[text])
            expected.append(tracker.signal(context))
            number = rng.randrange(5)
            names[-1].append(f"tree{number}")
            accepted = kept(trace, at, trees[number])
            is_hit = bool(trace.ranks[at, 0] == 0) if (0,) in trees[number].paths else None
            at += accepted + 1
            if at < end:
                tracker.step(float(trace.entropy[at]), float(trace.p0[at]), accepted, is_hit)
    assert seen == expected
    assert [list(plans) for plans in replayed.plans] == names


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cost_of_a_policy_is_that_of_its_trees(seed: int) -> None:
    """Last steps count; a fixed one costs what its rollout costs, and none beats the bound.

    Where texts end before their limit: near it trees are cut, and cost less.
    """
    trace = random_trace(seed)
    trace = replace(trace, facts=replace(trace.facts, max_new_tokens=1000))
    trees = [Topology(()), *(small_tree(random.Random(seed + i)) for i in range(4))]

    def cost(topology: Topology) -> float:
        return 1.0 + 0.2 * topology.num_nodes

    for tree in trees:
        replayed = replay_policy(trace, FixedScheduler("it", tree), cost)
        assert replayed.cost_ms == pytest.approx(rollout_cost(trace, tree, cost))
    bound = clairvoyant_cost(trace, trees, cost)
    for policy_seed in range(3):
        replayed = replay_policy(trace, RandomScheduler(policy_seed, trees), cost)
        assert replayed.cost_ms >= bound - 1e-9


def growing_case(seed: int) -> tuple[Trace, list[DraftPlan]]:
    """A trace with an envelope and copies, plans inside it, and two fixed trees."""
    rng = random.Random(seed)
    envelope = random_envelope(rng, 20, 3)
    plans = [random_plan(100 * seed + number, envelope) for number in range(6)]
    return with_growth(random_trace(seed), envelope, seed), [*plans, Topology(()), small_tree(rng)]


def slow_step(trace: Trace, plan: DraftPlan, root: int) -> tuple[Topology, int, bool | None, float]:
    """Tree, tokens kept, whether the best first token is right, milliseconds."""
    is_first = bool(trace.ranks[root, 0] == 0)
    if isinstance(plan, Topology):
        return plan, kept(trace, root, plan), is_first if (0,) in plan.paths else None, 0.0
    envelope, match = plan.rule.envelope, int(trace.copy_match[root])
    copy = None if match == NO_COPY else Copy(match, (0,) * MAX_COPY)
    path = envelope.path_nodes(int(trace.copy_node[root]))
    slow = grow_slowly(plan, trace.codes[root].tolist(), path, copy)
    tree = plan.rule.subtree(slow.kept, slow.attach).topology
    own = Topology(tuple(envelope.paths[n - 1] for n in sorted(slow.kept) if n < envelope.num_rows))
    copied = [n - envelope.num_rows for n in slow.kept if n >= envelope.num_rows]
    right = [at + 1 for at in copied if at < trace.copy_hits[root]]
    accepted = max([kept(trace, root, own), *right])
    was_asked = bool(slow.opened) and (0,) in envelope.paths
    return tree, accepted, is_first if was_asked else None, slow.cost_ms


def slow_text(trace: Trace, text: int, policy: SignalScheduler) -> list[Step]:
    """Every step of a text, the last one included."""
    start, end = (int(trace.offsets[text + more]) - more for more in (0, 1))
    tracker, at, steps = SignalTracker(), start, []
    tracker.start(float(trace.entropy[at]), float(trace.p0[at]))
    while at < end:
        context = int(trace.prompt_lengths[text]) + at - start
        decision = policy.choose(None, tracker.signal(context))
        num_left = trace.facts.max_new_tokens - (at - start + 1)
        found = slow_step(trace, decision.plan.truncate(num_left - 1), at)
        steps.append((decision.name, *found))
        at += found[1] + 1
        if at < end:
            accepted = found[1] if found[0].num_nodes else None
            tracker.step(float(trace.entropy[at]), float(trace.p0[at]), accepted, found[2])
    return steps


@pytest.mark.parametrize("seed", range(25))
def test_policies_that_grow_trees_are_walks_step_by_step(seed: int) -> None:
    """Plans, trees, tokens and times of every step, from codes and copies; signals follow."""
    trace, plans = growing_case(seed)
    policy = SignalScheduler(seed, plans)
    replayed = replay_policy(trace, policy)
    expected = [slow_text(trace, text, policy) for text in range(trace.num_texts)]
    found = [[(s.name, s.tree, s.accepted, s.cost_ms) for s in steps] for steps in replayed.steps]
    assert found == [[(*step[:3], step[4]) for step in steps] for steps in expected]
    assert list(replayed.counts) == [
        Counts(sum(step[2] + 1 for step in steps[:-1]), max(len(steps) - 1, 0))
        for steps in expected
    ]
    assert replayed.cost_ms == pytest.approx(sum(step[4] for steps in expected for step in steps))


def test_the_cases_above_keep_copies_and_nodes_below_them() -> None:
    """Trees of the envelope alone, of a copy alone, of both; paths end in either."""
    kinds, accepted = set(), set()
    for seed in range(25):
        trace, plans = growing_case(seed)
        size = Topology(trace.facts.envelope).num_rows
        growth = GrowthReplay(trace)
        for root in np.flatnonzero(~np.isnan(trace.entropy)).tolist():
            for plan in plans:
                if isinstance(plan, GrowthPlan):
                    step = growth.step(plan, root)
                    own = sum(node < size for node in step.kept)
                    kinds.add((own > 0, own < len(step.kept), step.attach > 0))
                    accepted.add((step.accepted > 3, step.is_hit))
    assert {(False, False, False), (True, False, False)} < kinds
    assert {(False, True, False), (True, True, False), (True, True, True)} < kinds
    assert accepted == {(deep, is_hit) for deep in (False, True) for is_hit in (None, False, True)}


def test_trees_are_cut_where_no_more_tokens_may_come() -> None:
    """As the engine does: the last token allowed is the target's own."""
    trace = random_trace(2, num_texts=20)
    tree = Topology.from_paths([(0,), (0, 0), (0, 0, 0)])
    limit = trace.facts.max_new_tokens
    for text, steps in enumerate(replay_policy(trace, FixedScheduler("it", tree)).steps):
        at = 0
        for step in steps:
            assert step.tree.max_depth == min(3, limit - at - 2)
            at += step.accepted + 1
        size = int(trace.offsets[text + 1] - trace.offsets[text])
        assert at <= limit - 1
        assert size == 1 or at >= size - 1


def test_texts_without_a_step_have_none() -> None:
    """A text of one token has no root with something behind it."""
    trace = random_trace(1)
    trace = cut_texts(trace, np.ones(trace.num_texts, dtype=np.int64))
    replayed = replay_policy(trace, FixedScheduler("it", Topology.from_paths([(0,)])))
    assert replayed.total == Counts(0, 0)
    assert replayed.steps == ((),) * trace.num_texts
    assert (replayed.num_tokens, replayed.cost_ms) == (0, 0)


def test_growing_needs_the_envelope_of_the_trace() -> None:
    """One without, and one of another."""
    trace, envelope = random_trace(1), Topology.from_paths([(0,), (1,)])
    policy = SignalScheduler(0, [GrowthPlan.whole(envelope)])
    with pytest.raises(TraceError, match=r"the trace has no envelope.*--envelope"):
        replay_policy(trace, policy)
    other = with_growth(trace, Topology.from_paths([(0,), (2,)]))
    with pytest.raises(TraceError, match=r"the envelope of the trace lacks the path \[1\]"):
        replay_policy(other, policy)


def test_the_best_token_of_an_envelope_without_it_is_never_checked() -> None:
    """Its first node is another rank, which says nothing of the best."""
    envelope = Topology.from_paths([(1,), (2,)])
    trace = with_growth(random_trace(4), envelope)
    trace = replace(trace, copy_match=np.full_like(trace.copy_match, NO_COPY))
    growth = GrowthReplay(trace)
    for root in np.flatnonzero(~np.isnan(trace.entropy)).tolist():
        step = growth.step(GrowthPlan.whole(envelope), root)
        assert (step.kept, step.is_hit) == ((1, 2), None)
        assert step.accepted == int(trace.ranks[root, 0] in (1, 2))
