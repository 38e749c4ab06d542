"""Traces whose texts are easy here and hard there, so that policies have something to find."""

from dataclasses import replace

import numpy as np

from entmtp.calibrate.trace import MISS, NO_COPY, Trace
from entmtp.growth import CODES_PER_NAT, NUM_CODES, UNSCORED
from entmtp.topology import Topology
from traces import FACTS

__all__ = ["ENVELOPE", "lively_trace"]

ENVELOPE = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
DEPTH = 3


def lively_trace(seed: int, num_texts: int = 12, size: int = 60) -> Trace:
    """Stretches of about 15 tokens in which drafts are mostly right, and others of the kind.

    Entropy, top-1 probability and the codes of the envelope follow the stretch, with noise.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(size // 2, size + 1, num_texts)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    total = int(offsets[-1])
    is_easy = (np.cumsum(rng.random(total) < 1 / 15) % 2).astype(bool)
    right = np.where(is_easy, 0.9, 0.15)
    ranks = rng.geometric(np.repeat(right[:, None], DEPTH, axis=1)) - 1
    ranks = np.where(ranks < 4, ranks, MISS).astype(np.uint8)
    for end in offsets[1:]:
        for ahead in range(DEPTH):
            ranks[max(end - 1 - ahead, 0) : end, ahead] = MISS
    entropy = (rng.gamma(2.0, 0.5, total) * np.where(is_easy, 0.4, 2.0)).astype(np.float32)
    entropy[offsets[1:] - 1] = np.nan
    share = np.clip(right + rng.normal(0, 0.15, total), 0.02, 0.98)
    codes = np.tile(np.floor(-np.log(share) * CODES_PER_NAT)[:, None], (1, ENVELOPE.num_nodes))
    codes[:, [1, 3]] += 12
    codes = np.minimum(codes, NUM_CODES - 1)
    codes[offsets[1:] - 1] = UNSCORED
    no_copies = np.zeros(total, dtype=np.uint8)
    return Trace(
        replace(FACTS, max_new_tokens=size, envelope=ENVELOPE.paths),
        tuple(f"p{text}" for text in range(num_texts)),
        tuple("ab"[text % 2] for text in range(num_texts)),
        np.zeros(total, dtype=np.int32),
        offsets,
        rng.integers(1, 200, num_texts).astype(np.int32),
        ranks,
        entropy,
        np.exp(-entropy).astype(np.float32),
        np.exp(-codes[:, [0, 2, 4]] / CODES_PER_NAT).astype(np.float16),
        codes.astype(np.uint8),
        np.full(total, NO_COPY, dtype=np.uint8),
        no_copies,
        no_copies,
    )
