"""Sizes and weights out of a GGUF file, under the Hugging Face names and in their row order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.base import TargetConfig
from entmtp.target.gguf_file import GGUFFile, dequantise, read_gguf
from entmtp.target.gguf_rope import ROPE_TENSORS, decimal, gguf_rope
from entmtp.target.hf_config import check_sizes
from entmtp.target.recurrent import refuse_recurrent

__all__ = ["gguf_config", "gguf_shapes", "gguf_tensors"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_config(file: GGUFFile) -> TargetConfig:
    """Sizes from the metadata; biases and tying from which tensors there are.

    Raises:
        CheckpointError: a size is missing or makes no sense.
        UnsupportedModelError: the model has a feature that the reference target lacks.
    """
    family = _architecture(file)
    _refuse_unsupported(file, family)
    heads = _size(file, f"{family}.attention.head_count")
    hidden = _size(file, f"{family}.embedding_length")
    head_dim = _size(file, f"{family}.attention.key_length", hidden // heads)
    positions = _size(file, f"{family}.context_length")
    rope = gguf_rope(file, family, head_dim, positions)
    window = _sliding_window(file, family)
    names = file.tensors
    config = TargetConfig(
        family=family,
        vocab_size=_vocab_size(file),
        hidden_size=hidden,
        intermediate_size=_size(file, f"{family}.feed_forward_length"),
        num_layers=_size(file, f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=_size(file, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        context_window=min(rope.positions, window or rope.positions),
        sliding_window=window,
        rms_norm_eps=decimal(file, f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm=family == "qwen3" or "blk.0.attn_q_norm.weight" in names,
        tie_embeddings="output.weight" not in names,
    )
    check_sizes(config, file.path)
    return config


def gguf_shapes(file: GGUFFile) -> dict[str, tuple[int, ...]]:
    """Shape of every weight under its Hugging Face name; unknown names stay as they are."""
    return {_hf_name(name): file.shape(name) for name in file.tensors if name not in ROPE_TENSORS}


def gguf_tensors(path: Path, config: TargetConfig) -> Iterator[tuple[str, Tensor]]:
    """Every weight in float32, one at a time, its rows in the Hugging Face order.

    Raises:
        UnsupportedModelError: a tensor's type cannot be dequantised.
    """
    file = read_gguf(path)
    interleaved = file.metadata.get("general.architecture") == "llama"
    for stored in file.tensors:
        if stored in ROPE_TENSORS:
            continue
        name = _hf_name(stored)
        values = torch.from_numpy(dequantise(file, stored))
        if interleaved and ".self_attn.q_proj." in name:
            values = _split_halves(values, config.num_heads)
        elif interleaved and ".self_attn.k_proj." in name:
            values = _split_halves(values, config.num_kv_heads)
        yield name, values


def _split_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the interleaving of rotary pairs.

    In architecture ``llama`` rows 2i and 2i+1 of a head rotate together; in the Hugging Face
    order rows i and i + head_dim/2 do.

    Args:
        rows: ``(num_heads * head_dim, ...)``.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK:
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{suffix}"
    return name


def _architecture(file: GGUFFile) -> str:
    name = file.metadata.get("general.architecture")
    refuse_recurrent(str(name), (), file.path, _ARCHITECTURES)
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(file: GGUFFile, family: str) -> None:
    get = file.metadata.get
    experts = get(f"{family}.expert_count", 0)
    if experts:
        raise UnsupportedModelError(
            f"{file.path}: a mixture of {experts} experts is not supported; "
            f"supported are dense models of the architectures {', '.join(_ARCHITECTURES)}"
        )
    if get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{file.path}: one part of a GGUF file split into {get('split.count')} is not "
            "supported; merge the parts into one file first"
        )
    rotated = get(f"{family}.rope.dimension_count")
    heads = _size(file, f"{family}.attention.head_count")
    hidden = _size(file, f"{family}.embedding_length")
    head_dim = _size(file, f"{family}.attention.key_length", hidden // heads)
    if rotated is not None and rotated != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rotary positions on {rotated} of {head_dim} head dimensions are not "
            "supported; supported are models that rotate all"
        )


def _sliding_window(file: GGUFFile, family: str) -> int | None:
    """Positions that the layers look back on, where the file limits them."""
    key = f"{family}.attention.sliding_window"
    return _size(file, key) if key in file.metadata else None


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight: fetch it again")
    return file.shape("token_embd.weight")[0]


def _size(file: GGUFFile, key: str, default: int | None = None) -> int:
    value: Any = file.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{file.path}: {key} differs from layer to layer, which is not supported; "
                "supported are models whose layers are alike"
            )
        value = value[0]
    if type(value) is not int or value <= 0:
        raise CheckpointError(
            f"{file.path}: {key} is {value!r}, not a positive integer: fetch the file again"
        )
    return value
