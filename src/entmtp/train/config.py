"""Settings of a training run; the command line reads its defaults here."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from entmtp.drafters.heads import KINDS
from entmtp.errors import InputError
from entmtp.params import MAX_SEED

__all__ = ["DataConfig", "HeadsRecipe", "TrainConfig"]


@dataclass(frozen=True)
class DataConfig:
    """What the target writes.

    Attributes:
        num_prompts: first turns answered, drawn as evenly over tasks as their numbers allow.
        max_new_tokens: longest answer, but for the long ones.
        temperature: of the answers; 0 is greedy, as heads are mostly used.
        seed: of the draw of prompts and, above temperature 0, of the answers.
        samples: most answers to one prompt, where a task has too few; all but the first are
            sampled.
        sample_temperature: of these.
        follow_ups: share of conversations that go on with a second turn.
        long_answers: share of answers that may be longer.
        long_new_tokens: longest of these.
        batch_size: answers written at once.
        answer_minutes: stop writing after this long and train on the groups of answers that are
            whole; 0 writes them all.
    """

    num_prompts: int = 1600
    max_new_tokens: int = 160
    temperature: float = 0.0
    seed: int = 0
    samples: int = 1
    sample_temperature: float = 0.8
    follow_ups: float = 0.0
    long_answers: float = 0.0
    long_new_tokens: int = 1024
    batch_size: int = 64
    answer_minutes: float = 0.0

    def __post_init__(self) -> None:
        """Refuse settings from which nothing can be learnt."""
        _require(self.num_prompts >= 2, "num_prompts", self.num_prompts, "at least 2")
        _require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, "at least 2")
        is_usable = 0 <= self.temperature < math.inf
        _require(is_usable, "temperature", self.temperature, "0 or more, and finite")
        _require(self.samples >= 1, "samples", self.samples, "at least 1")
        is_usable = 0 < self.sample_temperature < math.inf
        limits = "above 0, and finite"
        _require(is_usable, "sample_temperature", self.sample_temperature, limits)
        for name in ("follow_ups", "long_answers"):
            share = getattr(self, name)
            _require(0 <= share <= 1, name, share, "from 0 to 1")
        longest = self.long_new_tokens
        _require(longest >= 2, "long_new_tokens", longest, "at least 2")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        _require(self.answer_minutes >= 0, "answer_minutes", self.answer_minutes, "0 or more")
        _require_seed(self.seed)


@dataclass(frozen=True)
class HeadsRecipe:
    """How one set of heads is trained.

    Attributes:
        kind: ``medusa``, ``hydra``, ``hydra++`` or ``mtp``.
        num_heads: depths to draft; of ``mtp``, depths that it is unrolled for in training.
        num_layers: blocks a head.
        hot_vocab_size: most frequent answer tokens that heads score.
        embed_scale: factor on embeddings where they enter a Hydra head.
        epochs: passes over the training positions.
        batch_size: positions an optimiser step.
        learning_rate: peak of AdamW's, after a linear warm-up, falling to a tenth by a cosine.
        head_decay: head i's loss weighs ``head_decay ** i``.
        kl: weight of the divergence from the target's distribution; the rest is cross-entropy on
            its tokens.
        sampled_tokens: hot tokens that the loss of a step scores besides the most frequent ones,
            drawn anew each step; 0 scores all.
        noise: added to the states in training, Gaussian, in shares of their root mean square.
        is_tied: the blocks of a head, but for the conditioned one, are one and the same.
        sequences_a_step: answers that a step's positions lie in, for modules that attend to the
            text.
        measurements: how often the accuracy on some held-out answers is measured on the way, the
            end included; the untrained heads are measured besides.
        seed: of the order of positions.
    """

    kind: str = "hydra"
    num_heads: int = 4
    num_layers: int = 2
    hot_vocab_size: int = 8192
    embed_scale: float = 8.0
    epochs: int = 3
    batch_size: int = 512
    learning_rate: float = 1e-3
    head_decay: float = 0.8
    kl: float = 0.0
    sampled_tokens: int = 512
    noise: float = 0.0
    is_tied: bool = False
    sequences_a_step: int = 16
    measurements: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings from which nothing can be learnt."""
        kinds = ", ".join(KINDS)
        _require(self.kind in KINDS, "kind", self.kind, f"one of {kinds}")
        _require(0 <= self.kl <= 1, "kl", self.kl, "from 0 to 1")
        is_usable = 0 <= self.noise < math.inf
        _require(is_usable, "noise", self.noise, "0 or more, and finite")
        _require(self.sampled_tokens >= 0, "sampled_tokens", self.sampled_tokens, "0 or more")
        for name, value in asdict(self).items():
            if name not in ("kind", "kl", "sampled_tokens", "noise", "is_tied", "seed"):
                _require(0 < value < math.inf, name, value, "above 0, and finite")
        _require_seed(self.seed)


@dataclass(frozen=True)
class TrainConfig:
    """What is made of a folder of answers.

    Attributes:
        model_name: of the target; heads carry it.
        recipes: the sets of heads to train, in order.
        quantize: store the heads as int8.
        held_out: share of prompts whose answers are never trained on.
        train_tokens: train on whole answers of at most so many tokens together; ``None``: on all.
        start_from: file of trained heads whose weights and hot vocabulary each set begins with.
        checkpoint_s: seconds from one checkpoint to the next.
    """

    model_name: str
    recipes: tuple[HeadsRecipe, ...]
    quantize: bool = False
    held_out: float = 0.05
    train_tokens: int | None = None
    start_from: Path | None = None
    checkpoint_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse settings from which nothing can be learnt."""
        _require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1")
        if self.train_tokens is not None:
            _require(self.train_tokens >= 2, "train_tokens", self.train_tokens, "at least 2")
        _require(self.checkpoint_s >= 0, "checkpoint_s", self.checkpoint_s, "0 or more")


def _require_seed(seed: int) -> None:
    _require(0 <= seed <= MAX_SEED, "seed", seed, "between 0 and 2**63 - 1")


def _require(is_valid: bool, name: str, value: object, limits: str) -> None:
    if not is_valid:
        raise InputError(f"{name} is {value}; it must be {limits}")
