"""The Hugging Face ``config.json``: to a TargetConfig and back.

Defaults of absent keys are those of the family's configuration class in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.base import TargetConfig

__all__ = ["FAMILIES", "check_sizes", "config_from_dict", "config_to_dict"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types that the reference target decodes."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_WINDOW = 4096
_MOE_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def config_from_dict(data: Mapping[str, Any], source: Path) -> TargetConfig:
    """Turn the contents of a ``config.json`` into sizes.

    Args:
        data: the JSON object.
        source: the file, for messages.

    Raises:
        CheckpointError: a size is missing or makes no sense.
        UnsupportedModelError: the model has a feature that the reference target lacks.
    """
    family = _family(data, source)
    num_heads = _size(data, "num_attention_heads", source)
    hidden_size = _size(data, "hidden_size", source)
    num_layers = _size(data, "num_hidden_layers", source)
    attention_bias = family in ("llama", "qwen3") and bool(data.get("attention_bias", False))
    config = TargetConfig(
        family=family,
        vocab_size=_size(data, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_size(data, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(data, "num_key_value_heads", source, _DEFAULT_KV_HEADS[family])
        or num_heads,
        head_dim=_size(data, "head_dim", source, _DEFAULT_HEAD_DIM[family])
        or hidden_size // num_heads,
        context_window=_context_window(data, family, num_layers, source),
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(data, source),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=family == "llama" and bool(data.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
    )
    check_sizes(config, source)
    return config


def check_sizes(config: TargetConfig, source: Path) -> None:
    """Check that heads divide as attention needs them to.

    Raises:
        CheckpointError: they do not.
    """
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} attention heads cannot share "
            f"{config.num_kv_heads} key-value heads: correct the file"
        )
    if config.head_dim % 2:
        raise CheckpointError(
            f"{source}: head size {config.head_dim} is odd, which rotary positions cannot use: "
            "correct the file"
        )


def config_to_dict(config: TargetConfig) -> dict[str, Any]:
    """Turn sizes into a ``config.json`` that transformers and :func:`config_from_dict` read.

    Raises:
        CheckpointError: the family's configuration class cannot express the biases.
    """
    attention_bias = config.qkv_bias
    if config.family in ("mistral", "qwen2"):
        fits = config.qkv_bias == (config.family == "qwen2") and not config.o_bias
    else:
        fits = config.qkv_bias == config.o_bias
    if not fits or (config.mlp_bias and config.family != "llama"):
        raise CheckpointError(
            f"a {config.family} config.json cannot state these biases (query/key/value "
            f"{config.qkv_bias}, output {config.o_bias}, feed-forward {config.mlp_bias}): "
            "use the GGUF file itself as the model"
        )
    data: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_window,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.family in ("llama", "qwen3"):
        data["attention_bias"] = attention_bias
    if config.family == "llama":
        data["mlp_bias"] = config.mlp_bias
    else:
        data["sliding_window"] = None
    return data


def _family(data: Mapping[str, Any], source: Path) -> str:
    family = data.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(f"{source} names no model_type: fetch the model again")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{source}: model type {family!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    experts = next((key for key in _MOE_KEYS if data.get(key)), None)
    if experts is not None:
        raise UnsupportedModelError(
            f"{source}: a mixture of experts ({experts} = {data[experts]}) is not supported; "
            f"supported are dense models of the types {', '.join(FAMILIES)}"
        )
    quantization = data.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"{source}: quantised weights ({method or 'quantization_config'}) are not supported; "
            "use a float32, bfloat16 or float16 safetensors folder or a GGUF file"
        )
    activation = data.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{source}: activation {activation!r} is not supported; supported is 'silu'"
        )
    return family


def _size(data: Mapping[str, Any], key: str, source: Path, default: int | None = -1) -> int:
    """A positive integer; ``default`` -1 means required, ``None`` (0 is returned) derived."""
    value = data.get(key, default)
    if value is None and default != -1:
        return 0
    if type(value) is not int or value <= 0:
        state = "is missing" if key not in data else f"is {data[key]!r}"
        raise CheckpointError(
            f"{source}: {key} {state}, not a positive integer: fetch the model again"
        )
    return value


def _rope_theta(data: Mapping[str, Any], source: Path) -> float:
    """Base of the rotary frequencies; refuses every scaling of them."""
    rope = dict(data.get("rope_scaling") or {})
    rope.update(data.get("rope_parameters") or {})
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    kind = nested[0] if nested else rope.get("rope_type", rope.get("type")) or "default"
    if kind != "default":
        raise UnsupportedModelError(
            f"{source}: rotary scaling of type {kind!r} is not supported; "
            "supported are models without rotary scaling (none or 'default')"
        )
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1):
        raise UnsupportedModelError(
            f"{source}: a partial_rotary_factor of {partial} is not supported; supported is 1"
        )
    theta = rope.get("rope_theta", data.get("rope_theta", _DEFAULT_ROPE_THETA))
    if not isinstance(theta, int | float) or theta <= 0:
        raise CheckpointError(f"{source}: rope_theta is {theta!r}: fetch the model again")
    return float(theta)


def _context_window(data: Mapping[str, Any], family: str, num_layers: int, source: Path) -> int:
    """Positions within which attention is full: a sliding window caps them."""
    positions = _size(data, "max_position_embeddings", source, _DEFAULT_CONTEXT[family])
    if family == "llama":
        return positions
    slides = family == "mistral" or _qwen_slides(data, num_layers)
    window = data.get("sliding_window", _DEFAULT_WINDOW)
    if not slides or window is None:
        return positions
    return min(positions, _size({"sliding_window": window}, "sliding_window", source))


def _qwen_slides(data: Mapping[str, Any], num_layers: int) -> bool:
    if not data.get("use_sliding_window", False):
        return False
    layer_types = data.get("layer_types")
    if layer_types is not None:
        return "sliding_attention" in layer_types
    return bool(data.get("max_window_layers", 28) < num_layers)
