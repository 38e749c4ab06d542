"""Training of one set of heads: loss, optimiser, checkpoints, accuracy."""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.heads import Heads, HeadsConfig, build_heads
from entmtp.errors import TrainingError
from entmtp.train.batches import IGNORED, Batch, ExampleMaker, hot_vocabulary, iter_batches
from entmtp.train.config import HeadsRecipe
from entmtp.train.data import Answers
from entmtp.train.losses import TOPS, FeatureReader, count_hits, heads_loss, reads_text

__all__ = ["Accuracy", "TargetTensors", "measure_accuracy", "train_kind"]

Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class TargetTensors:
    """What training needs of the target.

    Attributes:
        embedding: ``(V, H)`` input embedding.
        output_rows: token ids -> their rows of the output head.
        block: sizes of its blocks, for modules that have one of their own.
    """

    embedding: Tensor
    output_rows: Callable[[Tensor], Tensor]
    block: BlockConfig | None = None


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out positions whose true token is among a head's best k, given the true path.

    Attributes:
        num_positions: per head.
        top: per head, the shares for k = 1, 2, 4, 8.
    """

    num_positions: tuple[int, ...]
    top: tuple[tuple[float, ...], ...]


def train_kind(  # noqa: PLR0913 - the last is keyword-only
    answers: Answers,
    held_out: list[int],
    recipe: HeadsRecipe,
    target: TargetTensors,
    folder: Path,
    progress: Progress,
    *,
    checkpoint_s: float = 60.0,
) -> tuple[Heads, Accuracy]:
    """Train one set of heads; goes on from the last checkpoint in ``folder``.

    Args:
        answers: training text.
        held_out: sequences for the accuracy, never trained on.
        recipe: settings.
        target: embedding, output head and sizes.
        folder: of the checkpoint.
        progress: told the optimiser steps done, and a short report.
        checkpoint_s: seconds from one checkpoint to the next; one is written at the end too.

    Raises:
        TrainingError: too little text, or the checkpoint belongs to other settings.
    """
    vocab_size = target.embedding.shape[0]
    hot_ids = hot_vocabulary(answers, recipe.hot_vocab_size, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # a block starts at random
        heads = build_heads(_config_of(recipe, target), hot_ids)
    heads.attach_output(target.output_rows(hot_ids).to(torch.float32))
    hot_index = torch.full((vocab_size,), IGNORED, dtype=torch.int64)
    hot_index[hot_ids] = torch.arange(len(hot_ids))
    kept_out = set(held_out)
    trained = [s for s in range(answers.num_sequences) if s not in kept_out]
    maker = ExampleMaker(answers, hot_index, recipe.num_heads, with_teacher=recipe.kl > 0)

    def batch_of(chosen: Tensor) -> Batch:
        return maker.of_sequences(chosen.tolist()) if reads_text(heads) else maker.at(chosen)

    units = _units(maker, answers, trained, whole=reads_text(heads))
    reader = FeatureReader(heads, target.embedding, recipe.num_heads)
    run = _Run(heads, reader, recipe, folder / f"{recipe.kind}.checkpoint.pt", units)
    run.fit(batch_of, progress, checkpoint_s)
    every = hot_index.clone()
    every[every == IGNORED] = len(hot_ids)  # a cold token is a miss, not a gap
    held = ExampleMaker(answers, every, recipe.num_heads)
    batches = (held.of_sequences([s]) for s in held_out if len(answers.positions([s])))
    return heads, measure_accuracy(heads, reader, batches, recipe.num_heads)


def measure_accuracy(
    heads: Heads, reader: FeatureReader, batches: Iterator[Batch], num_depths: int
) -> Accuracy:
    """Top-1/2/4/8 accuracy by depth; a token outside the hot vocabulary counts as missed."""
    hits, counts = torch.zeros(num_depths, len(TOPS)), torch.zeros(num_depths)
    for batch in batches:
        found, number = count_hits(heads, reader, batch, num_depths)
        hits, counts = hits + found, counts + number
    shares = hits / counts.clamp(min=1)[:, None]
    return Accuracy(
        tuple(int(n) for n in counts.tolist()),
        tuple(tuple(row) for row in shares.tolist()),
    )


def _config_of(recipe: HeadsRecipe, target: TargetTensors) -> HeadsConfig:
    is_recurrent, has_block = recipe.kind == "mtp", recipe.kind in ("hydra++", "mtp")
    vocab_size, hidden_size = target.embedding.shape
    return HeadsConfig(
        kind=recipe.kind,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=1 if is_recurrent else recipe.num_heads,
        num_layers=1 if is_recurrent else recipe.num_layers,
        embed_scale=recipe.embed_scale,
        is_tied=recipe.is_tied,
        block=target.block if has_block else None,
    )


def _units(maker: ExampleMaker, answers: Answers, sequences: list[int], *, whole: bool) -> Tensor:
    """What batches are drawn from: positions, or sequences for modules that attend to the text.

    Those with nothing to predict are left out, else a batch of them would end the run.
    """
    if whole:
        usable = []
        for sequence in sequences:
            targets = maker.targets(answers.positions([sequence]))
            if bool((targets != IGNORED).any()):
                usable.append(sequence)
        units = torch.tensor(usable, dtype=torch.int64)
    else:
        positions = answers.positions(sequences)
        units = positions[(maker.targets(positions) != IGNORED).any(dim=1)]
    if not len(units):
        raise TrainingError(
            "the answers hold nothing to train on; raise max_new_tokens or hot_vocab_size"
        )
    return units


class _Run:
    """An optimiser run that can be stopped anywhere and gives the same weights when it goes on."""

    def __init__(
        self, heads: Heads, reader: FeatureReader, recipe: HeadsRecipe, file: Path, units: Tensor
    ) -> None:
        self._heads, self._reader, self._recipe, self._file = heads, reader, recipe, file
        self._units = units
        self._batch_size = recipe.sequences_a_step if reads_text(heads) else recipe.batch_size
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=recipe.learning_rate, weight_decay=0.0, betas=(0.9, 0.98)
        )
        self._steps_per_epoch = math.ceil(len(units) / self._batch_size)
        self._num_steps = self._steps_per_epoch * recipe.epochs
        self._identity = {**asdict(recipe), "num_units": len(units)}
        self._done = self._resume()

    def fit(
        self, batch_of: Callable[[Tensor], Batch], progress: Progress, checkpoint_s: float
    ) -> None:
        """Run the remaining steps; write a checkpoint now and then, and at the end."""
        kind, saved, average = self._recipe.kind, time.monotonic(), 0.0
        progress(kind, self._done, self._num_steps, "")
        for epoch in range(self._done // self._steps_per_epoch, self._recipe.epochs):
            skip = self._done - epoch * self._steps_per_epoch
            batches = iter_batches(self._units, self._batch_size, self._recipe.seed, epoch)
            for index, chosen in enumerate(batches):
                if index < skip:
                    continue
                loss = self._step(batch_of(chosen))
                average = loss if not average else 0.98 * average + 0.02 * loss
                if time.monotonic() - saved >= checkpoint_s:
                    self._save()
                    saved = time.monotonic()
                progress(kind, self._done, self._num_steps, f"loss {average:.3f}")
        self._save()

    def _step(self, batch: Batch) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        recipe = self._recipe
        loss = heads_loss(self._heads, self._reader, batch, recipe.head_decay, recipe.kl)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._heads.parameters(), 1.0)
        self._optimizer.step()
        self._done += 1
        return float(loss.detach())

    def _learning_rate(self) -> float:
        warm_up = max(1, min(100, self._num_steps // 10))
        if self._done < warm_up:
            return self._recipe.learning_rate * (self._done + 1) / warm_up
        share = (self._done - warm_up) / max(1, self._num_steps - warm_up)
        return self._recipe.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))

    def _save(self) -> None:
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}.tmp")
        state = {
            "identity": self._identity,
            "done": self._done,
            "heads": self._heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        try:
            with temporary.open("wb") as file:
                torch.save(state, file)
            os.replace(temporary, self._file)
        finally:
            temporary.unlink(missing_ok=True)

    def _resume(self) -> int:
        if not self._file.exists():
            return 0
        try:
            state = torch.load(self._file, weights_only=True)
            is_same = state["identity"] == self._identity and torch.equal(
                state["heads"]["hot_ids"], self._heads.hot_ids
            )
        except Exception as error:  # torch raises many kinds for a damaged file
            raise TrainingError(
                f"{self._file}: damaged ({type(error).__name__}); delete it to start again"
            ) from error
        if not is_same:
            raise TrainingError(
                f"{self._file}: made with other settings or answers; use another output folder or "
                "delete it"
            )
        self._heads.load_state_dict(state["heads"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["done"])
