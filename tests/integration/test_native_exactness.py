"""The native core: a row has the same bits alone, in any tree, any batch, on any thread."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from entmtp.check import run_check
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment, TargetOutput
from entmtp.target.native import NativeKVCache, NativeTarget
from entmtp.target.native_weights import pack_model
from entmtp.topology import Topology
from exactness import make_drafter, outcome, plain_engine
from fakes import ByteTokenizer
from native_cases import (
    CASES,
    ISAS,
    LIBRARY,
    LONG,
    Alone,
    Job,
    TensorMatrices,
    assert_instruction_sets_agree,
    chain,
    decode_alone,
    make_case,
    make_native,
    make_reference,
    needs_library,
    prefilled,
    tokens_of,
    tree_segment,
)
from strategies import topologies

pytestmark = needs_library

TEXT = 300  # tokens: more than two spans of 128
EDGES = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 111, 112, 127, 128, 129, 191, 192, 255, 256, 257)
SIZES = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 150)

names = st.sampled_from(LONG)
thread_counts = st.integers(1, 3)
examples = settings(max_examples=25)


@lru_cache(maxsize=8)
def text_alone(name: str) -> tuple[Tensor, Alone]:
    """A text, and its rows when it is decoded one by one on one thread."""
    target = make_native(name)
    tokens = tokens_of(target, TEXT)
    return tokens, decode_alone(target, target.new_cache(TEXT), tokens)


def assert_same(output: TargetOutput, segment: int, expected: Alone, rows: slice) -> None:
    """Hidden states and logits of a segment are these rows, bit for bit."""
    assert torch.equal(output.hidden[segment], expected.hidden[rows])
    assert torch.equal(output.logits[segment], expected.logits[rows])


def assert_path(
    output: tuple[Tensor, Tensor], nodes: Sequence[int], expected: Alone, start: int = 0
) -> None:
    """Nodes of a tree are these rows, bit for bit."""
    picked, rows = list(nodes), slice(start, start + len(nodes))
    assert torch.equal(output[0][picked], expected.hidden[rows])
    assert torch.equal(output[1][picked], expected.logits[rows])


class Company:
    """Other sequences in the batch: chunks and trees, some of them committed."""

    def __init__(self, target: NativeTarget, data: st.DataObject) -> None:
        self._target, self._data = target, data
        prompts = data.draw(st.lists(st.sampled_from(EDGES[1:9]), max_size=3), label="company")
        self._caches = [prefilled(target, tokens_of(target, size, size)) for size in prompts]

    def around(self, own: Segment) -> tuple[list[Segment], int]:
        """Segments of a batch in any order, and the place of one's own."""
        segments = [own]
        for cache in self._caches:
            if self._data.draw(st.booleans(), label="is tree"):
                tree = self._data.draw(topologies(max_nodes=20), label="tree of the company")
                other = tree_segment(cache, tree, tokens_of(self._target, tree.num_rows, 9))
            else:
                size = self._data.draw(st.sampled_from((1, 3, 20)), label="chunk of the company")
                other = chain(cache, tokens_of(self._target, size, 8))
            segments.insert(self._data.draw(st.integers(0, len(segments))), other)
        return segments, next(i for i, s in enumerate(segments) if s is own)


# -- rows do not depend on their company -----------------------------------------------------------


@examples
@given(st.data(), names, thread_counts)
def test_chunks_of_a_text(data: st.DataObject, name: str, threads: int) -> None:
    """In any sizes, beside any other sequences, into a cache that grows: as one by one."""
    tokens, alone = text_alone(name)
    target = make_native(name, threads)
    company, at = Company(target, data), 0
    cache = target.new_cache(data.draw(st.sampled_from((1, 64, TEXT)), label="capacity"))
    while at < TEXT:
        size = min(TEXT - at, data.draw(st.sampled_from(SIZES), label="size"))
        segments, place = company.around(chain(cache, tokens[at : at + size]))
        output = target.forward(segments)
        assert_same(output, place, alone, slice(at, at + size))
        cache.commit(range(size))
        at += size


@examples
@given(st.data(), names, thread_counts, st.sampled_from(EDGES), topologies(127, 8))
def test_trees(data: st.DataObject, name: str, threads: int, prefix: int, tree: Topology) -> None:
    """Every path is its tokens one by one; after a commit the text goes on, bit for bit."""
    tokens, _ = text_alone(name)
    target, plain = make_native(name, threads), make_native(name)
    drafted = tokens_of(target, tree.num_rows, prefix)
    cache = prefilled(target, tokens[:prefix])
    segments, place = Company(target, data).around(tree_segment(cache, tree, drafted))
    output = target.forward(segments)
    rows = output.hidden[place], output.logits[place]
    for _ in range(3):
        node = data.draw(st.integers(0, tree.num_rows - 1), label="node")
        path = tree.path_nodes(node)
        twin = prefilled(plain, tokens[:prefix])
        assert_path(rows, path, decode_alone(plain, twin, drafted[path]))
    cache.commit(path)
    more = tree_segment(cache, tree, drafted)
    after = target.forward([more])
    assert_path((after.hidden[0], after.logits[0]), path, decode_alone(plain, twin, drafted[path]))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", LONG)
def test_more_rows_than_a_block_holds(name: str, threads: int) -> None:
    """128 rows go through the layers together; here five trees and two chunks are 457."""
    target, plain = make_native(name, threads), make_native(name)
    tree = Topology.from_paths([(a, *(0,) * d) for a in range(5) for d in range(7)])
    segments, expected = [], []
    for number, prefix in enumerate((17, 0, 128, 63, 250)):
        drafted = tokens_of(target, tree.num_rows, number)
        prompt = tokens_of(target, prefix, number + 50)
        segments.append(tree_segment(prefilled(target, prompt), tree, drafted))
        expected.append(plain.forward([tree_segment(prefilled(plain, prompt), tree, drafted)]))
    for place, size in ((1, 130), (4, 147)):
        tokens, _ = text_alone(name)
        segments.insert(place, chain(target.new_cache(1), tokens[:size]))
        expected.insert(place, plain.forward([chain(plain.new_cache(1), tokens[:size])]))
    output = target.forward(segments)
    for number, single in enumerate(expected):
        assert torch.equal(output.hidden[number], single.hidden[0])
        assert torch.equal(output.logits[number], single.logits[0])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_text_over_several_spans(threads: int) -> None:
    """The attention of each 128 positions is summed on its own: six spans, to the last position."""
    target, plain = make_native("llama", threads), make_native("llama")
    tokens = tokens_of(target, 700, 4)
    alone = decode_alone(plain, plain.new_cache(1), tokens)
    cache = target.new_cache(700)
    for start, stop in ((0, 690), (690, 699), (699, 700)):
        assert_same(
            target.forward([chain(cache, tokens[start:stop])]), 0, alone, slice(start, stop)
        )
        cache.commit(range(stop - start))
    assert cache.length == target.config.context_window


@pytest.mark.parametrize("capacity", [1, 64, 100, 300])
def test_a_cache_that_grows_keeps_its_rows(capacity: int) -> None:
    """In the middle of a text, whatever room it began with."""
    tokens, alone = text_alone("qwen2")
    target = make_native("qwen2", 2)
    cache = target.new_cache(capacity)
    for at in range(0, TEXT, 50):
        output = target.forward([chain(cache, tokens[at : at + 50])])
        assert_same(output, 0, alone, slice(at, at + 50))
        cache.commit(range(50))


def test_rows_that_were_not_committed_leave_no_trace() -> None:
    """A forward may be repeated, and a tree dropped whole."""
    tokens, alone = text_alone("llama")
    target = make_native("llama", 2)
    cache = prefilled(target, tokens[:100])
    tree = Topology.from_paths([(a, *(0,) * d) for a in range(9) for d in range(9)])
    target.forward([tree_segment(cache, tree, tokens_of(target, tree.num_rows, 3))])
    cache.commit([])
    for _ in range(2):
        output = target.forward([chain(cache, tokens[100:140])])
        assert_same(output, 0, alone, slice(100, 140))


@pytest.mark.parametrize("isa", ISAS)
def test_values_beyond_half_precision_stay_in_their_rows(isa: str) -> None:
    """They were once infinities in the cache, and 0 * inf spoiled rows that do not see them."""
    assert LIBRARY is not None
    config, tensors = make_case("llama")
    huge = dict(tensors)
    for name, weight in tensors.items():
        if "v_proj" in name:
            huge[name] = weight * 20000.0
    arrays = pack_model(config, huge.items(), LIBRARY, isa)
    matrices = TensorMatrices(config, huge)
    target = NativeTarget(config, arrays, matrices, LIBRARY, threads=2, isa=isa)
    tokens = tokens_of(target, 40)
    alone = decode_alone(target, target.new_cache(40), tokens)
    assert bool(torch.isfinite(alone.logits).all())
    assert_same(target.forward([chain(target.new_cache(40), tokens)]), 0, alone, slice(0, 40))


@pytest.mark.parametrize("logits", ["all", "last", "none"])
def test_only_rows_that_are_asked_for_have_logits(logits: str) -> None:
    """They are those of the whole; hidden states are always given."""
    tokens, alone = text_alone("qwen3")
    target = make_native("qwen3", 2)
    first = {"all": 0, "last": 139, "none": 140}[logits]
    segment = Segment(target.new_cache(8), tokens[:140], np.arange(140), None, logits)  # type: ignore[arg-type]
    output = target.forward([segment])
    assert torch.equal(output.logits[0], alone.logits[first:140])
    assert torch.equal(output.hidden[0], alone.hidden[:140])


# -- instruction sets ------------------------------------------------------------------------------


@pytest.mark.skipif(len(ISAS) < 2, reason=f"this CPU runs only {ISAS}")
@pytest.mark.parametrize("name", LONG)
def test_instruction_sets_agree(name: str) -> None:
    """All that this CPU runs give the same bits."""
    assert_instruction_sets_agree(name, ISAS)


@pytest.mark.parametrize("isa", ISAS)
def test_each_instruction_set_is_named(isa: str) -> None:
    """Reports tell what ran."""
    target = make_native("short", 1, isa)
    assert (target.isa, target.backend, target.precision) == (isa, f"native-{isa}", "int8")
    assert target.weight_bytes > 0


# -- statistics of logits --------------------------------------------------------------------------


def assert_statistics(job: Job) -> None:
    """Those of the logits in float64."""
    logits = job.logits.astype(np.float64)
    top = logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(1, keepdims=True)) + top
    probs = np.exp(logits - log_sum)
    entropy = -(probs * (logits - log_sum)).sum(1)
    assert np.array_equal(job.stats["argmax"], job.logits.argmax(1))  # numpy takes the lowest
    np.testing.assert_allclose(job.stats["p_max"], probs.max(1), rtol=2e-5)
    np.testing.assert_allclose(job.stats["log_sum_exp"], log_sum[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(job.stats["entropy"], entropy, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_logits(name: str, isa: str) -> None:
    """Arg-max, top probability, log-sum-exp and entropy, against float64."""
    target = make_native(name, 2, isa)
    job = Job(tokens_of(target, 40, 6).tolist())
    assert job.run(target, target.new_cache(40)) == 0
    assert_statistics(job)


@examples
@given(names, thread_counts, st.lists(st.integers(0, 139), min_size=1, max_size=9, unique=True))
def test_statistics_do_not_depend_on_their_company(
    name: str, threads: int, picked: list[int]
) -> None:
    """Of some rows of a chunk: the bits of each row alone; without logits they are the same."""
    tokens, alone = text_alone(name)
    target, plain = make_native(name, threads), make_native(name)
    rows = sorted(picked)
    job = Job(tokens[:140].tolist(), logit_rows=rows)
    assert job.run(target, target.new_cache(140)) == 0
    assert np.array_equal(job.logits, alone.logits[rows].numpy())
    single = Job(tokens[rows[-1] : rows[-1] + 1].tolist())
    assert single.run(plain, prefilled(plain, tokens[: rows[-1]])) == 0
    assert single.stats[0] == job.stats[-1]
    output = target.forward([chain(target.new_cache(140), tokens[:140])])
    assert output.stats is not None
    assert [output.stats[0].tokens[row] for row in rows] == job.stats["argmax"].tolist()
    assert [output.stats[0].entropy[row] for row in rows] == job.stats["entropy"].tolist()
    assert [output.stats[0].top1[row] for row in rows] == job.stats["p_max"].tolist()
    cache = target.new_cache(140)
    bare = target.forward([chain(cache, tokens[:140])], needs_logits=False)
    assert bare.stats is not None
    assert [len(part) for part in bare.logits] == [0]
    assert torch.equal(bare.hidden[0], output.hidden[0])
    for field in ("tokens", "entropy", "top1"):
        assert getattr(bare.stats[0], field) == getattr(output.stats[0], field)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("ids", [(3, 4), (40, 1500), (1023, 1024), (0, 2047), (7, 1030, 1031)])
def test_ties_go_to_the_lower_id(ids: tuple[int, ...], isa: str) -> None:
    """Within a panel, across panels, and across chunks of 1024."""
    assert LIBRARY is not None
    config, tensors = make_case("qwen3")
    tied, head = dict(tensors), tensors["lm_head.weight"].clone()
    head[list(ids)] = head[100] * 50  # far from all others, above or below
    tied["lm_head.weight"] = head
    arrays = pack_model(config, tied.items(), LIBRARY, isa)
    target = NativeTarget(config, arrays, TensorMatrices(config, tied), LIBRARY, threads=2, isa=isa)
    job = Job(tokens_of(target, 30, 2).tolist())
    assert job.run(target, target.new_cache(30)) == 0
    assert_statistics(job)
    won = set(job.stats["argmax"].tolist()) & set(ids)
    assert won == {min(ids)}


# -- the engine ------------------------------------------------------------------------------------

PROMPTS = [(f"p{n}", tuple((n * 7 + i * i) % 29 for i in range(size))) for n, size in
           enumerate((5, 120, 17, 62, 1))]  # fmt: skip


def make_engine(target: NativeTarget, kind: str) -> Engine:
    """Greedy texts of the target are what the half-right drafter knows."""
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=())
    texts = [
        [*ids, *plain_engine(target, tokenizer).generate(ids, SamplingParams(16)).token_ids]
        for _, ids in PROMPTS
    ]
    drafter = make_drafter(kind, target, texts, 3)
    return Engine(target, drafter, FixedScheduler.plain(), tokenizer)


@pytest.mark.parametrize("kind", ["half-right", "lookup", "hydra", "medusa"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_check_finds_no_difference_at_all(name: str, kind: str) -> None:
    """Random trees, batches of 1 and 4, one thread and two: every row of logits is the same."""
    engine = make_engine(make_native(name, 2), kind)
    report = run_check(engine, PROMPTS, max_new_tokens=16, batch_sizes=(1, 4), threads=(1, 2))
    assert report.cases == report.identical == 2 * 2 * 2 * len(PROMPTS)
    assert report.max_logit_difference == 0.0
    if kind == "half-right":
        assert report.num_tree_tokens > 1.3 * report.num_tree_steps  # drafts were accepted


@pytest.mark.parametrize("name", LONG)
def test_texts_do_not_depend_on_threads_batches_or_instruction_sets(name: str) -> None:
    """Sampled with one seed: the same tokens everywhere."""
    sampling = SamplingParams(max_new_tokens=12, temperature=0.9, top_p=0.95, seed=5)
    requests = [Request(ids, sampling) for _, ids in PROMPTS]
    found = set()
    for threads, isa, size in [(1, "auto", 1), (2, "auto", 4), (3, "auto", 2), (2, ISAS[-1], 4)]:
        target = make_native(name, threads, isa)
        engine = plain_engine(target, ByteTokenizer(target.config.vocab_size, eos_ids=()))
        limited = Engine(
            target, engine.drafter, engine.scheduler, engine.tokenizer,
            EngineLimits(max_batch_size=size, prefill_chunk=7 * size),
        )  # fmt: skip
        found.add(tuple(outcome(result) for result in limited.run(requests)))
    assert len(found) == 1


def test_trees_at_the_end_of_the_context_window() -> None:
    """They are cut where positions end, and the text is the plain one to the last position."""
    target = make_native("short", 2)
    tokenizer = ByteTokenizer(target.config.vocab_size, eos_ids=())
    sampling = SamplingParams(max_new_tokens=100, seed=2)
    plain = plain_engine(target, tokenizer).generate([1, 2, 3], sampling)
    drafter = make_drafter("half-right", target, [[1, 2, 3, *plain.token_ids]], 1)
    tree = Topology.from_paths([(a, *(0,) * d) for a in range(3) for d in range(8)])
    result = Engine(target, drafter, FixedScheduler("t", tree), tokenizer).generate(
        [1, 2, 3], sampling
    )
    assert outcome(result) == outcome(plain)
    assert len(plain.token_ids) > 30


# -- products of drafters --------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("out", "size"), [(70, 48), (32, 16), (1, 64), (300, 1200)])
def test_products_of_drafters(out: int, size: int, has_bias: bool) -> None:
    """Rows alone and together, on one thread and three: the same bits, near the real product."""
    generator = torch.Generator().manual_seed(out)
    weight, rows = (torch.randn(n, size, generator=generator) for n in (out, 150))
    bias = torch.randn(out, generator=generator) if has_bias else None
    one = make_native("llama").projection(weight, bias)
    together = make_native("llama", 3).projection(weight, bias)(rows)
    assert torch.equal(together, torch.cat([one(row[None]) for row in rows]))
    assert torch.equal(together[5:8], one(rows[5:8]))
    assert one(rows[:0]).shape == (0, out)
    exact = torch.nn.functional.linear(rows, weight, bias)
    assert float((together - exact).norm() / exact.norm()) < 0.02  # measured: 0.010


# -- against the reference target ------------------------------------------------------------------

# Relative error of a row of logits, in the 2-norm: the mean over rows and the largest of any row,
# measured on chunks of 300 tokens under six seeds of weights (random weights amplify rounding more
# than trained ones). Twice the first and 1.5 times the second are allowed; a row under a wrong mask
# or position is off by about 1.
ERRORS = {
    "llama": (0.050, 0.14),
    "mistral": (0.064, 0.22),
    "qwen2": (0.028, 0.062),
    "qwen3": (0.038, 0.062),
    "biased": (0.125, 0.51),
    "divisors": (0.025, 0.045),
}


def relative_error(native: Tensor, reference: Tensor) -> Tensor:
    """Of each row, in the 2-norm."""
    return (native - reference).norm(dim=1) / reference.norm(dim=1)


@settings(max_examples=40)
@given(st.data(), names, st.integers(0, 9))
def test_masks_lengths_and_batches_against_torch(data: st.DataObject, name: str, seed: int) -> None:
    """The reference target gives the same rows but for quantisation."""
    targets = make_reference(name), make_native(name, 2)
    batches: tuple[list[Segment], list[Segment]] = ([], [])
    prefixes = data.draw(st.lists(st.sampled_from(EDGES), min_size=1, max_size=4))
    for number, prefix in enumerate(prefixes):
        prompt = tokens_of(targets[0], prefix, seed + number)
        tree = data.draw(topologies(40, 8))
        drafted = tokens_of(targets[0], tree.num_rows, seed - 1)
        for target, batch in zip(targets, batches, strict=True):
            cache = target.new_cache(prefix)
            if prefix:
                target.forward([chain(cache, prompt)])
                cache.commit(range(prefix))
            batch.append(tree_segment(cache, tree, drafted))
    expected, found = targets[0].forward(batches[0]), targets[1].forward(batches[1])
    mean, largest = ERRORS[name]
    errors = relative_error(torch.cat(found.logits), torch.cat(expected.logits))
    assert float(errors.max()) < 1.5 * largest
    if len(errors) >= 40:
        assert float(errors.mean()) < 2 * mean
    hidden = relative_error(torch.cat(found.hidden), torch.cat(expected.hidden))
    assert float(hidden.max()) < 1.5 * largest


# -- jobs that must be refused ---------------------------------------------------------------------

BAD_JOBS = {
    "no rows": (1, Job([])),
    "rows without a segment": (2, Job([1, 2, 3], num_rows=2)),
    "a segment beyond the rows": (2, Job([1, 2, 3], num_rows=40)),
    "a huge segment": (2, Job([1, 2, 3], num_rows=2**31 - 1)),
    "a tree beyond a block": (3, Job([1] * 129, mask=np.ones((129, 129), dtype=bool))),
    "a position before": (5, Job([1, 2], depths=[-1, 1])),
    "a position far before": (5, Job([1, 2], depths=[0, -(2**31)])),
    "a chain with a gap": (5, Job([1, 2], depths=[0, 2])),
    "a depth beyond the rows": (5, Job([1, 2], depths=[0, 2], mask=np.ones((2, 2), dtype=bool))),
    "a position behind the last": (6, Job([1] * 36)),
    "a token below": (7, Job([1, -1])),
    "a token above": (7, Job([257, 1])),
    "logits twice": (8, Job([1, 2], logit_rows=[1, 1])),
    "logits of no row": (8, Job([1, 2], logit_rows=[2])),
    "logits before": (8, Job([1, 2], logit_rows=[-1, 0])),
}


@pytest.mark.parametrize("what", BAD_JOBS)
def test_a_job_that_makes_no_sense_is_refused(what: str) -> None:
    """With its code, without harm: the cache and the next job are as before."""
    code, job = BAD_JOBS[what]
    target = make_native("short", 2)
    tokens = tokens_of(target, 9)
    cache = prefilled(target, tokens[:5])
    assert job.run(target, cache) == code
    assert cache.length == 5
    fresh = target.forward([chain(prefilled(target, tokens[:5]), tokens[5:])])
    assert torch.equal(target.forward([chain(cache, tokens[5:])]).logits[0], fresh.logits[0])


def test_more_rows_than_fit_are_refused() -> None:
    """Where the caller made no room."""
    target = make_native("llama")
    cache = prefilled(target, tokens_of(target, 60))
    job = Job([1] * 5)
    assert job.run(target, cache, room=False) == 4
    assert job.run(target, cache) == 0


@settings(max_examples=30)
@given(st.data(), st.integers(1, 128))
def test_any_mask_is_survived(data: st.DataObject, size: int) -> None:
    """One that no tree has gives rows without meaning, but no crash."""
    target = make_native("llama", 2)
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    mask = rng.random((size, size)) < data.draw(st.floats(0, 1))
    depths = rng.integers(size, size=size).tolist()
    cache = prefilled(target, tokens_of(target, data.draw(st.sampled_from(EDGES))))
    assert Job(rng.integers(257, size=size).tolist(), depths, mask).run(target, cache) == 0


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [-1], [5], [0, 1, 2, 3]])
def test_commits_of_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    """By an assertion: the engine never asks for them."""
    target = make_native("llama")
    cache: NativeKVCache = prefilled(target, tokens_of(target, 20))
    target.forward([chain(cache, tokens_of(target, 3))])
    with pytest.raises(AssertionError):
        cache.commit(rows)
    assert cache.length == 20
