"""Replay of policies that grow trees is what decoding does: every tree of every step, exactly."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

from entmtp.calibrate.collect import TracePrompt, TraceSettings, collect_trace
from entmtp.calibrate.policies import PolicyReplay, replay_policy
from entmtp.calibrate.session import trace_facts
from entmtp.calibrate.summary import shorten
from entmtp.calibrate.trace import NO_COPY, Trace
from entmtp.drafters.base import AnyRequest, Drafter, DrafterState, DraftPlan, DraftTree
from entmtp.engine import Engine, GenerationResult, Request
from entmtp.growth import COPY_RANK
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.target.base import Target
from entmtp.topology import Topology
from fakes import ByteTokenizer
from growing import SignalScheduler, random_plan
from tiny_drafting import KINDS, every_backend, repeating, tiny_drafter, tiny_model

ENVELOPE = Topology.from_paths(
    [*((a,) * d for a in (0, 1, 4) for d in (1, 2, 3)), (0, 2), (2,), (0, 0, 1), (0, 0, 0, 0)]
)
GAPS = Topology.from_paths([(1,), (3,), (1, 1), (1, 2), (1, 2, 0)])
SAMPLING = SamplingParams(max_new_tokens=40, seed=7)


class Watched:
    """A drafter whose trees are noted, prompt by prompt."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._states: list[tuple[DrafterState, tuple[int, ...]]] = []
        self.trees: dict[tuple[int, ...], list[Topology]] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._drafter, name)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> DrafterState:
        state = self._drafter.prefill(prompt, hidden, root)
        self._states.append((state, tuple(prompt)))
        self.trees[tuple(prompt)] = []
        return state

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        trees = self._drafter.draft(requests)
        for request, tree in zip(requests, trees, strict=True):
            prompt = next(prompt for state, prompt in self._states if state is request.state)
            self.trees[prompt].append(tree.topology)
        return trees


@dataclass(frozen=True)
class Case:
    """A tiny model with heads of random weights, and prompts that repeat themselves."""

    target: Target
    drafter: Drafter
    prompts: tuple[TracePrompt, ...]
    tokenizer: ByteTokenizer

    @classmethod
    def make(cls, backend: str, kind: str, eos: int | None = None) -> "Case":
        target, drafter = tiny_model(backend), tiny_drafter(backend, kind)
        rng, vocab_size = random.Random(1), target.config.vocab_size
        prompts: dict[tuple[int, ...], TracePrompt] = {}
        while len(prompts) < 6:
            tokens = repeating(rng, vocab_size, 24)
            prompts[tokens] = TracePrompt(f"p{len(prompts)}", "t", tokens)
        tokenizer = ByteTokenizer(vocab_size, () if eos is None else (eos,))
        return cls(target, drafter, tuple(prompts.values()), tokenizer)

    def trace(self, sampling: SamplingParams, folder: Path, envelope: Topology) -> Trace:
        engine = Engine(self.target, self.drafter, FixedScheduler.plain(), self.tokenizer)
        settings = TraceSettings(sampling, envelope=envelope)
        facts = trace_facts(engine, "tiny", self.prompts, settings)
        file = folder / "it.trace"
        return collect_trace(engine, self.prompts, settings, facts, file, lambda *_: None)

    def decode(
        self, sampling: SamplingParams, scheduler: TopologyScheduler
    ) -> tuple[list[GenerationResult], list[list[Topology]]]:
        """Results, and the trees of every step, text by text; all texts in one batch."""
        watched = Watched(self.drafter)
        engine = Engine(self.target, watched, scheduler, self.tokenizer)  # type: ignore[arg-type]
        requests = [
            Request(prompt.tokens, replace(sampling, seed=derive_seed(sampling.seed or 0, number)))
            for number, prompt in enumerate(self.prompts)
        ]
        results = engine.run(requests)
        return results, [watched.trees[prompt.tokens] for prompt in self.prompts]


def plans_of(seed: int, envelope: Topology) -> list[DraftPlan]:
    """Ways to grow a tree, and two fixed ones."""
    fixed = [Topology(()), Topology.from_paths([(0,), (2,), (0, 1)])]
    return [*(random_plan(10 * seed + number, envelope) for number in range(8)), *fixed]


def assert_same_steps(
    replayed: PolicyReplay, results: list[GenerationResult], trees: list[list[Topology]]
) -> None:
    """Decisions, trees and accepted tokens.

    Where a text stops before its limit, its last step may accept tokens beyond the stop.
    """
    for steps, result, own in zip(replayed.steps, results, trees, strict=True):
        decoded = result.stats.steps
        assert [step.name for step in steps] == [step.topology for step in decoded]
        assert [step.tree for step in steps] == own
        last = len(steps) - (result.finish_reason == "stop")
        accepted = [step.accepted for step in steps]
        assert accepted[:last] == [step.num_accepted for step in decoded][:last]


@every_backend
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_replay_grows_the_trees_of_decoding(
    backend: str, kind: str, temperature: float, tmp_path: Path
) -> None:
    """By plans that change with the signal, up to the last token of every text."""
    case = Case.make(backend, kind)
    sampling = replace(SAMPLING, temperature=temperature)
    envelope = ENVELOPE.truncate(case.drafter.max_depth or 9)
    trace = case.trace(sampling, tmp_path, envelope)
    copied, mixed = 0, 0
    for seed in range(3):
        policy = SignalScheduler(seed, plans_of(seed, envelope))
        results, trees = case.decode(sampling, policy)
        replayed = replay_policy(trace, policy)
        assert_same_steps(replayed, results, trees)
        for steps in replayed.steps:
            for step in steps:
                ranks = {rank for path in step.tree.paths for rank in path}
                copied += COPY_RANK in ranks and step.accepted > 0
                mixed += COPY_RANK in ranks and len(ranks) > 1
    assert copied > 5
    assert mixed > 5


@every_backend
def test_texts_that_stop_early_are_replayed_too(backend: str, tmp_path: Path) -> None:
    """Trees are cut by the limit alone, not by a stop that no one can know of."""
    sampling = replace(SAMPLING, temperature=0.7)
    case = Case.make(backend, "hydra")
    plain, _ = case.decode(sampling, FixedScheduler.plain())
    eos = plain[0].token_ids[9]
    case = Case.make(backend, "hydra", eos)
    trace = case.trace(sampling, tmp_path, ENVELOPE)
    stopped = 0
    for seed in range(4):
        policy = SignalScheduler(seed, plans_of(seed, ENVELOPE))
        results, trees = case.decode(sampling, policy)
        assert_same_steps(replay_policy(trace, policy), results, trees)
        stopped += sum(result.finish_reason == "stop" for result in results)
    assert stopped > 0


@every_backend
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_envelope_without_the_best_token_is_replayed_too(
    backend: str, temperature: float, tmp_path: Path
) -> None:
    """What is known of the drafter's best token then comes from the fixed trees alone."""
    case, sampling = Case.make(backend, "mtp"), replace(SAMPLING, temperature=temperature)
    trace = case.trace(sampling, tmp_path, GAPS)
    for seed in range(6):
        policy = SignalScheduler(seed, plans_of(seed, GAPS))
        results, trees = case.decode(sampling, policy)
        assert_same_steps(replay_policy(trace, policy), results, trees)


@every_backend
def test_a_trace_knows_where_texts_are_copied(backend: str, tmp_path: Path) -> None:
    """Copies that are right, wrong, and on paths of the envelope all occur in the cases above."""
    case = Case.make(backend, "hydra")
    trace = case.trace(SAMPLING, tmp_path, ENVELOPE)
    is_copy = trace.copy_match != NO_COPY
    assert 0 < is_copy.sum() < trace.num_tokens
    assert {0, 1, 16} <= set(trace.copy_hits[is_copy].tolist())
    assert (trace.copy_node[is_copy] > 0).any()
    assert (trace.copy_hits[~is_copy] == 0).all()
    assert (trace.copy_node[~is_copy] == 0).all()
    short = shorten(trace)
    for name in ("codes", "copy_match", "copy_hits", "copy_node"):
        assert (getattr(short, name) == getattr(trace, name)).all()
