"""Traces that were never decoded: random ranks, for tests of replay and growth."""

import numpy as np

from entmtp.calibrate.trace import MISS, Trace, TraceFacts

FACTS = TraceFacts(
    model="tiny",
    model_digest="0",
    drafter="random",
    drafter_digest="0",
    backend="none",
    precision="none",
    prompts_digest="0",
    max_new_tokens=40,
    temperature=0.0,
    seed=0,
)


def random_trace(seed: int, num_texts: int = 6, depth: int = 3, max_rank: int = 4) -> Trace:
    """Texts of 1 to 40 tokens of two tasks, small ranks more often than large ones."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, FACTS.max_new_tokens + 1, num_texts)
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    total = int(offsets[-1])
    ranks = np.minimum(rng.geometric(0.5, (total, depth)) - 1, max_rank).astype(np.uint8)
    ranks[ranks == max_rank] = MISS
    for end in offsets[1:]:
        for ahead in range(depth):  # nothing follows the last token of a text
            ranks[max(end - 1 - ahead, 0) : end, ahead] = MISS
    entropy = rng.gamma(1.0, 1.0, total).astype(np.float32)
    entropy[offsets[1:] - 1] = np.nan  # no step has its root there
    return Trace(
        FACTS,
        tuple(f"p{text}" for text in range(num_texts)),
        tuple("ab"[text % 2] for text in range(num_texts)),
        rng.integers(0, 100, total).astype(np.int32),
        offsets,
        rng.integers(1, 50, num_texts).astype(np.int32),
        ranks,
        entropy,
        np.exp(-entropy).astype(np.float32),
        rng.random((total, depth)).astype(np.float16),
        np.zeros((total, 0), dtype=np.uint8),
    )
