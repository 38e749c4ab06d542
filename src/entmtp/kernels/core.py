"""Models and caches inside the core, by their addresses."""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.kernels.library import CLayer, CWeights, Library, address

__all__ = ["CoreArrays", "CoreModel", "NativeKVCache"]


class CoreArrays:
    """Arrays by name, as the core is given them: it copies what it keeps."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]], num_layers: int) -> None:
        """Take ``{layer}.{name}`` for the fields of ``CLayer``, and those of ``CWeights``."""
        self._kept = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
        self._layers = (CLayer * num_layers)()
        for index in range(num_layers):
            values = [self.at(f"{index}.{name}") for name, *_ in CLayer._fields_]
            self._layers[index] = CLayer(*values)
        names = [name for name, *_ in CWeights._fields_[1:]]
        self.weights = CWeights(self._layers, *(self.at(name) for name in names))

    def at(self, name: str) -> int | None:
        """Address of an array; ``None`` where there is none."""
        return address(self._kept.get(name))


class CoreModel:
    """A model inside the core; freed when no target, drafter, cache or projection holds it."""

    def __init__(
        self, library: Library, isa: str, pointer: int | None, owner: "CoreModel | None" = None
    ) -> None:
        """Own a model.

        Args:
            library: the compiled core.
            isa: instruction set.
            pointer: what the core gave; nothing where it had no memory.
            owner: whose threads it computes on, if not its own.
        """
        if not pointer:
            raise MemoryError("no memory for the weights of the model in the native core")
        self.library, self.isa = library, isa
        self.lib, self.pointer, self._owner = library.lib, pointer, owner
        weakref.finalize(self, library.lib.entmtp_model_free, pointer)

    @property
    def num_bytes(self) -> int:
        """Memory of weights and scratch."""
        return int(self.lib.entmtp_model_bytes(self.pointer))


class NativeKVCache:
    """Keys and values of one sequence inside the core, in half precision."""

    def __init__(self, model: CoreModel, capacity: int) -> None:
        """Allocate room for ``capacity`` rows."""
        self._lib, self._model = model.lib, model
        self._pointer = self._checked(self._lib.entmtp_cache_new(model.pointer, max(capacity, 1)))
        self._finalizer = weakref.finalize(self, self._lib.entmtp_cache_free, self._pointer)
        self._num_pending = 0

    @property
    def length(self) -> int:
        """Committed rows."""
        return int(self._lib.entmtp_cache_length(self._pointer))

    def begin(self, num_rows: int) -> int:
        """Make room for the rows of a forward; the address of the cache."""
        pointer = self.reserve(num_rows)
        self._num_pending = num_rows
        return pointer

    def reserve(self, num_rows: int) -> int:
        """Make room behind the committed rows; what lies there is lost where the cache grows."""
        need = self.length + num_rows
        capacity = int(self._lib.entmtp_cache_capacity(self._pointer))
        if need > capacity:
            self._finalizer.detach()
            grown = self._lib.entmtp_cache_grow(
                self._model.pointer, self._pointer, max(need, capacity * 3 // 2)
            )
            self._pointer = self._checked(grown)
            self._finalizer = weakref.finalize(self, self._lib.entmtp_cache_free, self._pointer)
        return self._pointer

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, in increasing order, and drop its others."""
        kept = (ctypes.c_int32 * len(rows))(*rows)
        assert not kept or rows[-1] < self._num_pending  # noqa: S101
        code = self._lib.entmtp_cache_commit(self._model.pointer, self._pointer, kept, len(rows))
        assert code == 0, f"rows {rows} are not increasing"  # noqa: S101
        self._num_pending = 0

    def truncate(self, length: int) -> None:
        """Forget the committed rows from ``length`` on, and all pending ones."""
        code = self._lib.entmtp_cache_truncate(self._pointer, length)
        assert code == 0, f"cannot cut {self.length} rows to {length}"  # noqa: S101
        self._num_pending = 0

    def _checked(self, pointer: int | None) -> int:
        if not pointer:
            raise MemoryError("no memory for the keys and values of a sequence")
        return pointer
