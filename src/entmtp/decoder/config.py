"""Sizes of one decoder block, and the names and shapes of its tensors."""

from dataclasses import dataclass

from entmtp.decoder.rope import RopeScaling

__all__ = ["BlockConfig", "block_shapes"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and options of one block.

    Attributes:
        hidden_size: H.
        intermediate_size: of the feed-forward part.
        num_heads: query heads.
        num_kv_heads: key-value heads, each shared by ``num_heads / num_kv_heads`` query heads.
        head_dim: of a head; ``num_heads * head_dim`` need not be H.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; ``None`` is not at all.
        qkv_bias: biases on the query, key and value projections.
        o_bias: bias on the attention output projection.
        mlp_bias: biases on the three projections of the feed-forward part.
        qk_norm: RMS norm on each query and key head before the rotation.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def block_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a block, under the Hugging Face names."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
