"""Multi-token modules that come inside a model's own checkpoint.

DeepSeek-V3 2024 and GLM-4.5: a further layer ``model.layers.{N}.`` behind the model's N, with
``enorm``, ``hnorm``, ``eh_proj``, a whole block, ``shared_head.norm``, and copies of the embedding
and the output head. MiMo 2025: ``model.mtp_layers.{i}.`` with ``token_layernorm``,
``hidden_layernorm``, ``input_proj`` (hidden state first), a whole block and ``final_layernorm``.
One module is used again at every depth, with its normed output in the place of the hidden state;
further modules are not read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.decoder.config import block_shapes
from entmtp.drafters.formats.base import (
    Checkpoint,
    HeadsSizes,
    ParsedHeads,
    Shape,
    TargetFacts,
    check_hidden_size,
    check_tensors,
    check_vocabulary,
    listing,
)
from entmtp.drafters.formats.hydra import block_config
from entmtp.drafters.heads import HeadsConfig
from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = ["DeepSeekLayout", "MimoLayout"]

_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_BUFFERS = re.compile(r".*\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class _Names:
    """What a layout calls the parts around the block."""

    embed_norm: str
    hidden_norm: str
    join: str
    final_norm: str

    def weights(self) -> tuple[str, ...]:
        """Names of all four tensors."""
        parts = (self.embed_norm, self.hidden_norm, self.join, self.final_norm)
        return tuple(f"{part}.weight" for part in parts)


class _ModuleLayout:
    """What both layouts share: one module's tensors under a prefix."""

    layout: str
    hidden_first: bool
    _names: _Names
    _prefix: re.Pattern[str]

    def sizes(self, checkpoint: Checkpoint) -> HeadsSizes:
        """Find the first module."""
        starts = self._starts(checkpoint)
        notes = []
        if len(starts) > 1:
            notes.append(f"{len(starts)} modules; the first is used at every depth")
        return HeadsSizes(
            layout=self.layout,
            kind="mtp",
            num_heads=1,
            num_layers=1,
            hidden_size=checkpoint.num_rows(f"{starts[0]}{self._names.join}.weight"),
            vocab_size=None,
            hot_vocab_size=None,
            output="the target's output head",
            notes=tuple(notes),
        )

    def parse(self, checkpoint: Checkpoint, target: TargetFacts) -> ParsedHeads:
        """Check every tensor and give it our name."""
        start = self._starts(checkpoint)[0]
        found = {n: value for n, value in checkpoint.tensors.items() if n.startswith(start)}
        own = Checkpoint(checkpoint.file, found, checkpoint.config)
        module = {name.removeprefix(start): value for name, value in found.items()}
        _refuse_other_blocks(checkpoint, module)
        size = self.sizes(checkpoint).hidden_size
        block = block_config(own, start, target.block, size)
        shapes: dict[str, Shape] = dict(block_shapes(block))
        shapes |= dict.fromkeys(self._names.weights(), (size,))
        shapes[f"{self._names.join}.weight"] = (size, 2 * size)
        copies = [name for name in _COPIES if name in module]
        num_rows = own.num_rows(f"{start}{copies[0]}") if copies else target.vocab_size
        shapes |= dict.fromkeys(copies, (num_rows, size))
        check_tensors(own, {f"{start}{name}": s for name, s in shapes.items()}, _BUFFERS)
        check_hidden_size(checkpoint, size, target)
        stated = checkpoint.config.get("vocab_size")
        if type(stated) is int:
            check_vocabulary(checkpoint, stated, target)
        check_vocabulary(checkpoint, num_rows, target)
        tensors = {f"layer.{name}": module[name] for name in block_shapes(block)}
        names = self._names
        tensors |= {
            "embed_norm": module[f"{names.embed_norm}.weight"],
            "hidden_norm": module[f"{names.hidden_norm}.weight"],
            "final_norm": module[f"{names.final_norm}.weight"],
            "join.weight": module[f"{names.join}.weight"],
        }
        config = HeadsConfig(
            kind="mtp",
            hidden_size=size,
            vocab_size=target.vocab_size,
            num_heads=1,
            hidden_first=self.hidden_first,
            block=block,
        )
        return ParsedHeads(
            config,
            torch.arange(target.vocab_size),
            tensors,
            embedding=module.get("embed_tokens.weight"),
            output=module.get("shared_head.head.weight"),
        )

    def _starts(self, checkpoint: Checkpoint) -> list[str]:
        """Prefixes of the modules, in order; at least one."""
        starts: dict[int, str] = {}
        for name in checkpoint.tensors:
            match = self._prefix.match(name)
            if match and name.removeprefix(match.group()) in self._names.weights():
                starts[int(match.group(1))] = match.group()
        if not starts:
            raise CheckpointError(
                f"{checkpoint.file} has none of the tensors {', '.join(self._names.weights())} of "
                f"a multi-token module, but {listing(checkpoint.tensors)}: it was not copied "
                "whole, or its tensors were renamed; fetch it again"
            )
        return [starts[number] for number in sorted(starts)]


class DeepSeekLayout(_ModuleLayout):
    """DeepSeek-V3 and GLM-4.5."""

    layout = "mtp-deepseek"
    hidden_first = False
    _names = _Names("enorm", "hnorm", "eh_proj", "shared_head.norm")
    _prefix = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class MimoLayout(_ModuleLayout):
    """MiMo-7B."""

    layout = "mtp-mimo"
    hidden_first = True
    _names = _Names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    _prefix = re.compile(r"(?:model\.)?mtp_layers\.(\d+)\.")


def _refuse_other_blocks(checkpoint: Checkpoint, module: Mapping[str, Tensor]) -> None:
    """Refuse blocks that the targets here do not have either."""
    for part, what in (
        ("mlp.experts.", "a mixture of experts"),
        ("mlp.gate.weight", "a mixture of experts"),
        ("self_attn.kv_a_proj", "multi-head latent attention"),
        ("linear_attn.", "linear attention, whose state cannot be rolled back for a tree"),
    ):
        if any(name.startswith(part) for name in module):
            raise UnsupportedModelError(
                f"{checkpoint.file}: its multi-token module has {what}, which is not supported; "
                "supported are dense blocks with full attention, as in Llama, Qwen2 and MiMo"
            )
