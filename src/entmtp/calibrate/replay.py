"""Replay: what any tree or policy would have done on the traced texts, without a model.

A step whose root is token j keeps the longest prefix of the ranks at j that is a path of its tree;
the next root is token ``j + 1 + accepted``. As the text does not depend on the trees this is what
decoding does, step by step, not an estimate. The step that reaches the end of a text is cut there
by a stop or a limit, so it is left out of counts of acceptance, here and where decoding is
compared; where time is counted it counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import TraceError
from entmtp.topology import Topology

__all__ = [
    "Counts",
    "Walk",
    "accepted_lengths",
    "clairvoyant_cost",
    "deepest_nodes",
    "headroom_share",
    "rollout_cost",
    "self_rollout",
    "text_counts",
    "walk",
]

IntArray = npt.NDArray[np.int64]
Cost = Callable[[Topology], float]
"""Milliseconds of a step with a tree."""


@dataclass(frozen=True)
class Counts:
    """Steps and the tokens they emitted; steps that reached the end of their text are left out."""

    num_tokens: int
    num_steps: int

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, bonus included; 1.0 where there was no step."""
        return self.num_tokens / self.num_steps if self.num_steps else 1.0


@dataclass(frozen=True)
class Walk:
    """Steps through all texts.

    Attributes:
        roots: int64 positions of the roots, text by text.
        is_last: which of these steps reached the end of their text.
        texts: int64 ``(steps,)`` text of each step.
    """

    roots: IntArray
    is_last: npt.NDArray[np.bool_]
    texts: IntArray

    @property
    def num_steps(self) -> int:
        """All steps, last ones included."""
        return len(self.roots)

    @property
    def inner(self) -> IntArray:
        """Roots of the steps that are not cut by the end of their text."""
        return self.roots[~self.is_last]


def deepest_nodes(trace: Trace, topology: Topology) -> IntArray:
    """``(T,)`` node of a tree where the true path leaves it, for every root.

    Raises:
        TraceError: the tree is deeper than the trace, or has ranks beyond what is traced.
    """
    _check_tree(trace, topology)
    table = _child_table(topology)
    nodes = np.zeros(trace.num_tokens, dtype=np.int64)
    is_inside = np.ones(trace.num_tokens, dtype=np.bool_)
    for depth in range(topology.max_depth):
        ranks = np.minimum(trace.ranks[:, depth], table.shape[1] - 1)
        below = table[nodes, ranks]
        is_inside &= below >= 0
        nodes = np.where(is_inside, below, nodes)
    return nodes


def accepted_lengths(trace: Trace, topology: Topology) -> IntArray:
    """``(T,)`` draft tokens that a step would keep, for every root."""
    return topology.depths[deepest_nodes(trace, topology)]


def walk(trace: Trace, accepted: IntArray) -> Walk:
    """Go through every text from its first token.

    Args:
        trace: the texts.
        accepted: ``(T,)`` draft tokens kept at each root.
    """
    ends = trace.offsets[1:] - 1  # a root there has nothing to do: the text is whole
    texts = np.flatnonzero(trace.offsets[:-1] < ends)
    at = trace.offsets[:-1][texts]
    found: list[tuple[IntArray, IntArray, npt.NDArray[np.bool_]]] = []
    while len(texts):
        after = at + accepted[at] + 1
        is_last = after >= ends[texts]
        found.append((texts, at, is_last))
        texts, at = texts[~is_last], after[~is_last]
    if not found:
        empty = np.zeros(0, dtype=np.int64)
        return Walk(empty, np.zeros(0, dtype=np.bool_), empty)
    all_texts, roots, is_last = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(roots, kind="stable")
    return Walk(roots[order], is_last[order], all_texts[order])


def self_rollout(trace: Trace, topology: Topology) -> Counts:
    """Tokens and steps of a tree that is used at every step (its ``own`` score)."""
    accepted = accepted_lengths(trace, topology)
    inner = walk(trace, accepted).inner
    return Counts(int(accepted[inner].sum()) + len(inner), len(inner))


def text_counts(trace: Trace, topology: Topology) -> list[Counts]:
    """:func:`self_rollout` of every text on its own."""
    accepted = accepted_lengths(trace, topology)
    steps = walk(trace, accepted)
    texts, inner = steps.texts[~steps.is_last], steps.inner
    num_steps = np.bincount(texts, minlength=trace.num_texts)
    tokens = np.bincount(texts, weights=accepted[inner], minlength=trace.num_texts)
    return [Counts(int(t) + int(n), int(n)) for t, n in zip(tokens, num_steps, strict=True)]


def rollout_cost(trace: Trace, topology: Topology, cost: Cost) -> float:
    """Milliseconds of all steps of one tree, last ones included."""
    return walk(trace, accepted_lengths(trace, topology)).num_steps * cost(topology)


def clairvoyant_cost(trace: Trace, topologies: Sequence[Topology], cost: Cost) -> float:
    """Least milliseconds in which any choice of these trees emits the texts.

    The shortest path: ``V(t) = min over trees of cost + V(t + 1 + accepted)``, 0 at the end of a
    text. No policy over the same trees can be faster.
    """
    prices = np.array([cost(topology) for topology in topologies])
    jumps = np.stack([accepted_lengths(trace, topology) for topology in topologies]) + 1
    total = 0.0
    for start, stop in zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True):
        end = stop - 1
        if start >= end:
            continue
        after = np.minimum(jumps[:, start:end] + np.arange(end - start), end - start)
        value = np.zeros(end - start + 1)
        for at in range(end - start - 1, -1, -1):
            value[at] = (prices + value[after[:, at]]).min()
        total += float(value[0])
    return total


def headroom_share(policy_ms: float, static_ms: Mapping[str, float], bound_ms: float) -> float:
    """Share of what a clairvoyant gains over the best static tree, in tokens/s; NaN without any.

    ``(policy - static) / (bound - static)`` of throughputs over the same texts.
    """
    best = min(static_ms.values())
    if bound_ms >= best:
        return float("nan")
    return (1 / policy_ms - 1 / best) / (1 / bound_ms - 1 / best)


def _child_table(topology: Topology) -> IntArray:
    """``(N, max_rank + 2)`` child of each node by rank, -1 where there is none."""
    table = np.full((topology.num_rows, topology.max_rank + 2), -1, dtype=np.int64)
    for node, path in enumerate(topology.paths, start=1):
        table[int(topology.parents[node]), path[-1]] = node
    return table


def _check_tree(trace: Trace, topology: Topology) -> None:
    if topology.max_depth > trace.max_depth:
        raise TraceError(
            f"the tree is {topology.max_depth} deep, the trace {trace.max_depth}; use a tree of "
            "at most that depth, or trace deeper"
        )
    if topology.max_rank >= MISS:
        raise TraceError(
            f"the tree has child rank {topology.max_rank}; ranks are traced below {MISS}"
        )
