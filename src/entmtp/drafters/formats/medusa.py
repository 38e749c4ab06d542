"""Medusa files: the original layout with and without output matrices, and that of vLLM.

Original (Cai et al. 2024): ``{head}.{layer}.linear.{weight,bias}`` and, in version 1,
``{head}.{layers}.weight``, the head's own output matrix without bias; version 2 scores with the
target's output head. vLLM: ``blocks.{head}.layers.{layer}.weight`` with or without ``.bias``,
``lm_heads.{head}.weight``, and ``token_map`` where only some tokens are scored. Configs misstate
the number of heads, so it is counted.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

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
from entmtp.errors import CheckpointError

__all__ = ["MedusaLayout", "VllmMedusaLayout"]


class MedusaLayout:
    """Versions 1 and 2 of the original."""

    def sizes(self, checkpoint: Checkpoint) -> HeadsSizes:
        """Count heads and layers."""
        names = checkpoint.tensors
        num_heads = count(names, r"(\d+)\.\d+\.(?:linear\.)?(?:weight|bias)")
        num_layers = count(names, r"\d+\.(\d+)\.linear\.(?:weight|bias)")
        hidden_size = checkpoint.num_rows("0.0.linear.weight")
        has_output = any(re.fullmatch(r"\d+\.\d+\.weight", name) for name in names)
        vocab_size = checkpoint.num_rows(f"0.{num_layers}.weight") if has_output else None
        stated = checkpoint.config.get("medusa_num_heads", num_heads)
        return HeadsSizes(
            layout="medusa-v1" if has_output else "medusa-v2",
            kind="medusa",
            num_heads=num_heads,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            hot_vocab_size=None,
            output="own matrix a head" if has_output else "the target's output head",
            notes=_count_notes(stated, num_heads),
        )

    def parse(self, checkpoint: Checkpoint, target: TargetFacts) -> ParsedHeads:
        """Check every tensor and give it our name."""
        sizes = self.sizes(checkpoint)
        has_output, size = sizes.vocab_size is not None, sizes.hidden_size
        expected: dict[str, Shape] = {}
        for head in range(sizes.num_heads):
            for layer in range(sizes.num_layers):
                expected[f"{head}.{layer}.linear.weight"] = (size, size)
                expected[f"{head}.{layer}.linear.bias"] = (size,)
            if sizes.vocab_size is not None:
                expected[f"{head}.{sizes.num_layers}.weight"] = (sizes.vocab_size, size)
        check_tensors(checkpoint, expected)
        check_hidden_size(checkpoint, size, target)
        if sizes.vocab_size is not None:
            check_vocabulary(checkpoint, sizes.vocab_size, target)
        found = checkpoint.tensors
        stems = [
            [f"{h}.{i}.linear" for i in range(sizes.num_layers)] for h in range(sizes.num_heads)
        ]
        is_tied = has_equal_layers(found, stems)
        tensors: dict[str, Tensor] = {}
        for head, layers in enumerate(stems):
            for layer, stem in enumerate(layers[:1] if is_tied else layers):
                for part in ("weight", "bias"):
                    tensors[f"blocks.{head}.{layer}.linear.{part}"] = found[f"{stem}.{part}"]
            if has_output:
                tensors[f"outputs.{head}.weight"] = found[f"{head}.{sizes.num_layers}.weight"]
        config = HeadsConfig(
            kind="medusa",
            hidden_size=size,
            vocab_size=target.vocab_size,
            num_heads=sizes.num_heads,
            num_layers=sizes.num_layers,
            has_own_output=has_output,
            has_output_bias=False,
            is_tied=is_tied,
        )
        return ParsedHeads(config, torch.arange(target.vocab_size), tensors)


class VllmMedusaLayout:
    """The layout that vLLM read, a truncated vocabulary included."""

    def sizes(self, checkpoint: Checkpoint) -> HeadsSizes:
        """Count heads and layers."""
        names = checkpoint.tensors
        num_heads = count(names, r"blocks\.(\d+)\.layers\.\d+\.(?:weight|bias)")
        said = checkpoint.config.get("num_heads", num_heads)
        outputs = _outputs(names)
        if not outputs:
            raise CheckpointError(
                f"{checkpoint.file} lacks lm_heads.0.weight, the output matrix: fetch it again"
            )
        rows = checkpoint.num_rows(outputs[0])
        hot = checkpoint.num_rows("token_map") if "token_map" in names else None
        stated = checkpoint.config.get("vocab_size")
        if not isinstance(stated, int):
            stated = rows if hot in (None, rows) else None
        return HeadsSizes(
            layout="medusa-vllm",
            kind="medusa",
            num_heads=num_heads,
            num_layers=count(names, r"blocks\.\d+\.layers\.(\d+)\.(?:weight|bias)"),
            hidden_size=checkpoint.num_rows("blocks.0.layers.0.weight"),
            vocab_size=stated if hot is not None else rows,
            hot_vocab_size=hot,
            output="one own matrix for all heads" if len(outputs) == 1 else "own matrix a head",
            notes=_count_notes(said, num_heads),
        )

    def parse(self, checkpoint: Checkpoint, target: TargetFacts) -> ParsedHeads:
        """Check every tensor and give it our name."""
        sizes, found = self.sizes(checkpoint), checkpoint.tensors
        size, outputs = sizes.hidden_size, _outputs(found)
        rows = checkpoint.num_rows(outputs[0])
        has_bias = any(re.fullmatch(r"blocks\.\d+\.layers\.\d+\.bias", name) for name in found)
        is_shared = checkpoint.config.get("original_lm_head", len(outputs) < sizes.num_heads)
        is_shared = bool(is_shared) and len(outputs) == 1
        expected: dict[str, Shape] = {}
        for head in range(sizes.num_heads):
            for layer in range(sizes.num_layers):
                expected[f"blocks.{head}.layers.{layer}.weight"] = (size, size)
                if has_bias:
                    expected[f"blocks.{head}.layers.{layer}.bias"] = (size,)
        needed = outputs if is_shared else [f"lm_heads.{h}.weight" for h in range(sizes.num_heads)]
        expected |= dict.fromkeys(needed, (rows, size))
        if sizes.hot_vocab_size is not None:
            expected["token_map"] = (sizes.hot_vocab_size,)
        check_tensors(checkpoint, expected, integers=("token_map",))
        check_hidden_size(checkpoint, size, target)
        hot_ids, order = torch.sort(self._hot_ids(checkpoint, rows, target))
        kept = order if rows == len(hot_ids) else hot_ids
        is_whole = torch.equal(kept, torch.arange(rows))
        tensors: dict[str, Tensor] = {}
        for name in expected:
            stem, _, part = name.rpartition(".")
            if stem.startswith("blocks."):
                _, head_index, _, layer_index = stem.split(".")
                tensors[f"blocks.{head_index}.{layer_index}.linear.{part}"] = found[name]
                if not has_bias:
                    zeros = torch.zeros(size, dtype=found[name].dtype)
                    tensors[f"blocks.{head_index}.{layer_index}.linear.bias"] = zeros
        for head, name in enumerate(needed):
            tensors[f"outputs.{head}.weight"] = found[name] if is_whole else found[name][kept]
        config = HeadsConfig(
            kind="medusa",
            hidden_size=size,
            vocab_size=target.vocab_size,
            num_heads=sizes.num_heads,
            num_layers=sizes.num_layers,
            has_own_output=True,
            has_output_bias=False,
            is_output_shared=is_shared,
        )
        return ParsedHeads(config, hot_ids, tensors)

    def _hot_ids(self, checkpoint: Checkpoint, rows: int, target: TargetFacts) -> Tensor:
        """The tokens that are scored, in the order of the output rows."""
        if "token_map" not in checkpoint.tensors:
            config = checkpoint.config
            is_cut = config.get("truncated_vocab_size") == rows != config.get("vocab_size")
            if is_cut and rows < target.vocab_size:
                raise CheckpointError(
                    f"{checkpoint.file} scores {rows} of {target.vocab_size} tokens, but lacks the "
                    "tensor token_map that says which: fetch it again"
                )
            check_vocabulary(checkpoint, rows, target)
            return torch.arange(rows)
        hot_ids = checkpoint.tensors["token_map"].to(torch.int64)
        if rows not in (len(hot_ids), target.vocab_size):
            raise CheckpointError(
                f"{checkpoint.file}: lm_heads have {rows} rows, but token_map has {len(hot_ids)} "
                f"entries and {target.name} {target.vocab_size} tokens: fetch the file again"
            )
        is_sound = bool((hot_ids >= 0).all() & (hot_ids < target.vocab_size).all())
        if not is_sound or not 0 < len(hot_ids) == len(set(hot_ids.tolist())):
            raise CheckpointError(
                f"{checkpoint.file}: token_map must hold distinct token ids below "
                f"{target.vocab_size}, the vocabulary of {target.name}: use heads made for it"
            )
        return hot_ids


def _count_notes(stated: object, num_heads: int) -> tuple[str, ...]:
    if stated == num_heads:
        return ()
    return (f"config.json says {stated} heads; the file holds {num_heads}",)


def _outputs(names: Mapping[str, Tensor]) -> list[str]:
    """The output matrices, in order of heads."""
    found = [name for name in names if re.fullmatch(r"lm_heads\.\d+\.weight", name)]
    ordered = sorted(found, key=lambda name: int(name.split(".")[1]))
    return ordered or [name for name in names if name == "lm_head.weight"]
