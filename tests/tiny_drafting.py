"""Tiny models whose texts are varied, with heads of random weights, in torch and in the core."""

import random

import pytest
import torch

from draft_cases import core_drafter
from entmtp.drafters.base import Drafter
from entmtp.target.base import Target
from exactness import make_drafter
from fakes import tiny_target
from native_cases import make_native, needs_library

__all__ = ["KINDS", "every_backend", "repeating", "tiny_drafter", "tiny_model"]

KINDS = ("medusa", "hydra", "hydra++", "mtp")

every_backend = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("native", marks=needs_library)]
)


def tiny_model(backend: str, window: int = 512) -> Target:
    """A few dozen tokens; a window of 40 where a small one is asked for."""
    if backend == "native":
        return make_native("short" if window == 40 else "biased", 2)
    return tiny_target(
        6, torch.float64, 0.3, vocab_size=12, context_window=window, tie_embeddings=False
    )


def tiny_drafter(backend: str, kind: str, window: int = 512) -> Drafter:
    """For the model of the same backend and window."""
    if backend == "native":
        return core_drafter(kind, "short" if window == 40 else "biased", 2)
    return make_drafter(kind, tiny_model(backend, window), (), 4)


def repeating(rng: random.Random, vocab_size: int, most: int) -> tuple[int, ...]:
    """A prompt of some words again and again, sometimes with a slip."""
    words = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 6))]
    tokens = (words * most)[: rng.randint(1, most)]
    if rng.random() < 0.5:
        tokens[rng.randrange(len(tokens))] = rng.randrange(vocab_size)
    return tuple(tokens)
