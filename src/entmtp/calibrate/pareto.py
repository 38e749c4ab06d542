"""From grown trees and costs to the entries of a bank.

Every candidate is scored by its own rollout on the traced texts and by what its steps cost. Kept
are the paper's throughput frontier (arXiv 2606.27550, phase 1: by number of nodes, while tokens/s
strictly improve), every tree that is best where the signal lies in some interval, the best tree of
each task, the best chains, and the empty tree. The second group matters: trees that a policy
switches to where the text is predictable are larger than the best single tree, so the frontier
alone would drop them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entmtp.bank import NONE, EntryScore
from entmtp.calibrate.replay import Counts, accepted_lengths, self_rollout, walk
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.topology import Topology

__all__ = [
    "Candidate",
    "acceptance_frontier",
    "predicted_ms",
    "predicted_rate",
    "score_candidates",
    "select_entries",
    "throughput_frontier",
]

NUM_BINS = 6
"""Intervals of the root's entropy, of equal numbers of positions."""

NUM_CHAINS = 2


@dataclass(frozen=True)
class Candidate:
    """A tree with all that decides about it.

    Attributes:
        topology: its shape.
        joint: tokens a step that the joint score promised; ``None`` for trees not grown by it.
        own: tokens and steps of its own rollout.
        step_ms: at the mean context.
        tokens_per_s: predicted, last steps of texts included.
    """

    topology: Topology
    joint: float | None
    own: Counts
    step_ms: float
    tokens_per_s: float

    @property
    def accept_own(self) -> float:
        """Tokens a step."""
        return self.own.mean_acceptance_length


def predicted_ms(trace: Trace, topology: Topology, costs: CostTable) -> float:
    """Milliseconds of decoding all texts with one tree, which is cut where the engine cuts it."""
    steps = walk(trace, accepted_lengths(trace, topology))
    if not steps.num_steps:
        return 0.0
    start = trace.prompt_lengths.astype(np.int64) - trace.offsets[:-1]
    context = float((steps.roots + start[steps.texts]).mean())
    deepest = topology.max_depth
    prices = np.array([costs.step_ms(topology.truncate(d), context) for d in range(deepest + 1)])
    return float(prices[np.minimum(trace.depth_left()[steps.roots], deepest)].sum())


def predicted_rate(trace: Trace, topology: Topology, costs: CostTable) -> float:
    """Tokens a second of decoding all texts with one tree, the first tokens left out."""
    return 1000 * _num_decoded(trace) / max(predicted_ms(trace, topology, costs), 1e-9)


def _num_decoded(trace: Trace) -> int:
    """Tokens after the first, over all texts."""
    return sum(max(int(size) - 1, 0) for size in np.diff(trace.offsets))


def score_candidates(
    trace: Trace, trees: Mapping[Topology, float | None], costs: CostTable, context: float
) -> list[Candidate]:
    """Score trees, chains of every depth and the empty tree; each shape once.

    Args:
        trace: the texts.
        trees: tree -> tokens a step that the joint score promised, where it was grown by it.
        costs: of this machine.
        context: at which ``step_ms`` is given.
    """
    chains = [Topology.chain(k) for k in range(trace.max_depth + 1)]
    return [
        Candidate(
            tree,
            trees.get(tree),
            self_rollout(trace, tree),
            costs.step_ms(tree, context),
            predicted_rate(trace, tree, costs),
        )
        for tree in dict.fromkeys([*trees, *chains])
    ]


def acceptance_frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By number of nodes, those with more tokens a step than all smaller ones."""
    return _frontier(candidates, [c.accept_own for c in candidates])


def throughput_frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The paper's Pareto set: non-empty trees by number of nodes while tokens/s improve."""
    return _frontier(candidates, [c.tokens_per_s for c in candidates])


def _frontier(candidates: Sequence[Candidate], values: Sequence[float]) -> list[Candidate]:
    order = sorted(
        (i for i, c in enumerate(candidates) if c.topology.num_nodes),
        key=lambda i: (candidates[i].topology.num_nodes, -values[i], candidates[i].topology.paths),
    )
    kept: list[int] = []
    for index in order:
        if not kept or values[index] > values[kept[-1]]:
            kept.append(index)
    return [candidates[index] for index in kept]


def select_entries(
    trace: Trace,
    candidates: Sequence[Candidate],
    costs: CostTable,
    *,
    with_frontier: bool = False,
) -> tuple[dict[str, Topology], dict[str, EntryScore]]:
    """The entries of a bank and what is known of them.

    Args:
        trace: the texts that the candidates were scored on.
        candidates: the empty tree among them.
        costs: of steps.
        with_frontier: keep the whole acceptance frontier too, as ``frontier``.
    """
    sources: dict[Topology, list[str]] = {}
    by_tree = {candidate.topology: candidate for candidate in candidates}

    def keep(candidate: Candidate, source: str) -> None:
        found = sources.setdefault(candidate.topology, [])
        if source not in found:
            found.append(source)

    for candidate in throughput_frontier(candidates):
        keep(candidate, "pareto")
    for candidate in _bin_winners(trace, candidates):
        keep(candidate, "signal")
    for candidate in _task_winners(trace, candidates, costs):
        keep(candidate, "task")
    for candidate in _best_chains(candidates):
        keep(candidate, "chain")
    if with_frontier:
        for candidate in acceptance_frontier(candidates):
            keep(candidate, "frontier")
    trees = [c for c in candidates if c.topology.num_nodes]
    keep(max(trees, key=lambda c: (c.tokens_per_s, -c.topology.num_nodes)), "best")
    keep(by_tree[Topology(())], "plain")
    names = _names(list(sources))
    entries = {names[tree]: tree for tree in sources}
    scores = {
        names[tree]: EntryScore(
            accept_joint=by_tree[tree].joint,
            accept_own=by_tree[tree].accept_own,
            step_ms=by_tree[tree].step_ms,
            tokens_per_s=by_tree[tree].tokens_per_s,
            source=tuple(found),
        )
        for tree, found in sources.items()
    }
    return entries, scores


def _bin_winners(trace: Trace, candidates: Sequence[Candidate]) -> list[Candidate]:
    """For each interval of the root's entropy the tree with the largest tokens - lambda * cost.

    Lambda is the rate of the best single tree: what a millisecond is worth elsewhere.
    """
    rate = max(c.tokens_per_s for c in candidates) / 1000
    usable = ~np.isnan(trace.entropy)
    bins = _entropy_bins(trace.entropy[usable])
    values = []
    for candidate in candidates:
        tokens = accepted_lengths(trace, candidate.topology)[usable] + 1
        sums = np.bincount(bins, weights=tokens, minlength=NUM_BINS)
        sizes = np.maximum(np.bincount(bins, minlength=NUM_BINS), 1)
        values.append(sums / sizes - rate * candidate.step_ms)
    table = np.array(values)
    return [candidates[int(index)] for index in table.argmax(axis=0)]


def _task_winners(
    trace: Trace, candidates: Sequence[Candidate], costs: CostTable
) -> list[Candidate]:
    """The fastest tree on the texts of each task; none where there is only one task."""
    tasks = trace.by_task()
    if len(tasks) < 2:
        return []
    trees = [c for c in candidates if c.topology.num_nodes]
    return [
        max(trees, key=lambda c: predicted_rate(part, c.topology, costs)) for part in tasks.values()
    ]


def _entropy_bins(entropy: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Number of the interval of each value; intervals hold equal numbers of values."""
    edges = np.quantile(entropy, np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    return np.digitize(entropy, edges)


def _best_chains(candidates: Sequence[Candidate]) -> list[Candidate]:
    chains = [c for c in candidates if c.topology.num_nodes == c.topology.max_depth > 0]
    chains = [c for c in chains if c.topology.max_rank == 0]
    return sorted(chains, key=lambda c: -c.tokens_per_s)[:NUM_CHAINS]


def _names(trees: Sequence[Topology]) -> dict[Topology, str]:
    """``none``, ``chain3``, or ``tree12d4`` (nodes and depth), numbered where two would agree."""
    names: dict[Topology, str] = {}
    taken: dict[str, int] = {}
    for tree in sorted(trees, key=lambda t: (t.num_nodes, t.max_depth, t.paths)):
        if not tree.num_nodes:
            names[tree] = NONE
            continue
        is_chain = tree.num_nodes == tree.max_depth and tree.max_rank == 0
        name = f"chain{tree.num_nodes}" if is_chain else f"tree{tree.num_nodes}d{tree.max_depth}"
        number = taken.get(name, 0)
        taken[name] = number + 1
        names[tree] = name + ("" if not number else f"-{number + 1}")
    return names
