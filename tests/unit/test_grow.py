"""Growing against the same rules written out: every candidate scored by a rollout of its own."""

from fractions import Fraction

import numpy as np
import pytest

from entmtp.calibrate.grow import GrowParams, best_within, frontier, grow, grow_all
from entmtp.calibrate.replay import accepted_lengths, self_rollout, walk
from entmtp.calibrate.trace import Trace
from entmtp.errors import InputError
from entmtp.topology import Path, Topology
from traces import cut_texts, random_trace


def grow_slowly(
    trace: Trace, max_depth: int, max_nodes: int, score: str, gap_ranks: int
) -> list[Topology]:
    """The construction, one candidate after the other, without shared tables."""
    tree = Topology.from_paths([(0,)])
    trees = [tree]
    while tree.num_nodes < max_nodes:
        candidates = []
        for parent in [(), *tree.paths]:
            if len(parent) == max_depth:
                continue
            free = [r for r in range(10) if (*parent, r) not in tree.paths]
            ranks = [r for r in free if r < gap_ranks] if gap_ranks else free[:1]
            candidates += [(*parent, rank) for rank in ranks]
        if not candidates:
            break
        values: list[tuple[Fraction, int, int, Path]] = []
        for path in candidates:
            larger = Topology.from_paths([*tree.paths, path])
            if score == "own":
                counts = self_rollout(trace, larger)
                value = Fraction(counts.num_tokens, counts.num_steps)
            else:
                roots = walk(trace, accepted_lengths(trace, tree)).inner
                kept = accepted_lengths(trace, larger)[roots]
                value = Fraction(int(kept.sum()) + len(roots), len(roots))
            values.append((-value, len(path), sum(path), path))
        tree = Topology.from_paths([*tree.paths, min(values)[3]])
        trees.append(tree)
    return trees


@pytest.mark.parametrize("score", ["joint", "own"])
@pytest.mark.parametrize("gap_ranks", [0, 5])
@pytest.mark.parametrize("seed", range(3))
def test_trees_grow_as_the_rules_say(seed: int, score: str, gap_ranks: int) -> None:
    """The same node at every stage, ties included: such small traces have many."""
    trace = random_trace(seed, num_texts=5)
    params = GrowParams(max_nodes=9, score=score, gap_ranks=gap_ranks)  # type: ignore[arg-type]
    for max_depth in (1, 2, 3):
        grown = [stage.topology for stage in grow(trace, max_depth, params)]
        assert grown == grow_slowly(trace, max_depth, 9, score, gap_ranks)


def test_ties_go_to_the_smaller_depth_then_rank_sum_then_path() -> None:
    """The frontier stands in that order, and the first of equals is taken."""
    tree = Topology.from_paths([(0,), (1,), (0, 0)])
    assert frontier(tree, 3) == [(2,), (0, 1), (1, 0), (0, 0, 0)]
    assert frontier(tree, 1, gap_ranks=4) == [(2,), (3,)]
    nothing_kept = random_trace(0)
    nothing_kept.ranks[:] = 200
    stages = list(grow(nothing_kept, 2, GrowParams(max_nodes=5)))
    assert stages[-1].topology == Topology.from_paths([(0,), (1,), (2,), (3,), (4,)])


def test_every_stage_is_scored_on_its_own_rollout() -> None:
    """``own`` is a rollout; under the score of that name it is what was promised."""
    trace = random_trace(4, num_texts=12)
    for stage in grow(trace, 3, GrowParams(max_nodes=12, score="own")):
        assert stage.own == self_rollout(trace, stage.topology)
        assert stage.joint == stage.own.mean_acceptance_length
        assert stage.optimism == 0
    promised = [stage.joint for stage in grow(trace, 3, GrowParams(max_nodes=12))]
    assert promised == sorted(promised)


def test_a_cost_makes_deep_nodes_compete_with_wide_ones() -> None:
    """Where a second depth costs more than it can bring, the tree stays flat."""
    trace = random_trace(6, num_texts=12)

    def cost(tree: Topology) -> float:
        return 1.0 if tree.max_depth < 2 else 10.0

    stages = list(grow(trace, 3, GrowParams(max_nodes=6), cost))
    assert all(stage.topology.max_depth == 1 for stage in stages)
    free = list(grow(trace, 3, GrowParams(max_nodes=6), lambda _: 1.0))
    assert [s.topology for s in free] == [
        s.topology for s in grow(trace, 3, GrowParams(max_nodes=6))
    ]


def test_all_depths_give_each_tree_once() -> None:
    """Progress goes up to the end, and the best of a size is found."""
    trace = random_trace(8, num_texts=12)
    seen: list[int] = []
    trees = grow_all(trace, GrowParams(max_nodes=10), progress=lambda done, _: seen.append(done))
    shapes = [tree.topology for tree in trees]
    assert len(set(shapes)) == len(shapes)
    assert seen == sorted(seen)
    assert {tree.max_depth for tree in trees} == {1, 2, 3}
    best = best_within(trees, 4)
    assert best.topology.num_nodes <= 4
    fitting = [t.own.mean_acceptance_length for t in trees if t.topology.num_nodes <= 4]
    assert best.own.mean_acceptance_length == max(fitting)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_nodes": 0}, "max_nodes is 0"),
        ({"max_nodes": 2000}, "max_nodes is 2000"),
        ({"score": "both"}, "score is 'both'"),
        ({"gap_ranks": 300}, "gap_ranks is 300"),
    ],
)
def test_settings_out_of_range_are_named(values: dict[str, object], message: str) -> None:
    """With the value and the limit."""
    with pytest.raises(InputError, match=message):
        GrowParams(**values)  # type: ignore[arg-type]


def test_what_cannot_be_grown_is_refused() -> None:
    """A depth that is not traced; texts of one token."""
    trace = random_trace(0)
    with pytest.raises(InputError, match="max_depth is 4; the trace goes to depth 3"):
        next(grow(trace, 4, GrowParams()))
    short = trace.select([0])
    assert np.diff(short.offsets)[0] >= 1
    with pytest.raises(InputError, match="long enough for a step"):
        next(grow(cut_texts(short, np.array([1])), 1, GrowParams()))
