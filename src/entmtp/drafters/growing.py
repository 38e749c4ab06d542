"""What drafters that grow trees have in common: depth by depth, what is opened and what is read."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from entmtp.drafters.base import (
    AnyRequest,
    DraftRequest,
    DraftTree,
    GrownTree,
    GrowRequest,
    first_tokens,
)
from entmtp.drafters.picking import BestChildren, Picker, ScoredRows, set_best_children
from entmtp.growth import CODES_PER_NAT, NUM_CODES, UNSCORED, Grower
from entmtp.topology import Level

__all__ = ["Growth", "draft_trees", "probability_codes"]


class _TreeMaker(Protocol):
    """A drafter that fills trees and grows them."""

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens of one tree a request, chosen by the picker."""

    def grow(self, requests: Sequence[GrowRequest]) -> list[GrownTree]:
        """One tree a request."""


def draft_trees(drafter: _TreeMaker, requests: Sequence[AnyRequest]) -> list[DraftTree]:
    """Fill the trees that have a shape and grow the others; in the order of the requests.

    Where nothing is worth being scored the drafter is not asked.
    """
    trees = [_bare_tree(request) for request in requests]
    fixed = [request for request in requests if isinstance(request, DraftRequest)]
    growing = [
        request
        for request, tree in zip(requests, trees, strict=True)
        if tree is None and isinstance(request, GrowRequest)
    ]
    tokens = iter(drafter.fill(fixed, BestChildren()) if fixed else ())
    grown = iter(drafter.grow(growing) if growing else ())
    for index, request in enumerate(requests):
        if isinstance(request, DraftRequest):
            trees[index] = DraftTree(request.plan, next(tokens))
        elif trees[index] is None:
            trees[index] = next(grown).tree
    return [tree for tree in trees if tree is not None]


def _bare_tree(request: AnyRequest) -> DraftTree | None:
    """The root, and what of a copy is worth it; ``None`` where the drafter has to be asked."""
    if isinstance(request, DraftRequest):
        return None
    topology = request.plan.bare(request.copy)
    if topology is None:
        return None
    copied = request.copy.tokens[: topology.num_nodes] if request.copy is not None else ()
    tokens = np.array((request.root, *copied), dtype=np.int64)
    return DraftTree(topology, torch.from_numpy(tokens), num_copied=topology.num_nodes)


def probability_codes(scores: Tensor, columns: Tensor) -> Tensor:
    """Codes of log-probabilities; see :data:`entmtp.growth.CODES_PER_NAT`.

    Args:
        scores: ``(R, hot)``, of which the probabilities are the softmax.
        columns: int64 ``(R, width)`` of the scores that are wanted.

    Returns:
        uint8 ``(R, width)``, on the CPU.
    """
    scores = scores.to(torch.float32)
    below = torch.logsumexp(scores, dim=1, keepdim=True) - scores.gather(1, columns)
    codes = torch.floor(below * CODES_PER_NAT).nan_to_num(nan=NUM_CODES - 1)
    return codes.clamp(0, NUM_CODES - 1).to(torch.uint8).cpu()


class Growth:
    """The trees of a batch while they grow.

    For the loop of a drafter it is what a static batch has in
    :class:`entmtp.drafters.filling.FixedShapes` and a picker: it says which rows to evaluate, and
    takes their scores.
    """

    takes_best = False  # it reads the scores

    def __init__(self, requests: Sequence[GrowRequest], device: torch.device) -> None:
        """Start with bare roots; tokens lie on the device."""
        self._plans = [request.plan for request in requests]
        self._growers = [Grower(request.plan, request.copy) for request in requests]
        sizes = [plan.rule.envelope.num_rows for plan in self._plans]
        self._codes = [np.full(size, UNSCORED, dtype=np.uint8) for size in sizes]
        self.trees = [
            torch.tensor(first_tokens(request), dtype=torch.int64, device=device)
            for request in requests
        ]
        """int64 ``(E + 1 + m,)`` tokens of each envelope and its copy."""

    def open(self, depth: int) -> dict[int, Level]:
        """The rows that are worth it, each with all its children in the envelope."""
        levels: dict[int, Level] = {}
        for index, (plan, grower) in enumerate(zip(self._plans, self._growers, strict=True)):
            if rows := grower.open_rows(depth):
                levels[index] = plan.rule.envelope.levels[depth].restrict(rows)
        return levels

    def pick(self, rows: ScoredRows) -> None:
        """Set the best children and value them."""
        codes = probability_codes(rows.scores, set_best_children(rows))
        parts = torch.split(codes, list(rows.counts))
        for at, index in enumerate(rows.indices):
            level = rows.levels[at]
            own = parts[at].numpy()[rows.parent_rows[at], level.ranks]
            self._codes[index][level.children] = own
            children, grower = level.children.tolist(), self._growers[index]
            copied = grower.copied(children, self.trees[index][children].tolist())
            grower.take(children, own.tolist(), copied)

    def results(self) -> list[GrownTree]:
        """What has grown, in the order of the requests."""
        return [
            GrownTree(plan, tokens.cpu().numpy(), codes, *grower.keep())
            for plan, tokens, codes, grower in zip(
                self._plans, self.trees, self._codes, self._growers, strict=True
            )
        ]
