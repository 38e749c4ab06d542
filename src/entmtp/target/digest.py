"""A short name for the weights of a target, so that what was made with others is not mixed up."""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from entmtp.target.base import Segment, Target, TargetConfig

__all__ = ["WeightsDigest", "model_digest"]

_SAMPLED_ROWS = 64
_SAMPLED_VALUES = 64


class WeightsDigest:
    """A digest of weights as they are stored: the same whatever a target makes of them.

    Banks carry it, since they may be used on another backend and in another precision.
    """

    def __init__(self, config: TargetConfig) -> None:
        """No tensor yet."""
        self._config = config
        self._tensors: dict[str, bytes] = {}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand tensors on, and take a sample of each."""
        for name, value in tensors:
            flat = value.detach().reshape(-1)
            digest = hashlib.sha256(str(tuple(value.shape)).encode())
            for part in (flat[:_SAMPLED_VALUES], flat[-_SAMPLED_VALUES:]):
                digest.update(part.to("cpu", torch.float32).numpy().tobytes())
            self._tensors[name] = digest.digest()
            yield name, value

    def hexdigest(self) -> str:
        """First 16 hex digits of the SHA-256 of the sizes and of the first and last values of every
        tensor that passed, in whatever order.
        """
        digest = hashlib.sha256(repr(self._config).encode())
        for name, part in sorted(self._tensors.items()):
            digest.update(name.encode() + part)
        return digest.hexdigest()[:16]


def model_digest(target: Target) -> str:
    """First 16 hex digits of the SHA-256 of a target's sizes, of the first rows of its ends, and of
    what it makes of a fixed text: other weights in between change some of its best tokens.
    """
    rows = torch.arange(min(_SAMPLED_ROWS, target.config.vocab_size))
    digest = hashlib.sha256(repr(target.config).encode())
    for matrix in (target.embedding()[: len(rows)], target.output_rows(rows)):
        digest.update(matrix.to("cpu", torch.float32).contiguous().numpy().tobytes())
    size = min(_SAMPLED_ROWS, target.config.context_window)
    tokens = torch.arange(size) * 7919 % target.config.vocab_size
    segment = Segment(target.new_cache(size), tokens, np.arange(size, dtype=np.int64))
    best = target.forward([segment]).logits[0].argmax(dim=-1)
    digest.update(best.to("cpu", torch.int64).numpy().tobytes())
    return digest.hexdigest()[:16]
