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
from typing import Any
from weakref import WeakKeyDictionary

import torch

from entmtp.calibrate.points import Point, StepSamples, TimedPoints, cost_table
from entmtp.costs import CostTable
from entmtp.drafters.base import AnyRequest, Drafter, DraftTree
from entmtp.engine import Engine, EngineLimits, Request, StepTimes
from entmtp.errors import InputError
from entmtp.params import SamplingParams
from entmtp.scheduler import SchedulerDecision, Signal
from entmtp.target.base import Target
from entmtp.topology import Topology

__all__ = [
    "Probe",
    "TimingParams",
    "filler_tokens",
    "probe_costs",
    "time_points",
    "time_steps",
    "timing_points",
]

_STAY = 96  # tokens that a sequence may grow before it begins anew
_FAR_ROWS = (1, 2, 4, 8, 16, 32)  # that are timed at further contexts
_BATCH_ROWS = (1, 2, 4, 8)

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


class _WholeTrees:
    """A drafter whose trees are always as large as the plan, whether it found tokens or not.

    Prompt lookup leaves out what it does not find, and finds little in filler text; the rows that
    are timed must be those that the table says.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.digest = drafter.name, drafter.digest
        self.max_depth, self.max_width = drafter.max_depth, drafter.max_width
        self.prefill, self.commit = drafter.prefill, drafter.commit

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """The trees, the root's token at nodes that have none."""
        trees = self._drafter.draft(requests)
        return [_whole(tree, one) for tree, one in zip(trees, requests, strict=True)]


def _whole(tree: DraftTree, request: AnyRequest) -> DraftTree:
    plan = request.plan
    if not isinstance(plan, Topology) or tree.topology.num_nodes == plan.num_nodes:
        return tree
    tokens = torch.full((plan.num_rows,), int(tree.tokens[0]), dtype=torch.int64)
    nodes = {path: node for node, path in enumerate(plan.paths, start=1)}
    for path, token in zip(tree.topology.paths, tree.tokens[1:].tolist(), strict=True):
        tokens[nodes[path]] = token
    return DraftTree(plan, tokens)


class _Place:
    """An engine with sequences at one context in one batch."""

    def __init__(
        self, engine: Engine, place: tuple[int, int], tokens: Sequence[int], temperature: float
    ) -> None:
        context, self.batch = place
        self._sampling = SamplingParams(
            max_new_tokens=4 * _STAY, temperature=temperature, seed=0, ignore_eos=True
        )
        self._policy = _Steered()
        limits = EngineLimits(max_batch_size=self.batch, prefill_chunk=4096)
        drafter = _WholeTrees(engine.drafter)
        self._engine = Engine(engine.target, drafter, self._policy, engine.tokenizer, limits)
        self._engine.times_observer = self._take
        start = max(1, context - _STAY // 2)
        self._prompt = tuple(tokens[at % len(tokens)] for at in range(start))
        self._times: StepTimes | None = None
        self._ids: list[int] = []
        self._grown = 0

    def step(self, plan: Topology, samples: StepSamples | None) -> None:
        """One step of all sequences with a tree."""
        if not self._ids or self._grown + plan.max_depth + 1 > _STAY:
            self._restart()
        self._policy.plan = plan
        started = time.perf_counter()
        chunks = self._engine.step()
        wall = time.perf_counter() - started
        self._grown += max(len(chunk.token_ids) for chunk in chunks)
        assert self._times is not None  # noqa: S101 - every step reports
        assert self._times.num_rows == self.batch * plan.num_rows  # noqa: S101 - nothing was cut
        if samples is not None:
            samples.add(self._times, wall)

    def close(self) -> None:
        """Drop the sequences."""
        for request_id in self._ids:
            self._engine.cancel(request_id)
        self._ids = []

    def _restart(self) -> None:
        self.close()
        self._ids = [
            self._engine.submit(Request(self._prompt, self._sampling)) for _ in range(self.batch)
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
    places = {place: _Place(engine, place, tokens, params.temperature) for place in where}
    samples = {point: StepSamples() for point in points}
    rng = random.Random(0)
    deadline = time.perf_counter() + params.seconds
    num_rounds = 0
    for number in range(params.max_rounds + 1):
        for point in rng.sample(points, len(points)):
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
    for place in places.values():
        place.close()
    return TimedPoints(samples, num_rounds)


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


def _of_sizes(plans: Sequence[Topology], sizes: Sequence[int]) -> list[Topology]:
    """For each size the nearest tree that is not larger."""
    found = [max((p for p in plans if p.num_rows <= s), key=lambda p: p.num_rows) for s in sizes]
    return list(dict.fromkeys(found))
