"""What a user of the native target meets at its limits."""

import gc

import pytest
import torch

from entmtp.errors import TopologyError
from entmtp.target.native import MAX_TREE_ROWS
from entmtp.topology import Topology
from native_cases import LONG, chain, make_native, needs_library, prefilled, tokens_of, tree_segment

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
