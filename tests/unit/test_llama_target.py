"""The torch target: trees, batches and chunks give what one token at a time gives."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.target.base import KVCache, Segment
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import tensor_shapes
from entmtp.topology import Topology
from fakes import tiny_config, tiny_target
from strategies import topologies

V = 61
PROMPT = [5, 60, 0, 17, 17, 33, 2]
FEATURES: dict[str, dict[str, object]] = {
    "llama": {},
    "untied": {"tie_embeddings": False},
    "biases": {"o_bias": True, "qkv_bias": True, "mlp_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 16},
    "one head each": {"num_kv_heads": 4},
    "short table": {"context_window": 4},  # rotations beyond it are made when needed
}


def make_target(**changes: object) -> LlamaTarget:
    """A seeded target with any feature, norms and biases away from their usual values."""
    config = tiny_config(vocab_size=V, **changes)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in tensor_shapes(config).items()
    }
    return LlamaTarget(config, tensors.items())


TARGETS = {name: make_target(**changes) for name, changes in FEATURES.items()}
TARGET = TARGETS["llama"]


def chain(cache: KVCache, tokens: Sequence[int]) -> Segment:
    """Tokens one after the other."""
    return Segment(cache, torch.tensor(tokens), np.arange(len(tokens)))


def tree_segment(cache: KVCache, tree: Topology, tokens: Sequence[int]) -> Segment:
    """A draft tree."""
    return Segment(cache, torch.tensor(tokens), tree.depths, tree.ancestor_mask)


def alone(target: LlamaTarget, tokens: Sequence[int]) -> torch.Tensor:
    """Logits ``(len, V)``, one forward a token."""
    cache, rows = target.new_cache(len(tokens)), []
    for token in tokens:
        rows.append(target.forward([chain(cache, [token])]).logits[0])
        cache.commit([0])
    return torch.cat(rows)


def prefilled(target: LlamaTarget, tokens: Sequence[int], capacity: int = 64) -> TorchKVCache:
    """A cache that holds these tokens."""
    cache = target.new_cache(capacity)
    if tokens:
        target.forward([chain(cache, tokens)])
        cache.commit(range(len(tokens)))
    return cache


def draw_tokens(seed: int, size: int) -> list[int]:
    """Seeded token ids."""
    return np.random.default_rng(seed).integers(V, size=size).tolist()


# -- trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=6)
@given(topologies(max_nodes=12, max_depth=4), st.integers(0, 7), st.integers(0, 2**32))
def test_every_node_equals_a_sequential_forward(
    name: str, tree: Topology, prefix: int, seed: int
) -> None:
    """Logits at a node are those after the prefix, the root and the node's own path."""
    target, tokens = TARGETS[name], draw_tokens(seed, tree.num_rows)
    cache = prefilled(target, PROMPT[:prefix])
    got = target.forward([tree_segment(cache, tree, tokens)]).logits[0]
    for row in tree.retrieve_indices:
        path = [int(node) for node in row if node >= 0]
        expected = alone(target, [*PROMPT[:prefix], *(tokens[node] for node in path)])[prefix:]
        torch.testing.assert_close(got[path], expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=20)
@given(st.lists(topologies(max_nodes=12, max_depth=4), max_size=5), st.integers(0, 2**32))
def test_cache_after_commits_equals_a_fresh_prefill(trees: list[Topology], seed: int) -> None:
    """After steps with changing trees the cache holds the accepted text and nothing else."""
    rng = np.random.default_rng(seed)
    cache, text = prefilled(TARGET, PROMPT, capacity=1), list(PROMPT)
    for tree in trees:
        tokens = rng.integers(V, size=tree.num_rows).tolist()
        TARGET.forward([tree_segment(cache, tree, tokens)])
        path = tree.path_nodes(int(rng.integers(tree.num_rows)))
        cache.commit(path)
        text += [tokens[node] for node in path]
    fresh = prefilled(TARGET, text)
    assert cache.length == fresh.length == len(text)
    for got, expected in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        close = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(got[:, :, : len(text)], expected[:, :, : len(text)], **close)


def test_an_abandoned_tree_leaves_no_trace() -> None:
    """A forward that is not committed changes nothing that a later one sees."""
    cache = prefilled(TARGET, PROMPT)
    tree = Topology.from_paths([[0], [1], [1, 0]])
    TARGET.forward([tree_segment(cache, tree, [1, 2, 3, 4])])
    got = TARGET.forward([chain(cache, [9])]).logits[0]
    torch.testing.assert_close(got, alone(TARGET, [*PROMPT, 9])[-1:], atol=1e-4, rtol=1e-4)


# -- batches and chunks ----------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), topologies(max_nodes=8, max_depth=3)), min_size=1, max_size=4
    ),
    st.integers(0, 2**32),
)
def test_a_ragged_batch_equals_each_segment_alone(
    cases: list[tuple[int, Topology]], seed: int
) -> None:
    """Sequences of other lengths and other trees in the batch change nothing."""

    def segments() -> list[Segment]:
        return [
            tree_segment(prefilled(TARGET, PROMPT[:prefix]), tree, draw_tokens(seed, tree.num_rows))
            for prefix, tree in cases
        ]

    together = TARGET.forward(segments())
    for index, segment in enumerate(segments()):
        single = TARGET.forward([segment])
        for got, expected in (
            (together.logits[index], single.logits[0]),
            (together.hidden[index], single.hidden[0]),
        ):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_prefill_and_trees_share_a_forward() -> None:
    """A prompt chunk, one token and a tree in one batch each get their own rows."""
    tree = Topology.from_paths([[0], [1]])
    caches = [prefilled(TARGET, PROMPT[:n]) for n in (0, 3, 5)]
    segments = [
        chain(caches[0], PROMPT),
        chain(caches[1], [8]),
        tree_segment(caches[2], tree, [1, 2, 3]),
    ]
    output = TARGET.forward(segments)
    assert [rows.shape for rows in output.logits] == [(7, V), (1, V), (3, V)]
    expected = [alone(TARGET, PROMPT), alone(TARGET, [*PROMPT[:3], 8])[3:]]
    for got, want in zip(output.logits, expected, strict=False):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_prompt_chunks_equal_one_chunk(size: int) -> None:
    """The size of a chunk changes neither hidden states nor the logits that follow."""
    cache, hidden = TARGET.new_cache(16), []
    for start in range(0, len(PROMPT), size):
        tokens = PROMPT[start : start + size]
        output = TARGET.forward([chain(cache, tokens)])
        cache.commit(range(len(tokens)))
        hidden.append(output.hidden[0])
    whole = TARGET.forward([chain(TARGET.new_cache(16), PROMPT)])
    torch.testing.assert_close(torch.cat(hidden), whole.hidden[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.logits[0][-1], whole.logits[0][-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "rows"), [("all", slice(0, 7)), ("last", slice(6, 7)), ("none", slice(7, 7))]
)
def test_logits_are_computed_for_the_rows_asked_for(wanted: str, rows: slice) -> None:
    """All rows, the last one or none; hidden states are there for all."""
    plain = chain(TARGET.new_cache(8), PROMPT)
    some = Segment(TARGET.new_cache(8), plain.tokens, plain.depths, logits=wanted)  # type: ignore[arg-type]
    got, whole = TARGET.forward([some]), TARGET.forward([plain])
    assert got.logits[0].shape == (rows.stop - rows.start, V)
    torch.testing.assert_close(got.logits[0], whole.logits[0][rows], atol=1e-5, rtol=1e-5)
    assert torch.equal(got.hidden[0], whole.hidden[0])


def test_segments_may_ask_for_different_rows() -> None:
    """Each segment of a batch gets its own number of logits."""
    asked = [
        Segment(TARGET.new_cache(8), torch.tensor(PROMPT), np.arange(7), logits=wanted)
        for wanted in ("none", "last", "all")
    ]
    assert [len(rows) for rows in TARGET.forward(asked).logits] == [0, 1, 7]


# -- the rest of the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "untied"])
def test_logits_are_hidden_states_times_output_rows(name: str) -> None:
    """Drafters that share the head get the rows that the target itself uses."""
    target = TARGETS[name]
    output = target.forward([chain(target.new_cache(8), PROMPT)])
    ids = torch.tensor([3, 0, 60])
    got = output.hidden[0] @ target.output_rows(ids).T
    torch.testing.assert_close(got, output.logits[0][:, ids], atol=1e-5, rtol=1e-5)
    assert torch.equal(target.embedding()[ids], target.output_rows(ids)) == (name == "llama")


def test_dtype_and_backend() -> None:
    """Logits and hidden states have the target's dtype; reports name the device."""
    target = tiny_target(dtype=torch.bfloat16)
    output = target.forward([chain(target.new_cache(8), PROMPT)])
    assert output.logits[0].dtype == output.hidden[0].dtype == target.dtype == torch.bfloat16
    assert (target.backend, target.device.type) == ("torch-cpu", "cpu")


def test_a_cache_of_another_backend_is_refused() -> None:
    """Mixing backends is an error of ours, told at once."""

    class OtherCache:
        length = 0

        def commit(self, rows: Sequence[int]) -> None:
            """Never called."""

    with pytest.raises(TypeError, match="reads TorchKVCache, not OtherCache"):
        TARGET.forward([chain(OtherCache(), [1])])


def test_missing_weights_are_refused() -> None:
    """A target is not made of half a model."""
    config = tiny_config(vocab_size=V)
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
    partial = {name: value for name, value in tensors.items() if "layers.1.mlp" not in name}
    with pytest.raises(KeyError, match=r"layers\.1\."):
        LlamaTarget(config, partial.items())
