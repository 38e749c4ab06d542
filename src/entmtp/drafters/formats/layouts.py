"""Which published layout a file has, by its tensors and not by its name."""

import re
from collections.abc import Mapping
from pathlib import Path
from re import Pattern
from typing import Any, Protocol

from torch import Tensor

from entmtp.drafters.formats.base import (
    Checkpoint,
    HeadsSizes,
    ParsedHeads,
    TargetFacts,
    listing,
)
from entmtp.drafters.formats.hydra import HydraLayout
from entmtp.drafters.formats.medusa import MedusaLayout, VllmMedusaLayout
from entmtp.drafters.formats.mtp import DeepSeekLayout, MimoLayout
from entmtp.drafters.formats.naming import strip_prefix
from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = ["Detected", "Layout", "detect"]

_MAX_COUNT = 256  # heads or layers; published files have at most a dozen
_MAX_NAME = 256  # characters; published names have at most 80


class Layout(Protocol):
    """One published layout."""

    def sizes(self, checkpoint: Checkpoint) -> HeadsSizes:
        """What the tensors alone tell."""

    def parse(self, checkpoint: Checkpoint, target: TargetFacts) -> ParsedHeads:
        """Check every tensor and give it our name."""


_SIGNS: tuple[tuple[Pattern[str], Layout], ...] = (
    (re.compile(r"hydra_mlp\."), HydraLayout()),
    (re.compile(r"blocks\.\d+\.layers\."), VllmMedusaLayout()),
    (re.compile(r".*mtp_layers\.\d+\."), MimoLayout()),
    (re.compile(r".*\.(eh_proj|enorm|hnorm)\.weight"), DeepSeekLayout()),
    (re.compile(r"\d+\.\d+\.(linear\.)?(weight|bias)"), MedusaLayout()),
)
"""A name that only this layout has, tried in order."""

_REFUSED = (
    ("hydra_mlps.", "the Hydra layout of speculators, which has no published checkpoint"),
    ("hydra_lm_heads.", "the Hydra layout of speculators, which has no published checkpoint"),
    ("midlayer.", "an EAGLE drafter"),
    ("cross_attn.", "a Hydra head with cross-attention"),
    ("fc.weight", "an EAGLE or Qwen3-Next drafter"),
    ("pre_fc_norm_embedding", "a Qwen3-Next multi-token module, whose target has linear attention"),
    ("mtp_block.", "an ERNIE multi-token module, whose target is a mixture of experts"),
)


def detect(file: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> "Detected":
    """Find the layout of a file.

    Raises:
        UnsupportedModelError: a known layout that cannot be drafted with.
        CheckpointError: no layout that is known.
    """
    odd = next((name for name in tensors if len(name) > _MAX_NAME or not name.isprintable()), None)
    if odd is not None:
        raise CheckpointError(
            f"{file} holds a tensor with the name {odd[:40]!r} ({len(odd)} characters), which no "
            "layout of heads has: fetch it again"
        )
    checkpoint = Checkpoint(file, strip_prefix(tensors), config)
    names = checkpoint.tensors
    for sign, what in _REFUSED:
        if any(name.startswith(sign) or f".{sign}" in name for name in names):
            raise UnsupportedModelError(
                f"{file} is {what}, and is not supported; supported are Medusa, Hydra, Hydra++ "
                "and the multi-token modules of DeepSeek, GLM and MiMo"
            )
    for pattern, layout in _SIGNS:
        if any(pattern.match(name) for name in names):
            return Detected(checkpoint, layout)
    raise CheckpointError(
        f"{file} is no file of heads in a known layout; it holds {listing(names) or 'nothing'}: "
        "give a file of Medusa, Hydra, Hydra++ or multi-token modules, as published or as "
        "'entmtp heads convert' writes it"
    )


class Detected:
    """A file and its layout."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout) -> None:
        """Join them; :func:`detect` finds them."""
        self.checkpoint = checkpoint
        self._layout = layout

    def sizes(self) -> HeadsSizes:
        """What the tensors alone tell.

        Raises:
            CheckpointError: a tensor without which nothing can be told is missing.
        """
        sizes = self._layout.sizes(self.checkpoint)
        if not 1 <= sizes.num_heads <= _MAX_COUNT or not 1 <= sizes.num_layers <= _MAX_COUNT:
            raise CheckpointError(
                f"{self.checkpoint.file} has {sizes.num_heads} heads of {sizes.num_layers} layers "
                f"by its tensors' names; between 1 and {_MAX_COUNT} of each make sense: fetch it "
                "again"
            )
        return sizes

    def parse(self, target: TargetFacts) -> ParsedHeads:
        """Check every tensor against the layout and the target.

        Raises:
            CheckpointError: missing, unexpected or wrongly shaped tensors, or another model's.
            UnsupportedModelError: a variant that cannot be drafted with.
        """
        self.sizes()
        return self._layout.parse(self.checkpoint, target)
