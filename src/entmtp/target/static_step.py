"""A decoding step of one sequence whose every address and size is fixed, so it can be recorded."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entmtp.decoder.static_rows import StaticRows
from entmtp.target.base import Segment
from entmtp.target.stack import DecoderStack

__all__ = ["StaticBuffers", "StaticStep", "StepInputs"]


@dataclass(frozen=True)
class StaticBuffers:
    """What all recorded steps of a target share.

    Attributes:
        keys: ``(layers, kv heads, capacity, head_dim)``; no row ever holds what is not finite,
            unless a row that the next step sees does.
        values: the same shape.
        cos: ``(>= capacity, head_dim)`` rotation table.
        sin: the same shape.
        logits: ``(most rows, V)``; the first rows are those of the last step.
        hidden: ``(most rows, H)``.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    logits: Tensor
    hidden: Tensor

    @classmethod
    def allocate(cls, stack: DecoderStack, capacity: int, max_rows: int) -> "StaticBuffers":
        """Buffers for sequences of up to ``capacity`` rows, zeroed."""
        layers, heads, head_dim = stack.cache_shape
        cos, sin = stack.rotation.whole(capacity)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=stack.dtype, device=stack.device)

        return cls(
            keys=zeros(layers, heads, capacity, head_dim),
            values=zeros(layers, heads, capacity, head_dim),
            cos=cos,
            sin=sin,
            logits=zeros(max_rows, stack.config.vocab_size),
            hidden=zeros(max_rows, stack.config.hidden_size),
        )

    @property
    def capacity(self) -> int:
        """Rows of a sequence."""
        return self.keys.shape[2]

    def clear(self) -> None:
        """Forget the sequence that was here."""
        self.keys.zero_()
        self.values.zero_()


@dataclass(frozen=True)
class StepInputs:
    """What changes from step to step, for B rows.

    Attributes:
        tokens: int64 ``(B,)``.
        numbers: int64 ``(1 + B,)``: committed rows, then the depths of the rows.
        own: boolean ``(B, B)``, what the rows see of one another.
    """

    tokens: Tensor
    numbers: Tensor
    own: Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> "StepInputs":
        """Inputs of B rows."""
        return cls(
            tokens=torch.zeros(num_rows, dtype=torch.int64, device=device),
            numbers=torch.zeros(1 + num_rows, dtype=torch.int64, device=device),
            own=torch.zeros((num_rows, num_rows), dtype=torch.bool, device=device),
        )

    def fill(self, segment: Segment) -> None:
        """Take over a segment of N <= B rows; the device is not waited for.

        The rows from N on repeat the first one: they see the prefix and themselves, hold numbers
        as finite as its own, and no other row sees them.
        """
        size, num_rows = len(self.tokens), segment.tokens.numel()
        tokens = segment.tokens
        if num_rows < size:
            tokens = torch.cat((tokens, tokens[:1].expand(size - num_rows)))
        numbers = np.full(1 + size, segment.depths[0], dtype=np.int64)
        numbers[0] = segment.cache.length
        numbers[1 : 1 + num_rows] = segment.depths
        own = np.eye(size, dtype=np.bool_)
        if segment.mask is not None:
            own[:num_rows, :num_rows] = segment.mask
        _send(tokens, self.tokens)
        _send(torch.from_numpy(numbers), self.numbers)
        _send(torch.from_numpy(own), self.own)


@dataclass(frozen=True)
class StaticStep:
    """Fills ``buffers.logits`` and ``buffers.hidden`` from ``inputs`` and the cached rows.

    It reads and writes these tensors alone and asks no number of the device, so recorded kernels
    repeat it. It may run any number of times on the same inputs.

    Attributes:
        span: rows of the cache that are attended over; at least committed rows + B.
    """

    stack: DecoderStack
    buffers: StaticBuffers
    inputs: StepInputs
    span: int

    def __call__(self) -> None:
        """Run the step."""
        stack, buffers, inputs = self.stack, self.buffers, self.inputs
        size = len(inputs.tokens)
        length, depths = inputs.numbers[:1], inputs.numbers[1:]
        cache = buffers.keys, buffers.values
        rows = StaticRows(cache, length, inputs.own, self.span, stack.config.num_heads)
        positions = length + depths
        rotation = (
            buffers.cos.index_select(0, positions).unsqueeze(1),
            buffers.sin.index_select(0, positions).unsqueeze(1),
        )
        hidden = stack.hidden(inputs.tokens, rotation, rows.mixer)
        buffers.hidden[:size] = hidden
        buffers.logits[:size] = stack.project(hidden)


def _send(source: Tensor, target: Tensor) -> None:
    """Copy without waiting; torch keeps the pinned memory until the copy is done."""
    if source.device.type == "cpu" and target.device.type != "cpu":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
