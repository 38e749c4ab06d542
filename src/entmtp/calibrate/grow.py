"""Growing trees on a trace: the paper's greedy construction (arXiv 2606.27550, phase 1).

From ``{(0,)}``, for each maximum depth, the best node of the frontier is added again and again.
Two scores: ``joint``, the paper's, where one rollout advanced by the present tree counts for every
candidate how often it would have been kept; and ``own``, where every candidate tree makes a
rollout of its own, which is what it does when it decodes. Ties go to the smaller depth, then to
the smaller sum of child ranks, then to the lexicographically smaller path.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.replay import Counts, deepest_nodes, self_rollout, walk
from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import InputError
from entmtp.topology import MAX_NODES, Path, Topology

__all__ = ["GrowParams", "GrownTree", "Score", "best_within", "frontier", "grow", "grow_all"]

IntArray = npt.NDArray[np.int64]
Score = Literal["joint", "own"]
Cost = Callable[[Topology], float]

_ENDS_ALL = Fraction(MAX_NODES)
_MAX_CELLS = 1 << 22  # of the tables that a scoring step holds


@dataclass(frozen=True)
class GrowParams:
    """How trees are grown.

    Attributes:
        max_nodes: nodes of the last tree.
        score: ``joint`` or ``own``.
        gap_ranks: candidates are all free child ranks below this; 0: the next rank alone, as in
            the paper.
    """

    max_nodes: int = 64
    score: Score = "joint"
    gap_ranks: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be grown.

        Raises:
            InputError: says which value.
        """
        if not 1 <= self.max_nodes <= MAX_NODES:
            raise InputError(f"max_nodes is {self.max_nodes}; it must be from 1 to {MAX_NODES}")
        if self.score not in ("joint", "own"):
            raise InputError(f"score is {self.score!r}; it must be joint or own")
        if not 0 <= self.gap_ranks <= MISS:
            raise InputError(f"gap_ranks is {self.gap_ranks}; it must be from 0 to {MISS}")


@dataclass(frozen=True)
class GrownTree:
    """A tree of the sequence.

    Attributes:
        topology: its shape.
        max_depth: the bound it was grown under.
        joint: tokens a step that the score promised when its last node was chosen; its own where
            the score was ``own``.
        own: what its own rollout gives on the same texts.
    """

    topology: Topology
    max_depth: int
    joint: float
    own: Counts

    @property
    def optimism(self) -> float:
        """Promised over kept, minus one."""
        return self.joint / self.own.mean_acceptance_length - 1


def frontier(tree: Topology, max_depth: int, gap_ranks: int = 0) -> list[Path]:
    """The nodes that may be added next, in the order in which ties are broken."""
    found: list[Path] = []
    for node, children in enumerate(tree.children):
        path = tree.paths[node - 1] if node else ()
        if len(path) >= max_depth:
            continue
        taken = {tree.paths[child - 1][-1] for child in children}
        next_rank = 0
        while next_rank in taken:
            next_rank += 1
        ranks = [next_rank] if not gap_ranks else [r for r in range(gap_ranks) if r not in taken]
        found += [(*path, rank) for rank in ranks if rank < MISS]
    return sorted(found, key=lambda path: (len(path), sum(path), path))


def grow(
    trace: Trace, max_depth: int, params: GrowParams, cost: Cost | None = None
) -> Iterator[GrownTree]:
    """Grow one tree node by node; every stage is given out.

    Args:
        trace: the texts to fit.
        max_depth: of the trees, at most the trace's.
        params: sizes and score.
        cost: milliseconds of a step; where it is given, candidates compete by tokens over time
            instead of by tokens alone.

    Raises:
        InputError: ``max_depth`` is not traced, or the trace holds no whole step.
    """
    if not 1 <= max_depth <= trace.max_depth:
        raise InputError(f"max_depth is {max_depth}; the trace goes to depth {trace.max_depth}")
    tree = Topology(((0,),))
    own = self_rollout(trace, tree)
    if own.num_steps == 0:
        raise InputError("no text of the trace is long enough for a step; use longer texts")
    joint = own.mean_acceptance_length
    while True:
        yield GrownTree(tree, max_depth, joint, own)
        candidates = frontier(tree, max_depth, params.gap_ranks)
        if tree.num_nodes >= params.max_nodes or not candidates:
            return
        scores = (_joint_scores if params.score == "joint" else _own_scores)(
            trace, tree, candidates
        )
        chosen = _best(tree, candidates, scores, cost)
        tree = Topology.from_paths([*tree.paths, candidates[chosen]])
        joint = scores[chosen].mean_acceptance_length
        own = self_rollout(trace, tree)


def grow_all(
    trace: Trace,
    params: GrowParams,
    cost: Cost | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[GrownTree]:
    """Trees of every size for every maximum depth 1 .. K, the same tree once."""
    found: dict[Topology, GrownTree] = {}
    for max_depth in range(1, trace.max_depth + 1):
        for stage in grow(trace, max_depth, params, cost):
            found.setdefault(stage.topology, stage)
            if progress is not None:
                size = stage.topology.num_nodes
                progress(
                    (max_depth - 1) * params.max_nodes + size, trace.max_depth * params.max_nodes
                )
    return list(found.values())


def best_within(trees: Sequence[GrownTree], max_nodes: int) -> GrownTree:
    """The tree with the most tokens a step within a node budget; of equals the smaller one."""
    fitting = [tree for tree in trees if tree.topology.num_nodes <= max_nodes]
    return max(fitting, key=lambda t: (t.own.mean_acceptance_length, -t.topology.num_nodes))


def _best(
    tree: Topology, candidates: Sequence[Path], scores: Sequence[Counts], cost: Cost | None
) -> int:
    """Index of the best candidate; the first of equals, which stands in the order of ties."""
    values = []
    for path, counts in zip(candidates, scores, strict=True):
        # a tree that needs a single step for every text leaves no whole step to count
        value = Fraction(counts.num_tokens, counts.num_steps) if counts.num_steps else _ENDS_ALL
        if cost is not None:
            value /= Fraction(cost(Topology.from_paths([*tree.paths, path])))
        values.append(value)
    return max(range(len(values)), key=lambda index: (values[index], -index))


def _joint_scores(trace: Trace, tree: Topology, candidates: Sequence[Path]) -> list[Counts]:
    """One rollout of the present tree: tokens a step with each candidate, were it in the tree."""
    nodes = deepest_nodes(trace, tree)
    roots = walk(trace, tree.depths[nodes]).inner
    base = int(tree.depths[nodes[roots]].sum()) + len(roots)
    node_of = {path: node for node, path in enumerate(tree.paths, start=1)} | {(): 0}
    counts = []
    left_at, ranks = nodes[roots], trace.ranks[roots]
    for path in candidates:
        is_kept = (left_at == node_of[path[:-1]]) & (ranks[:, len(path) - 1] == path[-1])
        counts.append(Counts(base + int(is_kept.sum()), len(roots)))
    return counts


def _own_scores(trace: Trace, tree: Topology, candidates: Sequence[Path]) -> list[Counts]:
    """A rollout of every candidate tree, many at once."""
    nodes = deepest_nodes(trace, tree)
    lengths = tree.depths[nodes]
    node_of = {path: node for node, path in enumerate(tree.paths, start=1)} | {(): 0}
    parents = np.array([node_of[path[:-1]] for path in candidates])
    depths = np.array([len(path) - 1 for path in candidates])
    ranks = np.array([path[-1] for path in candidates])
    group = max(1, _MAX_CELLS // max(trace.num_texts, 1))
    found: list[Counts] = []
    for first in range(0, len(candidates), group):
        part = slice(first, first + group)
        found += _rollouts(trace, nodes, lengths, parents[part], depths[part], ranks[part])
    return found


def _rollouts(
    trace: Trace,
    nodes: IntArray,
    lengths: IntArray,
    parents: IntArray,
    depths: IntArray,
    ranks: IntArray,
) -> list[Counts]:
    """Walks of all pairs of candidate and text, in step.

    A candidate adds one to what the tree keeps where the true path leaves the tree at the
    candidate's parent and goes on with its rank.
    """
    ends = trace.offsets[1:] - 1
    starts = trace.offsets[:-1]
    is_open = starts < ends
    texts = np.flatnonzero(is_open)
    candidate = np.repeat(np.arange(len(parents)), len(texts))
    text = np.tile(texts, len(parents))
    at = starts[text]
    tokens = np.zeros(len(parents), dtype=np.int64)
    steps = np.zeros(len(parents), dtype=np.int64)
    while len(at):
        is_kept = (nodes[at] == parents[candidate]) & (
            trace.ranks[at, depths[candidate]] == ranks[candidate]
        )
        emitted = lengths[at] + is_kept + 1
        after = at + emitted
        is_inner = after < ends[text]
        inner = candidate[is_inner]
        tokens += np.bincount(inner, weights=emitted[is_inner], minlength=len(parents)).astype(
            np.int64
        )
        steps += np.bincount(inner, minlength=len(parents))
        candidate, text, at = inner, text[is_inner], after[is_inner]
    return [Counts(int(t), int(n)) for t, n in zip(tokens, steps, strict=True)]
