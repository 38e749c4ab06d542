"""Prompts that ship with the package: what is in them, and how they are asked for."""

import json
import re
from pathlib import Path

import pytest

from entmtp.errors import InputError
from entmtp.workload import TASKS, read_prompts, read_task, read_workload

PARTS = ("code", "math", "chat", "creative")
NUM_PROMPTS = 56
LONGEST = 150
WINDOW = 10


def words(text: str) -> tuple[str, ...]:
    """What two prompts share, whatever their case and punctuation."""
    return tuple(re.findall(r"\w+", text.casefold()))


@pytest.mark.parametrize("task", PARTS)
def test_a_task_has_its_prompts(task: str) -> None:
    """56 prompts of one turn each, numbered in order, none blank or very long."""
    records = read_task(task)
    assert [record.id for record in records] == [f"{task}/{n:02d}" for n in range(1, 57)]
    assert {(record.task, len(record.turns), record.reference) for record in records} == {
        (task, 1, None)
    }
    assert all(3 < len(words(record.turns[0])) <= LONGEST for record in records)


def test_no_two_prompts_are_alike() -> None:
    """Over all tasks no run of ten words occurs in two prompts, and no prompt occurs twice."""
    texts = [words(record.turns[0]) for record in read_task("mixed")]
    assert len(set(texts)) == len(texts)
    runs = [{text[i : i + WINDOW] for i in range(len(text) - WINDOW + 1)} for text in texts]
    assert sum(map(len, runs)) == len(set().union(*runs))


@pytest.mark.parametrize("task", PARTS)
def test_both_halves_of_a_task_are_of_one_length(task: str) -> None:
    """Trees are fitted on one half and reported on the other, so neighbours are alike."""
    lengths = [len(words(record.turns[0])) for record in read_task(task)]
    first, second = sum(lengths[::2]), sum(lengths[1::2])
    assert abs(first - second) < 0.15 * (first + second) / 2


def test_mixed_takes_the_tasks_in_turn() -> None:
    """Every record keeps its own task; nothing is left out."""
    assert (*PARTS, "mixed") == TASKS
    mixed = read_task("mixed")
    assert [record.task for record in mixed] == list(PARTS) * NUM_PROMPTS
    for place, part in enumerate(PARTS):
        assert mixed[place::4] == read_task(part)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("limit", [1, 6, 1000])
def test_a_limit_keeps_the_first(task: str, limit: int) -> None:
    """It bounds what is returned, of ``mixed`` too."""
    assert read_task(task, limit) == read_task(task)[:limit]


@pytest.mark.parametrize("task", TASKS)
def test_a_limit_below_one_is_refused(task: str) -> None:
    """Zero prompts is a mistake, not a request."""
    with pytest.raises(InputError, match="limit is 0; it must be at least 1"):
        read_task(task, 0)


def test_an_unknown_task_is_refused() -> None:
    """The message names the value and the tasks."""
    with pytest.raises(InputError, match=r"'poems' is no task; .* code, math, chat, creative, mix"):
        read_task("poems")


def test_a_workload_is_a_task_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare task name is the task; a separator, a dot or a ``Path`` makes it a file."""
    monkeypatch.chdir(tmp_path)
    for name in ("code", "code.jsonl", "prompts"):
        Path(name).write_text(json.dumps({"id": name, "task": "x", "turns": ["hi"]}))
    assert read_workload("code", 3) == read_task("code", 3)
    assert read_workload("mixed") == read_task("mixed")
    for name in ("./code", str(tmp_path / "code"), Path("code")):
        assert [record.id for record in read_workload(name)] == ["code"]
    assert read_workload("code.jsonl", 1) == read_prompts(Path("code.jsonl"))
    assert [record.id for record in read_workload("prompts")] == ["prompts"]


def test_a_workload_that_is_neither_is_refused() -> None:
    """A word may have been meant as a task; a path was meant as a file."""
    with pytest.raises(InputError, match=r"'creativ' is neither a task \(code, .*mixed\) nor a fi"):
        read_workload("creativ")
    for name in ("./code", "none.jsonl", Path("creativ")):
        with pytest.raises(InputError, match="no such file; name a file of prompts"):
            read_workload(name)
