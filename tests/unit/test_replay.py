"""Replay against the same walk written out token by token."""

import itertools
import random

import numpy as np
import pytest

from entmtp.calibrate.replay import (
    Counts,
    accepted_lengths,
    clairvoyant_cost,
    headroom_share,
    rollout_cost,
    self_rollout,
    text_counts,
)
from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import TraceError
from entmtp.topology import Topology
from traces import cut_texts, kept, random_trace, small_tree

SEEDS = range(8)


def steps_of(trace: Trace, text: int, tree: Topology) -> list[tuple[int, int, bool]]:
    """Root, kept tokens, and whether the step reaches the end, for every step of a text."""
    at, end = int(trace.offsets[text]), int(trace.offsets[text + 1]) - 1
    steps = []
    while at < end:
        accepted = kept(trace, at, tree)
        steps.append((at, accepted, at + accepted + 1 >= end))
        at += accepted + 1
    return steps


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


@pytest.mark.parametrize("seed", range(4))
def test_the_clairvoyant_bound_is_the_best_of_all_choices(seed: int) -> None:
    """Tried out: every sequence of trees on short texts."""
    trace = random_trace(seed, num_texts=3)
    short = cut_texts(trace, np.minimum(np.diff(trace.offsets), 7))
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
    trace = random_trace(1)
    trace = cut_texts(trace, np.ones(trace.num_texts, dtype=np.int64))
    tree = Topology.from_paths([(0,)])
    assert self_rollout(trace, tree) == Counts(0, 0)
    assert Counts(0, 0).mean_acceptance_length == 1.0
    assert clairvoyant_cost(trace, [tree], lambda _: 1.0) == 0.0
