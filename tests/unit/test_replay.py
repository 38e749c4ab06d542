"""Replay against the same walk written out token by token."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from entmtp.calibrate.replay import (
    Counts,
    accepted_lengths,
    clairvoyant_cost,
    headroom_share,
    replay_policy,
    rollout_cost,
    self_rollout,
    text_counts,
)
from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import TraceError
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal, SignalTracker
from entmtp.topology import Topology
from exactness import RandomScheduler, random_topology
from growing import GrowingScheduler
from traces import random_trace

SEEDS = range(8)


def kept(trace: Trace, root: int, tree: Topology) -> int:
    """Longest prefix of the ranks at a root that is a path of the tree."""
    path: tuple[int, ...] = ()
    for rank in trace.ranks[root].tolist():
        if (*path, rank) not in tree.paths:
            break
        path = (*path, rank)
    return len(path)


def steps_of(trace: Trace, text: int, tree: Topology) -> list[tuple[int, int, bool]]:
    """Root, kept tokens, and whether the step reaches the end, for every step of a text."""
    at, end = int(trace.offsets[text]), int(trace.offsets[text + 1]) - 1
    steps = []
    while at < end:
        accepted = kept(trace, at, tree)
        steps.append((at, accepted, at + accepted + 1 >= end))
        at += accepted + 1
    return steps


def small_tree(rng: random.Random) -> Topology:
    """A tree that a random trace can meet."""
    return random_topology(rng, max_nodes=14, max_depth=3)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tree_keeps_the_longest_prefix_that_is_a_path(seed: int) -> None:
    """At every root, whether steps go there or not."""
    trace, tree = random_trace(seed), small_tree(random.Random(seed))
    expected = [kept(trace, root, tree) for root in range(trace.num_tokens)]
    assert accepted_lengths(trace, tree).tolist() == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_rollouts_are_walks_token_by_token(seed: int) -> None:
    """Counts of whole steps for each text and in all; time with the last steps."""
    trace, tree = random_trace(seed), small_tree(random.Random(100 + seed))
    walks = [steps_of(trace, text, tree) for text in range(trace.num_texts)]
    whole = [[accepted for _, accepted, is_last in steps if not is_last] for steps in walks]
    expected = [Counts(sum(a + 1 for a in lengths), len(lengths)) for lengths in whole]
    assert text_counts(trace, tree) == expected
    total = self_rollout(trace, tree)
    assert total.num_steps == sum(count.num_steps for count in expected)
    assert total.num_tokens == sum(count.num_tokens for count in expected)
    assert rollout_cost(trace, tree, lambda _: 2.5) == 2.5 * sum(len(steps) for steps in walks)


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
            expected.append(tracker.signal())
            number = rng.randrange(5)
            names[-1].append(f"tree{number}")
            accepted = kept(trace, at, trees[number])
            at += accepted + 1
            if at < end:
                tracker.step(float(trace.entropy[at]), float(trace.p0[at]), accepted)
    assert seen == expected
    assert [list(plans) for plans in replayed.plans] == names


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cost_of_a_policy_is_that_of_its_trees(seed: int) -> None:
    """Last steps count; a fixed one costs what its rollout costs, and none beats the bound."""
    trace = random_trace(seed)
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


@pytest.mark.parametrize("seed", range(4))
def test_the_clairvoyant_bound_is_the_best_of_all_choices(seed: int) -> None:
    """Tried out: every sequence of trees on short texts."""
    trace = random_trace(seed, num_texts=3)
    short = replace_lengths(trace, 7)
    trees = [Topology(()), Topology.from_paths([(0,)]), small_tree(random.Random(seed))]
    prices = {tree: 1.0 + 0.3 * tree.num_nodes for tree in trees}
    best = 0.0
    for text in range(short.num_texts):
        start, end = int(short.offsets[text]), int(short.offsets[text + 1]) - 1
        costs = []
        for choice in itertools.product(trees, repeat=max(end - start, 0)):
            at, paid = start, 0.0
            for tree in choice:
                if at >= end:
                    break
                at, paid = at + kept(short, at, tree) + 1, paid + prices[tree]
            costs.append(paid)
        best += min(costs)
    assert clairvoyant_cost(short, trees, prices.__getitem__) == pytest.approx(best)


def replace_lengths(trace: Trace, most: int) -> Trace:
    """The first tokens of every text."""
    sizes = np.minimum(np.diff(trace.offsets), most)
    index = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(trace.offsets[:-1], sizes, strict=True)]
    )
    return replace(
        trace,
        offsets=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        tokens=trace.tokens[index],
        ranks=trace.ranks[index],
        entropy=trace.entropy[index],
        p0=trace.p0[index],
        chain=trace.chain[index],
        codes=trace.codes[index],
    )


def test_a_policy_that_grows_trees_is_refused() -> None:
    """Before it is taken for one of fixed trees."""
    with pytest.raises(TraceError, match="policy growing grows trees"):
        replay_policy(random_trace(1), GrowingScheduler(1, [Topology.from_paths([(0,)])]))


def test_the_bound_is_never_worse_than_a_static_tree() -> None:
    """And the share of the headroom is 0 for the best static tree, 1 for the bound."""
    trace = random_trace(11, num_texts=20)
    trees = [Topology(()), *(small_tree(random.Random(seed)) for seed in range(4))]

    def cost(tree: Topology) -> float:
        return 1.0 + 0.1 * tree.num_nodes

    static = {str(i): rollout_cost(trace, tree, cost) for i, tree in enumerate(trees)}
    bound = clairvoyant_cost(trace, trees, cost)
    assert bound < min(static.values())
    assert headroom_share(min(static.values()), static, bound) == pytest.approx(0.0)
    assert headroom_share(bound, static, bound) == pytest.approx(1.0)
    assert np.isnan(headroom_share(1.0, static, min(static.values())))


def test_a_tree_beyond_the_trace_is_refused() -> None:
    """Deeper than the ranks go, or with ranks that are not told apart."""
    trace = random_trace(0)
    with pytest.raises(TraceError, match="the tree is 4 deep, the trace 3"):
        self_rollout(trace, Topology.from_paths([(0,) * d for d in range(1, 5)]))
    with pytest.raises(TraceError, match=f"child rank {MISS}"):
        self_rollout(trace, Topology.from_paths([(MISS,)]))


def test_texts_without_a_step_count_for_nothing() -> None:
    """A text of one token has no root with something behind it."""
    trace = replace_lengths(random_trace(1), 1)
    tree = Topology.from_paths([(0,)])
    assert self_rollout(trace, tree) == Counts(0, 0)
    assert Counts(0, 0).mean_acceptance_length == 1.0
    assert replay_policy(trace, FixedScheduler("it", tree)).total == Counts(0, 0)
    assert clairvoyant_cost(trace, [tree], lambda _: 1.0) == 0.0
