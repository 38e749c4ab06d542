"""Hydra files (Ankner et al. 2024): the ``mlp`` architecture, and ``prefix-mlp`` of Hydra++.

``hydra_mlp.{head}.{i}.{linear,res_connection}.{weight,bias}`` is the conditioned block, further
``hydra_mlp.{head}.{i}.linear.*`` the blocks behind it (one object, saved several times),
``hydra_lm_head.{head}.[1.]{weight,bias}`` the output matrix. Dropouts take numbers in prefix-mlp,
so its blocks are 1, 3, 5, ... The prefix layer is a one-layer Llama under
``prefix_embeding_layer.`` (sic), without the embedding that is saved with it.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig, block_shapes
from entmtp.drafters.formats.base import (
    Checkpoint,
    HeadsSizes,
    ParsedHeads,
    Shape,
    TargetFacts,
    check_hidden_size,
    check_tensors,
    check_vocabulary,
)
from entmtp.drafters.formats.naming import count, has_equal_layers
from entmtp.drafters.heads import HeadsConfig
from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = ["HydraLayout", "block_config"]

_PREFIX = "prefix_embeding_layer."
_EMBEDDING = "input_embed_fn.weight"
_IGNORED = re.compile(
    r"input_embed_fn\.weight|prefix_embeding_layer\.embed_tokens\.weight"
    r"|prefix_embeding_layer\.(layers\.0\.self_attn\.)?rotary_emb\.inv_freq"
)


class HydraLayout:
    """Both published architectures; the others are refused."""

    def sizes(self, checkpoint: Checkpoint) -> HeadsSizes:
        """Count heads and blocks."""
        names = checkpoint.tensors
        has_prefix = any(name.startswith(_PREFIX) for name in names)
        blocks = _block_numbers(names)
        first = f"hydra_mlp.0.{blocks[0] if blocks else 0}.linear.weight"
        config = checkpoint.config
        notes = ["the copy of the target's embedding is not loaded"] if _EMBEDDING in names else []
        num_heads = count(names, r"hydra_mlp\.(\d+)\..*")
        stated = config.get("hydra_num_heads", num_heads)
        if stated != num_heads:
            notes.append(f"config.json says {stated} heads; the file holds {num_heads}")
        return HeadsSizes(
            layout="hydra-prefix-mlp" if has_prefix else "hydra-mlp",
            kind="hydra++" if has_prefix else "hydra",
            num_heads=num_heads,
            num_layers=len(blocks),
            hidden_size=checkpoint.num_rows(first),
            vocab_size=checkpoint.num_rows(_output_name(names, 0)),
            hot_vocab_size=None,
            output="own matrix a head, with bias",
            notes=tuple(notes),
        )

    def parse(self, checkpoint: Checkpoint, target: TargetFacts) -> ParsedHeads:
        """Check every tensor and give it our name."""
        _refuse_other_architectures(checkpoint)
        sizes, found = self.sizes(checkpoint), checkpoint.tensors
        blocks = _block_numbers(found)
        bias = found.get(f"hydra_mlp.0.{blocks[0]}.linear.bias")
        if bias is not None and bias.shape == (
            sizes.hidden_size,
        ):  # two tensors agree: the file is sound, if not this one's
            check_hidden_size(checkpoint, sizes.hidden_size, target)
        expected = _head_shapes(sizes, blocks, found)
        block = None
        if sizes.kind == "hydra++":
            start = f"{_PREFIX}layers.0."
            block = block_config(checkpoint, start, target.block, sizes.hidden_size)
            expected |= {
                f"{_PREFIX}layers.0.{name}": shape for name, shape in block_shapes(block).items()
            }
            expected[f"{_PREFIX}norm.weight"] = (sizes.hidden_size,)
        check_tensors(checkpoint, expected, _IGNORED)
        check_hidden_size(checkpoint, sizes.hidden_size, target)
        assert sizes.vocab_size is not None  # noqa: S101 - set by sizes()
        check_vocabulary(checkpoint, sizes.vocab_size, target)
        stems = [
            [f"hydra_mlp.{head}.{number}.linear" for number in blocks[1:]]
            for head in range(sizes.num_heads)
        ]
        is_tied = has_equal_layers(found, stems)
        config = HeadsConfig(
            kind=sizes.kind,
            hidden_size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            num_heads=sizes.num_heads,
            num_layers=sizes.num_layers,
            has_own_output=True,
            is_tied=is_tied,
            block=block,
        )
        tensors = _renamed(sizes, blocks, found, is_tied)
        return ParsedHeads(
            config, torch.arange(sizes.vocab_size), tensors, embedding=found.get(_EMBEDDING)
        )


def block_config(
    checkpoint: Checkpoint, prefix: str, base: BlockConfig, hidden_size: int
) -> BlockConfig:
    """Sizes of a block in a file, counted from its tensors; the rest as in the target's blocks.

    Args:
        checkpoint: the file.
        prefix: of the block's tensors.
        base: sizes of the target's blocks.
        hidden_size: of the heads around the block.

    Raises:
        CheckpointError: a tensor is missing, or the query heads cannot share the key-value heads.
    """

    def has(*names: str) -> bool:
        return any(f"{prefix}{name}" in checkpoint.tensors for name in names)

    def heads(name: str) -> int:
        return max(1, checkpoint.num_rows(f"{prefix}self_attn.{name}.weight") // base.head_dim)

    num_heads, num_kv_heads = heads("q_proj"), heads("k_proj")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{checkpoint.file}: {num_heads} query heads of {prefix}self_attn.q_proj.weight cannot "
            f"share {num_kv_heads} key-value heads of {prefix}self_attn.k_proj.weight (of size "
            f"{base.head_dim}, as in the target): use heads made for this model"
        )
    return replace(
        BlockConfig(**{name: getattr(base, name) for name in BlockConfig.__dataclass_fields__}),
        hidden_size=hidden_size,
        intermediate_size=checkpoint.num_rows(f"{prefix}mlp.gate_proj.weight"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qkv_bias=has(*(f"self_attn.{part}_proj.bias" for part in "qkv")),
        o_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has(*(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down"))),
        qk_norm=has("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    )


def _block_numbers(names: Mapping[str, Tensor]) -> list[int]:
    """Numbers of the blocks of a head; dropouts in between take numbers too."""
    pattern = re.compile(r"hydra_mlp\.\d+\.(\d+)\.linear\.(?:weight|bias)")
    return sorted({int(m.group(1)) for name in names if (m := pattern.fullmatch(name))})


def _output_name(names: Mapping[str, Tensor], head: int) -> str:
    pattern = re.compile(r"hydra_lm_head\.\d+\.1\.(?:weight|bias)")  # a dropout comes before it
    inner = "1." if any(pattern.fullmatch(name) for name in names) else ""
    return f"hydra_lm_head.{head}.{inner}weight"


def _head_shapes(
    sizes: HeadsSizes, blocks: list[int], names: Mapping[str, Tensor]
) -> dict[str, Shape]:
    size, vocab_size = sizes.hidden_size, sizes.vocab_size or 0
    shapes: dict[str, Shape] = {}
    for head in range(sizes.num_heads):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.{blocks[0]}.{part}.weight"] = (size, (head + 2) * size)
            shapes[f"hydra_mlp.{head}.{blocks[0]}.{part}.bias"] = (size,)
        for number in blocks[1:]:
            shapes[f"hydra_mlp.{head}.{number}.linear.weight"] = (size, size)
            shapes[f"hydra_mlp.{head}.{number}.linear.bias"] = (size,)
        output = _output_name(names, head)
        shapes[output] = (vocab_size, size)
        shapes[output.removesuffix("weight") + "bias"] = (vocab_size,)
    return shapes


def _renamed(
    sizes: HeadsSizes, blocks: list[int], found: Mapping[str, Tensor], is_tied: bool
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    kept = blocks[1:2] if is_tied else blocks[1:]
    for head in range(sizes.num_heads):
        output = _output_name(found, head).removesuffix("weight")
        for part in ("weight", "bias"):
            for ours, theirs in (("linear", "linear"), ("residual", "res_connection")):
                name = f"hydra_mlp.{head}.{blocks[0]}.{theirs}.{part}"
                tensors[f"first.{head}.{ours}.{part}"] = found[name]
            for layer, number in enumerate(kept):
                name = f"hydra_mlp.{head}.{number}.linear.{part}"
                tensors[f"blocks.{head}.{layer}.linear.{part}"] = found[name]
            tensors[f"outputs.{head}.{part}"] = found[output + part]
    if sizes.kind == "hydra++":
        start = f"{_PREFIX}layers.0."
        for name, value in found.items():
            if name.startswith(start) and not _IGNORED.fullmatch(name):
                tensors[f"prefix.layer.{name.removeprefix(start)}"] = value
        tensors["prefix.norm"] = found[f"{_PREFIX}norm.weight"]
    return tensors


def _refuse_other_architectures(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ("mlp", "prefix-mlp"):
        raise UnsupportedModelError(
            f"{checkpoint.file}: the Hydra architecture {architecture!r} is not supported; "
            "supported are 'mlp' and 'prefix-mlp'"
        )
    names = checkpoint.tensors
    if not any(".res_connection." in name for name in names):
        raise UnsupportedModelError(
            f"{checkpoint.file}: Hydra heads that do not read the draft tokens (grounded_heads "
            "false) are not supported; supported are grounded ones"
        )
    if config.get("hidden_state_offset", 0) != 0:
        raise UnsupportedModelError(
            f"{checkpoint.file}: heads that read the hidden states of an earlier layer "
            f"(hidden_state_offset {config['hidden_state_offset']!r}) are not supported; supported "
            "is the last layer (0)"
        )
