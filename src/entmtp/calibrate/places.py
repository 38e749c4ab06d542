"""Sequences at one context and in one batch, on which steps with any tree are timed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from entmtp.calibrate.points import StepSamples
from entmtp.drafters.base import AnyRequest, Drafter, DraftTree
from entmtp.engine import Engine, EngineLimits, Request, StepTimes
from entmtp.params import SamplingParams
from entmtp.scheduler import SchedulerDecision, Signal
from entmtp.topology import Topology

__all__ = ["STAY", "TimedPlace", "filler_tokens"]

STAY = 96
"""Tokens that a sequence may grow before it begins anew."""


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


class TimedPlace:
    """An engine with sequences at one context in one batch."""

    def __init__(
        self, engine: Engine, place: tuple[int, int], tokens: Sequence[int], temperature: float
    ) -> None:
        context, self.batch = place
        self._sampling = SamplingParams(
            max_new_tokens=4 * STAY, temperature=temperature, seed=0, ignore_eos=True
        )
        self._policy = _Steered()
        limits = EngineLimits(max_batch_size=self.batch, prefill_chunk=4096)
        drafter = _WholeTrees(engine.drafter)
        self._engine = Engine(engine.target, drafter, self._policy, engine.tokenizer, limits)
        self._engine.times_observer = self._take
        start = max(1, context - STAY // 2)
        self._prompt = tuple(tokens[at % len(tokens)] for at in range(start))
        self._times: StepTimes | None = None
        self._ids: list[int] = []
        self._grown = 0

    def step(self, plan: Topology, samples: StepSamples | None) -> None:
        """One step of all sequences with a tree."""
        if not self._ids or self._grown + plan.max_depth + 1 > STAY:
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


def filler_tokens(engine: Engine) -> list[int]:
    """Tokens to fill contexts with: spread over the vocabulary, always the same."""
    size = engine.target.config.vocab_size
    return [7919 * at % size for at in range(4096)]
