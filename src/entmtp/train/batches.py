"""Training examples: what each head reads and what it must predict.

At position j of an answer (root ``tokens[j]``), head i reads ``hidden[j]`` and, if it is a Hydra
head, the embeddings of ``tokens[j] .. tokens[j + i]``; its target is ``tokens[j + i + 1]``. All of
these are answer tokens, so prompts are never trained on, and a target is never among the inputs.
Modules that attend to the text also read the states of its earlier tokens, the prompt's included.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.train.config import HeadsRecipe
from entmtp.train.data import Answers
from entmtp.train.sequences import SequenceRows

__all__ = [
    "IGNORED",
    "Batch",
    "ExampleMaker",
    "head_targets",
    "hot_vocabulary",
    "iter_batches",
    "iter_text_batches",
    "sequences_of",
    "step_generator",
]

IGNORED = -100
"""Target of a head that has nothing to predict: beyond the answer, or not a hot token."""


@dataclass(frozen=True)
class Batch:
    """Examples of one optimiser step.

    Attributes:
        hidden: float32 ``(B, H)``.
        above: int64 ``(B, K)`` token ids x_{t+1} .. x_{t+K}; head i reads the first i + 1.
        targets: int64 ``(B, K)`` hot indices, or ``IGNORED``.
        teacher: float32 ``(B, K, H)`` states that the target chose these tokens from, where wanted.
        text: the sequences that the examples stand in, for modules that attend to them.
    """

    hidden: Tensor
    above: Tensor
    targets: Tensor
    teacher: Tensor | None = None
    text: SequenceRows | None = None


def hot_vocabulary(
    answers: Answers, sequences: Sequence[int], size: int, vocab_size: int
) -> Tensor:
    """The most frequent tokens of some answers, the most frequent first, ties by id; int64."""
    counts = torch.bincount(answers.answer_tokens(sequences), minlength=vocab_size)
    return torch.sort(counts, descending=True, stable=True).indices[:size]


class ExampleMaker:
    """Gathers examples out of answers."""

    def __init__(
        self, answers: Answers, hot_index: Tensor, num_heads: int, *, with_teacher: bool = False
    ) -> None:
        """Look at answers through a hot vocabulary.

        Args:
            answers: the text.
            hot_index: int64 ``(V,)``, index of each token in the hot vocabulary or ``IGNORED``.
            num_heads: K.
            with_teacher: gather the states behind the targets too.
        """
        self._with_teacher = with_teacher
        self._answers, self._hot_index, self._num_heads = answers, hot_index, num_heads
        self._ends = answers.sequence_ends()
        self._places = torch.empty_like(answers.tokens)  # row of a token in the text of a batch

    def at(self, positions: Tensor) -> Batch:
        """Examples at some positions, int64 ``(B,)``, without the text they stand in."""
        return self._batch(positions, None)

    def in_text(self, positions: Tensor) -> Batch:
        """Examples at some positions, int64 ``(B,)``, with the sequences that they stand in."""
        answers = self._answers
        sequences = torch.unique(sequences_of(answers, positions)).tolist()
        spans = [(int(answers.offsets[s]) + 1, int(answers.offsets[s + 1])) for s in sequences]
        rows = torch.cat([torch.arange(*span) for span in spans])
        self._places[rows] = torch.arange(len(rows))
        text = SequenceRows(
            answers.hidden[rows].to(torch.float32),
            answers.tokens[rows],
            tuple(end - begin for begin, end in spans),
            self._places[positions],
        )
        return self._batch(positions, text)

    def targets(self, positions: Tensor) -> Tensor:
        """What each head must predict at some positions, int64 ``(B, K)``."""
        args = (self._answers, self._ends, positions, self._hot_index, self._num_heads)
        return head_targets(*args)

    def _batch(self, positions: Tensor, text: SequenceRows | None) -> Batch:
        answers, last = self._answers, len(self._answers.tokens) - 1
        ahead = positions[:, None] + torch.arange(self._num_heads)
        teacher = None
        if self._with_teacher:
            teacher = answers.hidden[(ahead + 1).clamp(max=last)].to(torch.float32)
        return Batch(
            answers.hidden[positions].to(torch.float32),
            answers.tokens[ahead.clamp(max=last)],
            self.targets(positions),
            teacher,
            text,
        )


def head_targets(
    answers: Answers, ends: Tensor, positions: Tensor, hot_index: Tensor, num_heads: int
) -> Tensor:
    """What each head must predict, int64 ``(B, K)``.

    Args:
        answers: the text.
        ends: end of the sequence of every position (``answers.sequence_ends()``).
        positions: int64 ``(B,)``.
        hot_index: int64 ``(V,)``, index of each token in the hot vocabulary or ``IGNORED``.
        num_heads: K.
    """
    index = positions[:, None] + torch.arange(1, num_heads + 1)
    is_inside = index < ends[positions][:, None]
    tokens = answers.tokens[index.clamp(max=len(answers.tokens) - 1)]
    return torch.where(is_inside, hot_index[tokens], IGNORED)


def sequences_of(answers: Answers, positions: Tensor) -> Tensor:
    """Numbers of the answers that positions lie in, int64 ``(B,)``."""
    return torch.searchsorted(answers.offsets, positions, right=True) - 1


def iter_batches(positions: Tensor, batch_size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Positions of one epoch in an order that depends on (seed, epoch) alone."""
    order = torch.randperm(len(positions), generator=step_generator(seed, epoch))
    yield from torch.split(positions[order], batch_size)


def iter_text_batches(
    answers: Answers, positions: Tensor, recipe: HeadsRecipe, epoch: int
) -> Iterator[Tensor]:
    """As :func:`iter_batches`, with few sequences a batch: a module that attends reads them whole.

    Sequences are put into groups, and the positions of each group into batches, which come in any
    order. Neighbours are alike, so batches of whole sequences would teach less.
    """
    draw = step_generator(recipe.seed, epoch)
    shuffled = positions[torch.randperm(len(positions), generator=draw)]
    numbers, which = torch.unique(sequences_of(answers, shuffled), return_inverse=True)
    group = torch.randperm(len(numbers), generator=draw)[which] // recipe.sequences_a_step
    sizes = torch.bincount(group).tolist()
    batches: list[Tensor] = []
    for part in torch.split(shuffled[torch.argsort(group, stable=True)], sizes):
        batches += part.tensor_split(max(1, round(len(part) / recipe.batch_size)))
    for index in torch.randperm(len(batches), generator=draw).tolist():
        yield batches[index]


def step_generator(seed: int, number: int) -> torch.Generator:
    """What one epoch or one step draws, whatever was drawn before."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)
