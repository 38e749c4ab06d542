"""From a batch of examples to features, loss and accuracy, for every kind of module."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from entmtp.decoder.rope import RotationTable
from entmtp.drafters.heads import Heads, HydraHeads, MedusaHeads, RecurrentModule
from entmtp.errors import TrainingError
from entmtp.train.batches import IGNORED, Batch
from entmtp.train.output_sample import OutputSample
from entmtp.train.sequences import ExampleMixer, SequenceRows

__all__ = ["FeatureReader", "count_hits", "heads_loss", "reads_text", "with_noise"]

TOPS = (1, 2, 4, 8)


def reads_text(heads: Heads) -> bool:
    """Whether a module attends to the text, so that whole sequences are needed."""
    return isinstance(heads, RecurrentModule) or (
        isinstance(heads, HydraHeads) and heads.prefix is not None
    )


class FeatureReader:
    """Computes what every depth of a module makes of a batch, as the drafter would."""

    def __init__(self, heads: Heads, embedding: Tensor, num_depths: int) -> None:
        """Join module and target.

        Args:
            heads: with parameters, not packed.
            embedding: ``(V, H)`` input embedding of the target.
            num_depths: K.
        """
        self._heads, self._embedding, self._num_depths = heads, embedding, num_depths
        self._rotation: RotationTable | None = None
        if heads.config.block is not None:
            where = torch.float32, torch.device("cpu")
            self._rotation = RotationTable(heads.config.block, 1024, *where)

    def read(self, batch: Batch) -> Iterator[Tensor]:
        """``(B, H)`` features, one depth after the other."""
        embedded = functional.embedding(batch.above, self._embedding).to(torch.float32)
        if isinstance(self._heads, RecurrentModule):
            yield from self._unroll(self._heads, batch, embedded)
            return
        assert isinstance(self._heads, MedusaHeads | HydraHeads)  # noqa: S101 - no other kind
        hidden = self._base(batch)
        for depth in range(self._num_depths):
            yield self._heads.features(depth, hidden, embedded[:, : depth + 1])

    def _base(self, batch: Batch) -> Tensor:
        """h_t of the target, or s_t of the prefix layer."""
        prefix = self._heads.prefix if isinstance(self._heads, HydraHeads) else None
        if prefix is None:
            return batch.hidden
        text = _text_of(batch)
        rotation = self._rotate(text.positions)
        out: Tensor = prefix(text.hidden, rotation, ExampleMixer(text), text.index)
        return out

    def _unroll(self, module: RecurrentModule, batch: Batch, embedded: Tensor) -> Iterator[Tensor]:
        """The module on the text, then again on its own features, a token further each time."""
        text = _text_of(batch)
        mix, positions = ExampleMixer(text), text.positions
        following = functional.embedding(text.following, self._embedding).to(torch.float32)
        rotation = self._rotate(positions)
        features = module.features(text.hidden, following, rotation, mix, text.index)
        yield features
        positions = positions[text.index]
        for depth in range(1, self._num_depths):
            rotation = self._rotate(positions + depth)
            features = module.features(features, embedded[:, depth], rotation, mix)
            yield features

    def _rotate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert self._rotation is not None  # noqa: S101 - modules that attend have a block
        return self._rotation.at(positions, int(positions.max()) + 1)


def heads_loss(
    reader: FeatureReader, batch: Batch, output: OutputSample, decay: float, kl: float = 0.0
) -> Tensor:
    """Loss of a batch, depth i weighted by ``decay ** i``.

    Cross-entropy on the target's own tokens, or the divergence from the target's distribution
    over the hot vocabulary (KL(target || head)), or a mixture: ``(1 - kl) CE + kl KL``.

    Raises:
        TrainingError: no head has anything to predict, or the loss is not finite.
    """
    total = batch.hidden.new_zeros(())
    has_target = False
    for depth, features in enumerate(reader.read(batch)):
        rows = batch.targets[:, depth] != IGNORED
        if not bool(rows.any()):
            continue
        has_target = True
        loss = features.new_zeros(())
        if kl < 1:
            loss = loss + (1 - kl) * output.cross_entropy(
                features[rows], batch.targets[rows, depth]
            )
        if kl > 0:
            assert batch.teacher is not None  # noqa: S101 - the trainer asks for it
            loss = loss + kl * output.divergence(features[rows], batch.teacher[rows, depth])
        total = total + decay**depth * loss
    if not has_target:
        raise TrainingError("a batch has no token to predict; are all answers masked or empty?")
    if not bool(torch.isfinite(total)):
        raise TrainingError("the loss is not finite; lower the learning rate")
    return total


def with_noise(batch: Batch, size: float, draw: torch.Generator) -> Batch:
    """A batch whose states have Gaussian noise of ``size`` times their root mean square."""
    if batch.text is None:
        return replace(batch, hidden=_shaken(batch.hidden, size, draw))
    text = replace(batch.text, hidden=_shaken(batch.text.hidden, size, draw))
    return replace(batch, hidden=text.hidden[text.index], text=text)


def _shaken(states: Tensor, size: float, draw: torch.Generator) -> Tensor:
    noise = torch.randn(states.shape, generator=draw)
    return states + size * states.square().mean().sqrt() * noise


@torch.no_grad()
def count_hits(
    heads: Heads, reader: FeatureReader, batch: Batch, num_depths: int
) -> tuple[Tensor, Tensor]:
    """By depth, how many examples have their token among the best 1, 2, 4, 8, and their number.

    Returns:
        ``(K, 4)`` and ``(K,)``.
    """
    hits, counts = torch.zeros(num_depths, len(TOPS)), torch.zeros(num_depths)
    for depth, features in enumerate(reader.read(batch)):
        rows = batch.targets[:, depth] != IGNORED
        if not bool(rows.any()):
            continue
        logits = heads.logits(_output_of(heads, depth), features[rows])
        best = logits.topk(min(TOPS[-1], logits.shape[1]), dim=1).indices
        is_hit = best == batch.targets[rows, depth][:, None]
        hits[depth] = torch.stack([is_hit[:, :k].any(dim=1).sum() for k in TOPS])
        counts[depth] = int(rows.sum())
    return hits, counts


def _output_of(heads: Heads, depth: int) -> int:
    """Which output matrix a depth uses: a recurrent module has one."""
    return 0 if isinstance(heads, RecurrentModule) else depth


def _text_of(batch: Batch) -> SequenceRows:
    assert batch.text is not None  # noqa: S101 - the trainer gives whole sequences to such modules
    return batch.text
