"""What heads are worth: trees grown on one half of the prompts, scored on the other."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.grow import GrownTree, GrowParams, best_within, grow_all
from entmtp.calibrate.replay import Counts, accepted_lengths, text_counts, walk
from entmtp.calibrate.trace import Trace
from entmtp.errors import InputError
from entmtp.topology import Topology

__all__ = ["BUDGETS", "Bin", "BudgetScore", "TaskScore", "evaluate_heads"]

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
TOP_RANKS = (1, 2, 4, 8)
HEADLINE_NODES = 16
POSITION_EDGES = (0, 128, 256, 512, 1024, 2048, 4096)
ENTROPY_EDGES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
RESAMPLES, CONFIDENCE = 2000, 0.95

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class BudgetScore:
    """The best tree of at most so many nodes.

    Attributes:
        nodes: the budget.
        paths: of the tree that was best on the fitting half.
        fitted: tokens a step on that half.
        mean_acceptance_length: on the other half.
        ci95: percentiles of a bootstrap over texts of the other half; ``None`` for fewer than two
            texts with a whole step.
    """

    nodes: int
    paths: list[list[int]]
    fitted: float
    mean_acceptance_length: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True)
class Bin:
    """Steps whose root lies in an interval.

    Attributes:
        low: inclusive.
        high: exclusive; ``None`` in the last bin.
        num_steps: in it.
        mean_acceptance_length: of them; ``None`` without any.
    """

    low: float
    high: float | None
    num_steps: int
    mean_acceptance_length: float | None


@dataclass(frozen=True)
class TaskScore:
    """Acceptance on one task, on the half that no tree was fitted to.

    Attributes:
        mean_acceptance_length: of the best tree of at most 16 nodes.
        ci95: of it.
        num_prompts: of that half.
        num_tokens: of that half.
        mean_entropy: of the target at all positions, nats.
        mean_p0: top-1 probability of the target there.
        budgets: by node budget.
        heads: for each depth, share of positions whose true token is among the first 1, 2, 4, 8;
            ``None`` where no text is so long.
        depths: for each depth of the best tree of 16, how often it is kept where the depth above
            is.
        by_position: tokens a step of that tree by position of the root in the text, prompt
            included.
        by_entropy: the same by entropy of the root's distribution.
        optimism: joint score over own rollout, minus one, of that tree on the fitting half.
    """

    mean_acceptance_length: float
    ci95: tuple[float, float] | None
    num_prompts: int
    num_tokens: int
    mean_entropy: float
    mean_p0: float
    budgets: list[BudgetScore]
    heads: list[dict[str, float | None]]
    depths: list[float | None]
    by_position: list[Bin]
    by_entropy: list[Bin]
    optimism: float

    def as_dict(self) -> dict[str, object]:
        """JSON form."""
        return asdict(self)


def evaluate_heads(
    trace: Trace, params: GrowParams | None = None, progress: Progress | None = None
) -> tuple[TaskScore, dict[str, TaskScore]]:
    """Score all texts together, and each task on its own.

    Args:
        trace: of at least two prompts a task.
        params: how trees are grown.
        progress: told what is being grown, and how far it is.

    Raises:
        InputError: a task has a single prompt, or its texts are too short for a step.
    """
    tasks = trace.by_task()
    for task, part in tasks.items():
        if part.num_texts < 2:
            raise InputError(
                f"task {task!r} has one prompt; trees are grown on one half of the prompts and "
                "scored on the other, so give at least two"
            )
    params = params or GrowParams(max_nodes=BUDGETS[-1])
    overall = _score(trace, params, _named(progress, "all"))
    if len(tasks) == 1:
        return overall, dict.fromkeys(tasks, overall)
    return overall, {
        task: _score(part, params, _named(progress, task)) for task, part in tasks.items()
    }


def _score(
    trace: Trace, params: GrowParams, progress: Callable[[int, int], None] | None
) -> TaskScore:
    fitting, other = trace.halves()
    if np.diff(other.offsets).max() < 2:
        raise InputError("the texts are too short for a step; raise max_new_tokens")
    trees = grow_all(fitting, params, progress=progress)
    budgets = [_budget(trees, nodes, other) for nodes in BUDGETS if nodes <= params.max_nodes]
    headline = best_within(trees, HEADLINE_NODES)
    counts = text_counts(other, headline.topology)
    signals = ~np.isnan(other.entropy)
    return TaskScore(
        mean_acceptance_length=_total(counts).mean_acceptance_length,
        ci95=_interval(counts),
        num_prompts=other.num_texts,
        num_tokens=other.num_tokens,
        mean_entropy=float(other.entropy[signals].mean()),
        mean_p0=float(other.p0[signals].mean()),
        budgets=budgets,
        heads=_top_shares(other),
        depths=_kept_shares(other, headline.topology),
        by_position=_bins(other, headline.topology, _positions(other), POSITION_EDGES),
        by_entropy=_bins(other, headline.topology, other.entropy, ENTROPY_EDGES),
        optimism=headline.optimism,
    )


def _budget(trees: Sequence[GrownTree], nodes: int, other: Trace) -> BudgetScore:
    chosen = best_within(trees, nodes)
    counts = text_counts(other, chosen.topology)
    return BudgetScore(
        nodes,
        chosen.topology.to_list(),
        chosen.own.mean_acceptance_length,
        _total(counts).mean_acceptance_length,
        _interval(counts),
    )


def _total(counts: Sequence[Counts]) -> Counts:
    return Counts(sum(c.num_tokens for c in counts), sum(c.num_steps for c in counts))


def _interval(counts: Sequence[Counts]) -> tuple[float, float] | None:
    """Percentiles of tokens a step under a bootstrap over texts that have a whole step."""
    usable = [c for c in counts if c.num_steps]
    if len(usable) < 2:
        return None
    tokens = np.array([c.num_tokens for c in usable])
    steps = np.array([c.num_steps for c in usable])
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(usable), (RESAMPLES, len(usable)))
    values = tokens[picks].sum(axis=1) / steps[picks].sum(axis=1)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _top_shares(trace: Trace) -> list[dict[str, float | None]]:
    """By depth; only positions that have a token so far ahead are counted."""
    shares: list[dict[str, float | None]] = []
    left = np.repeat(trace.offsets[1:], np.diff(trace.offsets)) - np.arange(trace.num_tokens)
    for depth in range(trace.max_depth):
        ranks = trace.ranks[left > depth + 1, depth]
        found = {f"top{top}": float((ranks < top).mean()) for top in TOP_RANKS if len(ranks)}
        shares.append({f"top{top}": found.get(f"top{top}") for top in TOP_RANKS})
    return shares


def _kept_shares(trace: Trace, tree: Topology) -> list[float | None]:
    accepted = accepted_lengths(trace, tree)
    kept = accepted[walk(trace, accepted).inner]
    shares: list[float | None] = []
    for depth in range(1, tree.max_depth + 1):
        reached = int((kept >= depth - 1).sum())
        shares.append(int((kept >= depth).sum()) / reached if reached else None)
    return shares


def _positions(trace: Trace) -> npt.NDArray[np.int64]:
    """Absolute position of every root."""
    sizes = np.diff(trace.offsets)
    start = np.repeat(trace.prompt_lengths.astype(np.int64) - trace.offsets[:-1], sizes)
    return start + np.arange(trace.num_tokens)


def _bins(
    trace: Trace, tree: Topology, values: npt.NDArray[np.generic], edges: Sequence[float]
) -> list[Bin]:
    accepted = accepted_lengths(trace, tree)
    roots = walk(trace, accepted).inner
    place = np.digitize(np.asarray(values)[roots], edges) - 1
    bins = []
    for index, low in enumerate(edges):
        kept = accepted[roots[place == index]]
        high = edges[index + 1] if index + 1 < len(edges) else None
        bins.append(Bin(low, high, len(kept), float(kept.mean()) + 1 if len(kept) else None))
    return bins


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)
