"""Caches of drafters stay in step with the text, whatever was drafted, accepted or broken off."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.drafters.base import (
    AnyRequest,
    Drafter,
    DrafterState,
    DraftPlan,
    DraftRequest,
    DraftTree,
    GrowRequest,
)
from entmtp.drafters.block_state import BlockState
from entmtp.drafters.heads import HydraHeads, RecurrentModule
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.growth import GrowthPlan
from entmtp.loading.drafters import make_drafter as attach_heads
from entmtp.params import SamplingParams
from entmtp.target.base import Segment
from entmtp.target.llama import LlamaTarget
from entmtp.topology import Topology
from exactness import RandomScheduler, SpyTarget, make_drafter, random_heads, random_topology
from fakes import ByteTokenizer, tiny_target
from growing import random_envelope, random_plan

VOCAB = 12  # so few that random trees often hold the right token
TARGET = tiny_target(seed=5, dtype=torch.float64, vocab_size=VOCAB, context_window=1024)
ONE = Topology.from_paths([(0,)])

with_a_cache = pytest.mark.parametrize("kind", ["hydra++", "mtp"])


@dataclass
class Followed:
    """A sequence as the drafter saw it: its state, and prompt, root and committed tokens."""

    state: DrafterState
    tokens: list[int]


@dataclass
class SpyDrafter:
    """A drafter that keeps all sequences it was shown, in order."""

    inner: Drafter
    followed: list[Followed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name, self.max_depth = self.inner.name, self.inner.max_depth
        self.max_width, self.digest = self.inner.max_width, self.inner.digest

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> DrafterState:
        state = self.inner.prefill(prompt, hidden, root)
        self.followed.append(Followed(state, [*prompt, root]))
        return state

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        return self.inner.draft(requests)

    def commit(self, state: DrafterState, hidden: Tensor, tokens: Sequence[int]) -> None:
        self.inner.commit(state, hidden, tokens)
        next(f for f in self.followed if f.state is state).tokens.extend(tokens)


def block_state(state: DrafterState) -> BlockState:
    """The part of a drafter's state that holds a cache."""
    return state if isinstance(state, BlockState) else state.prefix


def rows_of(cache: TorchKVCache) -> tuple[Tensor, Tensor]:
    """Copies of the committed keys and values."""
    return cache.keys[:, :, : cache.length].clone(), cache.values[:, :, : cache.length].clone()


def assert_close(cache: TorchKVCache, expected: TorchKVCache) -> None:
    """The same rows up to the rounding of float64."""
    assert cache.length == expected.length
    for ours, theirs in zip(rows_of(cache), rows_of(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def read_afresh(target: LlamaTarget, tokens: Sequence[int]) -> tuple[TorchKVCache, Tensor]:
    """Cache and hidden states of a text that the target reads in one pass, its last token apart."""
    cache, num_rows = target.new_cache(len(tokens)), len(tokens) - 1
    rows = torch.tensor(tokens[:-1])
    output = target.forward([Segment(cache, rows, np.arange(num_rows))])
    cache.commit(range(num_rows))
    return cache, output.hidden[0]


def assert_in_step(drafter: Drafter, followed: Followed, target_cache: TorchKVCache) -> None:
    """Both caches are those of a fresh prefill of the same tokens."""
    tokens = followed.tokens
    fresh_cache, hidden = read_afresh(TARGET, tokens)
    assert_close(target_cache, fresh_cache)
    mine = block_state(followed.state)
    assert mine.cache.length + sum(len(w[0]) for w in mine.waiting) == len(tokens) - 1
    fresh = drafter.prefill(tokens[:-1], hidden, tokens[-1])
    states = [followed.state, fresh]
    trees = drafter.draft([DraftRequest(state, tokens[-1], ONE) for state in states])
    assert mine.waiting == []
    assert_close(mine.cache, block_state(fresh).cache)
    torch.testing.assert_close(mine.feature, block_state(fresh).feature, rtol=1e-9, atol=1e-9)
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()


# -- in the engine ---------------------------------------------------------------------------------


def random_request(rng: random.Random) -> Request:
    """A prompt of another length each, and a text that ends soon or late."""
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
    sampling = SamplingParams(
        max_new_tokens=rng.choice([3, 20, 60]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**40),
    )
    return Request(prompt, sampling)


def come_and_go(engine: Engine, rng: random.Random, started: list[int]) -> None:
    """Now and then submit a request, or cancel one that has started, the first apart; then step."""
    if rng.random() < 0.15:
        engine.submit(random_request(rng))
    if len(started) > 1 and rng.random() < 0.05:
        engine.cancel(started.pop())
    for chunk in engine.step():
        if chunk.result is not None and chunk.request_id in started:
            started.remove(chunk.request_id)
        elif chunk.result is None and chunk.request_id not in started:
            started.append(chunk.request_id)


@with_a_cache
def test_after_many_steps_all_caches_are_those_of_a_fresh_prefill(kind: str) -> None:
    """200 steps of a changing batch of three, another tree or none at each, prompts in chunks."""
    rng = random.Random(kind)
    trees = [Topology(()), Topology(()), ONE, *(random_topology(rng, 24) for _ in range(6))]
    target, drafter = SpyTarget(TARGET), SpyDrafter(make_drafter(kind, TARGET, (), 4))
    engine = Engine(
        target,
        drafter,
        RandomScheduler(7, trees),
        ByteTokenizer(VOCAB, eos_ids=(VOCAB,)),
        EngineLimits(max_batch_size=3, prefill_chunk=16, spare_rows=0),
    )
    engine.submit(Request((3,) * 70, SamplingParams(max_new_tokens=900, temperature=1.0, seed=1)))
    started: list[int] = []
    for step in range(1, 201):
        come_and_go(engine, rng, started)
        if step % 50 == 0:
            pairs = list(zip(drafter.followed, target.caches, strict=False))
            for followed, cache in pairs:
                assert_in_step(drafter.inner, followed, cache)
    assert len(pairs) > 8
    assert len(drafter.followed[0].tokens) > 256  # beyond the first capacity of a cache


# -- drafts leave no trace -------------------------------------------------------------------------


class BreakingModule(RecurrentModule):
    """A recurrent module whose block fails when it is run for the n-th time."""

    breaks_at: int | None = None

    def features(self, *arguments: object) -> Tensor:  # type: ignore[override]
        if self.breaks_at is not None:
            self.breaks_at -= 1
            if self.breaks_at == 0:
                self.breaks_at = None
                raise MemoryError("no room")
        return super().features(*arguments)  # type: ignore[arg-type]


class BreakingHeads(HydraHeads):
    """Hydra heads of which one fails when heads are run for the n-th time."""

    breaks_at: int | None = None

    def features(self, head: int, hidden: Tensor, embedded: Tensor) -> Tensor:
        if self.breaks_at is not None:
            self.breaks_at -= 1
            if self.breaks_at == 0:
                self.breaks_at = None
                raise MemoryError("no room")
        return super().features(head, hidden, embedded)


def breaking_drafter(kind: str) -> tuple[Drafter, BreakingModule | BreakingHeads]:
    """A drafter that can be told to fail, and its module."""
    sound = random_heads(kind, TARGET, 4)
    made = BreakingModule if kind == "mtp" else BreakingHeads
    heads = made(sound.config, sound.hot_ids).to(TARGET.dtype)
    heads.load_state_dict(sound.state_dict())
    return attach_heads(heads, TARGET), heads


def some_texts(drafter: Drafter) -> list[Followed]:
    """Three texts of different lengths, the last rows of which wait."""
    texts = []
    for seed, size in enumerate((2, 30, 270)):  # one beyond the first capacity of a cache
        rng = random.Random(seed)
        tokens = [rng.randrange(VOCAB) for _ in range(size + 3)]
        _, hidden = read_afresh(TARGET, tokens)
        state = drafter.prefill(tokens[:size], hidden[:size], tokens[size])
        drafter.commit(state, hidden[size:], tokens[size + 1 :])
        texts.append(Followed(state, tokens))
    return texts


def ask(texts: Sequence[Followed], plans: Sequence[DraftPlan]) -> list[AnyRequest]:
    """A request for each text."""
    return [
        DraftRequest(text.state, text.tokens[-1], plan)
        if isinstance(plan, Topology)
        else GrowRequest(text.state, text.tokens[-1], plan)
        for text, plan in zip(texts, plans, strict=True)
    ]


def traces(texts: Sequence[Followed]) -> list[tuple[int, bytes, bytes, bytes, int]]:
    """All that a later draft reads of a text: committed rows, feature, and what waits."""
    found = []
    for text in texts:
        state = block_state(text.state)
        keys, values = rows_of(state.cache)
        parts = [part.numpy().tobytes() for part in (keys, values, state.feature)]
        found.append((state.cache.length, *parts, len(state.waiting)))
    return found


@with_a_cache
@pytest.mark.parametrize("seed", range(4))
def test_a_drafted_tree_leaves_no_trace(kind: str, seed: int) -> None:
    """Rows, feature and length stay to the last bit, and so does what is drafted next."""
    rng = random.Random(seed)
    drafter = make_drafter(kind, TARGET, (), 4)
    texts = some_texts(drafter)
    first = drafter.draft(ask(texts, [ONE] * 3))
    before = traces(texts)
    for _ in range(3):
        drafter.draft(ask(texts, [random_topology(rng) for _ in texts]))
        assert traces(texts) == before
        drafter.draft(ask(texts, [random_plan(seed, random_envelope(rng)) for _ in texts]))
        assert traces(texts) == before
    again = drafter.draft(ask(texts, [ONE] * 3))
    assert [t.tokens.tolist() for t in again] == [t.tokens.tolist() for t in first]


@with_a_cache
def test_an_empty_plan_leaves_the_waiting_rows_alone(kind: str) -> None:
    """A plain step beside others with trees reads nothing."""
    drafter = make_drafter(kind, TARGET, (), 4)
    texts = some_texts(drafter)
    before = traces(texts)
    trees = drafter.draft(ask(texts, [Topology(()), ONE, Topology(())]))
    assert [trace == old for trace, old in zip(traces(texts), before, strict=True)] == [
        True,
        False,
        True,
    ]
    assert [tree.tokens.tolist() for tree in trees[::2]] == [[t.tokens[-1]] for t in texts[::2]]


@with_a_cache
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("breaks_at", [1, 2, 3])
def test_a_draft_that_is_broken_off_leaves_no_trace(kind: str, breaks_at: int, grows: bool) -> None:
    """Whichever run of the module fails, in whole trees and in grown ones; the next draft is that
    of a drafter that never failed.
    """
    plan = Topology.from_paths([(0,), (1,), (1, 0), (1, 2), (1, 2, 0), (1, 2, 0, 3)])
    drafter, heads = breaking_drafter(kind)
    texts = some_texts(drafter)
    drafter.draft(ask(texts, [ONE] * 3))
    before = traces(texts)
    heads.breaks_at = breaks_at
    with pytest.raises(MemoryError):
        drafter.draft(ask(texts, [GrowthPlan.whole(t) if grows else t for t in (plan, ONE, plan)]))
    assert traces(texts) == before
    twin = make_drafter(kind, TARGET, (), 4)
    expected = twin.draft(ask(some_texts(twin), [plan] * 3))
    drafted = drafter.draft(ask(texts, [plan] * 3))
    assert [t.tokens.tolist() for t in drafted] == [t.tokens.tolist() for t in expected]


def test_waiting_rows_survive_where_reading_them_is_broken_off() -> None:
    """The next draft reads them again, and is that of a drafter that never failed."""
    drafter, module = breaking_drafter("mtp")
    texts = some_texts(drafter)
    module.breaks_at = 1
    with pytest.raises(MemoryError):
        drafter.draft(ask(texts, [ONE] * 3))
    assert all(block_state(text.state).waiting for text in texts)
    for text in texts:
        assert_in_step(drafter, text, read_afresh(TARGET, text.tokens)[0])


@with_a_cache
def test_waiting_rows_do_not_alias_the_target_s_buffer(kind: str) -> None:
    """A target may reuse the memory of its hidden states after a step."""
    drafter = make_drafter(kind, TARGET, (), 4)
    (text,) = some_texts(drafter)[:1]
    _, hidden = read_afresh(TARGET, [*text.tokens, 1, 2])
    step = hidden[-2:].clone()
    drafter.commit(text.state, step, [1, 2])
    text.tokens.extend([1, 2])
    step.fill_(7.0)
    assert_in_step(drafter, text, read_afresh(TARGET, text.tokens)[0])
