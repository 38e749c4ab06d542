"""What steps cost here and now: trees of many sizes, in turn, in the engine itself.

Sequences at several contexts and batches are decoded; before each step one point (a tree in one of
these places) is drawn without replacement, so that a drift of the machine falls on all points
alike. The first round warms up and is not counted. Rounds go on until the medians are certain
enough, or time is up, which the table then tells by its spread.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from entmtp.costs import CostTable
from entmtp.engine import Engine, EngineLimits, Request, StepTimes
from entmtp.errors import InputError
from entmtp.params import SamplingParams
from entmtp.scheduler import SchedulerDecision, Signal
from entmtp.topology import Topology

__all__ = ["TimingParams", "filler_tokens", "probe_costs", "time_steps"]

_STAY = 96  # tokens that a sequence may grow before it begins anew
_FAR_ROWS = (1, 2, 4, 8, 16, 32)  # that are timed at further contexts
_BATCH_ROWS = (1, 2, 4, 8)
_NORMAL_MEDIAN = 1.2533  # standard error of a median over that of a mean, for normal noise
_IQR = 1.349  # interquartile range of a normal distribution, in standard deviations

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TimingParams:
    """How costs are measured.

    Attributes:
        contexts: committed tokens; those that do not fit into the window are left out.
        batches: sequences in a step.
        min_rounds: visits to every point.
        max_rounds: at most.
        spread: go on until the standard error of each median is below this share of it.
        seconds: at most, but for ``min_rounds``.
    """

    contexts: tuple[int, ...] = (256, 1024)
    batches: tuple[int, ...] = (1, 4, 16)
    min_rounds: int = 9
    max_rounds: int = 40
    spread: float = 0.015
    seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InputError: says which value.
        """
        if not self.contexts or min(self.contexts) < 1:
            raise InputError(f"contexts is {self.contexts}; give at least one length >= 1")
        if not self.batches or self.batches[0] != 1 or min(self.batches) < 1:
            raise InputError(f"batches is {self.batches}; the first must be 1")
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise InputError("min_rounds must be from 1 to max_rounds")


@dataclass
class _Steered:
    """A policy that does what it is told."""

    plan: Topology = field(default_factory=lambda: Topology(()))
    policy = "steered"

    def start(self) -> None:
        """No state."""

    def choose(self, state: None, signal: Signal) -> SchedulerDecision:
        """The plan that was set."""
        del signal
        return SchedulerDecision("it", self.plan)


@dataclass
class _Samples:
    """Seconds of the parts of a step at one point."""

    draft: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)

    def add(self, times: StepTimes, wall_s: float) -> None:
        self.draft.append(times.draft_s)
        self.forward.append(times.forward_s)
        self.rest.append(max(wall_s - times.draft_s - times.forward_s, 0.0))

    def spread(self) -> float:
        """Standard error of the median of the whole step, as a share of it."""
        whole = np.array(self.draft) + np.array(self.forward) + np.array(self.rest)
        low, middle, high = np.percentile(whole, [25, 50, 75])
        error = _NORMAL_MEDIAN * (high - low) / _IQR / np.sqrt(len(whole))
        return float(error / middle)


class _Place:
    """An engine with sequences at one context in one batch."""

    def __init__(self, engine: Engine, context: int, batch: int, tokens: Sequence[int]) -> None:
        self.context, self.batch = context, batch
        self._policy = _Steered()
        limits = EngineLimits(max_batch_size=batch, prefill_chunk=4096)
        self._engine = Engine(engine.target, engine.drafter, self._policy, engine.tokenizer, limits)
        self._engine.times_observer = self._take
        start = max(1, context - _STAY // 2)
        self._prompt = tuple(tokens[at % len(tokens)] for at in range(start))
        self._times: StepTimes | None = None
        self._ids: list[int] = []
        self._grown = 0

    def step(self, plan: Topology, samples: _Samples | None) -> None:
        """One step of all sequences with a tree."""
        if not self._ids or self._grown + plan.max_depth + 1 > _STAY:
            self._restart()
        self._policy.plan = plan
        started = time.perf_counter()
        chunks = self._engine.step()
        wall = time.perf_counter() - started
        self._grown += max(len(chunk.token_ids) for chunk in chunks)
        assert self._times is not None  # noqa: S101 - every step reports
        if samples is not None:
            samples.add(self._times, wall)

    def close(self) -> None:
        """Drop the sequences."""
        for request_id in self._ids:
            self._engine.cancel(request_id)
        self._ids = []

    def _restart(self) -> None:
        self.close()
        sampling = SamplingParams(max_new_tokens=4 * _STAY, ignore_eos=True)
        self._ids = [
            self._engine.submit(Request(self._prompt, sampling)) for _ in range(self.batch)
        ]
        self._grown, emitted = 0, 0
        self._policy.plan = Topology(())
        while emitted < self.batch:  # read the prompts
            emitted += sum(bool(chunk.token_ids) for chunk in self._engine.step())

    def _take(self, times: StepTimes) -> None:
        self._times = times


def time_steps(
    engine: Engine,
    trees: Sequence[Topology],
    tokens: Sequence[int],
    params: TimingParams,
    progress: Progress | None = None,
) -> CostTable:
    """Measure the costs of steps.

    Args:
        engine: whose target and drafter are timed; it must be idle.
        trees: of many sizes and depths; the empty tree is added.
        tokens: to fill contexts with.
        params: how much is measured.
        progress: told rounds done and the most that there will be.

    Raises:
        InputError: no tree, no text, or a window too small for any context.
    """
    if not trees or not tokens:
        raise InputError("costs are measured with at least one tree and some text")
    contexts = _contexts(engine, params)
    plans = list(dict.fromkeys([Topology(()), *sorted(trees, key=lambda t: t.num_nodes)]))
    points = _points(engine, plans, contexts, params.batches, tokens)
    samples = {(place, plan): _Samples() for place, plan in points}
    rng = random.Random(0)
    deadline = time.perf_counter() + params.seconds
    num_rounds = 0
    for number in range(params.max_rounds + 1):
        for place, plan in rng.sample(points, len(points)):
            place.step(plan, samples[place, plan] if number else None)
        num_rounds = number
        if progress is not None:
            progress(number, params.max_rounds)
        if number >= params.min_rounds and (
            time.perf_counter() > deadline
            or max(s.spread() for s in samples.values()) < params.spread
        ):
            break
    for place in {place for place, _ in points}:
        place.close()
    spread = max(s.spread() for s in samples.values())
    return _as_table(samples, contexts, params.batches, spread, num_rounds)


def probe_costs(
    engine: Engine, costs: CostTable, trees: Sequence[Topology], tokens: Sequence[int]
) -> CostTable:
    """Rescale a table to the state of this process, in about a second.

    Costs do not survive a process: the same program can land in another regime of memory. A few
    sizes are timed at the smallest context, and the table is scaled by what they cost now.
    """
    chosen = _probe_trees(trees)
    params = TimingParams(
        contexts=costs.contexts[:1], batches=(1,), min_rounds=5, max_rounds=12, seconds=0.8
    )
    now = time_steps(engine, chosen, tokens, params)
    context = now.contexts[0]
    factors = [
        (now.forward(rows, context) + now.rest(rows))
        / (costs.forward(rows, context) + costs.rest(rows))
        for rows in now.rows
    ]
    deepest = max(chosen, key=lambda tree: tree.max_depth)
    draft = now.draft(deepest) / costs.draft(deepest) if costs.draft(deepest) else 1.0
    return costs.scaled(now.rows, factors, draft)


def filler_tokens(engine: Engine) -> list[int]:
    """Tokens to fill contexts with: spread over the vocabulary, always the same."""
    size = engine.target.config.vocab_size
    return [7919 * at % size for at in range(4096)]


def _probe_trees(trees: Sequence[Topology]) -> list[Topology]:
    """About five sizes: for each of 2, 4, 8 and 16 rows the nearest tree, the deepest of equals."""
    found = [
        min(trees, key=lambda tree: (abs(tree.num_rows - rows), -tree.max_depth))
        for rows in (2, 4, 8, 16)
    ]
    return list(dict.fromkeys(found))


def _contexts(engine: Engine, params: TimingParams) -> tuple[int, ...]:
    window = engine.target.config.context_window
    room = window - 2 * _STAY
    fitting = tuple(sorted({c for c in params.contexts if c <= room}))
    if not fitting:
        if room < 1:
            raise InputError(
                f"the context window of {window} is too small to time steps in; it takes at least "
                f"{2 * _STAY + 1}"
            )
        fitting = (room,)
    return fitting


def _points(
    engine: Engine,
    plans: Sequence[Topology],
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: Sequence[int],
) -> list[tuple[_Place, Topology]]:
    """All trees at the first context; a few sizes at the others, and in batches."""
    home = _Place(engine, contexts[0], 1, tokens)
    points = [(home, plan) for plan in plans]
    for context in contexts[1:]:
        place = _Place(engine, context, 1, tokens)
        points += [(place, plan) for plan in _of_sizes(plans, _FAR_ROWS)]
    for batch in batches[1:]:
        place = _Place(engine, contexts[0], batch, tokens)
        points += [(place, plan) for plan in _of_sizes(plans, _BATCH_ROWS)]
    return points


def _of_sizes(plans: Sequence[Topology], sizes: Sequence[int]) -> list[Topology]:
    """For each size the nearest tree that is not larger."""
    found = [max((p for p in plans if p.num_rows <= s), key=lambda p: p.num_rows) for s in sizes]
    return list(dict.fromkeys(found))


def _as_table(
    samples: dict[tuple[_Place, Topology], _Samples],
    contexts: tuple[int, ...],
    batches: tuple[int, ...],
    spread: float,
    num_rounds: int,
) -> CostTable:
    home = {p: s for (place, p), s in samples.items() if _is_at(place, contexts[0], 1)}
    rows = tuple(sorted({plan.num_rows for plan in home}))
    base_forward = _by_rows(home, rows, "forward")
    base_rest = _by_rows(home, rows, "rest")
    lines = []
    for context in contexts:
        here = {p: s for (place, p), s in samples.items() if _is_at(place, context, 1)}
        lines.append(base_forward * _ratio(here, home, rows, "forward"))
    single = np.stack(lines)  # (C, R)
    forward, rest = [], []
    for batch in batches:
        here = {p: s for (place, p), s in samples.items() if _is_at(place, contexts[0], batch)}
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
        spread,
        num_rounds,
    )


def _is_at(place: _Place, context: int, batch: int) -> bool:
    return place.context == context and place.batch == batch


def _by_rows(
    samples: dict[Topology, _Samples], rows: Sequence[int], part: str
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
    here: dict[Topology, _Samples],
    home: dict[Topology, _Samples],
    rows: Sequence[int],
    part: str,
) -> npt.NDArray[np.float64]:
    """Cost here over cost at home, known at some sizes and read linearly between them."""
    sizes = sorted({plan.num_rows for plan in here})
    common = {plan: home[plan] for plan in here}
    ratios = _by_rows(here, sizes, part) / np.maximum(_by_rows(common, sizes, part), 1e-9)
    return np.interp(rows, sizes, ratios)


def _draft_costs(
    samples: dict[tuple[_Place, Topology], _Samples],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Least squares for the cost of a depth and of its further rows, none below zero."""
    depth = max(plan.max_depth for _, plan in samples)
    lines, values = [], []
    for (place, plan), one in samples.items():
        if not plan.num_nodes:
            continue
        line = np.zeros(2 * depth)
        for at, level in enumerate(plan.levels):
            line[at] = 1.0
            line[depth + at] = len(level.parents) * place.batch - 1
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
