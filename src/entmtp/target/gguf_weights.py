"""Sizes and weights out of a GGUF file, under the Hugging Face names and in their row order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.base import TargetConfig
from entmtp.target.gguf_file import GGUFHeader, dequantise, read_header
from entmtp.target.hf_config import check_sizes

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


def gguf_config(header: GGUFHeader) -> TargetConfig:
    """Sizes from the metadata; biases and tying from which tensors there are.

    Raises:
        CheckpointError: a size is missing or makes no sense.
        UnsupportedModelError: the model has a feature that the reference target lacks.
    """
    family = _architecture(header)
    _refuse_unsupported(header, family)
    heads = _size(header, f"{family}.attention.head_count")
    hidden = _size(header, f"{family}.embedding_length")
    head_dim = _size(header, f"{family}.attention.key_length", hidden // heads)
    positions = _size(header, f"{family}.context_length")
    names = header.tensors
    config = TargetConfig(
        family=family,
        vocab_size=_vocab_size(header),
        hidden_size=hidden,
        intermediate_size=_size(header, f"{family}.feed_forward_length"),
        num_layers=_size(header, f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=_size(header, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        context_window=min(positions, _size(header, f"{family}.attention.sliding_window", 1 << 62)),
        rms_norm_eps=_decimal(header, f"{family}.attention.layer_norm_rms_epsilon", 1e-6),
        rope_theta=_decimal(header, f"{family}.rope.freq_base", 10000.0),
        qkv_bias=family == "qwen2" or "blk.0.attn_q.bias" in names,
        o_bias="blk.0.attn_output.bias" in names,
        mlp_bias="blk.0.ffn_down.bias" in names,
        qk_norm=family == "qwen3" or "blk.0.attn_q_norm.weight" in names,
        tie_embeddings="output.weight" not in names,
    )
    check_sizes(config, header.path)
    return config


def gguf_shapes(header: GGUFHeader) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor under its Hugging Face name; unknown names stay as they are."""
    return {_hf_name(name): tensor.shape for name, tensor in header.tensors.items()}


def gguf_tensors(path: Path, config: TargetConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in float32, one at a time, its rows in the Hugging Face order.

    Raises:
        UnsupportedModelError: a tensor's type cannot be dequantised.
    """
    header = read_header(path)
    interleaved = header.metadata.get("general.architecture") == "llama"
    for stored, tensor in header.tensors.items():
        name = _hf_name(stored)
        values = torch.from_numpy(dequantise(path, tensor))
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


def _architecture(header: GGUFHeader) -> str:
    name = header.metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: GGUF architecture {name!r} is not supported; "
            f"supported are {', '.join(_ARCHITECTURES)}"
        )
    return str(name)


def _refuse_unsupported(header: GGUFHeader, family: str) -> None:
    get = header.metadata.get
    experts = get(f"{family}.expert_count", 0)
    if experts:
        raise UnsupportedModelError(
            f"{header.path}: a mixture of {experts} experts is not supported; "
            f"supported are dense models of the architectures {', '.join(_ARCHITECTURES)}"
        )
    if get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"{header.path}: one part of a GGUF file split into {get('split.count')} is not "
            "supported; merge the parts into one file first"
        )
    scaling = get(f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in header.tensors:
        scaling = "llama3 (rope_freqs.weight)"
    if scaling != "none":
        raise UnsupportedModelError(
            f"{header.path}: rotary scaling of type {scaling!r} is not supported; "
            "supported are models without rotary scaling"
        )
    rotated = get(f"{family}.rope.dimension_count")
    heads = _size(header, f"{family}.attention.head_count")
    hidden = _size(header, f"{family}.embedding_length")
    head_dim = _size(header, f"{family}.attention.key_length", hidden // heads)
    if rotated is not None and rotated != head_dim:
        raise UnsupportedModelError(
            f"{header.path}: rotary positions on {rotated} of {head_dim} head dimensions are not "
            "supported; supported are models that rotate all"
        )


def _vocab_size(header: GGUFHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{header.path} has no tensor token_embd.weight: fetch it again")
    return embedding.shape[0]


def _size(header: GGUFHeader, key: str, default: int | None = None) -> int:
    value: Any = header.metadata.get(key, default)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{header.path}: {key} differs from layer to layer, which is not supported; "
                "supported are models whose layers are alike"
            )
        value = value[0]
    if type(value) is not int or value <= 0:
        raise CheckpointError(
            f"{header.path}: {key} is {value!r}, not a positive integer: fetch the file again"
        )
    return value


def _decimal(header: GGUFHeader, key: str, default: float) -> float:
    """A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06."""
    value = header.metadata.get(key, default)
    return float(str(np.float32(value)))
