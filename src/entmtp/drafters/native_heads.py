"""Drafting with heads inside the native core: one call a depth, for all sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entmtp.drafters.base import DraftRequest, DraftTree
from entmtp.drafters.filling import active_at, root_tokens
from entmtp.drafters.heads import HeadsConfig
from entmtp.drafters.native_rows import Floats, Ints, PrefixRunner, PrefixState, float_rows
from entmtp.drafters.picking import (
    BestChildren,
    LevelRows,
    Picker,
    ScoredRows,
    row_noise,
    set_ranked_children,
)
from entmtp.kernels.drafts import MAX_BEST, NativeHeads, Want

__all__ = ["NativeHeadsDrafter"]

_CPU = torch.device("cpu")


@dataclass
class _State:
    """What the heads read besides tokens, at the last committed token.

    Attributes:
        hidden: ``(1, H)`` hidden state of the target.
        prefix: of the prefix layer, where there is one.
    """

    hidden: Floats
    prefix: PrefixState | None = None


class NativeHeadsDrafter:
    """Fills trees from Medusa, Hydra or Hydra++ heads in the core.

    Implements :class:`entmtp.drafters.base.Drafter`; its slow twin in torch is
    :class:`entmtp.drafters.tree_heads.HeadsDrafter`. A row has bitwise the same scores alone, in
    any tree, in any batch and with any number of threads.
    """

    def __init__(
        self,
        config: HeadsConfig,
        heads: NativeHeads,
        hot_ids: Tensor,
        digest: str,
        prefix: PrefixRunner | None = None,
    ) -> None:
        """Join heads and what they score.

        Args:
            config: sizes.
            heads: in the core.
            hot_ids: int64 ``(hot,)``.
            digest: of the heads, from :func:`entmtp.drafters.checkpoint.heads_digest`.
            prefix: the layer of Hydra++.
        """
        self.config, self.hot_ids, self.digest = config, hot_ids, digest
        self._heads, self._prefix = heads, prefix
        self._tokens = hot_ids.numpy()

    @property
    def name(self) -> str:
        """``medusa``, ``hydra`` or ``hydra++``."""
        return self.config.kind

    @property
    def max_depth(self) -> int:
        """Number of heads."""
        return self.config.num_heads

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Keep the hidden state of the last prompt token; all of them for a prefix layer."""
        del prompt, root
        state = _State(float_rows(hidden[-1:]))
        if self._prefix is not None:
            state.prefix = self._prefix.start()
            state.prefix.waiting.append(float_rows(hidden))
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Keep the hidden state of the last accepted node; all of them for a prefix layer."""
        del tokens
        state.hidden = float_rows(hidden[-1:])
        if state.prefix is not None:
            state.prefix.waiting.append(float_rows(hidden))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Fill one tree a request, depth by depth."""
        trees = self.fill(requests, BestChildren())
        return [DraftTree(r.plan, tokens) for r, tokens in zip(requests, trees, strict=True)]

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, _CPU)
        base = self._base_rows(requests)
        for depth in range(max((r.plan.max_depth for r in requests), default=0)):
            rows = self._level_rows(depth, requests, trees)
            base_of = np.repeat(np.array(rows.indices, dtype=np.int32), rows.counts)
            self._pick(rows, picker, base, base_of)
        return trees

    def _base_rows(self, requests: Sequence[DraftRequest]) -> Floats:
        """``(B, H)``: h_t of each request, or s_t of the prefix layer for trees with nodes."""
        if self._prefix is None:
            return np.concatenate([r.state.hidden for r in requests])
        self._prefix.catch_up([r.state.prefix for r in requests if r.plan.num_nodes])
        return np.concatenate([r.state.prefix.feature for r in requests])

    def _level_rows(
        self, depth: int, requests: Sequence[DraftRequest], trees: Sequence[Tensor]
    ) -> LevelRows:
        indices = active_at(requests, depth)
        active = [requests[i] for i in indices]
        levels = [r.plan.levels[depth] for r in active]
        if self.config.kind == "medusa":  # a head sees h_t alone: one row serves every node
            counts = [1] * len(levels)
            parent_rows = [np.zeros_like(level.ranks) for level in levels]
        else:
            counts = [len(level.parents) for level in levels]
            parent_rows = [level.parent_rows for level in levels]
        return LevelRows(
            depth, indices, active, [trees[i] for i in indices], levels, counts, parent_rows
        )

    def _pick(self, rows: LevelRows, picker: Picker, base: Floats, base_of: Ints) -> None:
        """Evaluate head ``depth`` on the rows of all trees and set their children."""
        tokens: Ints | None = None
        if self.config.kind != "medusa":
            above = [
                tree.numpy()[level.paths]
                for tree, level in zip(rows.trees, rows.levels, strict=True)
            ]
            tokens = np.concatenate(above).astype(np.int32)
        if picker.takes_best and rows.width <= MAX_BEST:
            want = Want(rows.width, row_noise(rows))
            order = self._heads.best(rows.depth, base, base_of, tokens, want)
            set_ranked_children(rows, order, self._tokens)
            return
        scores = self._heads.scores(rows.depth, base, base_of, tokens)
        picker.pick(ScoredRows(**vars(rows), scores=torch.from_numpy(scores), hot_ids=self.hot_ids))
