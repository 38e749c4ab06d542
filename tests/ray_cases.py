"""Engines that workers of a cluster load in tests, importable there."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from entmtp.engine import Engine
from entmtp.scheduler import FixedScheduler
from exactness import make_drafter
from fakes import ByteTokenizer, tiny_target

__all__ = ["mortal_engine", "tiny_engine"]


def tiny_engine() -> Engine:
    """The same wherever it is made."""
    torch.set_num_threads(1)
    target = tiny_target(seed=5, dtype=torch.float64, vocab_size=256, context_window=512)
    drafter = make_drafter("hydra", target, (), 3)
    return Engine(target, drafter, FixedScheduler.plain(), ByteTokenizer())


def mortal_engine(marker: Path) -> Engine:
    """The same, but the first process that traces with it is killed, and leaves a file."""
    engine = tiny_engine()
    fill = engine.drafter.fill  # type: ignore[attr-defined]

    def fill_or_die(requests: Sequence[Any], picker: Any) -> Any:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return fill(requests, picker)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    engine.drafter.fill = fill_or_die  # type: ignore[attr-defined]
    return engine
