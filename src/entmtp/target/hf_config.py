"""The Hugging Face ``config.json``: to a TargetConfig and back.

Defaults of absent keys are those of the family's configuration class in transformers.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.base import TargetConfig
from entmtp.target.hf_rope import MOST_OF_ANY, positive_number, read_rope, rope_to_dict
from entmtp.target.recurrent import refuse_recurrent

__all__ = ["FAMILIES", "check_sizes", "config_from_dict", "config_to_dict"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
"""Model types that the reference target decodes."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mimo": "MiMoForCausalLM",
}
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072}  # of the Qwen classes: 32768
_DEFAULT_KV_HEADS = {"llama": None, "mistral": 8}  # of the Qwen classes: 32
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_WINDOW = 4096
_LAYER_TYPES = ("full_attention", "sliding_attention")
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
    default = {"max_position_embeddings": _DEFAULT_CONTEXT.get(family, 32768)}
    positions = _size({**default, **data}, "max_position_embeddings", source)
    rope = read_rope(data, positions, source)
    window = _sliding_window(data, family, num_layers, source)
    qkv_bias, o_bias, mlp_bias = _biases(data, family)
    config = TargetConfig(
        family=family,
        vocab_size=_size(data, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_size(data, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(data, "num_key_value_heads", source, _DEFAULT_KV_HEADS.get(family, 32))
        or num_heads,
        head_dim=_size(data, "head_dim", source, _DEFAULT_HEAD_DIM.get(family))
        or hidden_size // num_heads,
        context_window=min(rope.positions, window or rope.positions),
        sliding_window=window,
        rms_norm_eps=positive_number(data, "rms_norm_eps", source, 1e-6),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        tie_embeddings=bool(data.get("tie_word_embeddings", False)),
        num_mtp_modules=_num_mtp_modules(data, source),
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
        CheckpointError: a config.json of this family cannot state them.
    """
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
        "rms_norm_eps": config.rms_norm_eps,
        **rope_to_dict(config.rope_theta, config.rope_scaling, config.context_window),
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.family in ("llama", "qwen3", "mimo"):
        data["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        data["mlp_bias"] = config.mlp_bias
    else:
        data["sliding_window"] = config.sliding_window
        if config.sliding_window is not None and config.family != "mistral":
            data |= {"use_sliding_window": True, "max_window_layers": 0}
    if config.num_mtp_modules:
        data["num_nextn_predict_layers"] = config.num_mtp_modules
    _check_statable(config, config_from_dict(data, Path("config.json")))
    return data


def _check_statable(config: TargetConfig, stated: TargetConfig) -> None:
    """Hold what a config.json says, once read again, against what it should say."""
    names = [field.name for field in fields(config)]
    lost = [name for name in names if getattr(config, name) != getattr(stated, name)]
    if lost:
        values = ", ".join(f"{name} = {getattr(config, name)!r}" for name in lost)
        raise CheckpointError(
            f"a {config.family} config.json cannot state {values}: use the GGUF file itself as "
            "the model"
        )


def _family(data: Mapping[str, Any], source: Path) -> str:
    family = data.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(f"{source} names no model_type: fetch the model again")
    layers = _layer_types(data, source)
    refuse_recurrent(family, layers, source, FAMILIES)
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{source}: model type {family!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    other = next((kind for kind in layers if kind not in _LAYER_TYPES), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{source}: {other!r} layers are not supported, because which rows they read is not "
            f"known here; supported are {' and '.join(_LAYER_TYPES)}"
        )
    _refuse_unsupported(data, source)
    return family


def _refuse_unsupported(data: Mapping[str, Any], source: Path) -> None:
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


def _layer_types(data: Mapping[str, Any], source: Path) -> list[str]:
    """What each layer is, where the file says so."""
    value = data.get("layer_types")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
        raise CheckpointError(
            f"{source}: layer_types is {value!r}, not a list of names: fetch the model again"
        )
    return value


def _biases(data: Mapping[str, Any], family: str) -> tuple[bool, bool, bool]:
    """Whether there are biases on query, key and value, on the output, in the feed-forward part."""
    stated = bool(data.get("attention_bias", family == "mimo"))
    both = family in ("llama", "qwen3") and stated
    only_qkv = family == "qwen2" or (family == "mimo" and stated)
    return both or only_qkv, both, family == "llama" and bool(data.get("mlp_bias", False))


def _size(data: Mapping[str, Any], key: str, source: Path, default: int | None = -1) -> int:
    """A positive integer; ``default`` -1 means required, ``None`` (0 is returned) derived."""
    value = data.get(key, default)
    if value is None and default != -1:
        return 0
    if type(value) is not int or not 0 < value < MOST_OF_ANY:
        state = "is missing" if key not in data else f"is {data[key]!r}"
        raise CheckpointError(
            f"{source}: {key} {state}, not a positive integer below {MOST_OF_ANY}: "
            "fetch the model again"
        )
    return value


def _num_mtp_modules(data: Mapping[str, Any], source: Path) -> int:
    value = data.get("num_nextn_predict_layers")
    if value is None:
        return 0
    if type(value) is not int or value < 0:
        raise CheckpointError(
            f"{source}: num_nextn_predict_layers is {value!r}, not a number of modules: "
            "fetch the model again"
        )
    return value


def _sliding_window(
    data: Mapping[str, Any], family: str, num_layers: int, source: Path
) -> int | None:
    """Positions that sliding layers look back on, where there are such layers."""
    window = data.get("sliding_window", _DEFAULT_WINDOW)
    if "sliding_attention" not in _layer_types(data, source):
        slides = family == "mistral" or (
            family != "llama" and _qwen_slides(data, num_layers, source)
        )
        if not slides or window is None:
            return None
    return _size({"sliding_window": window}, "sliding_window", source)


def _qwen_slides(data: Mapping[str, Any], num_layers: int, source: Path) -> bool:
    """Whether some layers slide by their number, where the file has no list of them."""
    if not data.get("use_sliding_window", False) or data.get("layer_types") is not None:
        return False
    first = data.get("max_window_layers", 28)
    if type(first) is not int:
        raise CheckpointError(
            f"{source}: max_window_layers is {first!r}, not an integer: fetch the model again"
        )
    return first < num_layers
