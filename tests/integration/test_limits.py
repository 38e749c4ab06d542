"""Where a text ends, and the caches on the way: the same as in plain decoding."""

import random
from collections.abc import Sequence

import pytest
import torch

from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult, Request
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment, Target
from entmtp.target.llama import LlamaTarget
from entmtp.topology import Topology
from exactness import NONE, HalfRightDrafter, RandomScheduler, SpyTarget, outcome, random_topology
from fakes import ByteTokenizer, HopelessDrafter, PerfectDrafter, ScriptedDrafter, tiny_target

WINDOW, VOCAB = 32, 128
TARGET = tiny_target(
    seed=4, dtype=torch.float64, scale=0.1, vocab_size=VOCAB, context_window=WINDOW
)
DEPTH = 4
TREE = Topology.from_paths([(0,), (1,), (2,), (0, 0), (2, 1), (0, 0, 0), (0, 0, 0, 0)])
PROMPT = (70, 71)
NO_EOS = 999


def decode(
    drafter: Drafter,
    sampling: SamplingParams,
    prompt: Sequence[int] = PROMPT,
    eos: int = NO_EOS,
    tree: Topology = TREE,
    target: Target = TARGET,
) -> GenerationResult:
    """One text with one tree at every step."""
    tokenizer = ByteTokenizer(VOCAB, eos_ids=(eos,))
    return Engine(target, drafter, FixedScheduler("tree", tree), tokenizer).generate(
        prompt, sampling
    )


def decode_plain(
    sampling: SamplingParams, prompt: Sequence[int] = PROMPT, eos: int = NO_EOS
) -> GenerationResult:
    """The same text without drafts."""
    return decode(EmptyDrafter(), sampling, prompt, eos, Topology(()))


def varied(**changes: object) -> SamplingParams:
    """Seeded sampling, which gives a varied text."""
    return SamplingParams(**{"temperature": 1.0, "seed": 7, **changes})  # type: ignore[arg-type]


def full_text(prompt: Sequence[int] = PROMPT) -> list[int]:
    """The prompt and its plain continuation to the end of the window."""
    return [*prompt, *decode_plain(varied(), prompt).token_ids]


def drafters(prompt: Sequence[int] = PROMPT) -> list[Drafter]:
    """One that is always right, one that is never, and one that is half of the time."""
    text = full_text(prompt)
    return [
        PerfectDrafter([text], VOCAB),
        HopelessDrafter([text], VOCAB),
        HalfRightDrafter([text], VOCAB),
    ]


# -- token limit and window ------------------------------------------------------------------------


@pytest.mark.parametrize("distance", range(1, DEPTH + 3))
def test_near_the_window_a_text_ends_where_plain_decoding_ends(distance: int) -> None:
    """A prompt that leaves room for a few tokens gets exactly these, whatever the tree."""
    prompt = tuple(range(40, 40 + WINDOW - distance))
    expected = decode_plain(varied(), prompt)
    results = [decode(drafter, varied(), prompt) for drafter in drafters(prompt)]
    assert (len(expected.token_ids), expected.finish_reason) == (distance, "length")
    assert [outcome(result) for result in results] == [outcome(expected)] * 3


@pytest.mark.parametrize("limit", range(1, 2 * DEPTH + 4))
def test_a_token_limit_cuts_no_earlier_and_no_later_than_plain(limit: int) -> None:
    """The limit may fall anywhere in an accepted run."""
    sampling = varied(max_new_tokens=limit)
    expected = decode_plain(sampling)
    assert (len(expected.token_ids), expected.finish_reason) == (limit, "length")
    assert [outcome(decode(d, sampling)) for d in drafters()] == [outcome(expected)] * 3


def test_no_draft_lies_beyond_the_token_limit() -> None:
    """The tree steps down as the limit nears, and is empty where one token is left."""
    stats = decode(HopelessDrafter([full_text()], VOCAB), varied(max_new_tokens=7)).stats
    sizes = [TREE.truncate(depth).num_nodes for depth in (5, 4, 3, 2, 1, 0)]
    assert [step.num_nodes for step in stats.steps] == sizes


def test_no_row_lies_beyond_the_window() -> None:
    """Positions of drafts stay below the context window, as no model is defined outside it."""
    spy = SpyTarget(TARGET)
    positions = []

    class Watching(SpyTarget):
        def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> object:  # type: ignore[override]
            positions.extend(int(s.depths.max()) + s.cache.length for s in segments)
            return spy.forward(segments, needs_logits=needs_logits)

    for drafter in drafters():
        decode(drafter, varied(), target=Watching(TARGET))
    assert max(positions) < WINDOW


# -- end of text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(2 * DEPTH + 3))
def test_end_of_text_stops_at_any_place_of_an_accepted_run(place: int) -> None:
    """As root, inside a run, as its last token and as bonus token it ends the text there."""
    text = full_text()[len(PROMPT) :]
    eos = text[place]
    expected = decode_plain(varied(), eos=eos)
    results = [decode(drafter, varied(), eos=eos) for drafter in drafters()]
    assert expected.token_ids == tuple(text[: text.index(eos) + 1])
    assert expected.finish_reason == "stop"
    assert [outcome(result) for result in results] == [outcome(expected)] * 3


def test_end_of_text_is_found_at_every_place() -> None:
    """The places of the test above are what they are called: the text has no repetition there."""
    start = full_text()[len(PROMPT) :][: 2 * DEPTH + 3]
    assert len(set(start)) == len(start)


def test_a_drafted_end_of_text_that_is_not_the_targets_own_stops_nothing() -> None:
    """A tree full of end-of-text tokens changes neither tokens nor the end."""
    eos = next(token for token in range(VOCAB) if token not in full_text())
    drafter = ScriptedDrafter(lambda above, rank: eos)
    expected = decode_plain(varied(), eos=eos)
    assert outcome(decode(drafter, varied(), eos=eos)) == outcome(expected)
    assert expected.finish_reason == "length"


def test_drafts_below_an_accepted_end_of_text_are_not_emitted() -> None:
    """Whatever the tree holds below it, the text ends with the end-of-text token."""
    text = full_text()
    eos = text[len(PROMPT) + 2]
    result = decode(PerfectDrafter([text], VOCAB), varied(), eos=eos)
    assert result.token_ids == tuple(text[len(PROMPT) : len(PROMPT) + 3])
    assert result.stats.steps[0].num_accepted == DEPTH


def test_token_zero_may_be_the_end_of_text() -> None:
    """Nothing treats id 0 as absent."""
    target = tiny_target(seed=3, dtype=torch.float64, scale=0.1, vocab_size=4)
    tokenizer = ByteTokenizer(4, eos_ids=(0,))
    sampling = varied(max_new_tokens=20)
    plain = Engine(target, EmptyDrafter(), NONE, tokenizer).generate((1,), sampling)
    drafter = ScriptedDrafter(lambda above, rank: rank)
    tree = Topology.from_paths([(0,), (0, 0), (1,), (1, 0), (2,), (3,), (3, 1), (2, 2)])
    engine = Engine(target, drafter, FixedScheduler("tree", tree), tokenizer)
    assert (plain.token_ids[-1], plain.finish_reason) == (0, "stop")
    assert outcome(engine.generate((1,), sampling)) == outcome(plain)


def test_ignore_eos_goes_on() -> None:
    """An end-of-text token is a token like any other."""
    text = full_text()
    eos = text[len(PROMPT) + 2]
    result = decode(PerfectDrafter([text], VOCAB), varied(ignore_eos=True), eos=eos)
    assert list(result.token_ids) == text[len(PROMPT) :]


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(2 * DEPTH + 1))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_string_ends_the_text_at_any_place_of_an_accepted_run(start: int, size: int) -> None:
    """The text is cut before it, and the tokens end with the one that completes it."""
    text = bytes(full_text()[len(PROMPT) :]).decode()
    sampling = varied(stop=(text[start : start + size],))
    expected = decode_plain(sampling)
    results = [decode(drafter, sampling) for drafter in drafters()]
    assert expected.text == text[: text.index(sampling.stop[0])]
    assert expected.finish_reason == "stop"
    assert [outcome(result) for result in results] == [outcome(expected)] * 3


def test_the_beginning_of_a_stop_string_is_given_out_in_the_end() -> None:
    """Text that was held back because a stop string might follow is not lost at the limit."""
    text = bytes(full_text()[len(PROMPT) :]).decode()
    sampling = varied(max_new_tokens=6, stop=(text[3:6] + "never", text[5:6] + "\x7f\x7f"))
    result = decode(PerfectDrafter([full_text()], VOCAB), sampling)
    assert (result.text, result.finish_reason) == (text[:6], "length")


# -- token 0 after a leaf --------------------------------------------------------------------------


def test_token_zero_after_a_leaf_is_no_accepted_draft() -> None:
    """Where the target says 0 after a leaf above deeper branches, nothing but real nodes counts."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, 32),
        "model.norm.weight": torch.ones(32),
        "lm_head.weight": torch.zeros(VOCAB, 32),  # all logits equal: the answer is always 0
    }
    target = _with_random_blocks(tensors)
    tree = Topology.from_paths([(0,), (1,), (1, 0), (1, 0, 0)])
    drafter = ScriptedDrafter(lambda above, rank: rank)  # the leaf (0,) is right, (1,) is not
    result = decode(drafter, SamplingParams(max_new_tokens=9), tree=tree, target=target)
    assert result.token_ids == (0,) * 9
    assert [step.num_accepted for step in result.stats.steps] == [1, 1, 1, 1]


def test_token_zero_after_a_hopeless_tree_is_the_bonus_token() -> None:
    """No draft is kept where all of them are wrong, though the target says 0 every time."""
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, 32),
        "model.norm.weight": torch.ones(32),
        "lm_head.weight": torch.zeros(VOCAB, 32),
    }
    drafter = ScriptedDrafter(lambda above, rank: rank + 1)
    target = _with_random_blocks(tensors)
    result = decode(drafter, SamplingParams(max_new_tokens=6), target=target)
    assert result.token_ids == (0,) * 6
    assert result.stats.num_accepted == 0


def _with_random_blocks(tensors: dict[str, torch.Tensor]) -> LlamaTarget:
    """A one-layer target from its outer tensors."""
    config = tiny_target(
        num_layers=1, vocab_size=VOCAB, context_window=WINDOW, tie_embeddings=False
    ).config
    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
    }
    blocks = {f"model.layers.0.{n}.weight": torch.randn(*s) * 0.2 for n, s in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    blocks |= {f"model.layers.0.{name}.weight": torch.ones(32) for name in norms}
    return LlamaTarget(config, (tensors | blocks).items())


# -- caches ----------------------------------------------------------------------------------------


def fresh_cache(target: LlamaTarget, tokens: Sequence[int]) -> TorchKVCache:
    """Keys and values of a prefill of these tokens."""
    cache = target.new_cache(len(tokens))
    row_indices = torch.arange(len(tokens)).numpy()
    target.forward([Segment(cache, torch.tensor(tokens), row_indices, logits="none")])
    cache.commit(range(len(tokens)))
    return cache


@pytest.mark.parametrize("spare_rows", [0, 65])
def test_committed_rows_equal_those_of_a_fresh_prefill(spare_rows: int) -> None:
    """After every step with changing trees, in a batch, in all layers, float32 within 1e-5."""
    target = tiny_target(seed=5, scale=0.3, num_layers=3, context_window=64)
    prompts = [(1, 2, 3), (9,), (4, 5, 6, 7, 8, 9, 10)]
    requests = [Request(p, varied(max_new_tokens=40, seed=i)) for i, p in enumerate(prompts)]
    tokenizer = ByteTokenizer()
    plain = Engine(target, EmptyDrafter(), NONE, tokenizer).run(requests)
    texts = [[*p, *r.token_ids] for p, r in zip(prompts, plain, strict=True)]
    spy, rng = SpyTarget(target), random.Random(0)
    trees = [Topology(()), *(random_topology(rng, max_nodes=30) for _ in range(5))]
    limits = EngineLimits(prefill_chunk=4, spare_rows=spare_rows)
    drafter = HalfRightDrafter(texts, 257)
    engine = Engine(spy, drafter, RandomScheduler(1, trees), tokenizer, limits)
    emitted = {engine.submit(request): list(request.prompt) for request in requests}
    num_accepted = 0
    while engine.has_work:
        for chunk in engine.step():
            emitted[chunk.request_id] += chunk.token_ids
            num_accepted += len(chunk.token_ids) - 1
            if chunk.result is None:
                assert_fresh(target, spy.caches[chunk.request_id], emitted[chunk.request_id])
    assert num_accepted > 15


def assert_fresh(target: LlamaTarget, cache: object, tokens: Sequence[int]) -> None:
    """All tokens but the root are in the cache, as if they had been read at once."""
    assert isinstance(cache, TorchKVCache)
    assert cache.length == len(tokens) - 1
    fresh = fresh_cache(target, tokens[:-1])
    torch.testing.assert_close(
        cache.keys[:, :, : cache.length], fresh.keys[:, :, : cache.length], rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        cache.values[:, :, : cache.length], fresh.values[:, :, : cache.length], rtol=0, atol=1e-5
    )
