"""Our own heads under published names, so that the reference can read them."""

from collections.abc import Mapping

from torch import Tensor

from entmtp.drafters.heads import HeadsConfig

__all__ = ["published_names"]


def published_names(config: HeadsConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of our modules; tied blocks are repeated.

    Args:
        config: sizes.
        tensors: under our names, ``hot_ids`` among them.
    """
    renamed = {"token_map": tensors["hot_ids"]}
    for name, value in tensors.items():
        if name != "hot_ids":
            renamed |= dict.fromkeys(_names(config, name.split(".")), value)
    return renamed


def _names(config: HeadsConfig, parts: list[str]) -> list[str]:
    """Published names of one of our tensors."""
    part, last = parts[0], parts[-1]
    if config.kind == "mtp":
        return [_module_name(config, parts)]
    has_prefix = config.kind == "hydra++"
    if part == "prefix":
        start = "prefix_embeding_layer."
        return [
            f"{start}norm.weight" if last == "norm" else f"{start}layers.0.{'.'.join(parts[2:])}"
        ]
    head = parts[1]
    if part == "outputs":
        if config.kind == "medusa":
            return [f"lm_heads.{head}.{last}"]
        return [f"hydra_lm_head.{head}.{'1.' if has_prefix else ''}{last}"]
    if part == "first":
        inner = {"linear": "linear", "residual": "res_connection"}[parts[2]]
        return [f"hydra_mlp.{head}.{int(has_prefix)}.{inner}.{last}"]
    first = 0 if config.kind == "medusa" else 1
    layers = range(config.num_layers - first) if config.is_tied else [int(parts[2])]
    if config.kind == "medusa":
        return [f"blocks.{head}.layers.{layer}.{last}" for layer in layers]
    numbers = [2 * layer + 3 if has_prefix else layer + 1 for layer in layers]
    return [f"hydra_mlp.{head}.{number}.linear.{last}" for number in numbers]


def _module_name(config: HeadsConfig, parts: list[str]) -> str:
    """Of a recurrent module: MiMo's names where the hidden state comes first, else DeepSeek's."""
    start = "model.mtp_layers.0." if config.hidden_first else "model.layers.0."
    if parts[0] == "layer":
        return start + ".".join(parts[1:])
    if parts[0] == "outputs":
        return f"{start}shared_head.head.weight"
    mimo = {
        "embed_norm": "token_layernorm",
        "hidden_norm": "hidden_layernorm",
        "join": "input_proj",
        "final_norm": "final_layernorm",
    }
    deepseek = {
        "embed_norm": "enorm",
        "hidden_norm": "hnorm",
        "join": "eh_proj",
        "final_norm": "shared_head.norm",
    }
    return f"{start}{(mimo if config.hidden_first else deepseek)[parts[0]]}.weight"
