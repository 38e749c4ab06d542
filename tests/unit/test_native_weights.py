"""Weights of the native core: what is folded into them leaves the model as it was."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.kernels.library import Library
from entmtp.target.base import Segment, TargetConfig
from entmtp.target.native_weights import (
    Rotation,
    check_native,
    layer_rows,
    make_rotation,
    mix_count,
    native_obstacle,
    pack_model,
    rotary_tables,
)
from fakes import tiny_config
from native_cases import CASES, ISAS, LIBRARY, make_case, make_reference, needs_library, tokens_of

Rows = npt.NDArray[np.float64]
TOLERANCE = 2e-4  # float32 weights that were folded in float32; logits reach about 30

HEADER = 256  # bytes in front of a panel: 32 scales, 32 offsets
LAYOUTS = {"portable": 1, "avx2": 2, "avx512": 4}


# -- a forward over folded weights, in float64 -----------------------------------------------------


def hadamard(size: int) -> Rows:
    """By its definition: the sign is the parity of the common bits."""
    bits = [[bin(i & j).count("1") % 2 for j in range(size)] for i in range(size)]
    return 1.0 - 2.0 * np.array(bits)


def normed(x: Rows, eps: float) -> Rows:
    """RMS norm without a weight."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


class FoldedModel:
    """What the core computes, without quantisation, one causal text at a time."""

    def __init__(self, name: str) -> None:
        self.config, self._tensors = make_case(name)
        self._rotation = make_rotation(self.config.hidden_size)
        tables = rotary_tables(self.config, 64)
        self._cos, self._sin = (table.astype(np.float64) for table in tables)

    def forward(self, tokens: npt.NDArray[np.int64]) -> tuple[Rows, Rows]:
        """Hidden states after the final norm, and logits."""
        config, turn = self.config, self._rotation.full.astype(np.float64)
        x = self._tensor("model.embed_tokens.weight")[tokens] @ turn
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            block = {k.removeprefix(prefix): v for k, v in self._tensors.items() if prefix in k}
            folded = layer_rows(config, block, self._rotation)
            rows = {name: value.astype(np.float64) for name, value in folded.items()}
            x = x + self._attention(rows, normed(x, config.rms_norm_eps))
            x = x + self._feed_forward(rows, normed(x, config.rms_norm_eps))
        norm = self._tensor("model.norm.weight")
        last = normed(x, config.rms_norm_eps)
        head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        return (last @ turn.T) * norm, last @ ((self._tensor(head) * norm) @ turn).T

    def _tensor(self, name: str) -> Rows:
        return self._tensors[name].numpy().astype(np.float64)

    def _attention(self, rows: dict[str, Rows], x: Rows) -> Rows:
        config, size = self.config, len(x)
        panels = x @ rows["qkv"].T + rows.get("qkv_bias", 0.0)
        heads = panels.reshape(size, -1, config.head_dim // 32, 2, 16)  # (.., half, lane)
        low, high = (heads[:, :, :, i].reshape(size, -1, config.head_dim // 2) for i in (0, 1))
        split = config.num_heads, config.num_heads + config.num_kv_heads
        whole = np.concatenate((low, high), -1)
        q, k, v = whole[:, : split[0]], whole[:, split[0] : split[1]], whole[:, split[1] :]
        if config.qk_norm:
            q = normed(q, config.rms_norm_eps) * rows["q_norm"]
            k = normed(k, config.rms_norm_eps) * rows["k_norm"]
        q, k = self._rotated(q), self._rotated(k)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
        scores = np.where(np.tril(np.ones((size, size), dtype=bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(size, -1)
        return mixed @ rows["o"].T + rows.get("o_bias", 0.0)

    def _rotated(self, x: Rows) -> Rows:
        cos, sin = self._cos[: len(x), None], self._sin[: len(x), None]
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), -1)

    def _feed_forward(self, rows: dict[str, Rows], x: Rows) -> Rows:
        panels = x @ rows["gate_up"].T + rows.get("gate_up_bias", 0.0)
        pairs = panels.reshape(len(x), -1, 2, 16)
        gate, up = pairs[:, :, 0].reshape(len(x), -1), pairs[:, :, 1].reshape(len(x), -1)
        inner = gate / (1 + np.exp(-gate)) * up
        count = mix_count(self.config.intermediate_size)
        vectors = inner.reshape(len(x), -1, count, 16)
        mixed = np.einsum("ij,ngjl->ngil", hadamard(count), vectors).reshape(len(x), -1)
        return mixed @ rows["down"].T + rows.get("down_bias", 0.0)


@pytest.mark.parametrize("name", CASES)
def test_folding_leaves_the_model_as_it_was(name: str) -> None:
    """Rotated, folded, mixed and reordered weights compute what the reference target computes."""
    target = make_reference(name, torch.float64)
    tokens = tokens_of(target, 24)
    cache = target.new_cache(24)
    expected = target.forward([Segment(cache, tokens, np.arange(24))])
    hidden, logits = FoldedModel(name).forward(tokens.numpy())
    np.testing.assert_allclose(hidden, expected.hidden[0].numpy(), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits, expected.logits[0].numpy(), atol=TOLERANCE, rtol=0)


# -- the rotation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 64, 96, 160, 352, 576])
def test_the_rotation_is_orthogonal(size: int) -> None:
    """Its factors too, and it is the same at every start."""
    rotation = make_rotation(size)
    full, odd = rotation.full.astype(np.float64), len(rotation.dense)
    np.testing.assert_allclose(full @ full.T, np.eye(size), atol=1e-6)
    np.testing.assert_allclose(rotation.dense @ rotation.dense.T, np.eye(odd), atol=1e-12)
    assert odd % 2 == 1
    assert np.array_equal(make_rotation(size).full, rotation.full)


def test_the_rotation_is_a_small_dense_factor_and_a_hadamard_transform() -> None:
    """In this form the core turns hidden states back."""
    rotation = make_rotation(96)
    expected = np.kron(rotation.dense, hadamard(32) / math.sqrt(32))
    np.testing.assert_allclose(rotation.full, expected, atol=1e-7)


@pytest.mark.parametrize(
    ("inter", "count"), [(32, 2), (96, 2), (160, 2), (64, 4), (512, 32), (1536, 32), (11008, 16)]
)
def test_the_mixing_divides_the_feed_forward_row(inter: int, count: int) -> None:
    """The largest power of two up to 32 vectors of 16."""
    assert mix_count(inter) == count
    assert inter % (16 * count) == 0


def test_an_identity_rotation_leaves_only_the_order() -> None:
    """Channels of a panel: 16 of the first half of a head, then the 16 that turn with them."""
    config, tensors = make_case("mistral")
    block = {k.removeprefix("model.layers.0."): v for k, v in tensors.items()}
    identity = Rotation(np.eye(1), np.eye(config.hidden_size, dtype=np.float32))
    rows = layer_rows(config, block, identity)
    norm = block["input_layernorm.weight"].numpy()
    query = block["self_attn.q_proj.weight"].numpy() * norm
    half = config.head_dim // 2
    order = [*range(16), *range(half, half + 16), *range(16, 32), *range(half + 16, half + 32)]
    np.testing.assert_allclose(rows["qkv"][: config.head_dim], query[order], atol=1e-6)
    gate, up = (
        block[f"mlp.{n}_proj.weight"].numpy() * block["post_attention_layernorm.weight"].numpy()
        for n in ("gate", "up")
    )
    np.testing.assert_allclose(rows["gate_up"][:16], gate[:16], atol=1e-6)
    np.testing.assert_allclose(rows["gate_up"][16:32], up[:16], atol=1e-6)
    np.testing.assert_allclose(rows["gate_up"][32:48], gate[16:32], atol=1e-6)


# -- packing ---------------------------------------------------------------------------------------


def library() -> Library:
    """The compiled core."""
    assert LIBRARY is not None
    return LIBRARY


def panel_place(layout: int, k: int, channel: int, column: int) -> int:
    """Byte of a weight in its panel: ``layout`` columns of a channel lie side by side."""
    if layout == 1:
        return HEADER + column * 32 + channel
    if layout == 2:  # the two halves of the channels one after the other
        half = HEADER + channel // 16 * k * 16
        return half + column // 2 * 32 + channel % 16 * 2 + column % 2
    within = channel // 16 * 64 + channel % 16 * 4
    return HEADER + column // 4 * 128 + within + column % 4


def unpack(data: npt.NDArray[np.uint8], layout: int, channels: int, k: int) -> Rows:
    """The quantised matrix in real numbers; checks the offsets and that padding is zero."""
    size = HEADER + 32 * k
    rows = np.zeros((channels, k))
    assert len(data) == -(-channels // 32) * size
    for number, panel in enumerate(data.reshape(-1, size)):
        scales, offsets = panel[:128].view(np.float32), panel[128:256].view(np.int32)
        for channel in range(32):
            places = [panel_place(layout, k, channel, column) for column in range(k)]
            ints = panel[places].view(np.int8).astype(np.int64)
            assert int(offsets[channel]) == -128 * int(ints.sum())
            if number * 32 + channel < channels:
                rows[number * 32 + channel] = ints * float(scales[channel])
            else:
                assert scales[channel] == 0
                assert not ints.any()
    return rows


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("channels", "k"), [(32, 16), (33, 48), (70, 96), (1, 32)])
def test_packing_round_trip(isa: str, channels: int, k: int) -> None:
    """Every weight is found again, rounded to 1/127 of the largest of its channel."""
    matrix = np.random.default_rng(k).standard_normal((channels, k)).astype(np.float32)
    layout = library().layout(isa)
    assert layout == LAYOUTS[isa]
    found = unpack(library().pack(matrix, isa), layout, channels, k)
    step = np.abs(matrix).max(1, keepdims=True) / 127
    assert (np.abs(found - matrix) <= step * 0.5001).all()
    top = np.abs(matrix).argmax(1)
    np.testing.assert_allclose(found[range(channels), top], matrix[range(channels), top], rtol=1e-6)


@needs_library
@pytest.mark.parametrize("isa", ISAS)
def test_a_channel_of_zeros_stays_zero(isa: str) -> None:
    """It has no scale; the channels beside it keep theirs."""
    matrix = np.ones((3, 16), dtype=np.float32)
    matrix[1] = 0
    matrix[2] = 1e-40  # too small for a scale
    found = unpack(library().pack(matrix, isa), library().layout(isa), 3, 16)
    np.testing.assert_allclose(found, matrix, rtol=1e-6, atol=1e-39)


@needs_library
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.down_proj.bias",
    ],
)
def test_weights_that_are_not_finite_are_refused(name: str, value: float) -> None:
    """They were once packed as zeros; and a NaN was forgotten where numbers followed it."""
    config, tensors = make_case("biased")
    damaged = tensors[name].clone()
    damaged.view(-1)[5] = value
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        pack_model(config, {**tensors, name: damaged}.items(), library(), ISAS[-1])


@needs_library
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CASES)
def test_a_packed_model_has_every_array(name: str, isa: str) -> None:
    """Under the names of the C structure, with the bytes that its shape asks for."""
    config, tensors = make_case(name)
    arrays = pack_model(config, tensors.items(), library(), isa)
    panels = {
        "head": (config.vocab_size, config.hidden_size),
        "0.qkv": ((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, None),
        "0.o": (config.hidden_size, config.num_heads * config.head_dim),
        "0.gate_up": (2 * config.intermediate_size, config.hidden_size),
        "0.down": (config.hidden_size, config.intermediate_size),
    }
    for key, (channels, k) in panels.items():
        size = HEADER + 32 * (k or config.hidden_size)
        assert arrays[key].nbytes == -(-channels // 32) * size, key
    biases = {k.removeprefix("0.") for k in arrays if k.startswith("0.")} - {"qkv", "o", "down"}
    expected = {"gate_up"}
    expected |= {"qkv_bias"} if config.qkv_bias else set()
    expected |= {"o_bias"} if config.o_bias else set()
    expected |= {"gate_up_bias", "down_bias"} if config.mlp_bias else set()
    expected |= {"q_norm", "k_norm"} if config.qk_norm else set()
    assert biases == expected
    assert arrays["embedding"].dtype == np.float16
    assert arrays["embedding"].shape == (config.vocab_size, config.hidden_size)


# -- obstacles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden_size is 48, but the native core needs a multiple of 32"),
        ({"intermediate_size": 100}, "intermediate_size is 100"),
        ({"head_dim": 80}, "head_dim is 80"),
        ({"head_dim": 16}, "head_dim is 16"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_named(changes: dict[str, object], message: str) -> None:
    """The size, the limit and the way out."""
    config = fitting(**changes)
    obstacle = native_obstacle(config)
    assert obstacle is not None
    assert message in obstacle
    with pytest.raises(UnsupportedModelError, match="use --backend torch"):
        check_native(config)


def test_shapes_that_fit_have_no_obstacle() -> None:
    """Those of the other tests."""
    assert native_obstacle(fitting()) is None
    assert all(native_obstacle(make_case(name)[0]) is None for name in CASES)
    check_native(fitting())


def fitting(**changes: object) -> TargetConfig:
    """Sizes that the core takes, but for the changes."""
    return tiny_config(**{"head_dim": 32, "intermediate_size": 64, **changes})
