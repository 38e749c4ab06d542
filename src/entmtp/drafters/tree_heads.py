"""Drafting with heads: one evaluation and one batched top-k a depth, for all sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.drafters.base import DraftRequest, DraftTree
from entmtp.drafters.block_state import BlockRunner, BlockState
from entmtp.drafters.filling import active_at, root_tokens
from entmtp.drafters.heads import HydraHeads, MedusaHeads, PrefixLayer
from entmtp.drafters.picking import BestChildren, Picker, ScoredRows

__all__ = ["HeadsDrafter"]


@dataclass
class _State:
    """What the heads read besides tokens, at the last committed token.

    Attributes:
        hidden: ``(1, H)`` hidden state of the target.
        prefix: of the prefix layer, where there is one.
    """

    hidden: Tensor
    prefix: BlockState | None = None


class HeadsDrafter:
    """Fills trees from Medusa, Hydra or Hydra++ heads.

    Implements :class:`entmtp.drafters.base.Drafter`. Heads deeper than the deepest plan of the
    batch are not run. Any prefix-closed tree is filled rightly: a row is evaluated for each node
    that has children, whatever its rank. The prefix layer of Hydra++ reads the hidden states of
    committed tokens alone, so its cache knows nothing of draft trees.
    """

    def __init__(
        self, heads: MedusaHeads | HydraHeads, embedding: Tensor, digest: str = ""
    ) -> None:
        """Join heads and target.

        Args:
            heads: with output matrices, in the target's dtype and on its device; packed where
                they have a prefix layer.
            embedding: ``(V, H)`` input embedding of the target.
            digest: of the heads, from :func:`entmtp.drafters.checkpoint.heads_digest`.
        """
        self.digest = digest
        self.heads = heads.eval().requires_grad_(False)
        self._embedding = embedding
        self._reads_tokens = isinstance(heads, HydraHeads)
        prefix = heads.prefix if isinstance(heads, HydraHeads) else None
        self._prefix = None if prefix is None else _prefix_runner(prefix, embedding)

    @property
    def name(self) -> str:
        """``medusa``, ``hydra`` or ``hydra++``."""
        return self.heads.config.kind

    @property
    def max_depth(self) -> int:
        """Number of heads."""
        return self.heads.config.num_heads

    @property
    def hot_ids(self) -> Tensor:
        """int64 ``(hot,)``: the tokens that can be drafted."""
        return self.heads.hot_ids

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.heads.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Keep the hidden state of the last prompt token; all of them for a prefix layer."""
        del prompt, root
        state = _State(hidden[-1:].clone())
        if self._prefix is not None:
            state.prefix = self._prefix.start()
            state.prefix.waiting.append((hidden,))
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Keep the hidden state of the last accepted node; all of them for a prefix layer."""
        del tokens
        state.hidden = hidden[-1:].clone()
        if state.prefix is not None:
            state.prefix.waiting.append((hidden.clone(),))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Fill one tree a request, depth by depth."""
        trees = self.fill(requests, BestChildren())
        return [DraftTree(r.plan, tokens) for r, tokens in zip(requests, trees, strict=True)]

    @torch.inference_mode()
    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, self._embedding.device)
        base = self._base_features(requests)
        for depth in range(max((r.plan.max_depth for r in requests), default=0)):
            active = active_at(requests, depth)
            picker.pick(
                self._score_depth(
                    depth,
                    active,
                    [requests[i] for i in active],
                    [trees[i] for i in active],
                    [base[i] for i in active],
                )
            )
        return trees

    def _base_features(self, requests: Sequence[DraftRequest]) -> list[Tensor]:
        """``(1, H)`` of each request: h_t, or s_t of the prefix layer for trees with nodes."""
        if self._prefix is None:
            return [r.state.hidden for r in requests]
        self._prefix.catch_up([r.state.prefix for r in requests if r.plan.num_nodes])
        return [r.state.prefix.feature for r in requests]

    def _score_depth(
        self,
        depth: int,
        indices: Sequence[int],
        requests: Sequence[DraftRequest],
        trees: Sequence[Tensor],
        base: Sequence[Tensor],
    ) -> ScoredRows:
        """Evaluate head ``depth`` on the rows of all trees."""
        levels = [r.plan.levels[depth] for r in requests]
        if self._reads_tokens:
            counts = [len(level.parents) for level in levels]
            parent_rows = [level.parent_rows for level in levels]
            hidden = torch.cat([h.expand(n, -1) for h, n in zip(base, counts, strict=True)])
            above = torch.cat(
                [
                    tokens[torch.from_numpy(level.paths).to(tokens.device)]
                    for tokens, level in zip(trees, levels, strict=True)
                ]
            )
            embedded = functional.embedding(above, self._embedding)
        else:  # a head sees h_t alone: one row serves every node of its depth
            counts = [1] * len(levels)
            parent_rows = [np.zeros_like(level.ranks) for level in levels]
            hidden = torch.cat(list(base))
            embedded = hidden
        scores = self.heads.logits(depth, self.heads.features(depth, hidden, embedded))
        return ScoredRows(
            depth, indices, requests, trees, levels, counts, parent_rows, scores, self.heads.hot_ids
        )


def _prefix_runner(prefix: PrefixLayer, embedding: Tensor) -> BlockRunner:
    return BlockRunner(
        prefix.config,
        lambda inputs, rotation, mix: prefix(inputs[0], rotation, mix),
        embedding.dtype,
        embedding.device,
    )
