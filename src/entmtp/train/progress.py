"""What a run tells of itself while it works."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Progress", "TrainEvent"]


@dataclass(frozen=True)
class TrainEvent:
    """How far a stage has come.

    Attributes:
        stage: ``answers``, ``follow-ups``, or a kind of heads.
        done: answers or optimiser steps, those of an earlier run included.
        total: of these.
        num_items: tokens written by this run, or positions trained on so far.
        unit: of ``num_items``.
        seconds_left: until the stage ends whatever is done by then.
        loss: of training, mean since the last measurement.
        top1: by head, the last measured share of held-out tokens that were its first choice.
    """

    stage: str
    done: int
    total: int
    num_items: int
    unit: Literal["tokens", "positions"]
    seconds_left: float = math.inf
    loss: float | None = None
    top1: tuple[float, ...] = ()


Progress = Callable[[TrainEvent], None]
