"""Decoding through draft trees gives what plain decoding gives, whatever is drafted."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp.engine import Engine, EngineLimits, GenerationResult, Request, StreamChunk
from entmtp.errors import TopologyError
from entmtp.growth import MAX_COPY, MAX_ENVELOPE
from entmtp.params import SamplingParams
from entmtp.sampling import token_scores
from entmtp.scheduler import TopologyScheduler
from entmtp.target.llama import LlamaTarget
from entmtp.topology import Topology
from exactness import (
    RandomScheduler,
    make_drafter,
    outcome,
    plain_engine,
    random_target,
    random_topology,
)
from fakes import ByteTokenizer
from growing import GrowingScheduler, random_envelope
from strategies import topologies

HEADS = ("hydra", "medusa", "hydra++", "mtp")
DRAFTERS = (*HEADS, "lookup", "half-right")
FLOAT32_TOLERANCE = 1e-3

Rows = dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison of plain and tree decoding."""

    target_seed: int
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    trees: tuple[Topology, ...]
    drafter: str
    seed: int
    eos: int
    prefill_chunk: int


def greedy_or_sampled() -> st.SearchStrategy[SamplingParams]:
    """Any parameters under which tokens are chosen, stop strings included."""
    greedy = st.just(0.0)
    return st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 24),
        temperature=greedy | st.sampled_from([0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 3, 8]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
        seed=st.integers(0, 2**63 - 1),
        stop=st.sampled_from([(), (), ("\x03",), ("\x01\x02", "\x07\x07")]),
        ignore_eos=st.booleans(),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Targets x prompts x sampling x trees x drafters."""
    size = st.integers(1, 9) | st.integers(38, 47)
    token = st.integers(0, 11)
    prompt = size.flatmap(lambda n: st.lists(token, min_size=n, max_size=n)).map(tuple)
    return Case(
        target_seed=draw(st.integers(0, 23)),
        prompts=tuple(draw(st.lists(prompt, min_size=1, max_size=4))),
        sampling=draw(greedy_or_sampled()),
        trees=tuple(draw(st.lists(topologies(max_depth=5, max_rank=6), min_size=1, max_size=4))),
        drafter=draw(st.sampled_from(DRAFTERS)),
        seed=draw(st.integers(0, 999)),
        eos=draw(st.sampled_from([0, 5, 11])),
        prefill_chunk=draw(st.sampled_from([1, 7, 512])),
    )


def decode_both(
    case: Case, dtype: torch.dtype = torch.float64, scheduler: TopologyScheduler | None = None
) -> tuple[list[GenerationResult], list[GenerationResult], dict[str, Rows]]:
    """Plain and tree results, and the rows of logits that each token was chosen from."""
    target = random_target(case.target_seed, dtype)
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=(case.eos,))
    rows: dict[str, Rows] = {"plain": {}, "tree": {}}
    plain = plain_engine(target, tokenizer)
    plain.logits_observer = lambda i, index, row: rows["plain"].update({(i, index): row})
    expected = plain.generate_batch(case.prompts, case.sampling)
    texts = [(*p, *r.token_ids) for p, r in zip(case.prompts, expected, strict=True)]
    engine = Engine(
        target,
        make_drafter(case.drafter, target, texts, case.seed),
        scheduler or RandomScheduler(case.seed, case.trees),
        tokenizer,
        EngineLimits(max_batch_size=3, prefill_chunk=case.prefill_chunk, spare_rows=4),
    )
    engine.logits_observer = lambda i, index, row: rows["tree"].update({(i, index): row})
    return expected, engine.generate_batch(case.prompts, case.sampling), rows


@given(cases())
@settings(max_examples=160)
def test_any_trees_drafter_and_batch_give_the_tokens_of_plain_decoding(case: Case) -> None:
    """In float64, tokens, text, end and seed are those of plain decoding, to the last one."""
    expected, results, _ = decode_both(case)
    assert [outcome(r) for r in results] == [outcome(r) for r in expected]


@given(cases(), st.sampled_from(HEADS), st.sampled_from([0.0, 0.0, 0.4]))
@settings(max_examples=80)
def test_grown_trees_give_the_tokens_of_plain_decoding(
    case: Case, drafter: str, fixed_share: float
) -> None:
    """Whatever the rules, beside trees of a fixed shape too, up to the last token of the limit."""
    envelopes = [tree for tree in case.trees if 0 < tree.num_nodes <= MAX_ENVELOPE]
    envelopes.append(random_envelope(random.Random(case.seed)))
    scheduler = GrowingScheduler(case.seed, envelopes, fixed_share)
    expected, results, _ = decode_both(replace(case, drafter=drafter), scheduler=scheduler)
    assert [outcome(r) for r in results] == [outcome(r) for r in expected]
    assert {s.topology for r in results for s in r.stats.steps} <= {"grown", "fixed"}


@pytest.mark.parametrize("drafter", HEADS)
def test_a_step_counts_the_nodes_that_were_grown(drafter: str) -> None:
    """Not those of the envelope: some steps check none, some many, and paths are accepted."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    envelope = Topology.from_paths([(a,) * d for a in range(4) for d in (1, 2, 3)])
    case = Case(10, ((1, 2), (5,)), sampling, (), drafter, 5, eos=0, prefill_chunk=8)
    expected, results, _ = decode_both(case, scheduler=GrowingScheduler(5, [envelope]))
    assert [outcome(r) for r in results] == [outcome(r) for r in expected]
    steps = [step for result in results for step in result.stats.steps]
    sizes = {step.num_nodes for step in steps}
    assert 0 in sizes
    assert max(sizes) <= envelope.num_nodes + MAX_COPY
    assert len(sizes) > 4
    assert all(step.num_accepted <= step.num_nodes for step in steps)
    assert sum(step.num_accepted for step in steps) > 4


def test_lookup_is_not_asked_to_grow_trees() -> None:
    """The request ends with the reason, not with a wrong draft."""
    case = Case(2, ((1, 2),), SamplingParams(seed=0), (), "lookup", 5, eos=0, prefill_chunk=8)
    with pytest.raises(TopologyError, match="lookup drafter has no probabilities"):
        decode_both(case, scheduler=GrowingScheduler(1, [Topology.from_paths([(0,)])]))


@given(cases())
@settings(max_examples=40)
def test_in_float32_a_difference_is_a_near_tie(case: Case) -> None:
    """In float32 the first difference, if there is one, is two scores within rounding."""
    expected, results, rows = decode_both(case, torch.float32)
    for i, (left, right) in enumerate(zip(expected, results, strict=True)):
        if outcome(left) != outcome(right):
            assert_near_tie(case, i, (left, right), rows)


def assert_near_tie(
    case: Case,
    i: int,
    pair: tuple[GenerationResult, GenerationResult],
    rows: dict[str, Rows],
) -> None:
    """The criterion of the decoding contract, at the first token that differs."""
    left, right = (r.token_ids for r in pair)
    at = next(n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    row, other = rows["plain"][i, at], rows["tree"][i, at]
    difference = float((row - other).abs().max())
    history = (case.prompts[i], left[:at])
    position = len(case.prompts[i]) + at
    scores = token_scores(row, case.sampling, pair[0].seed, position, history)
    assert difference <= FLOAT32_TOLERANCE
    assert float(scores[left[at]] - scores[right[at]]) <= 2 * difference


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_new_random_tree_at_every_step_changes_nothing(drafter: str) -> None:
    """Unrelated trees of up to 64 nodes step by step give the tokens of plain decoding."""
    for seed in range(4):
        rng = random.Random(seed)
        prompt = tuple(rng.randrange(12) for _ in range(1 + seed))
        sampling = SamplingParams(max_new_tokens=40, temperature=seed % 2, seed=seed)
        case = Case(seed, (prompt,), sampling, (), drafter, seed, eos=11, prefill_chunk=512)
        expected, results, _ = decode_both(case)
        assert outcome(results[0]) == outcome(expected[0])


def test_the_half_right_drafter_gets_long_paths_accepted() -> None:
    """The cases above are no empty promise: whole paths of several nodes are kept in them."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    pairs = [(first, second) for first in range(4) for second in (0, 2)]
    tree = Topology.from_paths([(first,) for first in range(4)] + pairs)
    case = Case(2, ((1, 2),), sampling, (tree,), "half-right", 5, eos=0, prefill_chunk=8)
    _, (result,), _ = decode_both(case)
    assert max(step.num_accepted for step in result.stats.steps) == 2
    assert result.stats.mean_acceptance_length > 2


@pytest.mark.parametrize("drafter", ["hydra++", "mtp"])
def test_drafters_with_a_cache_get_paths_accepted(drafter: str) -> None:
    """In the cases above their caches move on by several rows a step, not by roots alone."""
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    case = Case(10, ((1, 2), (5,)), sampling, (), drafter, 5, eos=0, prefill_chunk=8)
    _, results, _ = decode_both(case)
    accepted = [step.num_accepted for result in results for step in result.stats.steps]
    assert max(accepted) >= 2
    assert sum(accepted) > 15


def test_a_tree_of_five_hundred_nodes_changes_nothing() -> None:
    """A cache that grows under a huge tree, and keeps rows from its far end, stays right."""
    wide = [(a,) for a in range(6)] + [(a, b) for a in range(6) for b in range(6)]
    deep = [(a, b, c) for a in range(6) for b in range(6) for c in range(13)]
    tree = Topology.from_paths(wide + deep)
    assert tree.num_nodes > 500
    for drafter in ("lookup", "half-right", "mtp"):
        sampling = SamplingParams(max_new_tokens=30, temperature=0.8, seed=1, ignore_eos=True)
        case = Case(12, ((3, 1), (4,)), sampling, (tree,), drafter, 1, eos=0, prefill_chunk=9)
        expected, results, _ = decode_both(case)
        assert [outcome(r) for r in results] == [outcome(r) for r in expected]


def drain(engine: Engine, seen: dict[int, list[StreamChunk]]) -> None:
    """Step once and sort the chunks by request."""
    for chunk in engine.step():
        seen.setdefault(chunk.request_id, []).append(chunk)


@pytest.mark.parametrize("drafter", ["lookup", "hydra++", "mtp"])
@given(st.integers(0, 10**6))
@settings(max_examples=12)
def test_requests_that_come_and_go_leave_the_others_alone(drafter: str, seed: int) -> None:
    """Requests submitted and cancelled between steps do not change what the others get."""
    rng = random.Random(seed)
    target = random_target(rng.randrange(24))
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=(0,))
    engine = Engine(
        target,
        make_drafter(drafter, target, (), 0),
        RandomScheduler(seed, [random_topology(rng) for _ in range(4)]),
        tokenizer,
        EngineLimits(max_batch_size=3, prefill_chunk=4, spare_rows=0),
    )
    pending = [random_request(rng) for _ in range(6)]
    submitted, cancelled = dict[int, Request](), set[int]()
    seen: dict[int, list[StreamChunk]] = {}
    while pending or engine.has_work:
        if pending and rng.random() < 0.4:
            request = pending.pop()
            submitted[engine.submit(request)] = request
        if submitted and rng.random() < 0.08:
            cancelled.add(victim := rng.choice(list(submitted)))
            engine.cancel(victim)
        drain(engine, seen)
    kept = {i: request for i, request in submitted.items() if i not in cancelled}
    assert_as_alone(target, tokenizer, kept, seen)


def random_request(rng: random.Random) -> Request:
    """A short prompt with its own sampling parameters."""
    prompt = tuple(rng.randrange(12) for _ in range(rng.randint(1, 12)))
    sampling = SamplingParams(
        max_new_tokens=rng.randint(1, 20),
        temperature=rng.choice([0.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        seed=rng.randrange(2**40),
    )
    return Request(prompt, sampling)


def assert_as_alone(
    target: LlamaTarget,
    tokenizer: ByteTokenizer,
    requests: dict[int, Request],
    seen: dict[int, Sequence[StreamChunk]],
) -> None:
    """Each request's chunks join to the result that plain decoding gives it alone."""
    for request_id, request in requests.items():
        expected = plain_engine(target, tokenizer).run([request])[0]
        chunks = seen[request_id]
        assert chunks[-1].result is not None
        assert outcome(chunks[-1].result) == outcome(expected)
        assert tuple(t for chunk in chunks for t in chunk.token_ids) == expected.token_ids
        assert "".join(chunk.text for chunk in chunks) == expected.text
