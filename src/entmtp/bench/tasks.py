"""Prompts in groups that are reported apart: a task or a file each, or the groups of Spec-Bench."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from entmtp.calibrate.collect import TracePrompt
from entmtp.calibrate.session import encode_records
from entmtp.engine import Engine
from entmtp.errors import InputError
from entmtp.workload import TASKS, PromptRecord, prompts_digest, read_workload

__all__ = ["Task", "encode_tasks", "read_tasks"]

_SUFFIXES = (".gz", ".jsonl", ".json")


@dataclass(frozen=True)
class Task:
    """Prompts that are reported together.

    Attributes:
        name: of the shipped task, of the file without its suffixes, or of the group.
        records: as they were read.
        prompts: the first turn of each, encoded.
        all_turns: whether the later turns are asked too.
    """

    name: str
    records: tuple[PromptRecord, ...]
    prompts: tuple[TracePrompt, ...]
    all_turns: bool = False

    @property
    def digest(self) -> str:
        """Names what is run."""
        return prompts_digest(list(self.records))

    @property
    def kinds(self) -> frozenset[str]:
        """What kinds of text the records say they are."""
        return frozenset(record.task for record in self.records)

    def turns(self, prompt: int) -> tuple[str, ...]:
        """What the user says."""
        turns = self.records[prompt].turns
        return turns if self.all_turns else turns[:1]


def read_tasks(names: Iterable[str], limit: int | None = None) -> dict[str, list[PromptRecord]]:
    """Name of a task -> its records, for what a user names.

    Args:
        names: tasks that ship, or files.
        limit: most records of each.

    Raises:
        InputError: one cannot be read, or two have one name.
    """
    found: dict[str, list[PromptRecord]] = {}
    for given in names:
        name = given if given in TASKS else _stem(given)
        if name in found:
            raise InputError(
                f"{given!r:.80} would be reported as {name!r}, which another one is; name each "
                "task once, and give files names of their own"
            )
        found[name] = read_workload(given, limit)
    return found


def encode_tasks(
    engine: Engine, records: dict[str, list[PromptRecord]], *, all_turns: bool = False
) -> list[Task]:
    """Tasks with their prompts under the model's chat template, or as raw text where it has none.

    Raises:
        InputError: a prompt that occurs twice, or leaves no room for an answer.
    """
    return [
        Task(name, tuple(found), tuple(_encoded(engine, name, found)), all_turns)
        for name, found in records.items()
    ]


def _encoded(engine: Engine, name: str, records: Sequence[PromptRecord]) -> list[TracePrompt]:
    try:
        return encode_records(engine, records)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _stem(given: str) -> str:
    name = Path(given).name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name or given
