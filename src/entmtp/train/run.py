"""The whole of ``entmtp train``: answers, then one set of heads after another."""

import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.checkpoint import save_heads
from entmtp.drafters.recording import RecordingDrafter
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import TrainingError
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Target
from entmtp.tokenizer import Tokenizer
from entmtp.train.config import DataConfig, HeadsRecipe
from entmtp.train.data import Answers, answers_by_job, collect_answers, load_answers
from entmtp.train.jobs import AnswerJob, first_jobs, second_jobs
from entmtp.train.trainer import Accuracy, TargetTensors, train_kind

__all__ = ["TrainConfig", "TrainedHeads", "train_heads"]

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        model_name: of the target; heads carry it.
        data: what the target writes.
        recipes: the sets of heads to train, in order.
        quantize: store the heads as int8.
    """

    model_name: str
    data: DataConfig
    recipes: tuple[HeadsRecipe, ...]
    quantize: bool = False


@dataclass(frozen=True)
class TrainedHeads:
    """One set of heads that was written.

    Attributes:
        kind: of modules.
        file: its safetensors file.
        accuracy: on held-out answers.
    """

    kind: str
    file: Path
    accuracy: Accuracy


def train_heads(  # noqa: PLR0913 - the last is keyword-only
    target: Target,
    tokenizer: Tokenizer,
    workloads: Sequence[str | Path],
    folder: Path,
    config: TrainConfig,
    progress: Progress,
    *,
    exclude: Sequence[str | Path] = (),
) -> list[TrainedHeads]:
    """Write answers, train heads, measure them; goes on where an earlier run in ``folder`` ended.

    Writes ``answers/``, checkpoints, ``<kind>.safetensors`` and ``report.json`` into ``folder``.

    Raises:
        TrainingError: the folder belongs to a run with other settings or cannot be written to, or
            the data is too thin.
        InputError: prompts cannot be read.
    """
    window = target.config.context_window
    jobs = first_jobs(workloads, exclude, tokenizer, window, config.data)
    try:
        return _train(target, tokenizer, jobs, folder, config, progress)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder}: cannot store the run there ({error}); free some space or use another "
            "output folder, and run again"
        ) from error


def _train(
    target: Target,
    tokenizer: Tokenizer,
    jobs: Sequence[AnswerJob],
    folder: Path,
    config: TrainConfig,
    progress: Progress,
) -> list[TrainedHeads]:
    answers_folder = folder / "answers"
    answers_folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder / "settings.json", config.model_name, jobs, config.data)
    if not any(folder.glob("*.checkpoint.pt")):  # once training has begun, its text stays
        _write_answers(target, tokenizer, jobs, config.data, answers_folder, progress)
    answers = load_answers(answers_folder)
    held_out = _hold_out(answers, config.data)
    tensors = TargetTensors(
        target.embedding().cpu().float(), lambda ids: _rows(target, ids), _block_of(target)
    )
    trained = []
    for recipe in config.recipes:
        heads, accuracy = train_kind(answers, held_out, recipe, tensors, folder, progress)
        file = folder / f"{recipe.kind}.safetensors"
        save_heads(heads, file, config.model_name, quantize=config.quantize)
        trained.append(TrainedHeads(recipe.kind, file, accuracy))
    if trained:
        _write_report(folder / "report.json", answers, config, trained)
    return trained


def _rows(target: Target, ids: Tensor) -> Tensor:
    return target.output_rows(ids).cpu()


def _block_of(target: Target) -> BlockConfig:
    """Sizes of the target's blocks, for modules with a block of their own."""
    names = BlockConfig.__dataclass_fields__
    return BlockConfig(**{name: getattr(target.config, name) for name in names})


def _check_settings(
    file: Path, model_name: str, jobs: Sequence[AnswerJob], config: DataConfig
) -> None:
    """Refuse to mix the answers of two different runs in one folder."""
    prompts = json.dumps([job.prompt for job in jobs])
    digest = hashlib.sha256(prompts.encode()).hexdigest()[:16]
    settings = {"model": model_name, "prompts": digest, **asdict(config)}
    for free in ("held_out", "batch_size", "answer_minutes"):  # change nothing in the answers
        del settings[free]
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"{file}: damaged ({error}); use another output folder, or delete this one"
            ) from error
        if found != settings:
            raise TrainingError(
                f"{file}: this folder holds a run with other prompts or settings; use another "
                "output folder, or delete this one"
            )
        return
    _write_text(file, json.dumps(settings, indent=1))


def _write_answers(
    target: Target,
    tokenizer: Tokenizer,
    jobs: Sequence[AnswerJob],
    config: DataConfig,
    folder: Path,
    progress: Progress,
) -> None:
    """First answers, then second turns behind some of them."""
    engine = Engine(
        target,
        RecordingDrafter(torch.float16),
        FixedScheduler.plain(),
        tokenizer,
        EngineLimits(max_batch_size=config.batch_size),
    )

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, done, total, "")

    deadline = time.monotonic() + (config.answer_minutes * 60 or math.inf)
    is_whole = collect_answers(engine, jobs, folder, "answers", report, deadline=deadline)
    if not is_whole or not config.follow_ups:
        return
    answers = answers_by_job(folder, "answers", len(jobs))
    further = second_jobs(jobs, answers, tokenizer, target.config.context_window, config)
    collect_answers(engine, further, folder, "follow-ups", report, deadline=deadline)


def _hold_out(answers: Answers, config: DataConfig) -> list[int]:
    """Sequences of whole groups, so that no prompt is on both sides."""
    groups = sorted(set(answers.groups.tolist()))
    num_held = max(1, round(len(groups) * config.held_out))
    if num_held >= len(groups):
        raise TrainingError(
            f"answers to {len(groups)} prompts leave none to train on; ask for more prompts"
        )
    held = set(random.Random(config.seed).sample(groups, num_held))
    return [s for s, group in enumerate(answers.groups.tolist()) if group in held]


def _write_report(
    file: Path,
    answers: Answers,
    config: TrainConfig,
    trained: Sequence[TrainedHeads],
) -> None:
    report = {
        "schema": 1,
        "model": config.model_name,
        "num_answers": answers.num_sequences,
        "num_tokens": answers.num_answer_tokens,
        "num_prompt_tokens": len(answers.tokens) - answers.num_answer_tokens,
        "data": asdict(config.data),
        "quantized": config.quantize,
        "heads": [
            {**asdict(recipe), "file": heads.file.name, "held_out": asdict(heads.accuracy)}
            for recipe, heads in zip(config.recipes, trained, strict=True)
        ],
    }
    _write_text(file, json.dumps(report, indent=1))


def _write_text(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    os.replace(temporary, file)
