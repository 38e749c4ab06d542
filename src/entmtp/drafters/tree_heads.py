"""Drafting with heads: one evaluation and one batched top-k a depth, for all sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.drafters.base import DraftRequest, DraftTree
from entmtp.drafters.heads import HydraHeads, MedusaHeads
from entmtp.sampling import stable_top_k

__all__ = ["HeadsDrafter"]


@dataclass
class _State:
    """The target's hidden state at the last committed token, ``(1, H)``."""

    hidden: Tensor


class HeadsDrafter:
    """Fills trees from Medusa or Hydra heads; implements :class:`entmtp.drafters.base.Drafter`.

    Heads deeper than the deepest plan of the batch are not run. Any prefix-closed tree is filled
    rightly: a row is evaluated for each node that has children, whatever its rank.
    """

    def __init__(self, heads: MedusaHeads | HydraHeads, embedding: Tensor) -> None:
        """Join heads and target.

        Args:
            heads: with output matrices, in the target's dtype and on its device.
            embedding: ``(V, H)`` input embedding of the target.
        """
        self.heads = heads.eval().requires_grad_(False)
        self._embedding = embedding
        self._reads_tokens = isinstance(heads, HydraHeads)

    @property
    def name(self) -> str:
        """``medusa`` or ``hydra``."""
        return self.heads.config.kind

    @property
    def max_depth(self) -> int:
        """Number of heads."""
        return self.heads.config.num_heads

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.heads.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Keep the hidden state of the last prompt token."""
        del prompt, root
        return _State(hidden[-1:].clone())

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Keep the hidden state of the last accepted node."""
        del tokens
        state.hidden = hidden[-1:].clone()

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Fill one tree a request, depth by depth."""
        device = self._embedding.device
        trees = [
            torch.full((r.plan.num_rows,), r.root, dtype=torch.int64, device=device)
            for r in requests
        ]
        for depth in range(max((r.plan.max_depth for r in requests), default=0)):
            active = [
                (r, tokens)
                for r, tokens in zip(requests, trees, strict=True)
                if r.plan.max_depth > depth
            ]
            self._fill_depth(depth, active)
        return [DraftTree(r.plan, tokens) for r, tokens in zip(requests, trees, strict=True)]

    def _fill_depth(self, depth: int, active: list[tuple[DraftRequest, Tensor]]) -> None:
        """Evaluate head ``depth`` on the rows of all trees; set the tokens one depth below."""
        levels = [r.plan.levels[depth] for r, _ in active]
        width = max(level.width for level in levels)
        if self._reads_tokens:
            counts = [len(level.parents) for level in levels]
            hidden = torch.cat(
                [r.state.hidden.expand(n, -1) for (r, _), n in zip(active, counts, strict=True)]
            )
            above = torch.cat(
                [
                    tokens[torch.from_numpy(level.paths).to(tokens.device)]
                    for (_, tokens), level in zip(active, levels, strict=True)
                ]
            )
            embedded = functional.embedding(above, self._embedding)
        else:  # a head sees h_t alone: one row serves every node of its depth
            counts = [1] * len(active)
            hidden = torch.cat([r.state.hidden for r, _ in active])
            embedded = hidden
        logits = self.heads.logits(depth, self.heads.features(depth, hidden, embedded))
        best = self.heads.hot_ids[stable_top_k(logits, width)[1]]
        for (_, tokens), level, rows in zip(active, levels, torch.split(best, counts), strict=True):
            parent_rows = level.parent_rows if self._reads_tokens else np.zeros_like(level.ranks)
            tokens[torch.from_numpy(level.children).to(tokens.device)] = rows[
                torch.from_numpy(parent_rows).to(tokens.device),
                torch.from_numpy(level.ranks).to(tokens.device),
            ]
