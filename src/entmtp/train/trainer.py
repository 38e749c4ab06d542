"""Training of one set of heads: loss, optimiser, checkpoints."""

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.checkpoint import heads_digest
from entmtp.drafters.heads import Heads, HeadsConfig, build_heads
from entmtp.errors import TrainingError
from entmtp.files import replacing
from entmtp.train.accuracy import (
    Accuracy,
    Measurement,
    measure_accuracy,
    measured_sequences,
    measured_steps,
)
from entmtp.train.batches import (
    IGNORED,
    ExampleMaker,
    hot_vocabulary,
    iter_batches,
    iter_text_batches,
    step_generator,
)
from entmtp.train.config import HeadsRecipe
from entmtp.train.losses import FeatureReader, heads_loss, reads_text, with_noise
from entmtp.train.output_sample import OutputSample
from entmtp.train.progress import Progress, TrainEvent
from entmtp.train.start import start_as_identity, start_from
from entmtp.train.text import TrainingText

__all__ = ["TargetTensors", "TrainedKind", "train_kind"]

_LossOf = Callable[[Tensor, torch.Generator], Tensor]
"""Positions of a step, and what it draws from, to its loss."""


@dataclass(frozen=True)
class TargetTensors:
    """What training needs besides text.

    Attributes:
        embedding: ``(V, H)`` input embedding of the target.
        output_rows: token ids -> their rows of its output head.
        block: sizes of its blocks, for modules that have one of their own.
        start: heads whose weights and hot vocabulary the run begins with.
    """

    embedding: Tensor
    output_rows: Callable[[Tensor], Tensor]
    block: BlockConfig | None = None
    start: Heads | None = None


@dataclass(frozen=True)
class TrainedKind:
    """One set of heads at the end of its training.

    Attributes:
        heads: with their output matrix.
        accuracy: on all that was held out.
        history: accuracy on some of it, on the way.
    """

    heads: Heads
    accuracy: Accuracy
    history: tuple[Measurement, ...]


def train_kind(
    text: TrainingText,
    recipe: HeadsRecipe,
    target: TargetTensors,
    folder: Path,
    progress: Progress,
    *,
    checkpoint_s: float = 60.0,
) -> TrainedKind:
    """Train one set of heads; goes on from the last checkpoint in ``folder``.

    Args:
        text: what is trained on, and what is held out.
        recipe: settings.
        target: embedding, output head and sizes.
        folder: of the checkpoint.
        progress: told every optimiser step.
        checkpoint_s: seconds from one checkpoint to the next; one is written at the end too.

    Raises:
        TrainingError: too little text, or the checkpoint belongs to other settings.
    """
    answers = text.answers
    heads, order = _begin(text, recipe, target)
    hot_ids = heads.hot_ids
    hot_index = torch.full((target.embedding.shape[0],), IGNORED, dtype=torch.int64)
    hot_index[hot_ids] = torch.arange(len(hot_ids))
    maker = ExampleMaker(answers, hot_index, recipe.num_heads, with_teacher=recipe.kl > 0)
    every = hot_index.clone()
    every[every == IGNORED] = len(hot_ids)  # a cold token is a miss, not a gap
    held = ExampleMaker(answers, every, recipe.num_heads)
    reader = FeatureReader(heads, target.embedding, recipe.num_heads)
    some = [
        held.in_text(answers.positions([s])) for s in measured_sequences(answers, text.held_out)
    ]

    def measure() -> Accuracy:
        return measure_accuracy(heads, reader, some, recipe.num_heads)

    epochs = _epochs(maker, text, recipe, whole=reads_text(heads))
    file = folder / f"{recipe.kind}.checkpoint.pt"
    digests = {
        "text": text.digest,
        "start": None if target.start is None else heads_digest(target.start),
    }
    run = _Run(heads, recipe, file, epochs, digests)
    make_batch = maker.in_text if reads_text(heads) else maker.at
    frequent = hot_index[order]

    def loss_of(positions: Tensor, draw: torch.Generator) -> Tensor:
        output = OutputSample(heads.shared_output, frequent, recipe.sampled_tokens, draw)
        batch = make_batch(positions)
        if recipe.noise:
            batch = with_noise(batch, recipe.noise, draw)
        return heads_loss(reader, batch, output, recipe.head_decay, recipe.kl)

    run.fit(loss_of, measure, progress, checkpoint_s)
    spans = (answers.positions([s]) for s in text.held_out)
    batches = (held.in_text(span) for span in spans if len(span))
    accuracy = measure_accuracy(heads, reader, batches, recipe.num_heads)
    return TrainedKind(heads, accuracy, tuple(run.history))


def _begin(text: TrainingText, recipe: HeadsRecipe, target: TargetTensors) -> tuple[Heads, Tensor]:
    """Heads before the first step, and their hot tokens with the most frequent one first."""
    answers, start, vocab_size = text.answers, target.start, target.embedding.shape[0]
    size = recipe.hot_vocab_size if start is None else vocab_size
    order = hot_vocabulary(answers, text.trained, size, vocab_size)
    if start is not None:
        order = order[torch.isin(order, start.hot_ids)]
    hot_ids = order.sort().values  # ascending, so that equal scores rank by token id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # a block starts at random
        heads = build_heads(_config_of(recipe, target), hot_ids)
    start_as_identity(heads, answers.hidden[answers.starts])
    if start is not None:
        start_from(heads, start)
    heads.attach_output(target.output_rows(hot_ids).to(torch.float32))
    return heads, order


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


def _epochs(
    maker: ExampleMaker, text: TrainingText, recipe: HeadsRecipe, *, whole: bool
) -> list[list[Tensor]]:
    """Positions of every batch of every epoch.

    Positions with nothing to predict are left out, else a batch of them would end the run.
    """
    answers = text.answers
    positions = answers.positions(text.trained)
    positions = positions[(maker.targets(positions) != IGNORED).any(dim=1)]
    if not len(positions):
        raise TrainingError(
            f"{len(text.trained)} answers of {text.num_trained_tokens} tokens hold nothing to "
            f"train on: no token behind the first of an answer is among the "
            f"{recipe.hot_vocab_size} most frequent ones; raise max_new_tokens or hot_vocab_size"
        )
    if whole:
        return [
            list(iter_text_batches(answers, positions, recipe, e)) for e in range(recipe.epochs)
        ]
    size, seed = recipe.batch_size, recipe.seed
    return [list(iter_batches(positions, size, seed, e)) for e in range(recipe.epochs)]


class _Run:
    """An optimiser run that can be stopped anywhere and gives the same weights when it goes on."""

    def __init__(
        self,
        heads: Heads,
        recipe: HeadsRecipe,
        file: Path,
        epochs: Sequence[Sequence[Tensor]],
        digests: Mapping[str, str | None],
    ) -> None:
        self._heads, self._recipe, self._file = heads, recipe, file
        self._batches = [batch for epoch in epochs for batch in epoch]
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=recipe.learning_rate, weight_decay=0.0, betas=(0.9, 0.98)
        )
        self._num_steps = len(self._batches)
        self._identity = {**asdict(recipe), **digests}
        self._done = self._positions_seen = 0
        self._loss_sum, self._loss_count = 0.0, 0  # since the last measurement
        self.history: list[Measurement] = []
        self._resume()

    def fit(
        self,
        loss_of: _LossOf,
        measure: Callable[[], Accuracy],
        progress: Progress,
        checkpoint_s: float,
    ) -> None:
        """Run the remaining steps; write a checkpoint now and then, and at the end."""
        saved, begun = time.monotonic(), self._done
        due = measured_steps(self._num_steps, self._recipe.measurements)
        if not self.history:
            self._measure(measure)
        progress(self._event())
        for positions in self._batches[begun:]:
            self._step(positions, loss_of)
            if self._done in due:
                self._measure(measure)
            if time.monotonic() - saved >= checkpoint_s:
                self._save()
                saved = time.monotonic()
            progress(self._event())
        if self._done > begun:
            self._save()

    def _step(self, positions: Tensor, loss_of: _LossOf) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        loss = loss_of(positions, step_generator(self._recipe.seed, self._done))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._heads.parameters(), 1.0)
        self._optimizer.step()
        self._done += 1
        self._positions_seen += len(positions)
        self._loss_sum += float(loss.detach())
        self._loss_count += 1

    def _learning_rate(self) -> float:
        warm_up = max(1, min(100, self._num_steps // 10))
        if self._done < warm_up:
            return self._recipe.learning_rate * (self._done + 1) / warm_up
        share = (self._done - warm_up) / max(1, self._num_steps - warm_up)
        return self._recipe.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))

    def _measure(self, measure: Callable[[], Accuracy]) -> None:
        counts = self._done, self._positions_seen
        self.history.append(Measurement(*counts, self._mean_loss(), measure().top))
        self._loss_sum, self._loss_count = 0.0, 0

    def _mean_loss(self) -> float | None:
        """Since the last measurement, or up to it."""
        if self._loss_count:
            return self._loss_sum / self._loss_count
        return self.history[-1].loss if self.history else None

    def _event(self) -> TrainEvent:
        loss, top1 = self._mean_loss(), tuple(top[0] for top in self.history[-1].top)
        counts = self._done, self._num_steps, self._positions_seen
        return TrainEvent(self._recipe.kind, *counts, "positions", loss=loss, top1=top1)

    def _save(self) -> None:
        state = {
            "identity": self._identity,
            "done": self._done,
            "positions_seen": self._positions_seen,
            "loss": [self._loss_sum, self._loss_count],
            "history": [asdict(measurement) for measurement in self.history],
            "heads": self._heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        buffer = io.BytesIO()  # torch hides what the system says of a file that cannot be written
        torch.save(state, buffer)
        with replacing(self._file) as temporary:
            temporary.write_bytes(buffer.getbuffer())

    def _resume(self) -> None:
        if not self._file.exists():
            return
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
        self._done, self._positions_seen = state["done"], state["positions_seen"]
        self._loss_sum, self._loss_count = state["loss"]
        self.history = [Measurement(**measurement) for measurement in state["history"]]
