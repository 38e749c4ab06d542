"""The cache of one sequence against a list of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from entmtp.decoder.kv_cache import TorchKVCache

LAYERS, HEADS, HEAD_DIM = 2, 3, 4


def make(capacity: int, dtype: torch.dtype = torch.float32) -> TorchKVCache:
    """An empty cache."""
    return TorchKVCache((LAYERS, HEADS, HEAD_DIM), capacity, dtype, torch.device("cpu"))


def forward(cache: TorchKVCache, first: int, num_rows: int) -> None:
    """Write rows ``first, first + 1, ...``: a row's numbers are its own everywhere."""
    cache.begin(num_rows)
    row = torch.arange(first, first + num_rows, dtype=torch.float32).reshape(1, -1, 1)
    for layer in range(LAYERS):
        keys = (row + layer / 10).expand(HEADS, -1, HEAD_DIM)
        cache.write(layer, keys, -keys)


def contents(cache: TorchKVCache) -> list[int]:
    """Numbers of the committed rows, after a check that layers, heads and values agree."""
    keys = cache.keys[:, :, : cache.length]
    rows = keys[0, 0, :, 0]
    expected = rows.reshape(1, 1, -1, 1) + torch.tensor([0.0, 0.1]).reshape(-1, 1, 1, 1)
    assert torch.equal(keys, expected.expand_as(keys))
    assert torch.equal(cache.values[:, :, : cache.length], -keys)
    return [int(number) for number in rows]


@given(
    st.integers(0, 6),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8),
)
def test_commits_equal_a_list_of_rows(capacity: int, steps: list[list[bool]]) -> None:
    """Any rows of any forwards are kept, in order, through any growth."""
    cache, kept, number = make(capacity), list[int](), 0
    for step in steps:
        forward(cache, number, len(step))
        cache.commit([i for i, is_kept in enumerate(step) if is_kept])
        kept += [number + i for i, is_kept in enumerate(step) if is_kept]
        number += len(step)
    assert contents(cache) == kept
    assert cache.length == len(kept) <= cache.capacity


def test_a_new_cache_is_empty() -> None:
    """It has the capacity asked for, and room for one row at least."""
    assert (make(5).length, make(5).capacity, make(0).capacity) == (0, 5, 1)


def test_written_rows_follow_the_committed_ones() -> None:
    """A forward sees the prefix, then its own rows."""
    cache = make(8)
    forward(cache, 0, 2)
    cache.commit([0, 1])
    cache.begin(1)
    keys, values = cache.write(0, torch.full((HEADS, 1, HEAD_DIM), 9.0), torch.zeros(HEADS, 1, 4))
    assert keys.shape == values.shape == (HEADS, 3, HEAD_DIM)
    assert keys[0, :, 0].tolist() == [0.0, 1.0, 9.0]
    assert values[2, :, 3].tolist() == [0.0, -1.0, 0.0]


def test_growth_is_by_half_at_least() -> None:
    """Many small forwards do not copy the cache each time; a large one gets what it needs."""
    cache = make(10)
    forward(cache, 0, 10)
    cache.commit(range(10))
    cache.begin(1)
    assert cache.capacity == 15
    cache.begin(20)
    assert cache.capacity == 30


def test_rows_that_fit_do_not_grow_the_cache() -> None:
    """A request sized right allocates once."""
    cache = make(4)
    before = cache.keys
    forward(cache, 0, 4)
    cache.commit([0, 3])
    assert cache.keys is before


def test_a_cache_grown_under_inference_mode_can_be_committed() -> None:
    """A target grows it within its forward, the engine commits outside."""
    cache = make(1)
    with torch.inference_mode():
        forward(cache, 0, 4)
    cache.commit([0, 2, 3])
    assert contents(cache) == [0, 2, 3]


def test_rows_of_an_abandoned_forward_are_dropped() -> None:
    """Another forward takes their place."""
    cache = make(8)
    forward(cache, 0, 3)
    forward(cache, 5, 2)
    cache.commit([0, 1])
    assert contents(cache) == [5, 6]


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [0, 3], [3], [-1, 0], [-1]])
def test_wrong_rows_are_an_error_of_ours(rows: list[int]) -> None:
    """Rows out of order or outside the last forward stop the program, not corrupt a text."""
    cache = make(8)
    forward(cache, 0, 3)
    with pytest.raises(AssertionError, match="not increasing indices below 3"):
        cache.commit(rows)


def test_rows_cannot_be_committed_twice() -> None:
    """After a commit nothing is pending."""
    cache = make(8)
    forward(cache, 0, 3)
    cache.commit([0])
    with pytest.raises(AssertionError, match="below 0"):
        cache.commit([1])


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_num_bytes(dtype: torch.dtype, size: int) -> None:
    """Memory is that of keys and values at full capacity."""
    assert make(5, dtype).num_bytes == 2 * LAYERS * HEADS * 5 * HEAD_DIM * size


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, 12)), max_size=8),
)
def test_truncations_equal_a_list_that_is_cut(
    capacity: int, steps: list[tuple[int, int, int]]
) -> None:
    """Rows behind the cut are gone, those before it stay as they are, through any growth."""
    cache, kept, number = make(capacity), list[int](), 0
    for num_rows, num_kept, cut in steps:
        forward(cache, number, num_rows)
        cache.commit(range(min(num_kept, num_rows)))
        kept += [number + i for i in range(min(num_kept, num_rows))]
        number += num_rows
        cache.truncate(min(cut, len(kept)))
        del kept[cut:]
        assert contents(cache) == kept


def test_a_truncation_drops_the_pending_rows_too() -> None:
    """Where a forward was broken off, its rows cannot be kept by mistake."""
    cache = make(8)
    forward(cache, 0, 2)
    cache.commit([0, 1])
    forward(cache, 5, 3)
    cache.truncate(2)
    with pytest.raises(AssertionError, match="below 0"):
        cache.commit([0])
    assert contents(cache) == [0, 1]


def test_a_truncation_moves_nothing() -> None:
    """It costs nothing: memory and capacity stay."""
    cache = make(8)
    forward(cache, 0, 5)
    cache.commit(range(5))
    before = (cache.keys, cache.values, cache.capacity)
    cache.truncate(3)
    assert (cache.keys, cache.values, cache.capacity) == before
    assert contents(cache) == [0, 1, 2]


@pytest.mark.parametrize("length", [-1, 3])
def test_a_truncation_to_rows_that_are_not_there_is_an_error_of_ours(length: int) -> None:
    """A cache is only ever cut."""
    cache = make(8)
    forward(cache, 0, 2)
    cache.commit([0, 1])
    with pytest.raises(AssertionError, match=f"cannot cut 2 rows to {length}"):
        cache.truncate(length)


def zeros(capacity: int) -> torch.Tensor:
    """Keys or values for a cache to move to."""
    return torch.zeros(LAYERS, HEADS, capacity, HEAD_DIM)


def test_a_moved_cache_goes_on_where_it_was() -> None:
    """Committed rows are copied, pending ones dropped, later ones written to the new place."""
    cache, keys, values = make(3), zeros(9), zeros(9)
    forward(cache, 0, 2)
    cache.commit([0, 1])
    forward(cache, 7, 1)
    cache.move(keys, values)
    assert cache.capacity == 9
    forward(cache, 2, 3)
    cache.commit([0, 2])
    assert contents(cache) == [0, 1, 2, 4]
    assert cache.keys is keys
    assert cache.values is values


def test_room_for_scratch_rows_is_made() -> None:
    """They are no rows to be committed."""
    cache = make(3)
    cache.begin(2, 5)
    assert cache.capacity >= 7
    with pytest.raises(AssertionError, match="below 2"):
        cache.commit([2])


def test_rows_that_any_forward_wrote_are_cleared() -> None:
    """Abandoned, rejected and scratch rows are zero after, committed ones are kept."""
    cache = make(1)
    cache.move(zeros(20), zeros(20))
    forward(cache, 1, 12)
    cache.commit([0, 1])
    cache.begin(1, 15)
    cache.keys[:, :, 2:18] = torch.nan
    forward(cache, 3, 2)
    cache.clear_from(4)
    cache.commit([0, 1])
    assert contents(cache) == [1, 2, 3, 4]
    assert not cache.keys[:, :, 4:].any()
    assert not cache.values[:, :, 4:].any()
