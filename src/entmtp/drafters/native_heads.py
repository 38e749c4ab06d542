"""Drafting with heads inside the native core: one call for the trees of all sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entmtp.drafters.base import AnyRequest, DraftRequest, DraftTree, GrownTree, GrowRequest
from entmtp.drafters.filling import FixedShapes, active_at, open_depths, root_tokens
from entmtp.drafters.growing import draft_trees
from entmtp.drafters.heads import HeadsConfig
from entmtp.drafters.native_rows import (
    CPU,
    Floats,
    Ints,
    PrefixRunner,
    PrefixState,
    float_rows,
    grow_or_keep,
    is_filled_in_core,
    newest_row,
    tree_request,
)
from entmtp.drafters.picking import LevelRows, Picker
from entmtp.kernels.drafts import NativeHeads
from entmtp.kernels.growth import GrowthRoom, GrowthTask

__all__ = ["NativeHeadsDrafter"]


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
        self._room = GrowthRoom()

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
        state = _State(newest_row(hidden))
        if self._prefix is not None:
            state.prefix = self._prefix.start()
            state.prefix.waiting.append(float_rows(hidden))
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Keep the hidden state of the last accepted node; all of them for a prefix layer."""
        del tokens
        state.hidden = newest_row(hidden)
        if state.prefix is not None:
            state.prefix.waiting.append(float_rows(hidden))

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """Fill or grow one tree a request."""
        return draft_trees(self, requests)

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, CPU)
        wanted = active_at(requests, 0)
        if not wanted:
            return trees
        base = self._base_rows([requests[i] for i in wanted])
        if is_filled_in_core(requests, picker):
            filled = self._heads.fill(
                base, [tree_request(requests[i], self.hot_ids) for i in wanted]
            )
            for index, tokens in zip(wanted, filled, strict=True):
                trees[index] = torch.from_numpy(tokens.astype(np.int64))
            return trees
        place = {index: row for row, index in enumerate(wanted)}
        shapes, is_shared = FixedShapes([r.plan for r in requests]), self.config.kind == "medusa"
        for depth, levels in open_depths(shapes):
            rows = LevelRows.of(depth, levels, requests, trees, share_row=is_shared)
            base_of = np.array([place[i] for i in rows.indices], dtype=np.int32)
            self._score(rows, picker, base, np.repeat(base_of, rows.counts))
        return trees

    def grow(self, requests: Sequence[GrowRequest]) -> list[GrownTree]:
        """Grow one tree a request, all in one call of the core."""
        return grow_or_keep(requests, self._room, self.hot_ids, self._grow_in_core)

    def _grow_in_core(self, requests: Sequence[GrowRequest], tasks: Sequence[GrowthTask]) -> None:
        self._heads.grow(self._base_rows(requests), tasks, self._room)

    def _base_rows(self, requests: Sequence[DraftRequest | GrowRequest]) -> Floats:
        """``(B, H)``: h_t of each request, or s_t of the prefix layer."""
        if self._prefix is None:
            rows = [r.state.hidden for r in requests]
            return rows[0] if len(rows) == 1 else np.concatenate(rows)
        self._prefix.catch_up([r.state.prefix for r in requests])
        return np.concatenate([r.state.prefix.feature for r in requests])

    def _score(self, rows: LevelRows, picker: Picker, base: Floats, base_of: Ints) -> None:
        """Evaluate head ``depth`` on the rows of all trees and let the picker choose."""
        tokens: Ints | None = None
        if self.config.kind != "medusa":
            above = [
                tree.numpy()[level.paths]
                for tree, level in zip(rows.trees, rows.levels, strict=True)
            ]
            tokens = np.concatenate(above).astype(np.int32)
        scores = self._heads.scores(rows.depth, base, base_of, tokens)
        picker.pick(rows.scored(torch.from_numpy(scores), self.hot_ids))
