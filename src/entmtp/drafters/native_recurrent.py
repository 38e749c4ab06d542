"""Drafting with one recurrent module inside the native core: one call a depth.

The cache of a sequence holds one row for every committed token but the first. Rows of a tree are
held behind them, one depth after the other, and never committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.drafters.base import DraftRequest, DraftTree
from entmtp.drafters.filling import active_at, root_tokens
from entmtp.drafters.native_rows import FIRST_CAPACITY, Floats, Ints, float_rows
from entmtp.drafters.picking import (
    BestChildren,
    LevelRows,
    Picker,
    ScoredRows,
    row_noise,
    set_ranked_children,
)
from entmtp.kernels.core import NativeKVCache
from entmtp.kernels.drafts import MAX_BEST, BlockPart, NativeBlock, Want
from entmtp.topology import Topology

__all__ = ["NativeRecurrentDrafter"]

_CPU = torch.device("cpu")

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


@dataclass(frozen=True)
class _HeldLevel:
    """The rows of one depth of a tree: its nodes that have children.

    Attributes:
        nodes: ``(R,)``.
        above: ``(R,)`` row of each node's parent among those of the depth above.
        mask: uint8 ``(R, held + R)`` which rows of the tree each sees.
        held: ``(held,)`` depths of the rows before, less 1.
    """

    nodes: npt.NDArray[np.int64]
    above: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]
    held: Ints


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
    levels: tuple[_HeldLevel, ...]
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
        self._tokens = hot_ids.numpy()

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

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Fill one tree a request, depth by depth."""
        trees = self.fill(requests, BestChildren())
        return [DraftTree(r.plan, tokens) for r, tokens in zip(requests, trees, strict=True)]

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, _CPU)
        none = np.empty((0, 0), dtype=np.float32)
        branches = [
            _Branch(i, requests[i], trees[i], _held_levels(requests[i].plan), none)
            for i in active_at(requests, 0)
        ]
        if branches:
            self._read_text(branches, picker)
        for depth in range(1, max((r.plan.max_depth for r in requests), default=0)):
            active = [b for b in branches if b.request.plan.max_depth > depth]
            self._read_level(depth, active, picker)
        return trees

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
        for branch, (rows, tokens), end in zip(branches, waiting, ends.tolist(), strict=True):
            state: _State = branch.request.state
            state.cache.commit(range(len(rows)))
            state.waiting, state.newest = [], (rows[-1:].copy(), tokens[-1:].copy())
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
        is_ranked = picker.takes_best and rows.width <= MAX_BEST
        want = Want(rows.width, row_noise(rows)) if is_ranked else Want()
        output = self._block.forward(parts, features, tokens, wanted, want)
        if is_ranked:
            set_ranked_children(rows, output.best, self._tokens)
        else:
            scores = torch.from_numpy(output.scores)
            picker.pick(ScoredRows(**vars(rows), scores=scores, hot_ids=self.hot_ids))
        return output.hidden


def _waiting(state: _State) -> _Inputs:
    """All rows that wait, or the newest one, whose place in the cache is given up for it."""
    if not state.waiting:
        assert state.newest is not None  # noqa: S101 - a prompt has tokens
        state.cache.truncate(state.cache.length - 1)
        state.waiting = [state.newest]
    rows, tokens = zip(*state.waiting, strict=True)
    return np.concatenate(rows), np.concatenate(tokens)


@lru_cache(maxsize=1024)
def _held_levels(plan: Topology) -> tuple[_HeldLevel, ...]:
    """Rows of depth 1 and below that have children."""
    found: list[_HeldLevel] = []
    row_of: dict[int, int] = {}
    depths: list[int] = []
    above = np.zeros(1, dtype=np.int64)  # nodes that were rows of the depth above
    for depth, level in enumerate(plan.levels[1:], start=1):
        held, first = np.array(depths, dtype=np.int32), len(depths)
        row_of |= {node: first + row for row, node in enumerate(level.parents.tolist())}
        depths += [depth - 1] * len(level.parents)
        mask = np.zeros((len(level.parents), len(depths)), dtype=np.uint8)
        for row, path in enumerate(level.paths.tolist()):
            mask[row, [row_of[node] for node in path[1:]]] = 1
        places = np.searchsorted(above, level.paths[:, -2])
        found.append(_HeldLevel(level.parents, places, mask, held))
        above = level.parents
    return tuple(found)
