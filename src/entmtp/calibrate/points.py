"""Points at which steps are timed, and the table of costs that their times make.

Points may be dealt to several machines of one kind. Each of them also times one common point, the
empty tree, and its times are scaled by it, so that a machine that is slower at the moment does not
make its own points look dear.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from entmtp.costs import CostTable
from entmtp.engine import StepTimes
from entmtp.topology import Topology

__all__ = ["Point", "StepSamples", "TimedPoints", "cost_table", "join_timed", "split_points"]

_NORMAL_MEDIAN = 1.2533  # standard error of a median over that of a mean, for normal noise
_IQR = 1.349  # interquartile range of a normal distribution, in standard deviations
_COMMON_VISITS = 3  # a round: the scale of all other points hangs on the common one


@dataclass(frozen=True)
class Point:
    """What is timed: a step with a tree, at a context, in a batch.

    Attributes:
        context: committed tokens.
        batch: sequences in the step.
        plan: the tree of each of them.
    """

    context: int
    batch: int
    plan: Topology


@dataclass
class StepSamples:
    """Seconds of the parts of a step at one point.

    Attributes:
        draft: of filling the trees.
        forward: of the target.
        rest: of the step.
    """

    draft: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)

    def add(self, times: StepTimes, wall_s: float) -> None:
        """Note one step."""
        self.draft.append(times.draft_s)
        self.forward.append(times.forward_s)
        self.rest.append(max(wall_s - times.draft_s - times.forward_s, 0.0))

    def whole(self) -> npt.NDArray[np.float64]:
        """Of whole steps."""
        parts: npt.NDArray[np.float64] = np.array([self.draft, self.forward, self.rest])
        return np.asarray(parts.sum(axis=0))

    def scaled(self, factor: float) -> "StepSamples":
        """Those of a machine that takes ``factor`` as long."""
        return StepSamples(
            *([factor * s for s in x] for x in (self.draft, self.forward, self.rest))
        )

    def spread(self) -> float:
        """Standard error of the median of the whole step, as a share of it."""
        whole = self.whole()
        low, middle, high = np.percentile(whole, [25, 50, 75])
        error = _NORMAL_MEDIAN * (high - low) / _IQR / np.sqrt(len(whole))
        return float(error / middle)


@dataclass(frozen=True)
class TimedPoints:
    """What was measured.

    Attributes:
        samples: of each point.
        num_rounds: times that every point was visited.
    """

    samples: dict[Point, StepSamples]
    num_rounds: int


def split_points(points: Sequence[Point], count: int) -> list[list[Point]]:
    """Deal points to at most ``count`` machines; each also gets the first point, a few times.

    Args:
        points: no two alike; neighbours are of similar cost.
        count: at least 1; one machine gets all points once.
    """
    count = min(count, len(points) - 1)
    if count <= 1:
        return [list(points)]
    common, others = [points[0]] * _COMMON_VISITS, points[1:]
    return [[*common, *others[at::count]] for at in range(count)]


def join_timed(parts: Sequence[TimedPoints]) -> TimedPoints:
    """What the machines of :func:`split_points` measured, at the speed of the first of them."""
    first = parts[0]
    common = next(iter(first.samples))
    joined = dict(first.samples)
    pace = float(np.median(first.samples[common].whole()))
    for part in parts[1:]:
        factor = pace / float(np.median(part.samples[common].whole()))
        for point, samples in part.samples.items():
            if point != common:
                joined[point] = samples.scaled(factor)
    return TimedPoints(joined, min(part.num_rounds for part in parts))


def cost_table(timed: TimedPoints) -> CostTable:
    """The table of what was measured: all trees at the smallest context, some of them elsewhere."""
    samples = timed.samples
    contexts = tuple(sorted({point.context for point in samples}))
    batches = tuple(sorted({point.batch for point in samples}))
    home = _at(samples, contexts[0], 1)
    rows = tuple(sorted({plan.num_rows for plan in home}))
    base_forward = _by_rows(home, rows, "forward")
    base_rest = _by_rows(home, rows, "rest")
    lines = []
    for context in contexts:
        here = _at(samples, context, 1)
        lines.append(base_forward * _ratio(here, home, rows, "forward"))
    single = np.stack(lines)  # (C, R)
    forward, rest = [], []
    for batch in batches:
        here = _at(samples, contexts[0], batch)
        together = base_forward * _ratio(here, home, rows, "forward")
        # what a longer context adds is attention, of each sequence on its own
        forward.append(together + batch * (single - single[0]))
        rest.append(base_rest * _ratio(here, home, rows, "rest"))
    draft, per_row = _draft_costs(samples)
    return CostTable(
        rows,
        contexts,
        batches,
        tuple(tuple(tuple(line) for line in np.maximum(f, 1e-6).tolist()) for f in forward),
        tuple(tuple(line.tolist()) for line in rest),
        tuple(draft.tolist()),
        tuple(per_row.tolist()),
        max(s.spread() for s in samples.values()),
        timed.num_rounds,
    )


def _at(
    samples: Mapping[Point, StepSamples], context: int, batch: int
) -> dict[Topology, StepSamples]:
    """Those of one place."""
    return {p.plan: s for p, s in samples.items() if (p.context, p.batch) == (context, batch)}


def _by_rows(
    samples: dict[Topology, StepSamples], rows: Sequence[int], part: str
) -> npt.NDArray[np.float64]:
    """Median milliseconds by number of rows, over all trees of that size."""
    found = []
    for size in rows:
        seconds = [
            s for p, one in samples.items() if p.num_rows == size for s in getattr(one, part)
        ]
        found.append(1000 * float(np.median(seconds)))
    return np.array(found)


def _ratio(
    here: dict[Topology, StepSamples],
    home: dict[Topology, StepSamples],
    rows: Sequence[int],
    part: str,
) -> npt.NDArray[np.float64]:
    """Cost here over cost at home, known at some sizes and read linearly between them."""
    sizes = sorted({plan.num_rows for plan in here})
    common = {plan: home[plan] for plan in here}
    ratios = _by_rows(here, sizes, part) / np.maximum(_by_rows(common, sizes, part), 1e-9)
    return np.interp(rows, sizes, ratios)


def _draft_costs(
    samples: Mapping[Point, StepSamples],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Least squares for the cost of a depth and of its further rows, none below zero."""
    depth = max(point.plan.max_depth for point in samples)
    lines, values = [], []
    for point, one in samples.items():
        if not point.plan.num_nodes:
            continue
        line = np.zeros(2 * depth)
        for at, level in enumerate(point.plan.levels):
            line[at] = 1.0
            line[depth + at] = len(level.parents) * point.batch - 1
        value = 1000 * float(np.median(one.draft))
        lines.append(line / value)  # errors count as shares
        values.append(1.0)
    found = _non_negative(np.array(lines), np.array(values))
    return found[:depth], found[depth:]


def _non_negative(
    matrix: npt.NDArray[np.float64], values: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Least squares where whatever would be negative is left out, again and again."""
    free = np.flatnonzero(np.abs(matrix).sum(axis=0) > 0)
    found = np.zeros(matrix.shape[1])
    while len(free):
        solved = np.linalg.lstsq(matrix[:, free], values, rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved
            break
        free = free[solved >= 0]
    return found
