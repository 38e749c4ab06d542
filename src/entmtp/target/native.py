"""The native target: int8 weights and activations on the CPU, bitwise independent of batching."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.errors import InputError, TopologyError
from entmtp.kernels.core import CoreArrays, CoreModel, NativeKVCache
from entmtp.kernels.library import CJob, CSegment, Library, address
from entmtp.linear import Projection
from entmtp.target.base import LogitStats, Segment, TargetConfig, TargetOutput
from entmtp.target.native_weights import Array, core_config, rotary_tables

__all__ = ["MAX_THREADS", "MAX_TREE_ROWS", "Matrices", "NativeKVCache", "NativeTarget"]

MAX_THREADS = 64
"""Of the core."""

MAX_TREE_ROWS = 128
"""``kBlockRows`` of core.h: rows that go through the layers together."""

_STATS = np.dtype([("argmax", "<i4"), ("p_max", "<f4"), ("log_sum_exp", "<f4"), ("entropy", "<f4")])
"""``RowStats`` of core.h."""


class Matrices(Protocol):
    """The two matrices of a model that drafters read."""

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding, float32."""

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, float32."""


class NativeProjection:
    """x W^T + b with int8 weights and activations, on the threads of a model."""

    def __init__(self, model: CoreModel, weight: Tensor, bias: Tensor | None) -> None:
        """Quantise and pack ``(out, in)``; nothing given is kept."""
        self._lib, self._model = model.lib, model
        self._shape = weight.shape[0], weight.shape[1]
        packed = model.library.pack(weight.detach().float().numpy(), model.isa)
        addend = None if bias is None else bias.detach().float().contiguous().numpy()
        pointer = self._lib.entmtp_linear_new(address(packed), address(addend), *self._shape)
        if not pointer:
            raise MemoryError("no memory for the heads in the native core")
        self._pointer = pointer
        weakref.finalize(self, self._lib.entmtp_linear_free, pointer)

    def __call__(self, x: Tensor) -> Tensor:
        """Rows ``(N, in)`` to ``(N, out)``, float32."""
        rows = np.ascontiguousarray(x.numpy(), dtype=np.float32)
        out = np.empty((len(rows), self._shape[0]), dtype=np.float32)
        code = self._lib.entmtp_linear_run(
            self._model.pointer, self._pointer, address(rows), len(rows), address(out)
        )
        assert code == 0  # noqa: S101 - whoever calls it gives whole rows
        return torch.from_numpy(out)


class NativeTarget:
    """A target in the native core; implements :class:`entmtp.target.base.Target`.

    A row's hidden state, logits and statistics are bitwise the same alone, in any tree, in any
    batch and with any number of threads.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    has_own_threads = True

    def __init__(
        self,
        config: TargetConfig,
        arrays: Mapping[str, Array],
        matrices: Matrices,
        library: Library,
        *,
        threads: int,
        isa: str = "auto",
    ) -> None:
        """Hand packed weights over to the core.

        Args:
            config: sizes.
            arrays: from :func:`entmtp.target.native_weights.pack_model`, for the same ``isa``.
            matrices: embedding and output head for drafters; asked only when they are needed.
            library: the compiled core.
            threads: of the core's own pool.
            isa: instruction set, see :meth:`Library.isa`.
        """
        self.config = config
        self.weights_digest = arrays["digest"].tobytes().decode()
        self._library, self.isa = library, library.isa(isa)
        self._matrices = matrices
        self._project: Callable[[Tensor], Tensor] | None = None
        self._room = _Room(MAX_TREE_ROWS, 1)
        self._no_logits = torch.empty((0, config.vocab_size))
        self._model = CoreModel(library, self.isa, self._make_model(arrays, threads))

    @property
    def core(self) -> CoreModel:
        """The model in the core, on whose threads drafters compute."""
        return self._model

    @property
    def backend(self) -> str:
        """``native-`` and the instruction set."""
        return f"native-{self.isa}"

    def new_cache(self, capacity: int) -> NativeKVCache:
        """An empty cache with room for ``capacity`` rows."""
        return NativeKVCache(self._model, capacity)

    @property
    def precision(self) -> str:
        """``int8``: of weights and activations in products."""
        return "int8"

    def set_threads(self, threads: int) -> None:
        """Change the number of threads of the core; texts do not change.

        Raises:
            InputError: not between 1 and 64.
        """
        code = self._library.lib.entmtp_model_threads(self._model.pointer, threads)
        if code < 0:
            raise MemoryError("no memory for so many threads of the native core")
        if code:
            raise InputError(f"threads is {threads}; the native core takes 1 to {MAX_THREADS}")

    @property
    def weight_bytes(self) -> int:
        """Memory of weights and scratch inside the core."""
        return self._model.num_bytes

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding, float32."""
        return self._matrices.embedding()

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, a copy."""
        return self._matrices.output_rows(ids)

    def project_output(self, features: Tensor) -> Tensor:
        """``(R, V)`` logits of features ``(R, H)`` under the whole output head."""
        if self._project is None:
            ids = torch.arange(self.config.vocab_size)
            self._project = self.projection(self._matrices.output_rows(ids), None)
        return self._project(features)

    def projection(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """x W^T + b in the core, int8, for drafters; in torch where the width does not fit."""
        if weight.shape[1] % 16:
            return Projection(weight, bias)
        return NativeProjection(self._model, weight, bias)

    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        """Evaluate all rows of all segments in one call; statistics come in any case.

        Raises:
            TopologyError: a tree of more than :data:`MAX_TREE_ROWS` rows.
        """
        sizes = [segment.tokens.numel() for segment in segments]
        total = sum(sizes)
        room = self._room = self._room.for_size(total, len(segments))
        counts = room.fill(segments, sizes)
        num_rows = sum(counts)
        hidden = np.empty((total, self.config.hidden_size), dtype=np.float32)
        logits = None
        if needs_logits:
            logits = np.empty((num_rows, self.config.vocab_size), dtype=np.float32)
        job = room.job_of(len(segments), hidden, num_rows, logits)
        code = self._library.lib.entmtp_forward(self._model.pointer, job)
        if code < 0:
            raise MemoryError("no memory for the attention of so long a text")
        assert code == 0, f"the core refused a job ({code})"  # noqa: S101 - our own engine's
        return TargetOutput(
            (self._no_logits,) * len(counts) if logits is None else _split(logits, counts),
            _split(hidden, sizes),
            _split_stats(room.stats[:num_rows], counts),
        )

    def _make_model(self, arrays: Mapping[str, Array], threads: int) -> int | None:
        config = self.config
        cos, sin = rotary_tables(config, config.context_window)
        given = CoreArrays({**arrays, "cos": cos, "sin": sin}, config.num_layers)
        shape = core_config(
            config,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            num_positions=config.context_window,
        )
        pointer: int | None = self._library.lib.entmtp_model_new(
            ctypes.byref(shape), ctypes.byref(given.weights), threads, self.isa.encode()
        )
        return pointer


class _Room:
    """What the core is told of a forward, in buffers that are used again; none is handed out."""

    def __init__(self, num_rows: int, num_segments: int) -> None:
        self._every = np.arange(num_rows, dtype=np.int32)
        self._tokens, self._positions, self._wanted = np.empty((3, num_rows), dtype=np.int32)
        self.stats = np.empty(num_rows, dtype=_STATS)
        segments = (CSegment * num_segments)()
        self._segments = list(segments)  # the structures themselves, which are costly to index
        self._job = CJob(
            tokens=address(self._tokens),
            positions=address(self._positions),
            segments=segments,
            logit_rows=address(self._wanted),
            stats=address(self.stats),
        )

    def for_size(self, num_rows: int, num_segments: int) -> "_Room":
        """Itself where that is enough."""
        rows, segments = len(self._every), len(self._segments)
        if num_rows <= rows and num_segments <= segments:
            return self
        return _Room(max(num_rows, rows), max(num_segments, segments))

    def fill(self, segments: Sequence[Segment], sizes: Sequence[int]) -> list[int]:
        """Tell of all segments; how many rows of each the output head is asked for.

        Raises:
            TopologyError: a tree of too many rows.
        """
        sized = zip(segments, sizes, strict=True)
        self._masks = [_mask_bytes(segment.mask, size) for segment, size in sized]
        counts: list[int] = []
        first = num_wanted = 0
        for index, (segment, size) in enumerate(zip(segments, sizes, strict=True)):
            cache, end = segment.cache, first + size
            assert isinstance(cache, NativeKVCache)  # noqa: S101 - made by new_cache
            self._tokens[first:end] = segment.tokens.numpy()
            np.add(segment.depths, cache.length, self._positions[first:end], casting="same_kind")
            place = self._segments[index]
            place.cache, place.first_row, place.num_rows = cache.begin(size), first, size
            place.mask = address(self._masks[index])
            count = {"all": size, "last": 1, "none": 0}[segment.logits]
            self._wanted[num_wanted : num_wanted + count] = self._every[end - count : end]
            counts.append(count)
            first, num_wanted = end, num_wanted + count
        return counts

    def job_of(
        self,
        num_segments: int,
        hidden: npt.NDArray[np.float32],
        num_wanted: int,
        logits: npt.NDArray[np.float32] | None,
    ) -> Any:
        """The job, by reference; what is given takes the results."""
        job = self._job
        job.num_segments, job.num_rows = num_segments, len(hidden)
        job.hidden, job.logits = address(hidden), address(logits)
        job.num_logit_rows = num_wanted
        return ctypes.byref(job)


def _mask_bytes(mask: npt.NDArray[np.bool_] | None, size: int) -> npt.NDArray[np.uint8] | None:
    """A mask as the core reads it, where it lies if it can.

    Raises:
        TopologyError: of more than :data:`MAX_TREE_ROWS` rows.
    """
    if mask is None:
        return None
    if size > MAX_TREE_ROWS:
        raise TopologyError(
            f"the tree has {size} rows, but the native core checks at most {MAX_TREE_ROWS}; use a "
            "smaller tree, or --backend torch"
        )
    assert mask.shape == (size, size)  # noqa: S101
    if mask.dtype == np.bool_ and mask.flags.c_contiguous:
        return mask.view(np.uint8)
    return np.ascontiguousarray(mask, dtype=np.uint8)


def _split(rows: npt.NDArray[np.float32], counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Rows of all segments, cut into segments."""
    whole = torch.from_numpy(rows)
    return (whole,) if len(counts) == 1 else tuple(torch.split(whole, list(counts)))


def _split_stats(rows: npt.NDArray[np.void], counts: Sequence[int]) -> tuple[LogitStats, ...]:
    """Statistics of all rows of logits, cut into segments."""
    tokens, entropy, top1 = (rows[name].tolist() for name in ("argmax", "entropy", "p_max"))
    parts, end = [], 0
    for count in counts:
        start, end = end, end + count
        parts.append(LogitStats(tokens[start:end], entropy[start:end], top1[start:end]))
    return tuple(parts)
