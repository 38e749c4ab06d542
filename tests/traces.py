"""Traces that were never decoded: random ranks, for tests of replay and growth."""

import random
from dataclasses import fields, replace

import numpy as np

from entmtp.calibrate.trace import MISS, NO_COPY, Trace, TraceFacts
from entmtp.drafters.copying import NUM_MATCHES
from entmtp.growth import MAX_COPY, NUM_CODES
from entmtp.topology import Topology
from exactness import random_topology

__all__ = ["FACTS", "cut_texts", "kept", "random_trace", "small_tree", "with_growth"]

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
        np.full(total, NO_COPY, dtype=np.uint8),
        np.zeros(total, dtype=np.uint8),
        np.zeros(total, dtype=np.uint8),
    )


def with_growth(trace: Trace, envelope: Topology, seed: int = 3) -> Trace:
    """The trace with random codes of an envelope, and random copies at most of its roots."""
    rng = np.random.default_rng(seed)
    total = trace.num_tokens
    is_copy = rng.random(total) < 0.7
    left = np.repeat(trace.offsets[1:], np.diff(trace.offsets)) - 1 - np.arange(total)
    hits = np.minimum(rng.integers(0, MAX_COPY + 1, total) * (rng.random(total) < 0.7), left)
    return replace(
        trace,
        facts=replace(trace.facts, envelope=envelope.paths),
        codes=rng.integers(0, NUM_CODES, (total, envelope.num_nodes)).astype(np.uint8),
        copy_match=np.where(is_copy, rng.integers(0, NUM_MATCHES, total), NO_COPY).astype(np.uint8),
        copy_hits=(hits * is_copy).astype(np.uint8),
        copy_node=(rng.integers(0, envelope.num_rows, total) * is_copy).astype(np.uint8),
    )


def cut_texts(trace: Trace, sizes: np.ndarray) -> Trace:
    """The first tokens of every text."""
    spans = zip(trace.offsets[:-1].tolist(), sizes.tolist(), strict=True)
    index = np.concatenate([np.arange(start, start + size) for start, size in spans])
    values = {field.name: getattr(trace, field.name) for field in fields(trace)}
    columns = {
        name: column[index]
        for name, column in values.items()
        if isinstance(column, np.ndarray) and name not in ("offsets", "prompt_lengths")
    }
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    return replace(trace, offsets=offsets, **columns)


def kept(trace: Trace, root: int, tree: Topology) -> int:
    """Longest prefix of the ranks at a root that is a path of the tree."""
    path: tuple[int, ...] = ()
    for rank in trace.ranks[root].tolist():
        if (*path, rank) not in tree.paths:
            break
        path = (*path, rank)
    return len(path)


def small_tree(rng: random.Random) -> Topology:
    """A tree that a random trace can meet."""
    return random_topology(rng, max_nodes=14, max_depth=3)
