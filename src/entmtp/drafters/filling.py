"""Tokens of a draft tree, set depth by depth from ranked candidates."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.drafters.base import DraftRequest
from entmtp.topology import Level

__all__ = ["active_at", "root_tokens", "set_children"]


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
