"""From the short form of a trace and a table of costs to the entries of a bank; no model."""

from collections.abc import Callable, Sequence

import numpy as np

from entmtp.bank import EntryScore
from entmtp.calibrate.grow import GrownTree, GrowParams, grow_all
from entmtp.calibrate.pareto import Candidate, score_candidates, select_entries
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.topology import Topology

__all__ = ["find_candidates", "fit_entries", "mean_context", "timing_trees"]

_TIMED_SIZES = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 47, 63)
_QUICK_SIZES = (1, 2, 3, 4, 5, 7, 9, 11, 15, 31)
_BOTH_SHAPES = 15  # nodes up to which flat and deep trees are timed even so
_GROWN_FOR_SPEED = 24  # nodes; larger trees come from the paper's growth

Progress = Callable[[int, int], None]


def fit_entries(
    trace: Trace, costs: CostTable, max_nodes: int
) -> tuple[dict[str, Topology], dict[str, EntryScore]]:
    """Entries and their scores, fitted to every second text of each task."""
    fitting, _ = trace.halves()
    trees = grow_all(fitting, GrowParams(max_nodes=max_nodes))
    return select_entries(fitting, find_candidates(fitting, trees, costs), costs)


def find_candidates(trace: Trace, trees: Sequence[GrownTree], costs: CostTable) -> list[Candidate]:
    """The paper's trees, and others that are grown for tokens/s on this machine; all scored.

    Args:
        trace: the texts to fit.
        trees: grown on them by the joint score.
        costs: of this machine.
    """
    context = mean_context(trace)
    size = min(_GROWN_FOR_SPEED, max(tree.topology.num_nodes for tree in trees))
    further = grow_all(
        trace,
        GrowParams(max_nodes=size, score="own"),
        lambda tree: costs.step_ms(tree, context),
    )
    joint: dict[Topology, float | None] = {tree.topology: tree.joint for tree in trees}
    for tree in further:
        joint.setdefault(tree.topology, None)
    return score_candidates(trace, joint, costs, context)


def mean_context(trace: Trace) -> float:
    """Committed tokens at a root, mean over all positions."""
    sizes = np.diff(trace.offsets)
    total = float((sizes * (trace.prompt_lengths + (sizes - 1) / 2)).sum())
    return total / max(int(sizes.sum()), 1)


def timing_trees(trees: Sequence[GrownTree], *, is_quick: bool = False) -> list[Topology]:
    """Grown trees that are timed: for each of some sizes a flat one and a deep one, and chains.

    Args:
        trees: of all sizes.
        is_quick: few large ones, deep alone: they take most of the time, and what they cost is
            nearly linear in their rows.
    """
    depth = max(tree.topology.max_depth for tree in trees)
    found = [Topology.chain(k) for k in range(1, depth + 1)]
    largest = max(tree.topology.num_nodes for tree in trees)
    for size in (*_QUICK_SIZES, largest) if is_quick else _TIMED_SIZES:
        of_size = [tree.topology for tree in trees if tree.topology.num_nodes == size]
        if of_size:
            if not is_quick or size <= _BOTH_SHAPES:
                found.append(min(of_size, key=lambda tree: (tree.max_depth, tree.paths)))
            found.append(max(of_size, key=lambda tree: (tree.max_depth, tree.paths)))
    return list(dict.fromkeys(found))
