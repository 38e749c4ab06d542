"""Training examples: what each head reads and what it must predict.

At position j of an answer (root ``tokens[j]``), head i reads ``hidden[j]`` and, if it is a Hydra
head, the embeddings of ``tokens[j] .. tokens[j + i]``; its target is ``tokens[j + i + 1]``. All of
these are answer tokens, so prompts are never trained on, and a target is never among the inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.train.data import Answers

__all__ = ["IGNORED", "Batch", "head_targets", "hot_vocabulary", "iter_batches", "make_batch"]

IGNORED = -100
"""Target of a head that has nothing to predict: beyond the answer, or not a hot token."""


@dataclass(frozen=True)
class Batch:
    """Examples of one optimiser step.

    Attributes:
        hidden: float32 ``(B, H)``.
        above: int64 ``(B, K)`` token ids x_{t+1} .. x_{t+K}; head i reads the first i + 1.
        targets: int64 ``(B, K)`` hot indices, or ``IGNORED``.
    """

    hidden: Tensor
    above: Tensor
    targets: Tensor


def hot_vocabulary(answers: Answers, size: int, vocab_size: int) -> Tensor:
    """The most frequent tokens of the answers, ties to the lower id; int64 ``(size,)``, ascending.

    As the ids ascend, equal scores of a head rank by token id.
    """
    counts = torch.bincount(answers.answer_tokens(), minlength=vocab_size)
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[: min(size, vocab_size)].sort().values


def make_batch(
    answers: Answers, ends: Tensor, positions: Tensor, hot_index: Tensor, num_heads: int
) -> Batch:
    """Gather the examples at some positions.

    Args:
        answers: the text.
        ends: end of the sequence of every position (``answers.sequence_ends()``).
        positions: int64 ``(B,)``.
        hot_index: int64 ``(V,)``, index of each token in the hot vocabulary or ``IGNORED``.
        num_heads: K.
    """
    index = positions[:, None] + torch.arange(num_heads)
    above = answers.tokens[index.clamp(max=len(answers.tokens) - 1)]
    targets = head_targets(answers, ends, positions, hot_index, num_heads)
    return Batch(answers.hidden[positions].to(torch.float32), above, targets)


def head_targets(
    answers: Answers, ends: Tensor, positions: Tensor, hot_index: Tensor, num_heads: int
) -> Tensor:
    """What each head must predict, int64 ``(B, K)``; arguments as :func:`make_batch`."""
    index = positions[:, None] + torch.arange(1, num_heads + 1)
    is_inside = index < ends[positions][:, None]
    tokens = answers.tokens[index.clamp(max=len(answers.tokens) - 1)]
    return torch.where(is_inside, hot_index[tokens], IGNORED)


def iter_batches(positions: Tensor, batch_size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Positions of one epoch in an order that depends on (seed, epoch) alone."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    order = positions[torch.randperm(len(positions), generator=generator)]
    yield from torch.split(order, batch_size)
