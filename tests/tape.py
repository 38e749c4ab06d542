"""A recorder for any device that repeats like a CUDA graph: the same operations, fixed for good."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Tape", "TapeRecorder"]

WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
"""Operations that a capture refuses, because the host would wait for the device."""


class Tape(TorchDispatchMode):
    """Every operation of a function, with the very tensors and numbers that it had.

    A repetition writes each result into the memory of the recorded one. What the function read on
    the host while it was recorded is part of the tape and does not change any more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in WAITING:
            raise AssertionError(f"{func} cannot be captured")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Repeat all operations."""
        for func, args, kwargs, recorded in self._calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and not is_same_memory(old, new):
                    assert old.shape == new.shape
                    old.copy_(new)


class TapeRecorder:
    """Implements :class:`entmtp.target.cuda_graphs.Recorder`."""

    def __init__(self) -> None:
        self.num_forgotten = 0

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        step()  # as in a warm-up
        tape = Tape()
        with tape:
            step()
        return tape.replay

    def forget(self) -> None:
        self.num_forgotten += 1


def is_same_memory(old: Tensor, new: Tensor) -> bool:
    """True for the results of views and of operations in place."""
    return old is new or (old.numel() > 0 and old.data_ptr() == new.data_ptr())
