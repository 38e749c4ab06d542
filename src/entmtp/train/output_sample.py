"""The columns of the hot vocabulary that the loss of one optimiser step is taken over.

Scoring the whole hot vocabulary costs most of a step. Text keeps to few tokens, so the most
frequent ones are always scored, and of the rest a sample that is drawn anew for every step, each
standing for its share of them: the sum of exponentials in the softmax is estimated without bias
(importance sampling, Bengio and Senecal 2008), and the token that must be predicted is always
counted exactly.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["NUM_EXACT", "OutputSample"]

NUM_EXACT = 1024
"""Most frequent hot tokens, which are always scored."""


class OutputSample:
    """Losses over some of the columns of an output matrix, which stand for all."""

    def __init__(self, output: Tensor, order: Tensor, num_sampled: int, draw: torch.Generator):
        """Choose the columns of a step.

        Args:
            output: ``(hot, H)`` rows of the output head.
            order: int64 ``(hot,)`` hot indices, the most frequent token first.
            num_sampled: tokens to draw besides the ``NUM_EXACT`` most frequent ones; 0, or as many
                as there are, scores all.
            draw: decides which.
        """
        self._output = output
        rare = order[NUM_EXACT:]
        self._is_whole = not num_sampled or num_sampled >= len(rare)
        if self._is_whole:
            self._rows = output
            return
        drawn = rare[torch.randperm(len(rare), generator=draw)[:num_sampled]]
        chosen = torch.cat((order[:NUM_EXACT], drawn))
        self._rows = output[chosen]
        self._shares = torch.zeros(len(chosen))
        self._shares[NUM_EXACT:] = math.log(len(rare) / num_sampled)
        self._columns = torch.full((len(output),), -1, dtype=torch.int64)
        self._columns[chosen] = torch.arange(len(chosen))

    def cross_entropy(self, features: Tensor, targets: Tensor) -> Tensor:
        """Mean over rows of ``-log p(target)``.

        Args:
            features: ``(R, H)``.
            targets: int64 ``(R,)`` hot indices.
        """
        scores = self._scores(features)
        if self._is_whole:
            return functional.cross_entropy(scores, targets)
        columns = self._columns[targets]
        own = (features * self._output[targets]).sum(dim=1)
        nothing = scores.new_full((), -math.inf)
        drawn = torch.nonzero(columns >= NUM_EXACT).flatten()  # they do not stand for others too
        scores = scores.index_put((drawn, columns[drawn]), nothing)
        is_rare = (columns < 0) | (columns >= NUM_EXACT)
        further = torch.where(is_rare, own, nothing)
        return (torch.logsumexp(torch.cat((scores, further[:, None]), dim=1), dim=1) - own).mean()

    def divergence(self, features: Tensor, states: Tensor) -> Tensor:
        """Mean over rows of KL(target || head), of the softmax over the hot vocabulary.

        Args:
            features: ``(R, H)``.
            states: ``(R, H)`` of the target, which chose the tokens from them.
        """
        with torch.no_grad():
            teacher = torch.log_softmax(self._scores(states), dim=1)
        student = torch.log_softmax(self._scores(features), dim=1)
        return functional.kl_div(student, teacher, reduction="batchmean", log_target=True)

    def _scores(self, features: Tensor) -> Tensor:
        scores = functional.linear(features, self._rows)
        return scores if self._is_whole else scores + self._shares
