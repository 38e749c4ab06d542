"""Which prompts the target answers, how often, and what it is asked next."""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from entmtp.errors import TrainingError
from entmtp.workload import PromptRecord, read_workload

__all__ = ["Draw", "draw_prompts", "follow_up"]


@dataclass(frozen=True)
class Draw:
    """One answer that is wanted.

    Attributes:
        record: the prompt; only its first turn is used.
        copy: 0 for the first answer to it, 1 for the next one, and so on.
    """

    record: PromptRecord
    copy: int = 0


def draw_prompts(
    workloads: Sequence[str | Path],
    num_prompts: int,
    seed: int,
    *,
    samples: int = 1,
    exclude: Sequence[str | Path] = (),
) -> list[Draw]:
    """Draw prompts as evenly over tasks, and in a task over workloads, as their numbers allow.

    Prompts whose first turns have the same words are drawn once, whatever their case and
    punctuation. Where a workload has too few for its share, its prompts are drawn again.

    Args:
        workloads: tasks and files of prompts, as :func:`entmtp.workload.read_workload` takes them.
        num_prompts: at most this many draws; all there are if there are fewer.
        seed: of the draw and the order.
        samples: most draws of one prompt.
        exclude: workloads that must not be drawn from, such as those that will be tested on.

    Raises:
        TrainingError: there are fewer than two prompts.
    """
    rng = random.Random(seed)
    seen = {_words(turn) for name in exclude for r in read_workload(name) for turn in r.turns}
    tasks: dict[str, list[list[PromptRecord]]] = {}
    for name in workloads:
        pools: dict[str, list[PromptRecord]] = {}
        for record in read_workload(name):
            words = _words(record.turns[0])
            if words not in seen:
                seen.add(words)
                pools.setdefault(record.task, []).append(record)
        for task, pool in pools.items():
            rng.shuffle(pool)
            tasks.setdefault(task, []).append(pool)
    sizes = [sum(map(len, pools)) * samples for pools in tasks.values()]
    drawn: list[Draw] = []
    for pools_of_task, share in zip(tasks.values(), _shares(sizes, num_prompts), strict=True):
        parts = _shares([len(pool) * samples for pool in pools_of_task], share)
        for pool, part in zip(pools_of_task, parts, strict=True):
            copies = (Draw(record, copy) for copy in range(samples) for record in pool)
            drawn += [draw for draw, _ in zip(copies, range(part), strict=False)]
    num_different = len({draw.record.turns[0] for draw in drawn})
    if num_different < 2:
        raise TrainingError(f"{num_different} prompts were found; at least 2 are needed")
    rng.shuffle(drawn)
    return drawn


def follow_up(task: str, rng: random.Random) -> str:
    """A second turn for a conversation of a task."""
    text = resources.files("entmtp").joinpath("data/follow_ups.json").read_text(encoding="utf-8")
    turns = json.loads(text)
    own: list[str] = turns["tasks"].get(task, [])
    choice: str = rng.choice(turns["any"] + own * 2)
    return choice


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """``total`` cut as evenly as sizes allow; the order of sizes is kept."""
    shares, left = [0] * len(sizes), total
    for place, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], left // (len(sizes) - place))
        left -= shares[index]
    return shares


def _words(turn: str) -> str:
    """What two prompts must share to be the same."""
    words: Iterable[str] = re.findall(r"\w+", turn.casefold())
    return " ".join(words) or turn
