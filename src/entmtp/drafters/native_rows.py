"""What drafters in the native core have in common: rows that wait, and caches in step with text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from entmtp.kernels.core import NativeKVCache
from entmtp.kernels.drafts import BlockPart, NativeBlock

__all__ = ["FIRST_CAPACITY", "Floats", "Ints", "PrefixRunner", "PrefixState", "float_rows"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

FIRST_CAPACITY = 256
"""Rows of a new cache."""


def float_rows(rows: Tensor) -> Floats:
    """A copy of float32 rows on the CPU."""
    copy: Floats = np.array(rows.numpy(), dtype=np.float32, order="C")
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
