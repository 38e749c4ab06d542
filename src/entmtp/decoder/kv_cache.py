"""Keys and values of one sequence, sized by the request."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["TorchKVCache"]


class TorchKVCache:
    """Committed rows ``0 .. length - 1``, then the pending rows of the last forward.

    Keys and values are two tensors of shape ``(layers, kv heads, capacity, head_dim)``. The
    capacity is what the request needs; a forward that needs more makes it grow by half.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate an empty cache.

        Args:
            shape: layers, key-value heads, head_dim.
            capacity: rows.
            dtype: of keys and values.
            device: where they live.
        """
        layers, heads, head_dim = shape
        size = (layers, heads, max(capacity, 1), head_dim)
        self.keys = torch.empty(size, dtype=dtype, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)
        self._length = 0
        self._num_pending = 0
        self._num_touched = 0  # rows that a forward may have written to

    @property
    def length(self) -> int:
        """Committed rows."""
        return self._length

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def begin(self, num_rows: int, num_scratch: int = 0) -> None:
        """Make room for the rows of a forward; pending rows of an earlier one are dropped.

        Args:
            num_rows: N.
            num_scratch: rows after them that the forward may write to as well.
        """
        need = self._length + num_rows + num_scratch
        if need > self.capacity:
            self.keys = self._grown(self.keys, need)
            self.values = self._grown(self.values, need)
        self._num_pending = num_rows
        self._num_touched = max(self._num_touched, need)

    def move(self, keys: Tensor, values: Tensor) -> None:
        """Go on in other tensors, which hold zeros; pending rows are dropped.

        Args:
            keys: ``(layers, kv heads, capacity, head_dim)``; the committed rows are copied there.
            values: the same shape.
        """
        keys[:, :, : self._length] = self.keys[:, :, : self._length]
        values[:, :, : self._length] = self.values[:, :, : self._length]
        self.keys, self.values = keys, values
        self._num_pending = 0
        self._num_touched = self._length

    def clear_from(self, row: int) -> None:
        """Zero what forwards left in the rows from this one on.

        After :meth:`move`, all rows from there on are zero then.
        """
        if row < self._num_touched:
            self.keys[:, :, row : self._num_touched] = 0
            self.values[:, :, row : self._num_touched] = 0
            self._num_touched = row

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the pending rows of one layer.

        Args:
            layer: index.
            keys: ``(kv heads, N, head_dim)``, rotated.
            values: the same shape.

        Returns:
            views of all keys and values, ``(kv heads, length + N, head_dim)``.
        """
        end = self._length + self._num_pending
        self.keys[layer, :, self._length : end] = keys
        self.values[layer, :, self._length : end] = values
        return self.keys[layer, :, :end], self.values[layer, :, :end]

    @torch.inference_mode()  # a cache that grew in a forward can be written to in no other mode
    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, in increasing order, and drop its others."""
        kept = list(rows)
        is_ordered = all(a < b for a, b in pairwise(kept))
        if not is_ordered or (kept and not 0 <= kept[0] <= kept[-1] < self._num_pending):
            raise AssertionError(  # our own engine passes paths, whose nodes increase
                f"rows {kept} are not increasing indices below {self._num_pending}"
            )
        if kept != list(range(len(kept))):
            index = torch.tensor(kept, device=self.keys.device) + self._length
            end = self._length + len(kept)
            self.keys[:, :, self._length : end] = self.keys[:, :, index]
            self.values[:, :, self._length : end] = self.values[:, :, index]
        self._length += len(kept)
        self._num_pending = 0

    def truncate(self, length: int) -> None:
        """Forget all rows from ``length`` on, the pending ones included."""
        assert 0 <= length <= self._length, f"cannot cut {self._length} rows to {length}"  # noqa: S101
        self._length = length
        self._num_pending = 0

    def _grown(self, old: Tensor, need: int) -> Tensor:
        layers, heads, capacity, head_dim = old.shape
        new = old.new_empty((layers, heads, max(need, capacity * 3 // 2), head_dim))
        new[:, :, : self._length] = old[:, :, : self._length]
        return new
