"""Tree attention against naive walks and loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.decoder.attention import attend, visible_keys
from entmtp.topology import Topology
from strategies import topologies

CPU = torch.device("cpu")


def naive_attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: list[list[int]]
) -> torch.Tensor:
    """One row and one head at a time, over a list of the keys that it may see."""
    num_rows, num_heads, head_dim = queries.shape
    groups = num_heads // keys.shape[0]
    out = torch.zeros(num_rows, num_heads, head_dim)
    for row in range(num_rows):
        for head in range(num_heads):
            own_keys = keys[head // groups, visible[row]]
            scores = own_keys @ queries[row, head] / math.sqrt(head_dim)
            out[row, head] = torch.softmax(scores, 0) @ values[head // groups, visible[row]]
    return out.reshape(num_rows, -1)


@given(topologies(max_nodes=24), st.integers(0, 5))
def test_visible_keys_equal_a_naive_walk(tree: Topology, prefix: int) -> None:
    """A node sees the prefix and the path that leads to it, nothing else."""
    visible = visible_keys(prefix, tree.num_rows, tree.ancestor_mask, CPU)
    if visible is None:
        visible = torch.ones(1, prefix + 1, dtype=torch.bool)
    for node, row in enumerate(visible):
        seen = row.nonzero().flatten().tolist()
        assert seen == [*range(prefix), *(prefix + n for n in tree.path_nodes(node))]


@pytest.mark.parametrize("prefix", [0, 3])
def test_rows_without_a_mask_are_a_chain(prefix: int) -> None:
    """Each row of a prompt chunk sees the prefix and the rows up to itself."""
    visible = visible_keys(prefix, 4, None, CPU)
    assert visible is not None
    assert visible.sum(dim=1).tolist() == [prefix + n for n in range(1, 5)]
    assert torch.equal(visible, torch.ones(4, prefix + 4, dtype=torch.bool).tril(prefix))


@pytest.mark.parametrize("mask", [None, np.ones((1, 1), dtype=np.bool_)])
def test_a_single_row_needs_no_mask(mask: np.ndarray | None) -> None:
    """Plain decoding sees everything."""
    assert visible_keys(7, 1, mask, CPU) is None


@given(
    topologies(max_nodes=10),
    st.integers(0, 4),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    st.integers(0, 2**32),
)
def test_attend_equals_a_naive_loop(
    tree: Topology, prefix: int, heads: tuple[int, int], seed: int
) -> None:
    """Grouped query heads read the key-value head of their group, under the ancestor mask."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, total = tree.num_rows, prefix + tree.num_rows
    queries = torch.randn(num_rows, heads[0], 8, generator=generator)
    keys = torch.randn(heads[1], total, 8, generator=generator)
    values = torch.randn(heads[1], total, 8, generator=generator)
    seen = [[*range(prefix), *(prefix + n for n in tree.path_nodes(i))] for i in range(num_rows)]
    visible = visible_keys(prefix, num_rows, tree.ancestor_mask, CPU)
    expected = naive_attend(queries, keys, values, seen)
    torch.testing.assert_close(attend(queries, keys, values, visible), expected)
