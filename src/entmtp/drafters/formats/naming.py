"""Counting and comparing tensors by their names."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["count", "has_equal_layers", "strip_prefix"]

_PREFIXES = ("module.", "model.medusa_head.", "medusa_heads.", "medusa_head.", "hydra_head.")


def count(names: Iterable[str], pattern: str) -> int:
    """One more than the largest number that the group of ``pattern`` catches; 0 for none."""
    matches = (re.fullmatch(pattern, name) for name in names)
    return 1 + max((int(match.group(1)) for match in matches if match), default=-1)


def has_equal_layers(tensors: Mapping[str, Tensor], heads: Sequence[Sequence[str]]) -> bool:
    """Whether the layers of each head are all one and the same.

    Args:
        tensors: weights and biases under ``stem.weight`` and ``stem.bias``.
        heads: stems of the layers of each head; fewer than two are never called equal.
    """
    return all(len(stems) > 1 for stems in heads) and all(
        torch.equal(tensors[f"{stems[0]}.{part}"], tensors[f"{stem}.{part}"])
        for stems in heads
        for stem in stems[1:]
        for part in ("weight", "bias")
    )


def strip_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without a usual prefix that all of them carry."""
    for prefix in _PREFIXES:
        if tensors and all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): value for name, value in tensors.items()}
    return dict(tensors)
