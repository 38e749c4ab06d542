"""The text of a run of training: which answers are trained on, and which are held out.

The choice is written into the folder of the run before anything is trained, so that a run that
goes on has the same text, whatever has been added to the answers since.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from entmtp.errors import TrainingError
from entmtp.files import write_text
from entmtp.train.config import TrainConfig
from entmtp.train.data import Answers, AnswerSizes, load_answers, read_sizes, shard_names
from entmtp.train.settings import read_json

__all__ = ["TrainingText", "open_text"]


@dataclass(frozen=True)
class TrainingText:
    """Answers in two parts.

    Attributes:
        answers: those of both parts.
        trained: numbers of sequences.
        held_out: numbers of sequences; no prompt is on both sides.
    """

    answers: Answers
    trained: tuple[int, ...]
    held_out: tuple[int, ...]

    @property
    def num_trained_tokens(self) -> int:
        """Answer tokens that are trained on."""
        ends, starts = self.answers.offsets[1:], self.answers.starts
        return int((ends - starts)[list(self.trained)].sum())

    @property
    def digest(self) -> str:
        """First 16 hex digits of the SHA-256 of tokens, parts and the last state of each answer."""
        answers = self.answers
        digest = hashlib.sha256(json.dumps([self.trained, self.held_out]).encode())
        last = answers.hidden[answers.offsets[1:] - 1]
        for tensor in (answers.tokens, answers.offsets, answers.starts, last):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Choice:
    """What decides on the text of a run; all but the names is asked for by the user."""

    model_digest: str
    held_out: float
    train_tokens: int | None
    names: tuple[str, ...]


def open_text(
    answers: Path, file: Path, seed: int, config: TrainConfig, model_digest: str
) -> TrainingText:
    """The text of a run: as ``file`` has it, or, in a new run, of all answers that are there.

    Args:
        answers: folder of the files of answers.
        file: says what the text is.
        seed: of the choice.
        config: how much is trained on and held out.
        model_digest: of the target.

    Raises:
        TrainingError: the run began with another text, or there is too little of it.
    """
    if not file.exists():
        asked = (model_digest, config.held_out, config.train_tokens)
        choice = _Choice(*asked, tuple(shard_names(answers)))
        text = _load(answers, seed, choice)
        fields = {**asdict(choice), "digest": text.digest}
        write_text(file, json.dumps(fields, indent=1))
        return text
    found = read_json(file)
    for name, value in (
        ("model_digest", model_digest),
        ("held_out", config.held_out),
        ("train_tokens", config.train_tokens),
    ):
        if found.get(name) != value:
            raise TrainingError(
                f"{file}: the run in this folder began with {name} {found.get(name)}, not {value}; "
                "use another output folder"
            )
    names = tuple(str(name) for name in found.get("names", ()))
    choice = _Choice(model_digest, config.held_out, config.train_tokens, names)
    text = _load(answers, seed, choice)
    if text.digest != found.get("digest"):
        raise TrainingError(
            f"{file}: the run in this folder began with other answers than those in {answers}; "
            "use another output folder"
        )
    return text


def _load(answers: Path, seed: int, choice: _Choice) -> TrainingText:
    sizes = read_sizes(answers, choice.names)
    groups = sizes.groups.tolist()
    order, num_held = _split(groups, choice.held_out, seed)
    held = {*order[:num_held]}
    held_out = [s for s, group in enumerate(groups) if group in held]
    trained = [s for s, group in enumerate(groups) if group not in held]
    if choice.train_tokens is not None:
        trained = _first(sizes, order[num_held:], choice.train_tokens)
    kept = sorted({*trained, *held_out})
    places = {sequence: place for place, sequence in enumerate(kept)}
    return TrainingText(
        load_answers(answers, choice.names, kept),
        tuple(places[s] for s in trained),
        tuple(places[s] for s in held_out),
    )


def _split(groups: Sequence[int], share: float, seed: int) -> tuple[list[int], int]:
    """Groups in an order that the seed decides, and how many of the first are held out."""
    different = sorted(set(groups))
    num_held = max(1, round(len(different) * share))
    if num_held >= len(different):
        raise TrainingError(
            f"answers to {len(different)} prompts leave none to train on; ask for more prompts"
        )
    held = random.Random(seed).sample(different, num_held)
    rest = sorted(set(different) - set(held))
    random.Random(seed + 1).shuffle(rest)
    return [*held, *rest], num_held


def _first(sizes: AnswerSizes, order: Sequence[int], limit: int) -> list[int]:
    """Sequences of the first groups that have at most so many answer tokens together, ascending."""
    members: dict[int, list[int]] = {}
    for sequence, group in enumerate(sizes.groups.tolist()):
        members.setdefault(group, []).append(sequence)
    lengths = (sizes.lengths - sizes.prompt_lengths).tolist()
    chosen: list[int] = []
    left = limit
    for sequence in (s for group in order for s in members[group]):
        left -= lengths[sequence]
        if left < 0:
            break
        chosen.append(sequence)
    else:
        if left > 0:
            raise TrainingError(
                f"train_tokens is {limit}, but the answers hold {limit - left} tokens to train on; "
                "give fewer, or leave it out to train on all"
            )
    if not chosen:
        raise TrainingError(f"train_tokens is {limit}, less than the first answer has; give more")
    return sorted(chosen)
