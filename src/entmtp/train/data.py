"""Answers written by the target, with the hidden states that heads will read.

The engine decodes many prompts at once; a drafter that proposes nothing records the hidden states
that pass by, so no second pass over the text is needed. Finished groups of prompts are written as
shards, atomically, and a later run goes on after the last one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, Request
from entmtp.errors import TrainingError
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed

__all__ = ["Answers", "RecordingDrafter", "collect_answers", "load_answers"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Answers:
    """Training text, all sequences end to end.

    Sequence s covers positions ``offsets[s] .. offsets[s + 1] - 1``. At position j, ``hidden[j]``
    is the state whose logits chose ``tokens[j]``: the root that a step at this point starts from.

    Attributes:
        tokens: int64 ``(T,)``, answer tokens only.
        hidden: float16 ``(T, H)``.
        offsets: int64 ``(num_sequences + 1,)``.
    """

    tokens: Tensor
    hidden: Tensor
    offsets: Tensor

    @property
    def num_sequences(self) -> int:
        """Answers."""
        return len(self.offsets) - 1

    def positions(self, sequences: Sequence[int]) -> Tensor:
        """Positions of some sequences from which at least head 0 has a token to predict."""
        spans = [
            torch.arange(int(self.offsets[s]), int(self.offsets[s + 1]) - 1) for s in sequences
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def sequence_ends(self) -> Tensor:
        """For every position, the end of its sequence, int64 ``(T,)``."""
        return torch.repeat_interleave(self.offsets[1:], self.offsets.diff())


class RecordingDrafter(EmptyDrafter):
    """Proposes nothing and keeps, for each prompt, the states that its answer was chosen from."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, ...], list[Tensor]] = {}

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> list[Tensor]:  # type: ignore[override]
        """Start a record with the state at the last prompt token."""
        record = self.records[tuple(prompt)] = [hidden[-1:].to("cpu", torch.float16)]
        return record

    def commit(self, state: list[Tensor], hidden: Tensor, tokens: Sequence[int]) -> None:  # type: ignore[override]
        """Append the state at the root."""
        state.append(hidden.to("cpu", torch.float16))


def collect_answers(  # noqa: PLR0913 - keyword-only beyond the fifth
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    folder: Path,
    progress: Progress,
    *,
    shard_size: int = 32,
    max_seconds: float = math.inf,
) -> None:
    """Let the target answer prompts; write shards into ``folder``.

    Args:
        engine: with a :class:`RecordingDrafter` and the empty tree.
        prompts: token ids, distinct.
        sampling: how answers are chosen; each prompt gets a seed of its own.
        folder: must be empty or hold shards of the same prompts and settings.
        progress: told the answers done.
        shard_size: prompts a shard.
        max_seconds: stop after this long; shards that are not whole by then are left out.
    """
    groups = [prompts[i : i + shard_size] for i in range(0, len(prompts), shard_size)]
    files = [folder / f"answers-{index:05d}.safetensors" for index in range(len(groups))]
    open_groups = {i: dict[int, list[int]]() for i, file in enumerate(files) if not file.exists()}
    num_done = sum(len(g) for i, g in enumerate(groups) if i not in open_groups)
    owner: dict[int, tuple[int, int]] = {}
    for group in open_groups:
        for row, prompt in enumerate(groups[group]):
            seed = derive_seed(sampling.seed or 0, group * shard_size + row)
            request = Request(prompt, replace(sampling, seed=seed))
            owner[engine.submit(request)] = (group, row)
    progress("answers", num_done, len(prompts))
    deadline = time.monotonic() + max_seconds
    while engine.has_work and time.monotonic() < deadline:
        for chunk in engine.step():
            if chunk.result is None:
                continue
            group, row = owner.pop(chunk.request_id)
            open_groups[group][row] = list(chunk.result.token_ids)
            num_done += 1
            progress("answers", num_done, len(prompts))
            if len(open_groups[group]) == len(groups[group]):
                _write_shard(files[group], groups[group], open_groups.pop(group), engine)


def load_answers(folder: Path) -> Answers:
    """Read all shards of a folder.

    Raises:
        TrainingError: there is none, or one is damaged.
    """
    files = sorted(folder.glob("answers-*.safetensors"))
    if not files:
        raise TrainingError(f"{folder}: no answers to train on")
    tokens, hidden, lengths = [], [], []
    for file in files:
        try:
            with safe_open(file, framework="pt") as shard:
                tokens.append(shard.get_tensor("tokens"))
                hidden.append(shard.get_tensor("hidden"))
                lengths.append(shard.get_tensor("lengths"))
        except Exception as error:  # the reader's own exception type is not exported
            raise TrainingError(f"{file}: damaged ({error}); delete it and run again") from error
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)))
    return Answers(torch.cat(tokens), torch.cat(hidden), offsets)


def _write_shard(
    file: Path, prompts: Sequence[tuple[int, ...]], rows: dict[int, list[int]], engine: Engine
) -> None:
    drafter = engine.drafter
    if not isinstance(drafter, RecordingDrafter):
        raise TypeError("answers are collected through a RecordingDrafter")
    answers = [rows[row] for row in range(len(prompts))]
    states = [torch.cat(drafter.records.pop(prompt)) for prompt in prompts]
    kept = [state[: len(answer)] for state, answer in zip(states, answers, strict=True)]
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    save_file(
        {
            "tokens": torch.tensor([t for answer in answers for t in answer], dtype=torch.int64),
            "hidden": torch.cat(kept),
            "lengths": torch.tensor([len(answer) for answer in answers], dtype=torch.int64),
        },
        temporary,
        metadata={"schema": "1", "num_prompts": json.dumps(len(prompts))},
    )
    os.replace(temporary, file)
