"""What crosses between a file of heads, the reader of its layout, and our modules."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.heads import HeadsConfig
from entmtp.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "HeadsSizes",
    "ParsedHeads",
    "Shape",
    "TargetFacts",
    "check_tensors",
    "listing",
]

Shape = tuple[int, ...]
_LISTED = 4  # names that a message lists before it only counts


@dataclass(frozen=True)
class Checkpoint:
    """A file of heads, read but not understood.

    Attributes:
        file: where it lies.
        tensors: by name.
        config: ``config.json`` beside it; empty where there is none.
    """

    file: Path
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_model(self) -> str | None:
        """The model that the config names as the heads' own."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def num_rows(self, name: str) -> int:
        """First dimension of a tensor that a layout cannot do without.

        Raises:
            CheckpointError: it is missing, or a single number.
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.file} lacks the tensor {name}: it was not copied whole, or its tensors "
                "were renamed; fetch it again"
            )
        shape = self.tensors[name].shape
        if not shape:
            raise CheckpointError(
                f"{self.file}: tensor {name} has shape (), a single number, where a matrix or a "
                "vector is needed: fetch the file again"
            )
        return int(shape[0])


@dataclass(frozen=True)
class HeadsSizes:
    """What the tensors of a file alone tell.

    Attributes:
        layout: name of the published layout.
        kind: of our modules.
        num_heads: depths; 1 for a recurrent module.
        num_layers: blocks a head.
        hidden_size: H.
        vocab_size: V; ``None`` where the file does not tell.
        hot_vocab_size: tokens that are scored; ``None`` is V.
        output: in words: whose matrix scores the tokens.
        notes: what a user should know.
    """

    layout: str
    kind: str
    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    hot_vocab_size: int | None
    output: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TargetFacts:
    """What a layout must know of the target.

    Attributes:
        name: for messages.
        vocab_size: V.
        block: sizes of a block of the target.
    """

    name: str
    vocab_size: int
    block: BlockConfig


@dataclass(frozen=True)
class ParsedHeads:
    """A file understood: ready for :func:`entmtp.drafters.checkpoint.assemble_heads`.

    Attributes:
        config: sizes.
        hot_ids: int64 ``(hot,)``.
        tensors: under the names of our modules.
        embedding: ``(V, H)`` copy of the target's input embedding in the file, to hold against it.
        output: ``(V, H)`` copy of the target's output head in the file, to hold against it.
    """

    config: HeadsConfig
    hot_ids: Tensor
    tensors: Mapping[str, Tensor]
    embedding: Tensor | None = None
    output: Tensor | None = None


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, Shape],
    ignored: re.Pattern[str] | None = None,
    integers: Collection[str] = (),
) -> None:
    """Hold the names, shapes and kinds of numbers of a file against a layout.

    Args:
        checkpoint: the file.
        expected: every tensor that the layout asks for.
        ignored: names that may be there and are not read.
        integers: names of tensors that hold integers; all others hold floating-point numbers.

    Raises:
        CheckpointError: missing, unexpected or wrongly shaped tensors; names them.
    """
    file, found = checkpoint.file, checkpoint.tensors
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(
            f"{file} lacks {listing(missing)}: it was not copied whole, or its tensors were "
            "renamed; fetch it again"
        )
    unexpected = [n for n in found if n not in expected and not (ignored and ignored.fullmatch(n))]
    if unexpected:
        raise CheckpointError(
            f"{file} holds {listing(unexpected)}, which its layout does not have: check that the "
            "file is whole and was not renamed, or remove these tensors"
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {tuple(found[name].shape)}, but {shape} is "
                "needed to go with the others: fetch the file again"
            )
        dtype = found[name].dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        is_float = dtype.is_floating_point and not str(dtype).endswith("_x2")  # packed pairs
        if not (is_integer if name in integers else is_float):
            needed = "integers" if name in integers else "floating-point numbers"
            raise CheckpointError(
                f"{file}: tensor {name} is stored as {str(dtype).removeprefix('torch.')}, but "
                f"{needed} are needed: use the file before it was quantised or converted"
            )


def listing(names: Iterable[str]) -> str:
    """A few names, and how many more."""
    ordered = list(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def check_hidden_size(checkpoint: Checkpoint, size: int, target: TargetFacts) -> None:
    """Refuse heads of a model of another width, naming both models.

    Raises:
        CheckpointError: hidden sizes differ.
    """
    if size != target.block.hidden_size:
        raise CheckpointError(
            f"{checkpoint.file}: the heads are for {_base(checkpoint)} with hidden size {size}, "
            f"but {target.name} has {target.block.hidden_size}: use heads made for this model"
        )


def check_vocabulary(checkpoint: Checkpoint, size: int, target: TargetFacts) -> None:
    """Refuse heads of a model with another vocabulary, naming both models.

    Raises:
        CheckpointError: vocabulary sizes differ.
    """
    if size != target.vocab_size:
        raise CheckpointError(
            f"{checkpoint.file}: the heads are for {_base(checkpoint)} with a vocabulary of "
            f"{size}, but {target.name} has {target.vocab_size}: use heads made for this model"
        )


def _base(checkpoint: Checkpoint) -> str:
    return checkpoint.base_model or "a model"
