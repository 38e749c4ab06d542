"""Training of one set of heads: loss, optimiser, checkpoints, accuracy."""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from entmtp.drafters.heads import HeadsConfig, HydraHeads, MedusaHeads, build_heads
from entmtp.errors import TrainingError
from entmtp.train.batches import (
    IGNORED,
    Batch,
    head_targets,
    hot_vocabulary,
    iter_batches,
    make_batch,
)
from entmtp.train.config import HeadsRecipe
from entmtp.train.data import Answers

__all__ = ["Accuracy", "TargetTensors", "heads_loss", "measure_accuracy", "train_kind"]

Progress = Callable[[str, int, int, str], None]
_TOPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class TargetTensors:
    """What training needs of the target.

    Attributes:
        embedding: ``(V, H)`` input embedding.
        output_rows: token ids -> their rows of the output head.
    """

    embedding: Tensor
    output_rows: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Accuracy:
    """Share of held-out positions whose true token is among a head's best k, given the true path.

    Attributes:
        num_positions: per head.
        top: per head, the shares for k = 1, 2, 4, 8.
    """

    num_positions: tuple[int, ...]
    top: tuple[tuple[float, ...], ...]


def heads_loss(
    heads: MedusaHeads | HydraHeads, batch: Batch, embedding: Tensor, decay: float
) -> Tensor:
    """Cross-entropy on the target's own tokens, head i weighted by ``decay ** i``.

    Raises:
        TrainingError: no head has anything to predict, or the loss is not finite.
    """
    embedded = functional.embedding(batch.above, embedding).to(torch.float32)
    total = batch.hidden.new_zeros(())
    has_target = False
    for head in range(heads.config.num_heads):
        rows = batch.targets[:, head] != IGNORED
        if not bool(rows.any()):
            continue
        has_target = True
        features = heads.features(head, batch.hidden[rows], embedded[rows, : head + 1])
        logits = heads.logits(head, features)
        total = total + decay**head * functional.cross_entropy(logits, batch.targets[rows, head])
    if not has_target:
        raise TrainingError("a batch has no token to predict; are all answers masked or empty?")
    if not bool(torch.isfinite(total)):
        raise TrainingError("the loss is not finite; lower the learning rate")
    return total


@torch.no_grad()
def measure_accuracy(
    heads: MedusaHeads | HydraHeads,
    batches: Iterator[Batch],
    embedding: Tensor,
) -> Accuracy:
    """Top-1/2/4/8 accuracy per head; a token outside the hot vocabulary counts as missed."""
    num_heads = heads.config.num_heads
    hits = torch.zeros(num_heads, len(_TOPS))
    counts = torch.zeros(num_heads)
    for batch in batches:
        embedded = functional.embedding(batch.above, embedding).to(torch.float32)
        for head in range(num_heads):
            rows = batch.targets[:, head] != IGNORED
            if not bool(rows.any()):
                continue
            features = heads.features(head, batch.hidden[rows], embedded[rows, : head + 1])
            logits = heads.logits(head, features)
            best = logits.topk(min(_TOPS[-1], logits.shape[1]), dim=1).indices
            is_hit = best == batch.targets[rows, head][:, None]
            hits[head] += torch.stack([is_hit[:, :k].any(dim=1).sum() for k in _TOPS])
            counts[head] += int(rows.sum())
    shares = hits / counts.clamp(min=1)[:, None]
    return Accuracy(
        tuple(int(n) for n in counts.tolist()),
        tuple(tuple(row) for row in shares.tolist()),
    )


def train_kind(  # noqa: PLR0913 - the last is keyword-only
    answers: Answers,
    held_out: list[int],
    recipe: HeadsRecipe,
    target: TargetTensors,
    folder: Path,
    progress: Progress,
    *,
    checkpoint_s: float = 60.0,
) -> tuple[MedusaHeads | HydraHeads, Accuracy]:
    """Train one set of heads; goes on from the last checkpoint in ``folder``.

    Args:
        answers: training text.
        held_out: sequences for the accuracy, never trained on.
        recipe: settings.
        target: embedding and output head.
        folder: of the checkpoint.
        progress: told the optimiser steps done, and a short report.
        checkpoint_s: seconds from one checkpoint to the next; one is written at the end too.

    Raises:
        TrainingError: too little text, or the checkpoint belongs to other settings.
    """
    vocab_size, hidden_size = target.embedding.shape
    config = HeadsConfig(
        kind=recipe.kind,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=recipe.num_heads,
        num_layers=recipe.num_layers,
        embed_scale=recipe.embed_scale,
    )
    hot_ids = hot_vocabulary(answers, recipe.hot_vocab_size, vocab_size)
    heads = build_heads(config, hot_ids)
    assert isinstance(heads, MedusaHeads | HydraHeads)  # noqa: S101 - the recipe checks its kind
    heads.attach_output(target.output_rows(hot_ids).to(torch.float32))
    hot_index = torch.full((vocab_size,), IGNORED, dtype=torch.int64)
    hot_index[hot_ids] = torch.arange(len(hot_ids))
    ends = answers.sequence_ends()
    kept_out = set(held_out)
    trained = answers.positions([s for s in range(answers.num_sequences) if s not in kept_out])
    targets = head_targets(answers, ends, trained, hot_index, recipe.num_heads)
    trained = trained[(targets != IGNORED).any(dim=1)]  # else a batch may have nothing to predict
    if not len(trained):
        raise TrainingError(
            "the answers hold nothing to train on; raise max_new_tokens or hot_vocab_size"
        )

    def batch_at(positions: Tensor) -> Batch:
        return make_batch(answers, ends, positions, hot_index, recipe.num_heads)

    run = _Run(heads, recipe, folder / f"{recipe.kind}.checkpoint.pt", len(trained))
    run.fit(trained, batch_at, target.embedding, progress, checkpoint_s)
    held = torch.split(answers.positions(held_out), recipe.batch_size)
    every = hot_index.clone()
    every[every == IGNORED] = len(hot_ids)  # a cold token is a miss, not a gap
    held_batches = (make_batch(answers, ends, p, every, recipe.num_heads) for p in held)
    return heads, measure_accuracy(heads, held_batches, target.embedding)


class _Run:
    """An optimiser run that can be stopped anywhere and gives the same weights when it goes on."""

    def __init__(
        self, heads: MedusaHeads | HydraHeads, recipe: HeadsRecipe, file: Path, num_positions: int
    ) -> None:
        self._heads, self._recipe, self._file = heads, recipe, file
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=recipe.learning_rate, weight_decay=0.0, betas=(0.9, 0.98)
        )
        self._steps_per_epoch = math.ceil(num_positions / recipe.batch_size)
        self._num_steps = self._steps_per_epoch * recipe.epochs
        self._identity = {**asdict(recipe), "num_positions": num_positions}
        self._done = self._resume()

    def fit(
        self,
        positions: Tensor,
        batch_at: Callable[[Tensor], Batch],
        embedding: Tensor,
        progress: Progress,
        checkpoint_s: float,
    ) -> None:
        """Run the remaining steps; write a checkpoint now and then, and at the end."""
        kind, saved, average = self._recipe.kind, time.monotonic(), 0.0
        progress(kind, self._done, self._num_steps, "")
        for epoch in range(self._done // self._steps_per_epoch, self._recipe.epochs):
            skip = self._done - epoch * self._steps_per_epoch
            batches = iter_batches(positions, self._recipe.batch_size, self._recipe.seed, epoch)
            for index, chosen in enumerate(batches):
                if index < skip:
                    continue
                loss = self._step(batch_at(chosen), embedding)
                average = loss if not average else 0.98 * average + 0.02 * loss
                if time.monotonic() - saved >= checkpoint_s:
                    self._save()
                    saved = time.monotonic()
                progress(kind, self._done, self._num_steps, f"loss {average:.3f}")
        self._save()

    def _step(self, batch: Batch, embedding: Tensor) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        loss = heads_loss(self._heads, batch, embedding, self._recipe.head_decay)
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
