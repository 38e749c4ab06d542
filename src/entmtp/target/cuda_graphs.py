"""Decoding steps of one sequence as replays of recorded kernels.

On a GPU a step of a small model takes longer to launch than to compute. A CUDA graph launches all
its kernels at once, but they run with the arguments of the recording: sizes and addresses cannot
change. So rows are padded to one of a few sizes, the cache lies in one buffer, and what differs
between steps is read from memory (:mod:`entmtp.target.static_step`).
"""

import logging
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.target.base import Segment, TargetOutput
from entmtp.target.stack import DecoderStack
from entmtp.target.static_step import StaticBuffers, StaticStep, StepInputs

__all__ = ["ROW_COUNTS", "CudaRecorder", "GraphRunner", "Recorder"]

ROW_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes that rows are padded to; segments of more rows are not recorded."""

_FIRST_SPAN = 256
"""Fewest rows of the cache that are attended over; then twice, four times as many and so on."""

_NUM_WARM_UPS = 2

_log = logging.getLogger("entmtp")


class Recorder(Protocol):
    """Makes a function repeatable without its launches."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """What repeats the device's work of ``step`` on the same memory.

        ``step`` may be run by this, any number of times. The repetition is valid as long as the
        tensors that ``step`` reads and writes live.
        """

    def forget(self) -> None:
        """Recordings made so far are not used any more; their memory need not be shared."""


class CudaRecorder:
    """Records CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self, device: torch.device) -> None:
        """Record on this device."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: torch.cuda._POOL_HANDLE | None = None

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Run ``step`` a few times, so that libraries load and allocate; then capture it."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stream, caller = self._stream, torch.cuda.current_stream()
            stream.wait_stream(caller)
            graph = torch.cuda.CUDAGraph()
            # the outer stream context restores the caller's stream where the capture fails
            with torch.cuda.stream(stream):
                for _ in range(_NUM_WARM_UPS):
                    step()
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ):
                    step()
            caller.wait_stream(stream)
        return graph.replay

    def forget(self) -> None:
        """A pool cannot be used again once all its graphs are gone: take a new one next time."""
        self._pool = None


class GraphRunner:
    """Runs segments as recorded steps where it can, one recording a number of rows and span."""

    def __init__(self, stack: DecoderStack, recorder: Recorder) -> None:
        """Nothing is allocated before the first step.

        Args:
            stack: the model.
            recorder: how steps are recorded.
        """
        self._stack = stack
        self._recorder = recorder
        self._buffers: StaticBuffers | None = None
        self._owner: Callable[[], TorchKVCache | None] = lambda: None  # a weak reference
        self._inputs: dict[int, StepInputs] = {}
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._has_failed = False
        self.graphs_captured = 0
        self.graph_replays = 0

    def step(self, segment: Segment) -> TargetOutput | None:
        """Evaluate a segment; ``None`` where it has to be evaluated without a recording.

        Returned tensors are copies; the next step leaves them alone.
        """
        cache, num_rows = segment.cache, segment.tokens.numel()
        size = _padded(segment)
        if self._has_failed or size is None or not isinstance(cache, TorchKVCache):
            return None
        end = cache.length + size
        try:
            buffers = self._place(cache, end)
            if buffers is None:
                return None
            inputs = self._inputs.get(size)
            if inputs is None:
                inputs = self._inputs[size] = StepInputs.allocate(size, self._stack.device)
            inputs.fill(segment)
            cache.begin(num_rows, size - num_rows)
            cache.clear_from(end)
            replay = self._replay(buffers, inputs, min(_span(end), buffers.capacity))
        except RuntimeError as error:
            self._fail(error)
            return None
        replay()
        self.graph_replays += 1
        return TargetOutput(
            logits=(buffers.logits[:num_rows].clone(),),
            hidden=(buffers.hidden[:num_rows].clone(),),
        )

    def _place(self, cache: TorchKVCache, end: int) -> StaticBuffers | None:
        """The buffers, if the sequence is in them or can be moved there, with room for its rows."""
        buffers, owner = self._buffers, self._owner()
        if buffers is not None and owner is not None:
            is_placed = owner.keys is buffers.keys
            if owner is cache:  # where it outgrew the buffers, it is not moved a second time
                return buffers if is_placed and end <= buffers.capacity else None
            if is_placed:
                return None
        need = max(end, cache.capacity)
        if buffers is None or buffers.capacity < need:
            self._drop()
            window = self._stack.config.context_window + ROW_COUNTS[-1]
            capacity = max(_rounded(need), min(_span(need), _rounded(window)))
            buffers = StaticBuffers.allocate(self._stack, capacity, ROW_COUNTS[-1])
            self._buffers = buffers
        else:
            buffers.clear()
        cache.move(buffers.keys, buffers.values)
        self._owner = weakref.ref(cache)
        return buffers

    def _replay(self, buffers: StaticBuffers, inputs: StepInputs, span: int) -> Callable[[], None]:
        key = len(inputs.tokens), span
        if key not in self._recorded:
            step = StaticStep(self._stack, buffers, inputs, span)
            self._recorded[key] = self._recorder.record(step)
            self.graphs_captured += 1
        return self._recorded[key]

    def _drop(self) -> None:
        """Let go of the buffers and of what was recorded on them."""
        self._recorded.clear()
        self._recorder.forget()
        self._buffers = None

    def _fail(self, error: RuntimeError) -> None:
        """Go on without recordings, and say so once."""
        self._has_failed = True
        self._drop()
        reason = error.__context__ or error  # the end of a failed capture raises an error as well
        _log.warning("decoding goes on without CUDA graphs, which failed: %s", reason)


def _padded(segment: Segment) -> int | None:
    """The number of rows to pad to; ``None`` where the segment is no token or tree to record."""
    num_rows = segment.tokens.numel()
    is_tree = num_rows == 1 or segment.mask is not None
    if not is_tree or segment.logits != "all" or int(segment.depths.max()) >= num_rows:
        return None
    return next((size for size in ROW_COUNTS if size >= num_rows), None)


def _rounded(rows: int) -> int:
    return -(-rows // _FIRST_SPAN) * _FIRST_SPAN


def _span(rows: int) -> int:
    """The smallest span that holds so many rows, in a cache of any capacity."""
    span = _FIRST_SPAN
    while span < rows:
        span *= 2
    return span
