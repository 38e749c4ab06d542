"""Recorded steps give what kernel-by-kernel evaluation gives; a tape stands for CUDA graphs."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.decoder.attention import attention_kernels
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.target.base import KVCache, Segment, TargetOutput
from entmtp.target.cuda_graphs import ROW_COUNTS, CudaRecorder
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import tensor_shapes
from entmtp.topology import Topology
from fakes import tiny_config
from strategies import topologies
from tape import Tape, TapeRecorder

V = 61
POISON = 7
"""A token whose embedding is not finite in ``poisoned``."""

FEATURES: dict[str, dict[str, object]] = {
    "llama": {},
    "untied, one head each": {"tie_embeddings": False, "num_kv_heads": 4},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 16, "num_kv_heads": 1},
    "biases, short window": {"qkv_bias": True, "o_bias": True, "context_window": 16},
}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def make_target(
    changes: dict[str, object],
    poison: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> LlamaTarget:
    """A seeded target without graphs."""
    config = tiny_config(vocab_size=V, **changes)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in tensor_shapes(config).items()
    }
    if poison is not None:
        tensors["model.embed_tokens.weight"][poison] = torch.nan
    return LlamaTarget(config, tensors.items(), dtype=dtype)


@lru_cache(maxsize=8)
def pair(name: str) -> tuple[LlamaTarget, LlamaTarget]:
    """A target that records and its twin that does not, on the same weights."""
    plain = make_target(FEATURES[name])
    return plain.with_graphs(TapeRecorder()), plain


@pytest.fixture
def target() -> LlamaTarget:
    """A target that has recorded nothing yet."""
    return pair("llama")[1].with_graphs(TapeRecorder())


def chain(cache: KVCache, tokens: Sequence[int], **changes: str) -> Segment:
    """Tokens one after the other, without a mask."""
    return Segment(cache, torch.tensor(tokens), np.arange(len(tokens)), **changes)  # type: ignore[arg-type]


def tree_segment(cache: KVCache, tree: Topology, tokens: Sequence[int]) -> Segment:
    """A draft tree."""
    return Segment(cache, torch.tensor(tokens), tree.depths, tree.ancestor_mask)


def wide(num_rows: int) -> Topology:
    """A root with children, two levels of them where there are many."""
    firsts = [(a,) for a in range(min(num_rows - 1, 40))]
    return Topology.from_paths([*firsts, *((0, b) for b in range(num_rows - 1 - len(firsts)))])


def prefilled(target: LlamaTarget, size: int, capacity: int = 100) -> TorchKVCache:
    """A cache that holds ``size`` tokens."""
    cache = target.new_cache(capacity)
    if size:
        target.forward([chain(cache, [n % V for n in range(size)], logits="none")])
        cache.commit(range(size))
    return cache


def assert_same(got: TargetOutput, expected: TargetOutput) -> None:
    """Logits and hidden states agree to rounding."""
    torch.testing.assert_close(got.logits[0], expected.logits[0], **CLOSE)
    torch.testing.assert_close(got.hidden[0], expected.hidden[0], **CLOSE)


def both(
    targets: tuple[LlamaTarget, LlamaTarget],
    caches: tuple[TorchKVCache, TorchKVCache],
    make: Callable[[TorchKVCache], Segment],
) -> None:
    """One forward on each twin gives the same."""
    got, expected = (
        target.forward([make(cache)]) for target, cache in zip(targets, caches, strict=True)
    )
    assert_same(got, expected)


# -- the step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEATURES)
@settings(max_examples=12)
@given(
    st.integers(0, 40),
    st.lists(topologies(max_nodes=40), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
def test_recorded_steps_equal_plain_ones(
    name: str, prefix: int, trees: list[Topology], seed: int
) -> None:
    """Trees, lengths and committed paths that change from step to step change nothing."""
    rng = np.random.default_rng(seed)
    targets = pair(name)
    before = targets[0].graph_replays
    caches = prefilled(targets[0], prefix), prefilled(targets[1], prefix)
    for tree in trees:
        tokens = rng.integers(V, size=tree.num_rows).tolist()
        both(targets, caches, lambda c, t=tree, ids=tokens: tree_segment(c, t, ids))  # type: ignore[misc]
        path = tree.path_nodes(int(rng.integers(tree.num_rows)))
        for cache in caches:
            cache.commit(path)
    assert targets[0].graph_replays == before + len(trees)
    length = caches[0].length
    for kind in ("keys", "values"):
        got, expected = (getattr(cache, kind)[:, :, :length] for cache in caches)
        torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("num_rows", sorted({n for m in ROW_COUNTS for n in (m - 1, m, m + 1)})[1:])
def test_every_number_of_rows_is_right(num_rows: int) -> None:
    """Rows that fill a size, and rows that are padded to it; too many are not recorded."""
    targets, tree = pair("llama"), wide(num_rows)
    before = targets[0].graph_replays
    caches = prefilled(targets[0], 9, 140), prefilled(targets[1], 9, 140)
    both(targets, caches, lambda c: tree_segment(c, tree, [n % V for n in range(num_rows)]))
    assert targets[0].graph_replays - before == (num_rows <= ROW_COUNTS[-1])


def test_tokens_may_follow_one_another(target: LlamaTarget) -> None:
    """Plain decoding, token by token, equals one forward over the text."""
    cache, text, rows = target.new_cache(30), [n * 7 % V for n in range(20)], []
    for token in text:
        rows.append(target.forward([chain(cache, [token])]).logits[0])
        cache.commit([0])
    whole = target.forward([chain(target.new_cache(30), text)]).logits[0]
    torch.testing.assert_close(torch.cat(rows), whole, **CLOSE)
    assert (target.graphs_captured, target.graph_replays) == (1, 20)


def test_half_precision_is_within_rounding() -> None:
    """bfloat16 steps differ from plain ones no more than the dtype explains."""
    plain = make_target({}, dtype=torch.bfloat16)
    recording = plain.with_graphs(TapeRecorder())
    tree = wide(11)
    outputs = []
    for target in (recording, plain):
        cache = target.new_cache(32)
        target.forward([chain(cache, [1, 2, 3], logits="none")])
        cache.commit(range(3))
        outputs.append(target.forward([tree_segment(cache, tree, list(range(11)))]).logits[0])
    assert outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[0], outputs[1], atol=0.1, rtol=0.05)


def test_outputs_are_not_overwritten(target: LlamaTarget) -> None:
    """Hidden states and logits that a caller keeps outlive the next steps."""
    cache = prefilled(target, 5)
    first = target.forward([chain(cache, [3])])
    kept = [tensor.clone() for tensor in (first.logits[0], first.hidden[0])]
    cache.commit([0])
    target.forward([chain(cache, [9])])
    target.forward([tree_segment(cache, wide(3), [1, 2, 3])])
    assert torch.equal(first.logits[0], kept[0])
    assert torch.equal(first.hidden[0], kept[1])


# -- what is left in the buffers -------------------------------------------------------------------


def poisoned() -> LlamaTarget:
    """A recording target with a token that makes its row, and what sees it, not finite."""
    return make_target({"tie_embeddings": False}, POISON).with_graphs(TapeRecorder())


def assert_finite(output: TargetOutput) -> None:
    """No number of another row or step has spread."""
    assert bool(torch.isfinite(output.logits[0]).all())


@pytest.mark.parametrize("num_rows", [40, 150])
@pytest.mark.parametrize("is_committed", [True, False])
def test_rows_of_earlier_steps_cannot_spread(num_rows: int, is_committed: bool) -> None:
    """NaN in a large tree, recorded or not, is gone in the next step, which is smaller."""
    target = poisoned()
    cache = prefilled(target, 5, 400)
    before = target.forward([tree_segment(cache, wide(3), [1, 2, 3])])  # moves the cache
    target.forward([tree_segment(cache, wide(num_rows), [1] * (num_rows - 1) + [POISON])])
    if is_committed:
        cache.commit([])
    after = target.forward([tree_segment(cache, wide(3), [1, 2, 3])])
    assert_finite(after)
    assert_same(after, before)
    assert target.graph_replays == 2 + (num_rows <= ROW_COUNTS[-1])


def test_rows_of_an_earlier_sequence_cannot_spread() -> None:
    """A sequence that takes the buffers over finds nothing of the one before."""
    target = poisoned()
    for size, token in ((30, POISON), (3, 1)):
        cache = prefilled(target, size)
        output = target.forward([chain(cache, [token])])
        del cache
    assert_finite(output)
    assert target.graph_replays == 2


def test_padding_cannot_spread() -> None:
    """The rows that fill up a size hold numbers as finite as the root's, whatever token 0 is."""
    target = make_target({"tie_embeddings": False}, 0).with_graphs(TapeRecorder())
    cache = target.new_cache(40)
    assert_finite(target.forward([tree_segment(cache, wide(5), [1, 2, 3, 4, 5])]))
    assert target.graph_replays == 1


# -- whose buffers they are ------------------------------------------------------------------------


def is_replayed(target: LlamaTarget, segments: Sequence[Segment]) -> bool:
    """Whether a forward is a replay."""
    before = target.graph_replays
    target.forward(segments)
    return target.graph_replays > before


def test_a_living_sequence_keeps_the_buffers(target: LlamaTarget) -> None:
    """Another one is evaluated without them, and both stay right."""
    first, second = prefilled(target, 5), prefilled(target, 5)
    tokens = [4, 5, 6]
    one = target.forward([tree_segment(first, wide(3), tokens)])
    two = target.forward([tree_segment(second, wide(3), tokens)])
    assert target.graph_replays == 1
    assert first.keys is not second.keys
    assert_same(two, one)
    assert is_replayed(target, [chain(first, [1])])


def test_a_dead_sequence_frees_the_buffers(target: LlamaTarget) -> None:
    """Sequences one after the other use the same memory and the same recordings."""
    places = set()
    for size in (5, 9, 0):
        cache = prefilled(target, size)
        assert is_replayed(target, [chain(cache, [1])])
        places.add(cache.keys.data_ptr())
        del cache
    assert len(places) == 1
    assert target.graphs_captured == 1


def test_a_sequence_left_alone_moves_in(target: LlamaTarget) -> None:
    """The survivor of a batch is recorded once the owner of the buffers is gone."""
    first, second = prefilled(target, 5), prefilled(target, 8)
    assert is_replayed(target, [chain(first, [1])])
    assert not is_replayed(target, [chain(first, [1]), chain(second, [1])])
    del first
    both((target, pair("llama")[1]), (second, prefilled(target, 8)), lambda c: chain(c, [1]))
    assert target.graph_replays == 2


def test_a_larger_sequence_gets_larger_buffers() -> None:
    """Recordings on the smaller ones are dropped; capacities double."""
    recorder = TapeRecorder()
    target = make_target({"context_window": 4000}).with_graphs(recorder)
    capacities, recorded = [], []
    for capacity in (10, 250, 257, 700, 20):
        cache = prefilled(target, 5, capacity)
        assert is_replayed(target, [chain(cache, [1])])
        capacities.append(cache.capacity)
        recorded.append(target.graphs_captured)
        del cache
    assert capacities == [256, 256, 512, 1024, 1024]
    assert recorded == [1, 1, 2, 3, 3]
    assert recorder.num_forgotten == 3


def test_buffers_are_no_larger_than_the_window_asks() -> None:
    """The last doubling is cut to the window and the rows of a step."""
    target = make_target({"context_window": 600}).with_graphs(TapeRecorder())
    cache = prefilled(target, 5, 665)
    assert is_replayed(target, [chain(cache, [1])])
    assert cache.capacity == 768


def test_a_long_sequence_is_recorded_again_at_each_doubling(target: LlamaTarget) -> None:
    """Short texts in large buffers read few rows: one recording a number of rows and span."""
    cache = prefilled(target, 200, 800)
    seen = []
    for _ in range(4):
        both((target, pair("llama")[1]), (cache, copied(cache)), lambda c: chain(c, [1]))
        seen.append(target.graphs_captured)
        target.forward([chain(cache, [3] * 100, logits="none")])
        cache.commit(range(100))
    assert seen == [1, 2, 2, 2]
    assert target.graph_replays == 4


def copied(cache: TorchKVCache) -> TorchKVCache:
    """An ordinary cache with the same rows."""
    layers, heads, _, head_dim = cache.keys.shape
    size = cache.capacity
    other = TorchKVCache((layers, heads, head_dim), size, cache.keys.dtype, cache.keys.device)
    other.begin(cache.length)
    other.keys[:, :, : cache.length] = cache.keys[:, :, : cache.length]
    other.values[:, :, : cache.length] = cache.values[:, :, : cache.length]
    other.commit(range(cache.length))
    return other


# -- what is evaluated without recordings ----------------------------------------------------------


def test_other_forwards_are_not_recorded(target: LlamaTarget) -> None:
    """Prompt chunks, batches, and rows without logits take the plain path, buffers or not."""
    cache, other = prefilled(target, 5), prefilled(target, 5)
    assert not is_replayed(target, [chain(cache, [1, 2, 3])])
    assert not is_replayed(target, [chain(cache, [1]), chain(other, [1])])
    assert not is_replayed(target, [chain(cache, [1], logits="last")])
    assert not is_replayed(target, [chain(cache, [1], logits="none")])
    assert target.graphs_captured == 0
    assert is_replayed(target, [chain(cache, [1])])


def test_a_sequence_that_fills_the_buffers_leaves_them(target: LlamaTarget) -> None:
    """Rows that no longer fit, and a cache that has grown, take the plain path, and stay right."""
    twins = target, pair("llama")[1]
    caches = prefilled(target, 240, 241), prefilled(twins[1], 240, 241)
    replays = []
    for _ in range(20):
        both(twins, caches, lambda c: tree_segment(c, wide(3), [1, 2, 3]))
        replays.append(target.graph_replays)
        for cache in caches:
            cache.commit([0, 2])
    assert replays == [1, 2, 3, 4, 5, 6, 7] + [7] * 13
    assert caches[0].capacity > 256
    assert is_replayed(target, [chain(prefilled(target, 5), [1])])  # they are free again


def test_a_failing_recorder_is_reported_once(
    target: LlamaTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoding goes on without recordings, with the same output."""

    class Broken(TapeRecorder):
        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            step()
            raise RuntimeError("operation not permitted when stream is capturing")

    broken = target.with_graphs(Broken())
    caches = prefilled(broken, 5), prefilled(target, 5)
    with caplog.at_level(logging.WARNING, logger="entmtp"):
        for token in (1, 2):
            both((broken, target), caches, lambda c, t=token: chain(c, [t]))  # type: ignore[misc]
    assert [r.message for r in caplog.records] == [
        "decoding goes on without CUDA graphs, which failed: "
        "operation not permitted when stream is capturing"
    ]
    assert (broken.graphs_captured, broken.graph_replays) == (0, 0)


def test_a_cpu_records_nothing_by_itself() -> None:
    """Graphs are for CUDA; what records is given by hand elsewhere."""
    plain = pair("llama")[1]
    for target in (plain, plain.with_graphs(True), plain.with_graphs(False)):
        assert not is_replayed(target, [chain(prefilled(target, 3), [1])])


def test_nothing_of_cuda_is_touched_before_the_first_recording() -> None:
    """Making a recorder asks no driver for anything."""
    CudaRecorder(torch.device("cuda", 1)).forget()


def test_a_target_is_freed_at_once() -> None:
    """Weights, buffers and recordings hold no cycle that would wait for a collection."""
    target = make_target({}).with_graphs(TapeRecorder())
    target.forward([chain(target.new_cache(9), [1])])
    watched = [weakref.ref(target.embedding()), weakref.ref(target)]
    gc.disable()
    try:
        del target
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


def test_on_cuda_attention_does_not_plan_for_each_length() -> None:
    """The kernels of cuDNN are left out there, and come back after."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled()
    with attention_kernels(torch.device("cuda")):
        assert not cuda.cudnn_sdp_enabled()
        assert cuda.mem_efficient_sdp_enabled()
        assert cuda.math_sdp_enabled()
    assert cuda.cudnn_sdp_enabled() == before


# -- the tape --------------------------------------------------------------------------------------


def test_a_tape_holds_on_to_what_the_host_read() -> None:
    """As in a CUDA graph, a number of the host is fixed, one on the device is not."""
    data, place, out = torch.arange(6), torch.tensor([2]), torch.zeros(2, dtype=torch.int64)
    host = [2]

    def step() -> None:
        out[0] = data[host[0]]
        out[1:] = data.index_select(0, place) * 1

    replay = TapeRecorder().record(step)
    host[0] = 5
    place.fill_(5)
    replay()
    assert out.tolist() == [2, 5]


def test_a_tape_refuses_to_wait_for_the_device() -> None:
    """What a capture would refuse."""
    with Tape(), pytest.raises(AssertionError, match="cannot be captured"):
        torch.ones(3).sum().item()
