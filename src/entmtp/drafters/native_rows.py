"""What drafters in the native core have in common: requests, rows that wait, a prefix layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.drafters.base import Coupling, DraftRequest, GrownTree, GrowRequest, bare_tree
from entmtp.drafters.picking import Picker, score_scale
from entmtp.growth import GrowthPlan
from entmtp.kernels.core import NativeKVCache
from entmtp.kernels.drafts import MAX_BEST, BlockPart, NativeBlock
from entmtp.kernels.growth import GrowthRoom, GrowthTask
from entmtp.kernels.trees import TreeRequest, tree_shape

__all__ = [
    "CPU",
    "FIRST_CAPACITY",
    "Floats",
    "Ints",
    "PrefixRunner",
    "PrefixState",
    "float_rows",
    "grow_or_keep",
    "is_filled_in_core",
    "newest_row",
    "tree_request",
]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

CPU = torch.device("cpu")

FIRST_CAPACITY = 256
"""Rows of a new cache."""


def is_filled_in_core(requests: Sequence[DraftRequest], picker: Picker) -> bool:
    """Whether whole trees can be left to the core: no one looks at scores, no rank is too high."""
    return picker.takes_best and all(tree_shape(r.plan).width <= MAX_BEST for r in requests)


def tree_request(request: DraftRequest, hot_ids: Tensor) -> TreeRequest:
    """A request as the core takes it; columns are scores of the hot ids."""
    coupling, plan = request.coupling, request.plan
    if coupling is None:
        return TreeRequest(plan, request.root)
    noise = _noise(coupling, plan.max_depth, hot_ids)
    return TreeRequest(plan, request.root, noise, score_scale(coupling))


def _noise(coupling: Coupling, depth: int, hot_ids: Tensor) -> list[Floats]:
    """Of the columns, at each depth."""
    places = range(coupling.position, coupling.position + depth)
    return [coupling.noise.of(place, hot_ids).numpy() for place in places]


def growth_task(request: GrowRequest, hot_ids: Tensor) -> GrowthTask:
    """A request as the core takes it; columns are scores of the hot ids."""
    coupling, plan = request.coupling, request.plan
    if coupling is None:
        return GrowthTask(plan, request.root, request.copy)
    noise = _noise(coupling, plan.max_depth, hot_ids)
    return GrowthTask(plan, request.root, request.copy, noise, score_scale(coupling))


def grow_or_keep(
    requests: Sequence[GrowRequest],
    room: GrowthRoom,
    hot_ids: Tensor,
    grow: Callable[[Sequence[GrowRequest], Sequence[GrowthTask]], None],
) -> list[GrownTree]:
    """Trees of a batch; those whose root is not worth being scored hold a copy at most.

    Args:
        requests: of the batch.
        room: that ``grow`` fills.
        hot_ids: int64 ``(hot,)`` that are scored.
        grow: the call of the core, for the requests that need it.
    """
    wanted = [i for i, request in enumerate(requests) if request.plan.bare(request.copy) is None]
    if wanted:
        active = [requests[index] for index in wanted]
        grow(active, [growth_task(request, hot_ids) for request in active])
    places = {index: place for place, index in enumerate(wanted)}
    return [
        _grown_tree(request.plan, room, places[index]) if index in places else bare_tree(request)
        for index, request in enumerate(requests)
    ]


def _grown_tree(plan: GrowthPlan, room: GrowthRoom, index: int) -> GrownTree:
    """What the core put into its room."""
    found = room.places[index]
    num_nodes, num_copied = found.num_nodes, found.num_copied
    tokens = room.tokens[index, : num_nodes + num_copied].astype(np.int64)
    kept = room.kept[index, : found.num_kept].tolist()
    return GrownTree(plan, tokens, room.codes[index, :num_nodes].copy(), kept, found.attach)


def float_rows(rows: Tensor) -> Floats:
    """A copy of float32 rows on the CPU."""
    copy: Floats = rows.numpy().astype(np.float32, order="C")
    return copy


def newest_row(rows: Tensor) -> Floats:
    """A copy ``(1, H)`` of the last of float32 rows on the CPU."""
    copy: Floats = rows.numpy()[-1:].astype(np.float32, order="C")
    return copy


@dataclass
class PrefixState:
    """One sequence's cache, the hidden states that wait, and the feature of the newest row read.

    Attributes:
        cache: keys and values of the rows read.
        feature: ``(1, H)`` of the newest row read.
        waiting: rows ``(n, H)``, oldest first.
    """

    cache: NativeKVCache
    feature: Floats
    waiting: list[Floats] = field(default_factory=list)


class PrefixRunner:
    """Runs the prefix layer of Hydra++ over committed tokens, when a tree is drafted."""

    def __init__(self, block: NativeBlock, hidden_size: int) -> None:
        """Wrap a layer in the core."""
        self._block, self._hidden_size = block, hidden_size

    def start(self) -> PrefixState:
        """State of a sequence of which nothing has been read."""
        feature = np.zeros((1, self._hidden_size), dtype=np.float32)
        return PrefixState(self._block.new_cache(FIRST_CAPACITY), feature)

    def catch_up(self, states: Sequence[PrefixState]) -> None:
        """Read what waits, all sequences together."""
        busy = [state for state in states if state.waiting]
        if not busy:
            return
        rows = [np.concatenate(state.waiting) for state in busy]
        parts = []
        for state, own in zip(busy, rows, strict=True):
            length = state.cache.length
            positions = np.arange(length, length + len(own), dtype=np.int32)
            parts.append(BlockPart(state.cache, positions))
            state.cache.begin(len(own))
        hidden = self._block.forward(parts, np.concatenate(rows)).hidden
        end = 0  # where the forward fails, the rows still wait
        for state, own in zip(busy, rows, strict=True):
            end += len(own)
            state.cache.commit(range(len(own)))
            state.waiting = []
            state.feature = hidden[end - 1 : end].copy()
