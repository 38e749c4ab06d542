"""Weights of a target for the native core: rotated, folded, ordered, quantised, packed.

Activations are quantised to 8 bits a row, and outliers in a row cost the others their precision.
So the residual stream is turned by an orthogonal matrix R, which is folded into all weights that
read or write it (as in QuaRot, Ashkboos et al. 2024), and the hidden row of the feed-forward part
is mixed by a Hadamard transform whose inverse is folded into the down projection.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig, block_shapes
from entmtp.decoder.rope import inverse_frequencies
from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.kernels.library import CConfig, Library
from entmtp.target.base import TargetConfig
from entmtp.target.digest import WeightsDigest

__all__ = [
    "Array",
    "Rotation",
    "check_native",
    "core_config",
    "interleave",
    "layer_rows",
    "make_rotation",
    "mix_count",
    "native_obstacle",
    "pack_model",
    "rotary_tables",
]

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rotation:
    """R = dense (x) Hadamard / sqrt(power), orthogonal ``(H, H)``.

    Attributes:
        dense: ``(odd, odd)`` orthogonal factor.
        full: R in float32.
    """

    dense: npt.NDArray[np.float64]
    full: Floats


def native_obstacle(config: BlockConfig) -> str | None:
    """What keeps a model out of the core; ``None`` where nothing does."""
    for name, value, multiple in (
        ("hidden_size", config.hidden_size, 32),
        ("intermediate_size", config.intermediate_size, 32),
        ("head_dim", config.head_dim, 32),
    ):
        if value % multiple:
            return f"{name} is {value}, but the native core needs a multiple of {multiple}"
    return None


def check_native(config: TargetConfig) -> None:
    """Refuse shapes that the core does not compute.

    Raises:
        UnsupportedModelError: names the size and the limit.
    """
    obstacle = native_obstacle(config)
    if obstacle is not None:
        raise UnsupportedModelError(f"{obstacle}; use --backend torch")


def core_config(
    config: BlockConfig, *, num_layers: int, vocab_size: int, num_positions: int
) -> CConfig:
    """Sizes of a model in the core.

    Args:
        config: of its blocks.
        num_layers: blocks.
        vocab_size: tokens that it scores.
        num_positions: that its rotary tables hold.
    """
    size = config.hidden_size
    return CConfig(
        num_layers,
        size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        vocab_size,
        num_positions,
        config.qkv_bias,
        config.o_bias,
        config.mlp_bias,
        config.qk_norm,
        mix_count(config.intermediate_size),
        size // (size & -size),
        config.rms_norm_eps,
    )


def make_rotation(size: int) -> Rotation:
    """A rotation of the hidden size: Hadamard on its power of two, random on the odd factor."""
    power = size & -size
    generator = np.random.default_rng(0)
    dense = np.linalg.qr(generator.standard_normal((size // power, size // power)))[0]
    full = np.kron(dense, _hadamard(power) / np.sqrt(power))
    return Rotation(dense, full.astype(np.float32))


def mix_count(inter: int) -> int:
    """Vectors of 16 that are mixed together: the largest power of two up to 32 that divides."""
    count = 1
    while count < 32 and inter % (count * 32) == 0:
        count *= 2
    return count


def layer_rows(
    config: BlockConfig, tensors: Mapping[str, Tensor], rotation: Rotation
) -> dict[str, Floats]:
    """Matrices and vectors of one block in the order of the core's panels.

    Args:
        config: sizes.
        tensors: of the block, under the names without ``model.layers.N.``.
        rotation: of the residual stream.

    Returns:
        ``qkv``, ``o``, ``gate_up``, ``down`` as ``(channels, k)``; biases and norms, where there
        are some, under the names of the C structure.
    """
    get = {name: value.to(torch.float32).numpy() for name, value in tensors.items()}
    turn = rotation.full
    attention = get["input_layernorm.weight"]
    feed = get["post_attention_layernorm.weight"]
    order = _head_order(config)
    qkv = np.concatenate([get[f"self_attn.{n}_proj.weight"] for n in "qkv"])
    pairs = interleave(get["mlp.gate_proj.weight"], get["mlp.up_proj.weight"])
    down = _mixed(turn.T @ get["mlp.down_proj.weight"], mix_count(config.intermediate_size))
    rows = {
        "qkv": ((qkv * attention) @ turn)[order],
        "o": turn.T @ get["self_attn.o_proj.weight"],
        "gate_up": (pairs * feed) @ turn,
        "down": down,
    }
    if config.qkv_bias:
        bias = np.concatenate([get[f"self_attn.{n}_proj.bias"] for n in "qkv"])
        rows["qkv_bias"] = bias[order]
    if config.o_bias:
        rows["o_bias"] = turn.T @ get["self_attn.o_proj.bias"]
    if config.mlp_bias:
        gate, up = get["mlp.gate_proj.bias"][:, None], get["mlp.up_proj.bias"][:, None]
        rows["gate_up_bias"] = interleave(gate, up)[:, 0]
        rows["down_bias"] = turn.T @ get["mlp.down_proj.bias"]
    if config.qk_norm:
        rows["q_norm"] = get["self_attn.q_norm.weight"]
        rows["k_norm"] = get["self_attn.k_norm.weight"]
    return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in rows.items()}


def pack_model(
    config: TargetConfig,
    tensors: Iterable[tuple[str, Tensor]],
    library: Library,
    isa: str,
) -> dict[str, Array]:
    """Every array that the core is made from, by name.

    Args:
        config: sizes, see :func:`check_native`.
        tensors: (name, value) under the Hugging Face names.
        library: quantises and packs.
        isa: instruction set that will run.

    Raises:
        CheckpointError: the weights hold NaN or infinity.

    Returns:
        ``{layer}.{name}`` of each block, ``head``, ``embedding``, ``dense``, ``final_norm`` and
        ``digest``, the letters of the digest of the weights.
    """
    check_native(config)
    rotation = make_rotation(config.hidden_size)
    digest = WeightsDigest(config)
    pool = dict(digest.watch(tensors))
    embedding = pool.pop("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else pool.pop("lm_head.weight")
    norm = pool.pop("model.norm.weight").float()
    arrays: dict[str, Array] = {}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        block = {name: pool.pop(prefix + name) for name in block_shapes(config)}
        for name, rows in layer_rows(config, block, rotation).items():
            arrays[f"{layer}.{name}"] = library.pack(rows, isa) if rows.ndim == 2 else rows
    arrays["head"] = np.concatenate(
        [library.pack(rows, isa) for rows in _head_rows(head, norm, rotation)]
    )
    arrays["embedding"] = _rotated_embedding(embedding, rotation)
    arrays["dense"] = rotation.dense.astype(np.float32)
    arrays["final_norm"] = norm.numpy()
    arrays["digest"] = np.array(list(digest.hexdigest().encode()), dtype=np.uint8)
    for array in arrays.values():  # packed ones are checked when they are packed
        if array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
            raise CheckpointError("the weights hold NaN or infinity: fetch the model again")
    return arrays


def _head_rows(head: Tensor, norm: Tensor, rotation: Rotation) -> Iterator[Floats]:
    """The output head ``(V, H)`` with the final norm folded in, some thousand rows at a time."""
    scale = norm.to(torch.float32).numpy()
    for part in torch.split(head, 8192):
        rows = (part.to(torch.float32).numpy() * scale) @ rotation.full
        yield np.ascontiguousarray(rows, dtype=np.float32)


def _rotated_embedding(embedding: Tensor, rotation: Rotation) -> npt.NDArray[np.float16]:
    """``(V, H)`` in rotated coordinates, in half precision."""
    out = np.empty(embedding.shape, dtype=np.float16)
    for start in range(0, len(embedding), 8192):
        part = embedding[start : start + 8192].to(torch.float32).numpy()
        out[start : start + 8192] = part @ rotation.full
    return out


def rotary_tables(config: BlockConfig, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines ``(length, head_dim / 2)`` as the reference target computes them."""
    angle = torch.outer(torch.arange(length).float(), inverse_frequencies(config))
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return (angle.cos() * scale).numpy(), (angle.sin() * scale).numpy()


def _hadamard(size: int) -> npt.NDArray[np.float64]:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _head_order(config: BlockConfig) -> npt.NDArray[np.int64]:
    """Channels by panel: 16 of the first half of a head, then those that rotate with them."""
    half = config.head_dim // 2
    within = [
        i + part * half + lane for i in range(0, half, 16) for part in (0, 1) for lane in range(16)
    ]
    heads = config.num_heads + 2 * config.num_kv_heads
    order = np.arange(heads)[:, None] * config.head_dim + np.array(within)[None, :]
    flat: npt.NDArray[np.int64] = order.reshape(-1).astype(np.int64)
    return flat


def interleave(gate: Floats, up: Floats) -> Floats:
    """16 gate rows, then the 16 up rows that belong to them, and so on."""
    pair = np.stack([gate.reshape(-1, 16, gate.shape[1]), up.reshape(-1, 16, up.shape[1])], axis=1)
    return pair.reshape(-1, gate.shape[1])


def _mixed(down: Floats, count: int) -> Floats:
    """Undo, in the columns, the transform of ``count`` vectors of 16 that the core applies."""
    matrix = (np.kron(_hadamard(count), np.eye(16)) / count).astype(np.float32)
    groups = np.split(down, down.shape[1] // (16 * count), axis=1)
    return np.concatenate([group @ matrix for group in groups], axis=1)
