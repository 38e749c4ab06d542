"""A whole run of training on a tiny target, in a moment."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from entmtp.drafters.heads import Heads
from entmtp.tokenizer import Message
from entmtp.train import (
    DataConfig,
    HeadsRecipe,
    TrainConfig,
    TrainedHeads,
    TrainEvent,
    train_heads,
    write_answers,
)
from entmtp.train.output_sample import OutputSample
from fakes import ByteTokenizer, tiny_target

__all__ = [
    "DATA",
    "NUM_HEADS",
    "RECIPE",
    "LastWordsTokenizer",
    "Stop",
    "run_training",
    "silent",
    "stopping_at",
    "train_on",
    "whole_output",
    "write",
    "write_prompts",
]

NUM_HEADS = 3
RECIPE = HeadsRecipe(
    num_heads=NUM_HEADS, hot_vocab_size=30, epochs=2, batch_size=8, learning_rate=0.01
)
DATA = DataConfig(num_prompts=6, max_new_tokens=6, batch_size=4)


class Stop(Exception):
    """Stands for whatever ends a run: a signal, a crash, a full disk."""


class LastWordsTokenizer(ByteTokenizer):
    """Its chat prompts end in the user's own words, so that answers differ."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode(messages[-1]["content"])


def silent(event: TrainEvent) -> None:
    """Report nothing."""


def whole_output(heads: Heads) -> OutputSample:
    """All hot tokens are scored."""
    return OutputSample(heads.shared_output, torch.arange(len(heads.hot_ids)), 0, torch.Generator())


def stopping_at(last: int, *, stage: str | None = None) -> Callable[[TrainEvent], None]:
    """A progress report that ends the run at some count."""

    def report(event: TrainEvent) -> None:
        if event.done >= last and event.stage == (stage or event.stage):
            raise Stop

    return report


def write_prompts(file: Path, turns: Sequence[str]) -> Path:
    """A file of prompts in our own layout."""
    records = [{"id": f"p{i}", "task": "t", "turns": [turn]} for i, turn in enumerate(turns)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def write(
    folder: Path,
    *,
    data: DataConfig = DATA,
    name: str = "tiny",
    progress: Callable[[TrainEvent], None] = silent,
    turns: Sequence[str] = tuple(f"number {i} of them" for i in range(8)),
    model_seed: int = 1,
) -> None:
    """Answers of a tiny target."""
    file = write_prompts(folder.with_suffix(".jsonl"), turns)
    target = tiny_target(model_seed, tie_embeddings=False)
    write_answers(target, LastWordsTokenizer(), [file], folder, data, progress, model_name=name)


def train_on(
    source: Path,
    folder: Path,
    *,
    recipe: HeadsRecipe = RECIPE,
    progress: Callable[[TrainEvent], None] = silent,
    model_seed: int = 1,
    **config: Any,
) -> TrainedHeads:
    """Heads of a tiny target, on answers that are there."""
    target = tiny_target(model_seed, tie_embeddings=False)
    return train_heads(target, source, folder, TrainConfig("tiny", (recipe,), **config), progress)[
        0
    ]


def run_training(
    folder: Path,
    *,
    recipe: HeadsRecipe = RECIPE,
    progress: Callable[[TrainEvent], None] = silent,
    held_out: float = 0.05,
    **answers: Any,
) -> TrainedHeads:
    """The whole of training in one folder."""
    write(folder, progress=progress, **answers)
    return train_on(folder, folder, recipe=recipe, progress=progress, held_out=held_out)
