"""Tokens of a draft tree, set depth by depth from ranked candidates."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.drafters.base import DraftRequest
from entmtp.topology import Level, Topology

__all__ = ["FixedShapes", "Shapes", "active_at", "open_depths", "root_tokens", "set_children"]


class Shapes(Protocol):
    """Says which rows of the trees of a batch are evaluated."""

    def open(self, depth: int) -> Mapping[int, Level]:
        """By index of the request, what is wanted of the rows of a depth; nothing: all is done."""


class FixedShapes:
    """Whole trees of given shapes."""

    def __init__(self, plans: Sequence[Topology]) -> None:
        """Take the shape of each tree."""
        self._plans = plans

    def open(self, depth: int) -> dict[int, Level]:
        """The levels of the trees that are deeper."""
        plans = enumerate(self._plans)
        return {index: plan.levels[depth] for index, plan in plans if plan.max_depth > depth}


def open_depths(shapes: Shapes) -> Iterator[tuple[int, Mapping[int, Level]]]:
    """Depth after depth with its levels; one may be asked for when the one above is filled."""
    for depth in count():
        levels = shapes.open(depth)
        if not levels:
            return
        yield depth, levels


def root_tokens(requests: Sequence[DraftRequest], device: torch.device) -> list[Tensor]:
    """An int64 tensor ``(N,)`` for each tree, the root's token everywhere."""
    return [
        torch.full((r.plan.num_rows,), r.root, dtype=torch.int64, device=device) for r in requests
    ]


def active_at(requests: Sequence[DraftRequest], depth: int) -> list[int]:
    """Indices of the requests whose trees have nodes below ``depth``."""
    return [index for index, r in enumerate(requests) if r.plan.max_depth > depth]


def set_children(
    tokens: Tensor, level: Level, best: Tensor, parent_rows: npt.NDArray[np.int64]
) -> None:
    """Set the tokens of one depth.

    Args:
        tokens: ``(N,)`` of a tree; written to.
        level: of that depth.
        best: ``(R, width)`` candidates of each parent's row, best first.
        parent_rows: ``(C,)`` row of ``best`` for each child.
    """
    rows = torch.from_numpy(parent_rows).to(tokens.device)
    ranks = torch.from_numpy(level.ranks).to(tokens.device)
    tokens[torch.from_numpy(level.children).to(tokens.device)] = best[rows, ranks]
