"""The project's own file of heads: one safetensors file that says what it holds.

Metadata: ``format`` = ``entmtp-heads``, ``schema``, and the fields of :class:`HeadsConfig` plus
``target`` (the model that the heads were trained on) as strings. Tensors carry the names of the
module's parameters and buffers (``hot_ids``, ``blocks.0.1.linear.weight``, ...). A matrix may be
stored as int8 with one float32 scale a row under ``<name>.scale``; it is dequantised when read.
Without output matrices of their own, heads use the rows of the target's output head at
``hot_ids``, which are not stored.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.decoder.rope import RopeScaling, inverse_frequencies
from entmtp.drafters.heads import KINDS, Heads, HeadsConfig, build_heads
from entmtp.errors import CheckpointError
from entmtp.files import replacing

__all__ = [
    "FORMAT",
    "HeadsFile",
    "assemble_heads",
    "heads_digest",
    "load_heads",
    "read_heads_file",
    "save_heads",
]

FORMAT, SCHEMA = "entmtp-heads", "1"
_MAX_COUNT = 256  # heads or layers; published files have at most a dozen
_MAX_SIZE = 1 << 20  # rows or columns of a block; the products of three fit in 64 bits
_SAMPLE = 4096  # values of each end of a tensor that enter a digest
_FLAGS = ("has_own_output", "has_output_bias", "is_output_shared", "is_tied", "hidden_first")


@dataclass(frozen=True)
class HeadsFile:
    """What a file says about itself.

    Attributes:
        config: sizes.
        target: name of the model that the heads were trained on.
        hot_vocab_size: tokens that the heads score.
    """

    config: HeadsConfig
    target: str
    hot_vocab_size: int


def heads_digest(heads: Heads) -> str:
    """First 16 hex digits of the SHA-256 of sizes, names and the beginning and end of every tensor.

    Call it before heads are packed, which gives their tensors up. The dtype does not enter: values
    are widened to float32.
    """
    digest = hashlib.sha256(json.dumps(_write_config(heads.config)).encode())
    for name, value in sorted(heads.state_dict().items()):
        flat = value.detach().reshape(-1)
        digest.update(f"{name} {tuple(value.shape)}".encode())
        for part in (flat[:_SAMPLE], flat[-_SAMPLE:]):
            digest.update(part.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def save_heads(heads: Heads, file: Path, target: str, *, quantize: bool = False) -> None:
    """Write heads, atomically.

    Args:
        heads: the shared output matrix is left out.
        file: ``.safetensors``.
        target: name of the model that they belong to.
        quantize: store matrices as int8 (symmetric, one scale a row), vectors as they are.
    """
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, value in heads.state_dict().items():
        value = value.detach().cpu().contiguous()
        if value.untyped_storage().data_ptr() in places:
            value = value.clone()  # some published heads share a matrix, which the format cannot
        places.add(value.untyped_storage().data_ptr())
        if quantize and value.dim() == 2:
            scale = value.abs().amax(dim=1).clamp(min=1e-12).to(torch.float32) / 127.0
            tensors[name] = torch.round(value / scale[:, None]).to(torch.int8)
            tensors[f"{name}.scale"] = scale
        else:
            tensors[name] = value.to(torch.int32) if name == "hot_ids" else value
    metadata = {"format": FORMAT, "schema": SCHEMA, "target": target}
    metadata |= _write_config(heads.config)
    with replacing(file) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # the writer makes a file that only its owner can read
        save_file(tensors, temporary, metadata=metadata)
        temporary.chmod(mode)


def read_heads_file(file: Path) -> HeadsFile:
    """Read the description of a file, not its tensors.

    Raises:
        CheckpointError: missing, damaged, or not a file of heads.
    """
    with _open(file) as reader:
        metadata = reader.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise CheckpointError(f"{file}: not a file of heads written by entmtp")
        if metadata.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{file}: schema {metadata.get('schema')!r}; this version reads {SCHEMA}"
            )
        if "hot_ids" not in reader.keys():  # noqa: SIM118 - the reader is no mapping
            raise CheckpointError(f"{file}: the tensor 'hot_ids' is missing; train the heads again")
        size = math.prod(reader.get_slice("hot_ids").get_shape())
    return HeadsFile(_parse_config(metadata, file), metadata.get("target", "unknown"), size)


def load_heads(file: Path, *, hidden_size: int, vocab_size: int, target: str) -> Heads:
    """Read heads and check that they belong to a target of these sizes.

    Args:
        file: written by :func:`save_heads`.
        hidden_size: H of the target.
        vocab_size: V of the target.
        target: its name, for the error message.

    Returns:
        Heads in the stored dtype, float32 where int8 is stored. Where they have no output matrices
        of their own, ``attach_output`` or ``attach_projection`` comes next.

    Raises:
        CheckpointError: damaged file, missing, unexpected or wrongly shaped tensors, or heads of
            another model.
    """
    about = read_heads_file(file)
    for what, mine, theirs in (
        ("hidden size", hidden_size, about.config.hidden_size),
        ("vocabulary", vocab_size, about.config.vocab_size),
    ):
        if mine != theirs:
            raise CheckpointError(
                f"{file}: the heads were trained on {about.target} with a {what} of {theirs}, but "
                f"{target} has {mine}; use heads made for this model, or train them"
            )
    tensors = _read_tensors(file)
    hot_ids = tensors["hot_ids"].to(torch.int64)
    if (
        hot_ids.dim() != 1
        or not len(hot_ids)
        or not 0 <= hot_ids.min() <= hot_ids.max() < vocab_size
    ):
        raise CheckpointError(f"{file}: hot_ids must be token ids below {vocab_size}")
    return assemble_heads(about.config, hot_ids, tensors, file)


def assemble_heads(
    config: HeadsConfig, hot_ids: Tensor, tensors: Mapping[str, Tensor], file: Path
) -> Heads:
    """Heads around tensors that are there already; nothing is copied.

    Args:
        config: sizes.
        hot_ids: int64 ``(hot,)``.
        tensors: all but ``hot_ids``, under the names of the module's parameters.
        file: that they come from, for messages.

    Raises:
        CheckpointError: missing, unexpected or wrongly shaped tensors.
    """
    with torch.device("meta"):
        heads = build_heads(config, hot_ids)
    tensors = {**tensors, "hot_ids": hot_ids}
    _check_tensors(heads, tensors, file)
    heads.load_state_dict(tensors, assign=True)
    heads.shared_output = torch.empty(0, config.hidden_size)
    return heads


def _open(file: Path):  # type: ignore[no-untyped-def]
    try:
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file of heads")
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as safetensors ({error})") from error


def _read_tensors(file: Path) -> dict[str, Tensor]:
    with _open(file) as reader:
        raw = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    scales = {name: raw.pop(name) for name in list(raw) if name.endswith(".scale")}
    for name, scale in scales.items():
        matrix = raw.get(name.removesuffix(".scale"))
        if (
            matrix is None
            or matrix.dtype != torch.int8
            or scale.shape != matrix.shape[:1]
            or not matrix.dim()
        ):
            raise CheckpointError(f"{file}: the scale {name!r} fits no int8 matrix")
        raw[name.removesuffix(".scale")] = matrix.to(torch.float32) * scale[:, None]
    return raw


def _check_tensors(heads: Heads, tensors: Mapping[str, Tensor], file: Path) -> None:
    expected = heads.state_dict()
    for what, names in (
        ("missing", expected.keys() - tensors.keys()),
        ("unexpected", tensors.keys() - expected.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:4])
            raise CheckpointError(f"{file}: {len(names)} {what} tensor(s): {listed}")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {tuple(value.shape)}, but "
                f"{tuple(expected[name].shape)} is needed"
            )
        if name != "hot_ids" and not value.is_floating_point():
            dtype = str(value.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"{file}: tensor {name!r} is stored as {dtype} without a scale: convert the heads "
                "again"
            )


def _write_config(config: HeadsConfig) -> dict[str, str]:
    """Every field as text; the block's sizes as JSON, left out where there is no block."""
    values = asdict(config)
    block = values.pop("block")
    texts = {key: str(value) for key, value in values.items()}
    return texts if block is None else {**texts, "block": json.dumps(block)}


def _parse_config(metadata: dict[str, str], file: Path) -> HeadsConfig:
    try:
        flags = {name: metadata[name] == "True" for name in _FLAGS if name in metadata}
        config = HeadsConfig(
            kind=metadata["kind"],
            hidden_size=int(metadata["hidden_size"]),
            vocab_size=int(metadata["vocab_size"]),
            num_heads=int(metadata["num_heads"]),
            num_layers=int(metadata["num_layers"]),
            embed_scale=float(metadata["embed_scale"]),
            block=_parse_block(metadata.get("block")),
            **flags,
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: bad or missing metadata: {error}") from error
    sizes = (config.hidden_size, config.vocab_size, config.num_heads, config.num_layers)
    is_sound = config.kind in KINDS and min(sizes) >= 1 and max(sizes[2:]) <= _MAX_COUNT
    is_sound = is_sound and (config.block is None or _fits(config.block, config.hidden_size))
    if not is_sound or (config.kind in ("hydra++", "mtp")) != (config.block is not None):
        raise CheckpointError(f"{file}: not a set of {', '.join(KINDS)} heads: {config}")
    return config


def _fits(block: BlockConfig, hidden_size: int) -> bool:
    """Whether a block can be computed, behind rows of the heads' width."""
    sizes = (block.intermediate_size, block.num_heads, block.num_kv_heads, block.head_dim)
    is_sound = all(type(size) is int and 1 <= size <= _MAX_SIZE for size in sizes)
    is_sound = is_sound and block.num_heads % block.num_kv_heads == block.head_dim % 2 == 0
    return is_sound and block.hidden_size == hidden_size and _has_numbers(block)


def _has_numbers(block: BlockConfig) -> bool:
    """Whether norms and rotary frequencies can be computed."""
    scaling = block.rope_scaling
    scale = 1.0 if scaling is None else scaling.attention_factor
    try:
        is_sound = all(0 < x < math.inf for x in (block.rms_norm_eps, block.rope_theta, scale))
        frequencies = inverse_frequencies(block)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):  # texts, zeros, other lengths
        return False
    is_sound = is_sound and len(frequencies) == block.head_dim // 2
    return is_sound and bool(frequencies.isfinite().all())


def _parse_block(text: str | None) -> BlockConfig | None:
    if text is None:
        return None
    values: dict[str, Any] = json.loads(text)
    scaling = values.pop("rope_scaling", None)
    if scaling is not None:
        scaling = RopeScaling(**{**scaling, "divisors": tuple(scaling["divisors"])})
    return BlockConfig(**values, rope_scaling=scaling)
