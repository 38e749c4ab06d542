"""Answers written by the target, with the hidden states that heads will read.

The engine decodes many prompts at once; a drafter that proposes nothing records the hidden states
that pass by, so no second pass over the text is needed. Finished groups of prompts are written as
shards, atomically, and a later run goes on after the last one.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.drafters.recording import RecordingDrafter
from entmtp.engine import Engine, Request
from entmtp.errors import TrainingError
from entmtp.files import replacing
from entmtp.train.jobs import AnswerJob
from entmtp.train.progress import Progress, TrainEvent

__all__ = [
    "SHARD_SIZE",
    "AnswerSizes",
    "Answers",
    "answers_by_job",
    "collect_answers",
    "load_answers",
    "read_sizes",
    "shard_names",
]

SHARD_SIZE = 32
"""Answers in a file; a run that is cut off loses at most the answers of unfinished files."""

_SCHEMA = "2"


@dataclass(frozen=True)
class Answers:
    """Training text: prompts and answers, all sequences end to end.

    Sequence s covers positions ``offsets[s] .. offsets[s + 1] - 1``; its answer begins at
    ``starts[s]``. At position j, ``hidden[j]`` is the state whose logits chose ``tokens[j]``: at an
    answer token, the root that a step at this point starts from. The first token of a sequence was
    chosen by no state; zeros stand there.

    Attributes:
        tokens: int64 ``(T,)``.
        hidden: float16 ``(T, H)``.
        offsets: int64 ``(num_sequences + 1,)``.
        starts: int64 ``(num_sequences,)``.
        groups: int64 ``(num_sequences,)``; answers of one group belong to one prompt.
    """

    tokens: Tensor
    hidden: Tensor
    offsets: Tensor
    starts: Tensor
    groups: Tensor

    @property
    def num_sequences(self) -> int:
        """Answers."""
        return len(self.offsets) - 1

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of answers alone."""
        return int((self.offsets[1:] - self.starts).sum())

    def answer_tokens(self, sequences: Sequence[int] | None = None) -> Tensor:
        """int64: the tokens of some answers, without prompts; of all by default."""
        chosen = range(self.num_sequences) if sequences is None else sequences
        ends = self.offsets[1:]
        return torch.cat([self.tokens[int(self.starts[s]) : int(ends[s])] for s in chosen])

    def positions(self, sequences: Sequence[int]) -> Tensor:
        """Answer positions of some sequences from which at least head 0 has a token to predict."""
        spans = [torch.arange(int(self.starts[s]), int(self.offsets[s + 1]) - 1) for s in sequences]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def sequence_ends(self) -> Tensor:
        """For every position, the end of its sequence, int64 ``(T,)``."""
        return torch.repeat_interleave(self.offsets[1:], self.offsets.diff())


def collect_answers(
    engine: Engine,
    jobs: Sequence[AnswerJob],
    folder: Path,
    stem: str,
    progress: Progress,
    *,
    deadline: float = math.inf,
) -> bool:
    """Let the target answer prompts; write shards into ``folder``.

    Args:
        engine: with a :class:`RecordingDrafter` and the empty tree.
        jobs: what is written, in order.
        folder: must be empty or hold shards of the same jobs.
        stem: of the shards' names, and the stage that ``progress`` is told.
        progress: told the answers done, after every step of the engine.
        deadline: of the monotonic clock, in seconds; shards that are not whole by then are left
            out.

    Returns:
        whether all are written.
    """
    groups = [jobs[i : i + SHARD_SIZE] for i in range(0, len(jobs), SHARD_SIZE)]
    files = list(_shard_files(folder, stem, len(jobs)))
    open_groups = {i: dict[int, list[int]]() for i, file in enumerate(files) if not file.exists()}
    num_done = sum(len(g) for i, g in enumerate(groups) if i not in open_groups)
    num_tokens = 0
    owner: dict[int, tuple[int, int]] = {}
    for group in open_groups:
        for row, job in enumerate(groups[group]):
            owner[engine.submit(Request(job.prompt, job.sampling))] = (group, row)

    def report() -> None:
        left = deadline - time.monotonic()
        progress(TrainEvent(stem, num_done, len(jobs), num_tokens, "tokens", left))

    report()
    while engine.has_work and time.monotonic() < deadline:
        for chunk in engine.step():
            num_tokens += len(chunk.token_ids)
            if chunk.result is None:
                continue
            group, row = owner.pop(chunk.request_id)
            open_groups[group][row] = list(chunk.result.token_ids)
            num_done += 1
            if len(open_groups[group]) == len(groups[group]):
                _write_shard(files[group], groups[group], open_groups.pop(group), engine)
        report()
    return not open_groups


def answers_by_job(folder: Path, stem: str, num_jobs: int) -> dict[int, list[int]]:
    """The answers of shards that are whole, by number of their job.

    Raises:
        TrainingError: a shard is damaged.
    """
    found = {}
    for index, file in enumerate(_shard_files(folder, stem, num_jobs)):
        if not file.exists():
            continue
        shard = _read_shard(file)
        start = 0
        for row, (length, prompt) in enumerate(
            zip(shard["lengths"].tolist(), shard["prompt_lengths"].tolist(), strict=True)
        ):
            answer = shard["tokens"][start + prompt : start + length]
            found[index * SHARD_SIZE + row] = answer.tolist()
            start += length
    return found


def _shard_files(folder: Path, stem: str, num_jobs: int) -> Iterator[Path]:
    for index in range((num_jobs + SHARD_SIZE - 1) // SHARD_SIZE):
        yield folder / f"{stem}-{index:05d}.safetensors"


@dataclass(frozen=True)
class AnswerSizes:
    """What can be known of answers without their states.

    Attributes:
        counts: answers of each file.
        lengths: int64 ``(num_sequences,)`` tokens of prompt and answer.
        prompt_lengths: int64 ``(num_sequences,)``.
        groups: int64 ``(num_sequences,)``.
    """

    counts: tuple[int, ...]
    lengths: Tensor
    prompt_lengths: Tensor
    groups: Tensor


def shard_names(folder: Path) -> list[str]:
    """Names of the files of answers that are whole, in order."""
    return sorted(file.name for file in folder.glob("*-*.safetensors"))


def read_sizes(folder: Path, names: Sequence[str]) -> AnswerSizes:
    """Look at files of answers without reading their states.

    Raises:
        TrainingError: there is none, or one is missing or damaged.
    """
    if not names:
        raise TrainingError(f"{folder}: no answers to train on; write some first")
    keys = ("lengths", "prompt_lengths", "groups")
    shards = [_read_shard(folder / name, keys) for name in names]
    joined = [torch.cat([shard[key] for shard in shards]) for key in keys]
    return AnswerSizes(tuple(len(shard["lengths"]) for shard in shards), *joined)


def load_answers(
    folder: Path, names: Sequence[str] | None = None, sequences: Sequence[int] | None = None
) -> Answers:
    """Read answers; no more is held in memory than what is asked for and one file.

    Args:
        folder: of the files.
        names: of the files; all by default.
        sequences: numbers of the answers that are wanted, ascending; all by default.

    Raises:
        TrainingError: there is none, or a file is missing or damaged.
    """
    names = shard_names(folder) if names is None else names
    sizes = read_sizes(folder, names)
    is_wanted = torch.ones(len(sizes.lengths), dtype=torch.bool)
    if sequences is not None:
        is_wanted.zero_()[list(sequences)] = True
    lengths = sizes.lengths[is_wanted]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    total = int(offsets[-1])
    tokens, hidden = torch.empty(total, dtype=torch.int64), torch.empty(0)
    place = 0
    counts = list(sizes.counts)
    parts = zip(torch.split(is_wanted, counts), torch.split(sizes.lengths, counts), strict=True)
    for name, (is_wanted_here, lengths_here) in zip(names, parts, strict=True):
        if not bool(is_wanted_here.any()):
            continue
        shard = _read_shard(folder / name)
        rows = torch.repeat_interleave(is_wanted_here, lengths_here)
        if place == 0:
            hidden = shard["hidden"].new_empty((total, shard["hidden"].shape[1]))
        end = place + int(rows.sum())
        tokens[place:end], hidden[place:end] = shard["tokens"][rows], shard["hidden"][rows]
        place = end
    starts = offsets[:-1] + sizes.prompt_lengths[is_wanted]
    return Answers(tokens, hidden, offsets, starts, sizes.groups[is_wanted])


def _read_shard(file: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file; all by default."""
    if not file.exists():
        raise TrainingError(
            f"{file}: missing, but the run began with it; put it back, or use another output folder"
        )
    try:
        with safe_open(file, framework="pt") as shard:
            schema = (shard.metadata() or {}).get("schema")
            wanted = (shard.keys() if names is None else names) if schema == _SCHEMA else ()
            found = {name: shard.get_tensor(name) for name in wanted}
    except Exception as error:  # the reader's own exception type is not exported
        raise TrainingError(f"{file}: damaged ({error}); delete it and run again") from error
    if schema != _SCHEMA:
        raise TrainingError(
            f"{file}: answers of schema {schema!r}, this version reads {_SCHEMA}; use another "
            "output folder"
        )
    return found


def _write_shard(
    file: Path, jobs: Sequence[AnswerJob], rows: dict[int, list[int]], engine: Engine
) -> None:
    drafter = engine.drafter
    if not isinstance(drafter, RecordingDrafter):
        raise TypeError("answers are collected through a RecordingDrafter")
    texts = [[*job.prompt, *rows[row]] for row, job in enumerate(jobs)]
    states = []
    for text in texts:
        taken = drafter.take(text)
        states += [taken.new_zeros((1, taken.shape[1])), taken]
    tensors = {
        "tokens": torch.tensor([t for text in texts for t in text], dtype=torch.int32),
        "hidden": torch.cat(states).to(torch.float16),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64),
        "prompt_lengths": torch.tensor([len(job.prompt) for job in jobs], dtype=torch.int64),
        "groups": torch.tensor([job.group for job in jobs], dtype=torch.int64),
    }
    with replacing(file) as temporary:
        save_file(tensors, temporary, metadata={"schema": _SCHEMA})
