"""What a folder of answers says about itself: the model, the prompts, and how they were written."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from entmtp.errors import TrainingError
from entmtp.files import write_text
from entmtp.target.base import Segment, Target
from entmtp.target.digest import model_digest
from entmtp.train.config import DataConfig
from entmtp.train.data import load_answers, shard_names
from entmtp.train.jobs import AnswerJob

__all__ = ["TEXT_FILE", "check_states", "claim_answers", "read_json", "read_settings"]

TEXT_FILE = "text.json"
"""What a run trains on; where it is, training has begun."""

_FILE = "settings.json"
_FREE = ("batch_size", "answer_minutes")
_CHECKED_ROWS = 256
_MIN_COSINE = 0.98


def claim_answers(
    folder: Path,
    target: Target,
    model_name: str,
    jobs: Sequence[AnswerJob],
    config: DataConfig,
) -> None:
    """Make a folder one of these answers; refuse to mix those of two runs.

    Args:
        folder: with ``settings.json`` and ``answers/``, or new.
        target: that writes.
        model_name: its name.
        jobs: what is written.
        config: how it was drawn.

    Raises:
        TrainingError: the folder is of another run.
    """
    file = folder / _FILE
    prompts = json.dumps([job.prompt for job in jobs])
    digest = hashlib.sha256(prompts.encode()).hexdigest()[:16]
    settings = {"model": model_name, "prompts": digest, **asdict(config)}
    for free in _FREE:  # change nothing in the answers
        del settings[free]
    weights = model_digest(target)
    if file.exists():
        found = read_json(file)
        known = found.pop("model_digest", None)
        if found != settings:
            raise TrainingError(
                f"{file}: this folder holds a run with other prompts or settings "
                f"({_difference(found, settings)}); use another output folder, or delete this one"
            )
        if known == weights:
            return
        if known is not None:
            raise TrainingError(
                f"{file}: the answers are of a model {model_name!r} with digest {known}, this one "
                f"has {weights}: other weights, another --dtype or another device; use the same, "
                "or another output folder"
            )
        check_states(folder, target)
    elif (folder / TEXT_FILE).exists():
        raise TrainingError(
            f"{folder}: this folder holds heads of answers in another folder; go on with them by "
            "--answers, or use another output folder"
        )
    write_text(file, json.dumps({**settings, "model_digest": weights}, indent=1))


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of a folder of answers.

    Raises:
        TrainingError: it is none.
    """
    file = folder / _FILE
    if not file.exists():
        raise TrainingError(
            f"{folder}: no folder of answers, as it holds no {_FILE}; name one that was the output "
            "folder of a run"
        )
    settings = read_json(file)
    if not isinstance(settings.get("seed"), int):
        raise TrainingError(f"{file}: damaged (no seed); write the answers again")
    return settings


def check_states(folder: Path, target: Target) -> None:
    """Hold the states of one answer against the target's own, up to another precision.

    Raises:
        TrainingError: they are another model's.
    """
    names = shard_names(folder / "answers")
    if not names:
        return
    answers = load_answers(folder / "answers", names[:1], [0])
    tokens, config = answers.tokens[:_CHECKED_ROWS], target.config
    kept = answers.hidden[1 : len(tokens) + 1].to(torch.float32)
    what = f"states of size {kept.shape[1]}, the model has {config.hidden_size}"
    is_same = kept.shape[1] == config.hidden_size and int(tokens.max()) < config.vocab_size
    if is_same and len(kept):
        rows = tokens[: len(kept)]
        segment = Segment(target.new_cache(len(rows)), rows, np.arange(len(rows)), None, "none")
        states = target.forward([segment]).hidden[0].to("cpu", torch.float32)
        cosine = float(functional.cosine_similarity(states, kept).mean())
        what = f"its states have a cosine of {cosine:.2f} with those of this one"
        is_same = cosine >= _MIN_COSINE
    if not is_same:
        raise TrainingError(
            f"{folder}: the answers are of another model ({what}); name the model that wrote them, "
            "or write answers with this one"
        )


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object.

    Raises:
        TrainingError: the file is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{file}: damaged ({error}); use another output folder, or delete this one"
        ) from error
    return found


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first setting that differs."""
    for name in (*wanted, *found):
        if found.get(name) != wanted.get(name):
            return f"{name} was {found.get(name)!r} and is {wanted.get(name)!r}"
    return ""
