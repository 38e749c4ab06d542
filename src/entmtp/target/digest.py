"""A short name for the weights of a target, so that what was made with others is not mixed up."""

import hashlib

import numpy as np
import torch

from entmtp.target.base import Segment, Target

__all__ = ["model_digest"]

_SAMPLED_ROWS = 64


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
