"""State of a drafter that holds a decoder block: a cache in step with the text, read lazily.

Rows that the block has not read yet wait until a tree is drafted, so that plain steps cost
nothing and the waiting rows of all sequences are read in one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.decoder.block import Mixer, RaggedRows
from entmtp.decoder.config import BlockConfig
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.decoder.rope import RotationTable

__all__ = ["BlockInputs", "BlockRows", "BlockRunner", "BlockState"]

CHUNK = 512
"""Waiting rows of a sequence that are read in one pass, which bounds the attention mask."""

_FIRST_CAPACITY = 256
_FIRST_ROTATIONS = 2048

BlockInputs = tuple[Tensor, ...]
"""What a block reads, row by row: tensors ``(n, ...)`` of equal n."""

Evaluate = Callable[[BlockInputs, tuple[Tensor, Tensor], Mixer], Tensor]
"""Inputs, rotation and mixer to features ``(n, H)``."""


@dataclass
class BlockState:
    """One sequence's cache, the inputs that wait, and the feature of the newest row read.

    Attributes:
        cache: keys and values of the rows read.
        waiting: inputs, oldest first.
        feature: ``(1, H)`` of the newest row read.
    """

    cache: TorchKVCache
    feature: Tensor
    waiting: list[BlockInputs] = field(default_factory=list)


@dataclass(frozen=True)
class BlockRows:
    """Rows of one sequence that are read in a pass.

    Attributes:
        state: of the sequence; the rows are appended to its cache, committed.
        inputs: n rows.
        positions: ``(n,)``.
        mask: ``(n, length + n)`` what each row sees; ``None`` is causal.
    """

    state: BlockState
    inputs: BlockInputs
    positions: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_] | None = None


class BlockRunner:
    """Runs a block over the rows of several sequences, each with its own cache."""

    def __init__(
        self, config: BlockConfig, evaluate: Evaluate, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Join a block and the place where it computes."""
        self._shape = (1, config.num_kv_heads, config.head_dim)
        self._hidden_size = config.hidden_size
        self._evaluate = evaluate
        self._dtype, self._device = dtype, device
        self._rotation = RotationTable(config, _FIRST_ROTATIONS, dtype, device)

    def start(self) -> BlockState:
        """State of a sequence of which nothing has been read."""
        return BlockState(
            TorchKVCache(self._shape, _FIRST_CAPACITY, self._dtype, self._device),
            torch.zeros((1, self._hidden_size), dtype=self._dtype, device=self._device),
        )

    def catch_up(self, states: Sequence[BlockState]) -> None:
        """Read what waits, chunk by chunk, all sequences together."""
        while busy := [state for state in states if state.waiting]:
            rows, rests = [], []
            for state in busy:
                inputs, rest = _split_waiting(state)
                positions = np.arange(len(inputs[0]), dtype=np.int64) + state.cache.length
                rows.append(BlockRows(state, inputs, positions))
                rests.append(rest)
            features = self.run(rows)  # where it fails, the rows still wait
            for state, rest, read in zip(busy, rests, features, strict=True):
                state.waiting = rest
                state.feature = read[-1:].clone()

    def run(self, rows: Sequence[BlockRows]) -> list[Tensor]:
        """Features ``(n, H)`` of the rows of each sequence."""
        ragged = RaggedRows(self._device)
        for part in rows:
            num_rows = len(part.inputs[0])
            if part.mask is None:
                ragged.add(part.state.cache, num_rows)
            else:
                visible = torch.from_numpy(part.mask).to(self._device)
                ragged.add_visible(part.state.cache, num_rows, visible)
        positions = np.concatenate([part.positions for part in rows])
        index = torch.from_numpy(positions).to(self._device)
        rotation = self._rotation.at(index, int(positions.max()) + 1)
        inputs = tuple(torch.cat(column) for column in zip(*(r.inputs for r in rows), strict=True))
        features = self._evaluate(inputs, rotation, ragged.mixer(0))
        for part in rows:
            part.state.cache.commit(range(len(part.inputs[0])))
        return [features[start:stop] for start, stop in ragged.bounds()]


def _split_waiting(state: BlockState) -> tuple[BlockInputs, list[BlockInputs]]:
    """The oldest inputs that wait, at most :data:`CHUNK` rows, and what waits on."""
    joined = tuple(torch.cat(column) for column in zip(*state.waiting, strict=True))
    rest = tuple(column[CHUNK:] for column in joined)
    return tuple(column[:CHUNK] for column in joined), [rest] if len(rest[0]) else []
