"""The two parts of ``entmtp train``: answers, then one set of heads after another."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.checkpoint import load_heads, save_heads
from entmtp.drafters.heads import Heads
from entmtp.drafters.recording import RecordingDrafter
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import TrainingError
from entmtp.files import write_text
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Target
from entmtp.target.digest import model_digest
from entmtp.tokenizer import Tokenizer
from entmtp.train.accuracy import Accuracy, Measurement
from entmtp.train.config import DataConfig, HeadsRecipe, TrainConfig
from entmtp.train.data import answers_by_job, collect_answers
from entmtp.train.files import open_folder
from entmtp.train.jobs import AnswerJob, first_jobs, second_jobs
from entmtp.train.progress import Progress
from entmtp.train.settings import TEXT_FILE, check_states, claim_answers, read_settings
from entmtp.train.start import check_start
from entmtp.train.text import TrainingText, open_text
from entmtp.train.trainer import TargetTensors, train_kind

__all__ = ["TrainedHeads", "train_heads", "write_answers"]

_SCHEMA = 2
"""Of ``report.json``."""


@dataclass(frozen=True)
class TrainedHeads:
    """One set of heads that was written.

    Attributes:
        kind: of modules.
        file: its safetensors file.
        accuracy: on held-out answers.
        history: accuracy on some of them, on the way.
    """

    kind: str
    file: Path
    accuracy: Accuracy
    history: tuple[Measurement, ...]


def write_answers(  # noqa: PLR0913 - the last two are keyword-only
    target: Target,
    tokenizer: Tokenizer,
    workloads: Sequence[str | Path],
    folder: Path,
    config: DataConfig,
    progress: Progress,
    *,
    model_name: str,
    exclude: Sequence[str | Path] = (),
) -> None:
    """Let the target answer prompts; goes on where an earlier run in ``folder`` ended.

    Writes ``settings.json`` and ``answers/``. Nothing is added once heads are trained in the same
    folder.

    Args:
        target: that answers.
        tokenizer: with a chat template.
        workloads: tasks and files of prompts, as :func:`entmtp.workload.read_workload` takes them.
        folder: for the answers.
        config: how many, and how.
        progress: told what is done.
        model_name: of the target.
        exclude: those whose prompts must not be answered.

    Raises:
        TrainingError: the folder belongs to a run with other settings or another model, or cannot
            be written to, or there are too few prompts.
        InputError: prompts cannot be read.
    """
    window = target.config.context_window
    jobs = first_jobs(workloads, exclude, tokenizer, window, config)
    with open_folder(folder):
        claim_answers(folder, target, model_name, jobs, config)
        (folder / "answers").mkdir(exist_ok=True)
        if not (folder / TEXT_FILE).exists():
            _write(target, tokenizer, jobs, config, folder / "answers", progress)


def train_heads(
    target: Target, source: Path, folder: Path, config: TrainConfig, progress: Progress
) -> list[TrainedHeads]:
    """Train heads on answers, measure them; goes on where an earlier run in ``folder`` ended.

    Writes ``text.json``, checkpoints, ``<kind>.safetensors`` and ``report.json``.

    Args:
        target: that wrote the answers.
        source: folder that :func:`write_answers` wrote; read only, unless it is ``folder`` too.
        folder: for the heads.
        config: which heads, and on how much text.
        progress: told what is done.

    Raises:
        TrainingError: the answers are another model's, the folder belongs to a run with other
            settings or cannot be written to, or there is too little text.
    """
    settings = read_settings(source)
    with open_folder(folder):
        if source.resolve() != folder.resolve() and (folder / "answers").exists():
            raise TrainingError(
                f"{folder}: this folder has answers of its own, so heads of those in {source} "
                "would be mixed up with theirs; use another output folder"
            )
        check_states(source, target)
        digest = model_digest(target)
        text = open_text(source / "answers", folder / TEXT_FILE, settings["seed"], config, digest)
        start = _start_of(target, config)
        tensors = TargetTensors(
            target.embedding().cpu().float(),
            lambda ids: _rows(target, ids),
            _block_of(target),
            start,
        )
        if start is not None:
            config = replace(config, recipes=_recipes_from(start, config.recipes))
        trained = [
            _train_one(text, recipe, tensors, folder, config, progress) for recipe in config.recipes
        ]
        report = _report(text, config, trained, settings, digest)
        write_text(folder / "report.json", json.dumps(report, indent=1))
    return trained


def _train_one(
    text: TrainingText,
    recipe: HeadsRecipe,
    tensors: TargetTensors,
    folder: Path,
    config: TrainConfig,
    progress: Progress,
) -> TrainedHeads:
    """Train, measure and store one set of heads."""
    made = train_kind(text, recipe, tensors, folder, progress, checkpoint_s=config.checkpoint_s)
    file = folder / f"{recipe.kind}.safetensors"
    save_heads(made.heads, file, config.model_name, quantize=config.quantize)
    return TrainedHeads(recipe.kind, file, made.accuracy, made.history)


def _start_of(target: Target, config: TrainConfig) -> Heads | None:
    if config.start_from is None:
        return None
    vocab_size, hidden_size = target.embedding().shape
    return load_heads(
        config.start_from,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        target=config.model_name,
    )


def _recipes_from(start: Heads, recipes: Sequence[HeadsRecipe]) -> tuple[HeadsRecipe, ...]:
    """Recipes with the hot vocabulary of the heads that they begin with; all kinds must fit."""
    for recipe in recipes:
        check_start(start, recipe.kind)
    return tuple(replace(recipe, hot_vocab_size=len(start.hot_ids)) for recipe in recipes)


def _rows(target: Target, ids: Tensor) -> Tensor:
    return target.output_rows(ids).cpu()


def _block_of(target: Target) -> BlockConfig:
    """Sizes of the target's blocks, for modules with a block of their own."""
    names = BlockConfig.__dataclass_fields__
    return BlockConfig(**{name: getattr(target.config, name) for name in names})


def _write(
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
    deadline = time.monotonic() + (config.answer_minutes * 60 or math.inf)
    is_whole = collect_answers(engine, jobs, folder, "answers", progress, deadline=deadline)
    if not is_whole or not config.follow_ups:
        return
    answers = answers_by_job(folder, "answers", len(jobs))
    further = second_jobs(jobs, answers, tokenizer, target.config.context_window, config)
    collect_answers(engine, further, folder, "follow-ups", progress, deadline=deadline)


def _report(
    text: TrainingText,
    config: TrainConfig,
    trained: Sequence[TrainedHeads],
    settings: dict[str, Any],
    digest: str,
) -> dict[str, Any]:
    answers = text.answers
    return {
        "schema": _SCHEMA,
        "model": config.model_name,
        "model_digest": digest,
        "text_digest": text.digest,
        "num_answers": answers.num_sequences,
        "num_tokens": answers.num_answer_tokens,
        "num_prompt_tokens": len(answers.tokens) - answers.num_answer_tokens,
        "num_train_tokens": text.num_trained_tokens,
        "train_tokens": config.train_tokens,
        "held_out": config.held_out,
        "data": settings,
        "quantized": config.quantize,
        "start_from": None if config.start_from is None else str(config.start_from),
        "heads": [
            {
                **asdict(recipe),
                "file": heads.file.name,
                "held_out": asdict(heads.accuracy),
                "history": [measurement.as_dict() for measurement in heads.history],
            }
            for recipe, heads in zip(config.recipes, trained, strict=True)
        ],
    }
