"""Which prompts the target answers: an even, seeded draw over prompt files."""

import random
from collections.abc import Sequence
from pathlib import Path

from entmtp.errors import TrainingError
from entmtp.workload import PromptRecord, read_prompts

__all__ = ["draw_prompts"]


def draw_prompts(files: Sequence[Path], num_prompts: int, seed: int) -> list[PromptRecord]:
    """Draw prompts as evenly over files as their lengths allow, in a seeded random order.

    Only first turns matter here; prompts with the same first turn are drawn once.

    Args:
        files: prompt files, any format of :mod:`entmtp.workload`.
        num_prompts: at most this many; all there are if there are fewer.
        seed: of the draw and the order.

    Raises:
        TrainingError: there are fewer than two prompts.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    pools = []
    for file in files:
        pool = list({r.turns[0]: r for r in read_prompts(file) if r.turns[0] not in seen}.values())
        seen.update(record.turns[0] for record in pool)
        rng.shuffle(pool)
        pools.append(pool)
    drawn: list[PromptRecord] = []
    for index, pool in enumerate(sorted(pools, key=len)):
        share = (num_prompts - len(drawn)) // (len(pools) - index)
        drawn.extend(pool[:share])
    if len(drawn) < 2:
        raise TrainingError(f"{len(drawn)} prompts were found; at least 2 are needed")
    rng.shuffle(drawn)
    return drawn
