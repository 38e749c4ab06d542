"""Spec-Bench: its question file, its groups, its answer files, its measures.

Its speed of a question is new tokens over wall time, the prompt included; that of a group is the
mean over questions, and the speed-up the ratio of two such means. Mean accepted tokens are those of
a step, over all steps. An answer file here counts tokens as they were emitted, for plain decoding
too, where Spec-Bench's own script encodes the plain text again.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import uuid4

from entmtp.bench.methods import PLAIN
from entmtp.bench.runs import Run
from entmtp.bench.summary import by_method
from entmtp.bench.tasks import Task
from entmtp.errors import InputError
from entmtp.files import write_text
from entmtp.workload import PromptRecord, read_prompts

__all__ = ["GROUPS", "OVERALL", "group_measures", "read_questions", "write_answers"]

GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
OVERALL = "overall"

_PREFIX = "question/"
_MT_BENCH = frozenset(
    (
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    )
)


def read_questions(file: Path, limit: int | None = None) -> dict[str, list[PromptRecord]]:
    """Group -> its questions, in the order of :data:`GROUPS`.

    Args:
        file: JSON lines with question_id, category and turns.
        limit: most questions of each group.

    Raises:
        InputError: not such a file, or a category of no group.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; it must be at least 1, or left out to read all")
    groups: dict[str, list[PromptRecord]] = {group: [] for group in GROUPS}
    for record in read_prompts(file):
        group = "mt_bench" if record.task in _MT_BENCH else record.task
        if group not in groups:
            raise InputError(
                f"{file}: question {record.id!r} is of category {record.task!r}, which is none of "
                "Spec-Bench; give its question.jsonl, or leave out --spec-bench"
            )
        if limit is None or len(groups[group]) < limit:
            groups[group].append(record)
    return {group: found for group, found in groups.items() if found}


def write_answers(
    folder: Path, model: str, tasks: Sequence[Task], runs: Sequence[Sequence[Run]]
) -> list[Path]:
    """Write one answer file a method; returns the files.

    Args:
        folder: that is there.
        model: its name.
        tasks: the groups.
        runs: of each group.

    Raises:
        InputError: a file cannot be written.
    """
    lines: dict[str, list[str]] = {}
    for task, found in zip(tasks, runs, strict=True):
        for method, own in by_method(found).items():
            model_id = f"{Path(model).name}-{method}"
            for prompt in dict.fromkeys(run.prompt for run in own):
                same = [run for run in own if run.prompt == prompt]
                answer = _answer(task.records[prompt], model_id, same)
                lines.setdefault(method, []).append(json.dumps(answer, ensure_ascii=False))
    files = []
    for method, own_lines in lines.items():
        file = folder / f"{Path(model).name}-{method.replace(':', '-')}.jsonl"
        try:
            write_text(file, "\n".join(own_lines))
        except OSError as error:
            raise InputError(f"{file}: cannot be written ({error})") from error
        files.append(file)
    return files


def group_measures(
    tasks: Sequence[Task], runs: Sequence[Sequence[Run]]
) -> dict[str, dict[str, dict[str, float | None]]]:
    """``[method][group]`` -> speed-up over plain decoding and mean accepted tokens, and overall."""
    groups = {task.name: by_method(found) for task, found in zip(tasks, runs, strict=True)}
    methods = list(dict.fromkeys(name for found in groups.values() for name in found))
    measures: dict[str, dict[str, dict[str, float | None]]] = {}
    for method in methods:
        own = {group: found[method] for group, found in groups.items() if method in found}
        plain = {
            group: _of_prompts(groups[group][PLAIN], {run.prompt for run in found})
            for group, found in own.items()
        }
        measures[method] = {group: _measure(own[group], plain[group]) for group in own}
        measures[method][OVERALL] = _measure(
            [run for found in own.values() for run in found],
            [run for found in plain.values() for run in found],
        )
    return measures


def _answer(record: PromptRecord, model_id: str, runs: Sequence[Run]) -> Mapping[str, Any]:
    """One line; a choice is a repeat."""
    number = record.id.removeprefix(_PREFIX)
    return {
        "question_id": int(number) if number.isdigit() else record.id,
        "category": record.task,
        "answer_id": uuid4().hex,
        "model_id": model_id,
        "choices": [
            {
                "index": run.repeat,
                "turns": [turn.text for turn in run.turns],
                "decoding_steps": [turn.num_steps for turn in run.turns],
                "new_tokens": [len(turn.tokens) for turn in run.turns],
                "wall_time": [turn.prefill_s + turn.decode_s for turn in run.turns],
                "accept_lengths": [n for turn in run.turns for n in turn.accept_lengths],
            }
            for run in runs
        ],
        "tstamp": time.time(),
    }


def _measure(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, float | None]:
    lengths = [length for run in runs for turn in run.turns for length in turn.accept_lengths]
    return {
        "speed_up": _speed(runs) / _speed(plain),
        "mean_accepted_tokens": fmean(lengths) if lengths else None,
    }


def _of_prompts(runs: Sequence[Run], prompts: set[int]) -> list[Run]:
    return [run for run in runs if run.prompt in prompts]


def _speed(runs: Sequence[Run]) -> float:
    """Mean over questions, and repeats, of tokens a second."""
    return fmean(
        run.num_tokens / sum(turn.prefill_s + turn.decode_s for turn in run.turns) for run in runs
    )
