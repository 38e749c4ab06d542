"""How likely the target finds what was written."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from entmtp.bench.runs import Turn
from entmtp.quality import CHUNK, TargetScorer
from entmtp.target.base import Target

__all__ = ["Likelihood"]


class Likelihood:
    """Negative log-likelihoods of texts under one target, each text read once."""

    def __init__(self, target: Target) -> None:
        """Read nothing yet."""
        self._scorer = TargetScorer(target, target.config.context_window)
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def scored(self, prompt: Sequence[int], turn: Turn) -> Turn:
        """The answer with the likelihood of its tokens behind the prompt."""
        key = tuple(prompt), turn.tokens
        if key not in self._known:
            self._known[key] = self._nll(*key)
        return replace(turn, nll=self._known[key])

    def forget(self) -> None:
        """Texts of other prompts follow."""
        self._known.clear()

    @torch.inference_mode()
    def _nll(self, prompt: tuple[int, ...], text: tuple[int, ...]) -> float:
        """Sum over a text, nats, at temperature 1."""
        tokens, first = prompt + text, len(prompt)
        self._scorer.start()
        self._scorer.read(tokens[: first - 1])
        parts = []
        for start in range(first - 1, len(tokens) - 1, CHUNK):
            chunk = tokens[start : start + CHUNK + 1]
            logits = self._scorer.logits(chunk[:-1]).float()
            following = torch.tensor(chunk[1:], device=logits.device)
            own = torch.log_softmax(logits, dim=-1).gather(1, following[:, None])
            parts.append(-float(own.double().sum()))
        return math.fsum(parts)
