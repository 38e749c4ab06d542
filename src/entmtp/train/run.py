"""The whole of ``entmtp train``: answers, then one set of heads after another."""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from entmtp.drafters.checkpoint import save_heads
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import TrainingError
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Target
from entmtp.tokenizer import Tokenizer
from entmtp.train.config import DataConfig, HeadsRecipe
from entmtp.train.data import Answers, RecordingDrafter, collect_answers, load_answers
from entmtp.train.prompts import draw_prompts
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
        kind: ``medusa`` or ``hydra``.
        file: its safetensors file.
        accuracy: on held-out answers.
    """

    kind: str
    file: Path
    accuracy: Accuracy


def train_heads(
    target: Target,
    tokenizer: Tokenizer,
    prompt_files: Sequence[Path],
    folder: Path,
    config: TrainConfig,
    progress: Progress,
) -> list[TrainedHeads]:
    """Write answers, train heads, measure them; goes on where an earlier run in ``folder`` ended.

    Writes ``answers/``, checkpoints, ``<kind>.safetensors`` and ``report.json`` into ``folder``.

    Raises:
        TrainingError: the folder belongs to a run with other settings or cannot be written to, or
            the data is too thin.
        InputError: a prompt file cannot be read.
    """
    prompts = _encode_prompts(prompt_files, tokenizer, target, config.data)
    try:
        return _train(target, tokenizer, prompts, folder, config, progress)
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder}: cannot store the run there ({error}); free some space or use another "
            "output folder, and run again"
        ) from error


def _train(
    target: Target,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[int, ...]],
    folder: Path,
    config: TrainConfig,
    progress: Progress,
) -> list[TrainedHeads]:
    answers_folder = folder / "answers"
    answers_folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder / "settings.json", config.model_name, prompts, config.data)
    if not any(folder.glob("*.checkpoint.pt")):  # once training has begun, its text stays
        _write_answers(target, tokenizer, prompts, config.data, answers_folder, progress)
    answers = load_answers(answers_folder)
    held_out = _hold_out(answers, config.data)
    tensors = TargetTensors(target.embedding().cpu().float(), lambda ids: _rows(target, ids))
    trained = []
    for recipe in config.recipes:
        heads, accuracy = train_kind(answers, held_out, recipe, tensors, folder, progress)
        file = folder / f"{recipe.kind}.safetensors"
        save_heads(heads, file, config.model_name, quantize=config.quantize)
        trained.append(TrainedHeads(recipe.kind, file, accuracy))
    _write_report(folder / "report.json", answers, config, trained)
    return trained


def _rows(target: Target, ids: Tensor) -> Tensor:
    return target.output_rows(ids).cpu()


def _encode_prompts(
    files: Sequence[Path], tokenizer: Tokenizer, target: Target, config: DataConfig
) -> list[tuple[int, ...]]:
    """Chat prompts as token ids, without repeats and without those that leave no room to answer."""
    records = draw_prompts(files, config.num_prompts, config.seed)
    encoded = (
        tuple(tokenizer.encode_chat([{"role": "user", "content": record.turns[0]}]))
        for record in records
    )
    room = target.config.context_window - config.max_new_tokens
    prompts = [ids for ids in dict.fromkeys(encoded) if 0 < len(ids) <= room]
    if len(prompts) < 2:
        raise TrainingError(
            f"{len(prompts)} prompts fit the context window of {target.config.context_window} with "
            f"{config.max_new_tokens} new tokens; at least 2 are needed"
        )
    return prompts


def _check_settings(
    file: Path, model_name: str, prompts: Sequence[tuple[int, ...]], config: DataConfig
) -> None:
    """Refuse to mix the answers of two different runs in one folder."""
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
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
    prompts: Sequence[tuple[int, ...]],
    config: DataConfig,
    folder: Path,
    progress: Progress,
) -> None:
    engine = Engine(
        target,
        RecordingDrafter(),
        FixedScheduler.plain(),
        tokenizer,
        EngineLimits(max_batch_size=config.batch_size),
    )
    sampling = SamplingParams(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
    )

    def report(stage: str, done: int, total: int) -> None:
        progress(stage, done, total, "")

    seconds = config.answer_minutes * 60 or math.inf
    collect_answers(engine, prompts, sampling, folder, report, max_seconds=seconds)


def _hold_out(answers: Answers, config: DataConfig) -> list[int]:
    num_held = max(1, round(answers.num_sequences * config.held_out))
    if num_held >= answers.num_sequences:
        raise TrainingError(
            f"{answers.num_sequences} answers leave none to train on; ask for more prompts"
        )
    order = random.Random(config.seed).sample(range(answers.num_sequences), num_held)
    return sorted(order)


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
        "num_tokens": len(answers.tokens),
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
