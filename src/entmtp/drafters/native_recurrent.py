"""Drafting with one recurrent module inside the native core: one call for all trees.

The cache of a sequence holds one row for every committed token but the first. Rows of a tree are
held behind them, one depth after the other, and never committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from entmtp.drafters.base import AnyRequest, DraftRequest, DraftTree, GrownTree, GrowRequest
from entmtp.drafters.filling import active_at, root_tokens
from entmtp.drafters.growing import draft_trees
from entmtp.drafters.native_rows import (
    CPU,
    FIRST_CAPACITY,
    Floats,
    Ints,
    float_rows,
    grow_or_keep,
    is_filled_in_core,
    tree_request,
)
from entmtp.drafters.picking import LevelRows, Picker
from entmtp.kernels.core import NativeKVCache
from entmtp.kernels.drafts import BlockPart, BlockText, NativeBlock
from entmtp.kernels.growth import GrowthRoom, GrowthTask
from entmtp.kernels.trees import HeldLevel, held_levels

__all__ = ["NativeRecurrentDrafter"]

_Inputs = tuple[Floats, Ints]
"""Rows ``(n, H)`` and the tokens ``(n,)`` that they are joined with."""


@dataclass
class _State:
    """One sequence.

    Attributes:
        cache: keys and values of the rows read.
        waiting: inputs, oldest first; not empty before the first draft.
        newest: the newest row read, which is read again where nothing waits.
    """

    cache: NativeKVCache
    waiting: list[_Inputs] = field(default_factory=list)
    newest: _Inputs | None = None


@dataclass
class _Branch:
    """One tree while it is being filled.

    Attributes:
        index: of the request in its batch.
        request: what is wanted.
        tree: ``(N,)`` tokens.
        levels: of its plan.
        features: ``(R, H)`` of the depth that was read last.
    """

    index: int
    request: DraftRequest
    tree: Tensor
    levels: tuple[HeldLevel, ...]
    features: Floats


class NativeRecurrentDrafter:
    """Fills trees of any depth from a multi-token module in the core.

    Implements :class:`entmtp.drafters.base.Drafter`; its slow twin in torch is
    :class:`entmtp.drafters.recurrent.RecurrentDrafter`. A row has bitwise the same scores alone,
    in any tree, in any batch and with any number of threads.
    """

    name = "mtp"
    max_depth: int | None = None

    def __init__(self, block: NativeBlock, hot_ids: Tensor, digest: str) -> None:
        """Join a module and what it scores.

        Args:
            block: in the core.
            hot_ids: int64 ``(hot,)``.
            digest: of the module, from :func:`entmtp.drafters.checkpoint.heads_digest`.
        """
        self.hot_ids, self.digest = hot_ids, digest
        self._block = block
        self._room = GrowthRoom()

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Let the rows (h_t, x_{t+1}) of the prompt wait, the root's included."""
        state = _State(self._block.new_cache(FIRST_CAPACITY))
        self.commit(state, hidden, [*prompt[1:], root])
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Let the rows of the root and the accepted nodes wait."""
        state.waiting.append((float_rows(hidden), np.array(tokens, dtype=np.int32)))

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """Fill or grow one tree a request."""
        return draft_trees(self, requests)

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, CPU)
        wanted = active_at(requests, 0)
        if not wanted:
            return trees
        if is_filled_in_core(requests, picker):
            self._fill_in_core([requests[i] for i in wanted], wanted, trees)
            return trees
        none = np.empty((0, 0), dtype=np.float32)
        branches = [
            _Branch(i, requests[i], trees[i], held_levels(requests[i].plan), none) for i in wanted
        ]
        self._read_text(branches, picker)
        for depth in range(1, max(r.plan.max_depth for r in requests)):
            active = [b for b in branches if b.request.plan.max_depth > depth]
            self._read_level(depth, active, picker)
        return trees

    def grow(self, requests: Sequence[GrowRequest]) -> list[GrownTree]:
        """Grow one tree a request, all in one call of the core."""
        return grow_or_keep(requests, self._room, self.hot_ids, self._grow_in_core)

    def _grow_in_core(self, requests: Sequence[GrowRequest], tasks: Sequence[GrowthTask]) -> None:
        waiting, texts = _texts(requests)
        self._block.grow(texts, tasks, self._room)
        for request, inputs in zip(requests, waiting, strict=True):
            _have_read(request.state, inputs)

    def _fill_in_core(
        self, requests: Sequence[DraftRequest], places: Sequence[int], trees: list[Tensor]
    ) -> None:
        """Whole trees of the best children."""
        waiting, texts = _texts(requests)
        filled = self._block.fill(
            texts, [tree_request(request, self.hot_ids) for request in requests]
        )
        for request, inputs, place, tokens in zip(requests, waiting, places, filled, strict=True):
            _have_read(request.state, inputs)
            trees[place] = torch.from_numpy(tokens.astype(np.int64))

    def _read_text(self, branches: Sequence[_Branch], picker: Picker) -> None:
        """Read what waits of each text; the newest row is the root's."""
        waiting = [_waiting(branch.request.state) for branch in branches]
        parts = []
        for branch, (rows, _) in zip(branches, waiting, strict=True):
            cache = branch.request.state.cache
            cache.begin(len(rows) + sum(len(level.nodes) for level in branch.levels))
            start = cache.length
            parts.append(BlockPart(cache, np.arange(start, start + len(rows), dtype=np.int32)))
        ends = np.cumsum([len(rows) for rows, _ in waiting])
        hidden = self._evaluate(0, branches, parts, waiting, (ends - 1).astype(np.int32), picker)
        for branch, inputs, end in zip(branches, waiting, ends.tolist(), strict=True):
            branch.request.state.cache.commit(range(len(inputs[0])))
            _have_read(branch.request.state, inputs)
            branch.features = hidden[end - 1 : end]

    def _read_level(self, depth: int, branches: Sequence[_Branch], picker: Picker) -> None:
        """Read the nodes of ``depth`` that have children."""
        parts, inputs = [], []
        for branch in branches:
            level, cache = branch.levels[depth - 1], branch.request.state.cache
            start = cache.length
            positions = np.full(len(level.nodes), start - 1 + depth, dtype=np.int32)
            parts.append(BlockPart(cache, positions, level.mask, level.held + np.int32(start)))
            tokens = branch.tree.numpy()[level.nodes].astype(np.int32)
            inputs.append((branch.features[level.above], tokens))
        num_rows = sum(len(tokens) for _, tokens in inputs)
        every = np.arange(num_rows, dtype=np.int32)
        hidden, end = self._evaluate(depth, branches, parts, inputs, every, picker), 0
        for branch, (_, tokens) in zip(branches, inputs, strict=True):
            branch.features = hidden[end : end + len(tokens)]
            end += len(tokens)

    def _evaluate(
        self,
        depth: int,
        branches: Sequence[_Branch],
        parts: Sequence[BlockPart],
        inputs: Sequence[_Inputs],
        wanted: Ints,
        picker: Picker,
    ) -> Floats:
        """Run the block, set the children of the wanted rows; features of all rows."""
        plans = [branch.request.plan.levels[depth] for branch in branches]
        rows = LevelRows(
            depth,
            [branch.index for branch in branches],
            [branch.request for branch in branches],
            [branch.tree for branch in branches],
            plans,
            [len(level.parents) for level in plans],
            [level.parent_rows for level in plans],
        )
        features = np.concatenate([row for row, _ in inputs])
        tokens = np.concatenate([token for _, token in inputs])
        output = self._block.forward(parts, features, tokens, wanted)
        picker.pick(rows.scored(torch.from_numpy(output.scores), self.hot_ids))
        return output.hidden


def _texts(
    requests: Sequence[DraftRequest | GrowRequest],
) -> tuple[list[_Inputs], list[BlockText]]:
    """What waits of each text, and as the core takes it."""
    waiting = [_waiting(request.state) for request in requests]
    texts = [
        BlockText(request.state.cache, *inputs)
        for request, inputs in zip(requests, waiting, strict=True)
    ]
    return waiting, texts


def _waiting(state: _State) -> _Inputs:
    """All rows that wait, or the newest one, whose place in the cache is given up for it."""
    if not state.waiting:
        assert state.newest is not None  # noqa: S101 - a prompt has tokens
        state.cache.truncate(state.cache.length - 1)
        state.waiting = [state.newest]
    rows, tokens = zip(*state.waiting, strict=True)
    return np.concatenate(rows), np.concatenate(tokens)


def _have_read(state: _State, inputs: _Inputs) -> None:
    rows, tokens = inputs
    state.waiting, state.newest = [], (rows[-1:].copy(), tokens[-1:].copy())
