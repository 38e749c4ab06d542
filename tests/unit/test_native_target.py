"""What a user of the native target meets at its limits."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from entmtp.errors import TopologyError
from entmtp.target.base import Segment, TargetOutput
from entmtp.target.native import MAX_TREE_ROWS
from entmtp.topology import Topology
from native_cases import (
    LONG,
    Job,
    chain,
    make_native,
    needs_library,
    prefilled,
    tokens_of,
    tree_segment,
)

pytestmark = needs_library


def wide(num_rows: int) -> Topology:
    """A tree of so many rows, all children of the root."""
    return Topology.from_paths([[rank] for rank in range(num_rows - 1)])


def test_a_tree_of_more_rows_than_the_core_takes_is_refused() -> None:
    """The message names the limit and the way out; the largest tree that fits is evaluated."""
    target = make_native(LONG[0])
    cache = prefilled(target, tokens_of(target, 5))
    tree = wide(MAX_TREE_ROWS)
    output = target.forward([tree_segment(cache, tree, tokens_of(target, MAX_TREE_ROWS))])
    assert len(output.logits[0]) == MAX_TREE_ROWS
    larger = wide(MAX_TREE_ROWS + 1)
    with pytest.raises(TopologyError, match=r"129 rows.*at most 128.*--backend torch"):
        target.forward([tree_segment(cache, larger, tokens_of(target, MAX_TREE_ROWS + 1))])


def test_caches_and_projections_outlive_their_target() -> None:
    """They hold the model, so nothing that is freed is touched."""
    target = make_native(LONG[0])
    cache = prefilled(target, tokens_of(target, 5))
    target.forward([chain(cache, tokens_of(target, 2))])
    project = target.projection(torch.ones(8, 32), None)
    del target
    gc.collect()
    cache.commit([0])
    assert cache.length == 6
    assert project(torch.ones(3, 32)).shape == (3, 8)


TREE = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)])


def parts_of(output: TargetOutput) -> list[np.ndarray]:
    """All that a forward gave, as copies."""
    stats = output.stats or ()
    lists = [values for one in stats for values in (one.tokens, one.entropy, one.top1)]
    rows = [rows.numpy().copy() for rows in (*output.logits, *output.hidden)]
    return [*rows, *map(np.array, lists)]


def test_a_forward_leaves_the_results_of_others_alone() -> None:
    """One and many segments, more and fewer rows, each twice, in whatever order: the same bits."""
    target = make_native("llama", 2)
    segments = [
        tree_segment(prefilled(target, tokens_of(target, 9, n)), TREE, tokens_of(target, 7, n))
        for n in range(3)
    ]
    long = chain(target.new_cache(300), tokens_of(target, 200))
    chunks = [replace(long, logits=kind) for kind in ("last", "none")]
    one = chain(prefilled(target, tokens_of(target, 20, 4)), tokens_of(target, 1, 5))
    batches = [[one], segments[:1], [*segments, chunks[0], one], [chunks[1], one], [one]]
    for needs_logits in (True, False):
        outputs = [target.forward(batch, needs_logits=needs_logits) for batch in batches]
        first = [parts_of(output) for output in outputs]
        for number in (3, 1, 2, 0, 4):
            again = target.forward(batches[number], needs_logits=needs_logits)
            for found, expected in zip(parts_of(again), first[number], strict=True):
                assert_array_equal(found, expected)
        for output, expected in zip(outputs, first, strict=True):
            for found, part in zip(parts_of(output), expected, strict=True):
                assert_array_equal(found, part)
        assert [[len(rows) for rows in output.logits] for output in outputs] == (
            [[1], [7], [7, 7, 7, 1, 1], [0, 1], [1]]
            if needs_logits
            else [[0], [0], [0] * 5, [0] * 2, [0]]
        )


def test_a_mask_is_read_however_it_lies() -> None:
    """As a job that is written by hand reads it."""
    target = make_native("llama", 2)
    tokens, cache = tokens_of(target, TREE.num_rows), prefilled(target, tokens_of(target, 9))
    mask = TREE.ancestor_mask
    job = Job(tokens.tolist(), TREE.depths.tolist(), mask)
    assert job.run(target, cache) == 0
    frozen = mask.copy()
    frozen.flags.writeable = False
    strided = np.repeat(mask, 2, axis=1)[:, ::2]
    for form in (mask, np.asfortranarray(mask), strided, mask.astype(np.uint8), frozen):
        output = target.forward([Segment(cache, tokens, TREE.depths, form)])
        assert output.stats is not None
        assert_array_equal(output.hidden[0].numpy(), job.hidden)
        assert_array_equal(output.logits[0].numpy(), job.logits)
        assert output.stats[0].tokens == job.stats["argmax"].tolist()
        assert output.stats[0].entropy == job.stats["entropy"].tolist()
        assert output.stats[0].top1 == job.stats["p_max"].tolist()
