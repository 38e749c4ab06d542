"""How the children of scored rows are chosen: the best ones when drafting, others when tracing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.drafters.base import AnyRequest, Coupling
from entmtp.drafters.filling import set_children
from entmtp.sampling import LEAST_TEMPERATURE, stable_top_k
from entmtp.topology import Level

__all__ = [
    "BestChildren",
    "LevelRows",
    "Picker",
    "ScoredRows",
    "coupled_scores",
    "score_scale",
    "set_best_children",
]


@dataclass(frozen=True)
class LevelRows:
    """The parents of one depth, of all trees of a batch.

    Attributes:
        depth: of the parents; the root has depth 0.
        indices: of the requests in the batch that have children at this depth.
        requests: those requests.
        trees: int64 ``(N,)`` tokens of each of their trees; children are written to them.
        levels: what each tree wants at this depth.
        counts: rows of each request.
        parent_rows: for each request, the row among its own that each child hangs on.
    """

    depth: int
    indices: Sequence[int]
    requests: Sequence[AnyRequest]
    trees: Sequence[Tensor]
    levels: Sequence[Level]
    counts: Sequence[int]
    parent_rows: Sequence[npt.NDArray[np.int64]]

    @classmethod
    def of(
        cls,
        depth: int,
        levels: Mapping[int, Level],
        requests: Sequence[AnyRequest],
        trees: Sequence[Tensor],
        *,
        share_row: bool = False,
    ) -> "LevelRows":
        """The rows of one depth.

        Args:
            depth: of the parents.
            levels: by index of the request.
            requests: all of the batch.
            trees: of all requests.
            share_row: one row serves all nodes of a tree.
        """
        own = list(levels.values())
        return LevelRows(
            depth,
            list(levels),
            [requests[index] for index in levels],
            [trees[index] for index in levels],
            own,
            [1 if share_row else len(level.parents) for level in own],
            [np.zeros_like(level.ranks) if share_row else level.parent_rows for level in own],
        )

    def scored(self, scores: Tensor, hot_ids: Tensor) -> "ScoredRows":
        """These rows with their scores; see :class:`ScoredRows`."""
        return ScoredRows(**vars(self), scores=scores, hot_ids=hot_ids)

    @property
    def width(self) -> int:
        """Candidates that a row must yield at most."""
        return max(level.width for level in self.levels)


@dataclass(frozen=True)
class ScoredRows(LevelRows):
    """Rows with the scores of their children.

    Attributes:
        scores: ``(R, hot)`` of all rows.
        hot_ids: int64 ``(hot,)`` token of each column.
    """

    scores: Tensor
    hot_ids: Tensor


class Picker(Protocol):
    """Sets the children of scored rows."""

    @property
    def takes_best(self) -> bool:
        """True where it does no more than :func:`set_best_children`.

        Then a drafter may fill trees by itself, and :meth:`pick` need not be called.
        """

    def pick(self, rows: ScoredRows) -> None:
        """Write a token for every child into the trees."""


class BestChildren:
    """Child rank r is the r-th best token: what a draft tree wants."""

    takes_best = True

    def pick(self, rows: ScoredRows) -> None:
        """Take the best tokens of each row, ties to the lower token."""
        set_best_children(rows)


def set_best_children(rows: ScoredRows) -> Tensor:
    """Write the best tokens of each row into the trees.

    Returns:
        int64 ``(R, width)`` columns of the scores, best first, ties to the lower token.
    """
    order = stable_top_k(coupled_scores(rows), rows.width)[1]
    parts = torch.split(rows.hot_ids[order], list(rows.counts))
    for tokens, level, part, parents in zip(
        rows.trees, rows.levels, parts, rows.parent_rows, strict=True
    ):
        set_children(tokens, level, part, parents)
    return order


def coupled_scores(rows: ScoredRows) -> Tensor:
    """Scores by which children are ranked: with the noise of sampling where a request asks for it.

    The target's own token is the arg-max of its scores over the temperature plus the noise of its
    position. Heads that rank by the same sum agree with it more often than by their scores alone.
    """
    if all(request.coupling is None for request in rows.requests):
        return rows.scores
    parts = []
    for request, scores in zip(
        rows.requests, torch.split(rows.scores, list(rows.counts)), strict=True
    ):
        coupling = request.coupling
        if coupling is None:
            parts.append(scores)
            continue
        noise = coupling.noise.of(coupling.position + rows.depth, rows.hot_ids)
        # rounded after each of the two operations, as the native core does
        parts.append(noise + scores.to(torch.float32) * score_scale(coupling))
    return torch.cat(parts)


def score_scale(coupling: Coupling) -> float:
    """Factor on the scores beside the noise."""
    return 1 / max(coupling.temperature, LEAST_TEMPERATURE)
