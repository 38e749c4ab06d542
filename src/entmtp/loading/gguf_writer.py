"""Writes a model as a GGUF file for llama.cpp, without a tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from entmtp.decoder.rope import inverse_frequencies
from entmtp.errors import UnsupportedModelError
from entmtp.target.base import TargetConfig
from entmtp.target.weights import iter_tensors, read_config, tensor_shapes

__all__ = ["GGUF_TYPES", "matrix_type", "write_gguf"]

GGUF_TYPES = ("BF16", "Q8_0", "Q4_0")
"""Types of matrices; vectors are F32.

The output head of Q4_0 is Q8_0. llama.cpp's own tool makes it Q6_K, or Q8_0 where its rows cannot
be cut into blocks of 256; the ``gguf`` package cannot write Q6_K.
"""

_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_0
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: Path, file: Path, kind: str) -> None:
    """Write the weights of a model; memory holds one tensor at a time.

    Args:
        model: a Hugging Face folder or a .gguf file.
        file: what is written.
        kind: one of :data:`GGUF_TYPES`.

    Raises:
        CheckpointError: damaged weights.
        UnsupportedModelError: a GGUF file cannot state the model, or a row cannot be cut into
            blocks of 32 weights.
    """
    import gguf

    config = read_config(model)
    _check(config, kind)
    arch = _ARCHITECTURES[config.family]
    writer = gguf.GGUFWriter(file, arch)
    try:
        _add_sizes(writer, config)
        divisors = _divisors(config)
        if divisors is not None:
            writer.add_tensor_info(
                "rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes
            )
        shapes = tensor_shapes(config)
        for name, _ in iter_tensors(model, config):
            _add_info(writer, name, shapes[name], matrix_type(name, config, kind))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if divisors is not None:
            writer.write_tensor_data(divisors)
        for name, tensor in iter_tensors(model, config):
            values = tensor.to(torch.float32).numpy()
            writer.write_tensor_data(_stored(name, values, config, matrix_type(name, config, kind)))
    finally:
        writer.close()


def matrix_type(name: str, config: TargetConfig, kind: str) -> str:
    """Type of a matrix, by its Hugging Face name, in a file of a kind."""
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return "Q8_0" if kind == "Q4_0" and name == head else kind


def _check(config: TargetConfig, kind: str) -> None:
    if config.family not in _ARCHITECTURES:
        raise UnsupportedModelError(f"llama.cpp has no {config.family} models as they are here")
    if config.rope_scaling is not None and config.rope_scaling.attention_factor != 1.0:
        raise UnsupportedModelError(
            f"rotary scaling {config.rope_scaling.kind} cannot be written as GGUF; "
            "leave llama.cpp out"
        )
    for shape in tensor_shapes(config).values():
        if kind != "BF16" and len(shape) == 2 and shape[1] % _BLOCK:
            raise UnsupportedModelError(
                f"rows of {shape[1]} weights cannot be stored as {kind}, which takes blocks of "
                f"{_BLOCK}; leave llama.cpp out or take BF16"
            )


def _add_sizes(writer: Any, config: TargetConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_window)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _divisors(config: TargetConfig) -> npt.NDArray[np.float32] | None:
    """By what each rotary frequency is divided; ``None`` where it is not."""
    if config.rope_scaling is None:
        return None
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    plain = config.rope_theta**-exponent
    divisors: npt.NDArray[np.float32] = (
        plain / inverse_frequencies(config).double().numpy()
    ).astype(np.float32)
    return divisors


def _add_info(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    import gguf
    from gguf.quants import quant_shape_to_byte_shape

    if len(shape) == 1:
        writer.add_tensor_info(_gguf_name(name), shape, np.dtype(np.float32), 4 * shape[0])
        return
    raw = gguf.GGMLQuantizationType[kind]
    rows = quant_shape_to_byte_shape(shape, raw)
    size = int(np.prod(rows))
    writer.add_tensor_info(_gguf_name(name), rows, np.dtype(np.uint8), size, raw_dtype=raw)


def _stored(
    name: str, values: npt.NDArray[np.float32], config: TargetConfig, kind: str
) -> npt.NDArray[Any]:
    """What a file holds of a tensor."""
    import gguf
    from gguf import quants

    if _ARCHITECTURES[config.family] == "llama":
        if ".self_attn.q_proj." in name:
            values = _join_halves(values, config.num_heads)
        elif ".self_attn.k_proj." in name:
            values = _join_halves(values, config.num_kv_heads)
    if values.ndim == 1:
        return values
    stored: npt.NDArray[Any] = quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return stored


def _join_halves(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows i and i + head_dim/2 of a head, which rotate together, next to each other."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{suffix}"
