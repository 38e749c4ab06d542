"""Prompt sets: one record type, read from our own layout and from the published ones.

The layout is told from the fields of the first record; every further record must have the same.
A file holds one JSON object a line, or one JSON array of objects; it may be compressed with gzip.
The prompts of the tasks in :data:`TASKS` ship with the package.
"""

import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import BinaryIO, cast

from entmtp.errors import InputError

__all__ = [
    "TASKS",
    "PromptRecord",
    "prompts_digest",
    "read_prompts",
    "read_task",
    "read_workload",
]

TASKS = ("code", "math", "chat", "creative", "mixed")

_MIXED = "mixed"
_GZIP_MAGIC = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_HUMAN_ROLES = ("human", "user")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt or conversation; the model under test writes the replies between the turns.

    Attributes:
        id: unique in its file.
        task: what kind of text it is, for example ``code``; reports are grouped by it.
        turns: what the user says, at least one turn, none of them blank.
        reference: a known answer (to the first turn), where the file has one.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    reference: str | None = None


def read_prompts(file: Path, limit: int | None = None) -> list[PromptRecord]:
    """Read the prompts of a file, in its order.

    Layouts, by their fields: our own (id, task, turns), HumanEval (task_id, prompt, entry_point),
    MBPP (task_id, text or prompt, test_list), GSM8K (question, answer), ShareGPT (conversations),
    MT-bench and Spec-Bench (question_id, category, turns), and a bare prompt or text. Other fields
    are not read. Of a ShareGPT conversation the turns of the user are kept, blank ones left out;
    a conversation without any holds no prompt and is passed over.

    Args:
        file: JSON lines or a JSON array, UTF-8, plain or gzip.
        limit: most records to return; the rest of the file is not looked at.

    Raises:
        InputError: the file, the line and the value that cannot be used, and the way out.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; it must be at least 1, or left out to read all")
    try:
        records = list(itertools.islice(_records(file), limit))
    except FileNotFoundError as error:
        raise InputError(f"{file}: no such file; name a file of prompts") from error
    except IsADirectoryError as error:
        raise InputError(f"{file}: a directory; name a file of prompts in it") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{file}: damaged gzip data ({error}); make or copy it again") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror or error})") from error
    if not records:
        raise InputError(f"{file}: no prompts in it; it needs at least one record")
    return records


def read_task(name: str, limit: int | None = None) -> list[PromptRecord]:
    """Read the prompts of a task that ships with the package, in their order.

    Neighbours are of a similar kind, so the records of even and of odd number are alike. ``mixed``
    takes the other tasks in turn; its records keep their own task.

    Args:
        name: one of :data:`TASKS`.
        limit: most records to return.

    Raises:
        InputError: no such task, or a limit below 1.
    """
    if name not in TASKS:
        raise InputError(f"{name!r:.80} is no task; choose one of {', '.join(TASKS)}")
    if name == _MIXED:
        parts = [read_task(part, limit) for part in TASKS if part != _MIXED]
        turns = zip(*parts, strict=True)
        return list(itertools.islice(itertools.chain.from_iterable(turns), limit))
    source = resources.files("entmtp").joinpath(f"data/tasks/{name}.jsonl")
    with resources.as_file(source) as file:
        return read_prompts(file, limit)


def read_workload(name_or_file: str | Path, limit: int | None = None) -> list[PromptRecord]:
    """Read a task that ships with the package, or a file of prompts.

    A text that is exactly the name of a task is the task, even where a file of that name exists;
    anything else is a file. So a file named like a task is given as a path with a separator or a
    dot, such as ``./code`` or ``code.jsonl``. A ``Path`` is always a file.

    Args:
        name_or_file: one of :data:`TASKS`, or a path that :func:`read_prompts` takes.
        limit: most records to return.

    Raises:
        InputError: neither a task nor a file, or what :func:`read_prompts` raises.
    """
    if isinstance(name_or_file, str):
        if name_or_file in TASKS:
            return read_task(name_or_file, limit)
        is_word = os.path.basename(name_or_file) == name_or_file and "." not in name_or_file
        if is_word and not os.path.exists(name_or_file):
            raise InputError(
                f"{name_or_file!r:.80} is neither a task ({', '.join(TASKS)}) nor a file; name "
                "one of these, or a file of prompts"
            )
    return read_prompts(Path(name_or_file), limit)


def prompts_digest(records: list[PromptRecord]) -> str:
    """First 16 hex digits of the SHA-256 of ids and turns in order: names what was run."""
    text = json.dumps([[record.id, record.turns] for record in records], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Row:
    """One JSON object of a file and where it stands there."""

    where: str
    index: int
    fields: Mapping[str, object]

    def error(self, text: str) -> InputError:
        return InputError(f"{self.where}: {text}")

    def text(self, name: str) -> str:
        return self.check_text(name, self.fields[name])

    def check_text(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{name} is {value!r:.80}; it must be a text that is not blank")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"{name} holds half a surrogate pair; write whole characters"
            ) from error
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.fields[name]
        if not isinstance(values, list) or not values:
            raise self.error(f"{name} is {values!r:.80}; it must be a list of at least one text")
        return tuple(
            self.check_text(f"{name}[{index}]", value) for index, value in enumerate(values)
        )

    def reference(self, name: str) -> str | None:
        """A text, the first of a list (of turns, of equally good answers), or nothing."""
        value = self.fields.get(name)
        while isinstance(value, list):
            value = value[0] if value else None
        return None if value is None or value == "" else self.check_text(name, value)

    def identity(self, name: str, prefix: str) -> str:
        """The record's own id; numbers, and the place in the file, go after the prefix."""
        value = self.fields.get(name)
        if value is None:
            return f"{prefix}/{self.index}"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{prefix}/{value}"
        return self.check_text(name, value)


@dataclass(frozen=True)
class _Layout:
    name: str
    required: tuple[str, ...]
    read: Callable[[_Row], PromptRecord | None]


def _read_own(row: _Row) -> PromptRecord:
    return PromptRecord(
        row.identity("id", "prompt"),
        row.text("task"),
        row.texts("turns"),
        row.reference("reference"),
    )


def _read_humaneval(row: _Row) -> PromptRecord:
    answer = row.reference("canonical_solution")
    return PromptRecord(row.identity("task_id", "humaneval"), "code", (row.text("prompt"),), answer)


def _read_mbpp(row: _Row) -> PromptRecord:
    task = row.text("text" if "text" in row.fields else "prompt")
    tests = "\n".join(row.texts("test_list"))
    prompt = f"{task}\nYour code should pass these tests:\n\n{tests}"
    return PromptRecord(row.identity("task_id", "mbpp"), "code", (prompt,), row.reference("code"))


def _read_gsm8k(row: _Row) -> PromptRecord:
    question, answer = row.text("question"), row.text("answer")
    return PromptRecord(row.identity("id", "gsm8k"), "math", (question,), answer)


def _read_sharegpt(row: _Row) -> PromptRecord | None:
    messages = row.fields["conversations"]
    if not isinstance(messages, list):
        raise row.error(f"conversations is {messages!r:.80}; it must be a list of messages")
    turns = []
    for message in messages:
        if not isinstance(message, dict) or not {"from", "value"} <= message.keys():
            raise row.error(
                f"a message is {message!r:.80}; it must be an object with 'from' and 'value'"
            )
        value = message["value"]
        is_blank = isinstance(value, str) and not value.strip()
        if message["from"] in _HUMAN_ROLES and not is_blank:
            turns.append(row.check_text("value", value))
    return PromptRecord(row.identity("id", "sharegpt"), "chat", tuple(turns)) if turns else None


def _read_mtbench(row: _Row) -> PromptRecord:
    name = row.identity("question_id", "question")
    return PromptRecord(name, row.text("category"), row.texts("turns"), row.reference("reference"))


def _read_plain(row: _Row) -> PromptRecord:
    task = row.text("task") if "task" in row.fields else "text"
    prompt = row.text("prompt" if "prompt" in row.fields else "text")
    return PromptRecord(row.identity("id", "prompt"), task, (prompt,), row.reference("reference"))


_LAYOUTS = (
    _Layout("own", ("id", "task", "turns"), _read_own),
    _Layout("MT-bench", ("question_id", "category", "turns"), _read_mtbench),
    _Layout("HumanEval", ("task_id", "prompt", "entry_point"), _read_humaneval),
    _Layout("MBPP", ("task_id", "text", "test_list"), _read_mbpp),
    _Layout("MBPP", ("task_id", "prompt", "test_list"), _read_mbpp),
    _Layout("GSM8K", ("question", "answer"), _read_gsm8k),
    _Layout("ShareGPT", ("conversations",), _read_sharegpt),
    _Layout("plain", ("prompt",), _read_plain),
    _Layout("plain", ("text",), _read_plain),
)


def _records(file: Path) -> Iterator[PromptRecord]:
    layout = None
    first_seen: dict[str, str] = {}
    for row in _rows(file):
        layout = layout or _recognise(row)
        missing = [name for name in layout.required if name not in row.fields]
        if missing:
            raise row.error(
                f"lacks the field {missing[0]!r}, which the first record has; a file holds one "
                f"layout (here: {layout.name})"
            )
        record = layout.read(row)
        if record is None:
            continue
        if record.id in first_seen:
            raise row.error(
                f"the id {record.id!r:.80} was taken by {first_seen[record.id]}; make ids unique"
            )
        first_seen[record.id] = row.where.removeprefix(f"{file}, ")
        yield record


def _recognise(row: _Row) -> _Layout:
    for layout in _LAYOUTS:
        if row.fields.keys() >= set(layout.required):
            return layout
    fields = ", ".join(row.fields) or "none"
    known = "; ".join(f"{layout.name}: {', '.join(layout.required)}" for layout in _LAYOUTS)
    raise row.error(f"its fields ({fields:.80}) are those of no known layout ({known})")


def _rows(file: Path) -> Iterator[_Row]:
    with file.open("rb") as raw:
        is_gzip = raw.peek(2).startswith(_GZIP_MAGIC)
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw) if is_gzip else raw)
        index = 0
        for number, line in enumerate(stream, start=1):
            line = line.removeprefix(_UTF8_MARK) if number == 1 else line
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            if index == 0 and line.lstrip().startswith(b"["):
                yield from _array_rows(file, number, line + stream.read())
                return
            yield _Row(where, index, _as_object(where, _parse(file, number, line.rstrip())))
            index += 1


def _array_rows(file: Path, first_line: int, data: bytes) -> Iterator[_Row]:
    for index, item in enumerate(cast(list[object], _parse(file, first_line, data))):
        where = f"{file}, record {index + 1}"
        yield _Row(where, index, _as_object(where, item))


def _parse(file: Path, first_line: int, data: bytes) -> object:
    """Parse one line, or one array of many lines that starts at ``first_line``."""
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        byte = data[error.start]
        raise InputError(
            f"{file}, line {line}: byte {byte:#04x} is not UTF-8; save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(
            f"{file}, line {line}, column {error.colno}: not JSON ({error.msg}); the file must "
            "hold one JSON object a line, or one array of objects"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}, line {first_line}: not usable as JSON ({error})") from error


def _as_object(where: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {value!r:.80} is not an object; write {{...}} for each prompt")
    return value
