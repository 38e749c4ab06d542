"""What steps cost here and now: trees of many sizes, in turn, in the engine itself.

Sequences at several contexts and batches are decoded; before each step one point (a tree in one of
these places) is drawn without replacement, so that a drift of the machine falls on all points
alike. The first round warms up and is not counted. Rounds go on until the medians are certain
enough, or time is up, which the table then tells by its spread.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from entmtp.calibrate.places import STAY, TimedPlace
from entmtp.calibrate.points import Point, StepSamples, TimedPoints, cost_table
from entmtp.costs import CostTable
from entmtp.engine import Engine
from entmtp.errors import InputError
from entmtp.target.base import Target
from entmtp.topology import Topology

__all__ = [
    "Probe",
    "TimingParams",
    "probe_costs",
    "time_points",
    "time_steps",
    "timing_points",
]

_FAR_ROWS = (1, 2, 4, 8, 16, 32)  # that are timed at further contexts
_BATCH_ROWS = (1, 2, 4, 8)
_OFTEN_ROWS, _OFTEN = 8, 3  # trees up to this size, at home, are visited so often a round

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TimingParams:
    """How costs are measured.

    Attributes:
        contexts: committed tokens; those that do not fit into the window are left out.
        batches: sequences in a step.
        min_rounds: visits to every point; small trees alone have more.
        max_rounds: at most.
        spread: go on until the standard error of each median is below this share of it.
        seconds: at most, but for ``min_rounds``.
        temperature: of sampling, whose work is part of a step.
    """

    contexts: tuple[int, ...] = (256, 1024)
    batches: tuple[int, ...] = (1, 4, 16)
    min_rounds: int = 9
    max_rounds: int = 40
    spread: float = 0.015
    seconds: float = 60.0
    temperature: float = 0.0

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
    points = timing_points(engine, trees, params)
    return cost_table(time_points(engine, points, tokens, params, progress))


def timing_points(engine: Engine, trees: Sequence[Topology], params: TimingParams) -> list[Point]:
    """All trees at the first context, the empty one first; a few sizes at the others, in batches.

    Raises:
        InputError: no tree, or a window too small for any context.
    """
    if not trees:
        raise InputError("costs are measured with at least one tree")
    contexts = _contexts(engine, params)
    plans = list(dict.fromkeys([Topology(()), *sorted(trees, key=lambda t: t.num_nodes)]))
    points = [Point(contexts[0], 1, plan) for plan in plans]
    for context in contexts[1:]:
        points += [Point(context, 1, plan) for plan in _of_sizes(plans, _FAR_ROWS)]
    for batch in params.batches[1:]:
        points += [Point(contexts[0], batch, plan) for plan in _of_sizes(plans, _BATCH_ROWS)]
    return points


def time_points(
    engine: Engine,
    points: Sequence[Point],
    tokens: Sequence[int],
    params: TimingParams,
    progress: Progress | None = None,
) -> TimedPoints:
    """Visit points in turn, again and again.

    Args:
        engine: whose target and drafter are timed; it must be idle.
        points: one that is named twice is visited twice a round.
        tokens: to fill contexts with, at least one.
        params: how much is measured.
        progress: told rounds done and the most that there will be.
    """
    where = dict.fromkeys((point.context, point.batch) for point in points)
    samples = {point: StepSamples() for point in points}
    visits = [point for point in points for _ in range(_visits(point, points[0].context))]
    with ExitStack() as opened:
        places = {
            place: opened.enter_context(
                closing(TimedPlace(engine, place, tokens, params.temperature))
            )
            for place in where
        }
        num_rounds = _visit(places, samples, visits, params, progress)
    return TimedPoints(samples, num_rounds)


def _visit(
    places: Mapping[tuple[int, int], TimedPlace],
    samples: Mapping[Point, StepSamples],
    visits: Sequence[Point],
    params: TimingParams,
    progress: Progress | None,
) -> int:
    """Time steps until their spread or the time is small enough; the number of rounds."""
    rng = random.Random(0)
    deadline = time.perf_counter() + params.seconds
    num_rounds = 0
    for number in range(params.max_rounds + 1):
        for point in rng.sample(visits, len(visits)):
            place = places[point.context, point.batch]
            place.step(point.plan, samples[point] if number else None)
        num_rounds = number
        if progress is not None:
            progress(number, params.max_rounds)
        if number >= params.min_rounds and (
            time.perf_counter() > deadline
            or max(s.spread() for s in samples.values()) < params.spread
        ):
            break
    if progress is not None:
        progress(params.max_rounds, params.max_rounds)
    return num_rounds


def _visits(point: Point, home: int) -> int:
    """A round: predictions are mostly made of small trees alone, and they are quickly timed."""
    is_often = point.plan.num_rows <= _OFTEN_ROWS and (point.context, point.batch) == (home, 1)
    return _OFTEN if is_often else 1


@dataclass(frozen=True)
class Probe:
    """What a few sizes cost in this process.

    Attributes:
        costs: at the smallest context, alone.
        deepest: tree by which drafting is compared.
    """

    costs: CostTable
    deepest: Topology

    def rescale(self, costs: CostTable) -> tuple[CostTable, dict[str, Any]]:
        """A table of the same machine as it is in this process, and what was found, for JSON."""
        now, context = self.costs, costs.contexts[0]
        factors = [
            (now.forward(rows, now.contexts[0]) + now.rest(rows))
            / (costs.forward(rows, context) + costs.rest(rows))
            for rows in now.rows
        ]
        before = costs.draft(self.deepest)
        draft = now.draft(self.deepest) / before if before else 1.0
        found = {"rows": now.rows, "factors": factors, "draft": draft, "spread": now.spread}
        return costs.scaled(now.rows, factors, draft), found


_probes: WeakKeyDictionary[Target, dict[tuple[object, ...], Probe]] = WeakKeyDictionary()


def probe_costs(
    engine: Engine,
    context: int,
    trees: Sequence[Topology],
    tokens: Sequence[int],
    temperature: float = 0.0,
) -> Probe:
    """Time a few sizes, in about a second; once for each target and drafter of a process.

    Costs do not survive a process: the same program can land in another regime of memory.

    Args:
        engine: whose target and drafter are timed; it must be idle.
        context: committed tokens.
        trees: to choose from.
        tokens: to fill the context with.
        temperature: of sampling.
    """
    about = (engine.drafter.name, engine.drafter.digest, torch.get_num_threads(), temperature)
    known = _probes.setdefault(engine.target, {})
    if about not in known:
        chosen = _probe_trees(trees)
        params = TimingParams(
            contexts=(context,),
            batches=(1,),
            min_rounds=4,
            max_rounds=12,
            seconds=0.8,
            temperature=temperature,
        )
        costs = time_steps(engine, chosen, tokens, params)
        known[about] = Probe(costs, max(chosen, key=lambda tree: tree.max_depth))
    return known[about]


def _probe_trees(trees: Sequence[Topology]) -> list[Topology]:
    """About five sizes: for each of 2, 4, 8 and 16 rows the nearest tree, the deepest of equals."""
    found = [
        min(trees, key=lambda tree: (abs(tree.num_rows - rows), -tree.max_depth))
        for rows in (2, 4, 8, 16)
    ]
    return list(dict.fromkeys(found))


def _contexts(engine: Engine, params: TimingParams) -> tuple[int, ...]:
    window = engine.target.config.context_window
    room = window - 2 * STAY
    fitting = tuple(sorted({c for c in params.contexts if c <= room}))
    if not fitting:
        if room < 1:
            raise InputError(
                f"the context window of {window} is too small to time steps in; it takes at least "
                f"{2 * STAY + 1}"
            )
        fitting = (room,)
    return fitting


def _of_sizes(plans: Sequence[Topology], sizes: Sequence[int]) -> list[Topology]:
    """For each size the nearest tree that is not larger."""
    found = [max((p for p in plans if p.num_rows <= s), key=lambda p: p.num_rows) for s in sizes]
    return list(dict.fromkeys(found))
