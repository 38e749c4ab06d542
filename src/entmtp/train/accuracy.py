"""How often heads are right on answers that were held out: at the end, and on the way."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from entmtp.drafters.heads import Heads
from entmtp.train.batches import Batch
from entmtp.train.data import Answers
from entmtp.train.losses import TOPS, FeatureReader, count_hits

__all__ = ["Accuracy", "Measurement", "measure_accuracy", "measured_sequences", "measured_steps"]

_MAX_SEQUENCES = 40
_MAX_POSITIONS = 2000


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out positions whose true token is among a head's best k, given the true path.

    Attributes:
        num_positions: per head.
        top: per head, the shares for k = 1, 2, 4, 8.
    """

    num_positions: tuple[int, ...]
    top: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Measurement:
    """What heads were worth at one moment of their training, on some of the held-out answers.

    Attributes:
        step: optimiser steps done.
        positions_seen: positions trained on.
        loss: of training, mean since the measurement before; ``None`` before the first step.
        top: per head, the shares for k = 1, 2, 4, 8.
    """

    step: int
    positions_seen: int
    loss: float | None
    top: tuple[tuple[float, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """For a report: ``top1`` and so on hold one share a head."""
        shares = zip(*self.top, strict=True)
        tops = {f"top{k}": list(row) for k, row in zip(TOPS, shares, strict=True)}
        return {
            "step": self.step,
            "positions_seen": self.positions_seen,
            "loss": self.loss,
            **tops,
        }


def measure_accuracy(
    heads: Heads, reader: FeatureReader, batches: Iterable[Batch], num_depths: int
) -> Accuracy:
    """Top-1/2/4/8 accuracy by depth; a token outside the hot vocabulary counts as missed."""
    hits, counts = torch.zeros(num_depths, len(TOPS)), torch.zeros(num_depths)
    for batch in batches:
        found, number = count_hits(heads, reader, batch, num_depths)
        hits, counts = hits + found, counts + number
    shares = hits / counts.clamp(min=1)[:, None]
    return Accuracy(
        tuple(int(n) for n in counts.tolist()),
        tuple(tuple(row) for row in shares.tolist()),
    )


def measured_steps(num_steps: int, measurements: int) -> set[int]:
    """After which optimiser steps heads are measured: evenly spaced, 0 and the last included."""
    return {num_steps * i // measurements for i in range(measurements + 1)}


def measured_sequences(answers: Answers, held_out: Sequence[int]) -> list[int]:
    """Some held-out answers, few enough to be read again and again.

    At most 40 of at most 2,000 positions together, always the same ones of the same answers; where
    each is longer than that, the shortest one.
    """
    lengths = {s: len(answers.positions([s])) for s in held_out}
    usable = [s for s in held_out if lengths[s]]
    random.Random(0).shuffle(usable)
    chosen: list[int] = []
    left = _MAX_POSITIONS
    for sequence in usable:
        if lengths[sequence] <= left and len(chosen) < _MAX_SEQUENCES:
            chosen.append(sequence)
            left -= lengths[sequence]
    return chosen or sorted(usable, key=lengths.__getitem__)[:1]
