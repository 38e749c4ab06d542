"""The native target: int8 weights and activations on the CPU, bitwise independent of batching."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
        starts = np.cumsum([0, *sizes])
        total = int(starts[-1])
        tokens = torch.cat([s.tokens for s in segments]).to(torch.int32).numpy()
        places = (CSegment * len(segments))()
        masks: list[npt.NDArray[np.uint8]] = []
        positions = np.empty(total, dtype=np.int32)
        wanted: list[npt.NDArray[np.int64]] = []
        for index, segment in enumerate(segments):
            cache = segment.cache
            assert isinstance(cache, NativeKVCache)  # noqa: S101 - made by new_cache
            mask = None
            if segment.mask is not None:
                if sizes[index] > MAX_TREE_ROWS:
                    raise TopologyError(
                        f"the tree has {sizes[index]} rows, but the native core checks at most "
                        f"{MAX_TREE_ROWS}; use a smaller tree, or --backend torch"
                    )
                assert segment.mask.shape == (sizes[index], sizes[index])  # noqa: S101
                mask = np.ascontiguousarray(segment.mask, dtype=np.uint8)
                masks.append(mask)
            first, size = int(starts[index]), sizes[index]
            positions[first : first + size] = segment.depths + cache.length
            places[index] = CSegment(cache.begin(size), first, size, address(mask))
            begin = {"all": 0, "last": size - 1, "none": size}[segment.logits]
            wanted.append(np.arange(first + begin, first + size))
        rows = np.concatenate(wanted).astype(np.int32)
        hidden = np.empty((total, self.config.hidden_size), dtype=np.float32)
        num_kept = len(rows) if needs_logits else 0
        logits = np.empty((num_kept, self.config.vocab_size), dtype=np.float32)
        stats = np.zeros(len(rows), dtype=_STATS)
        job = CJob(
            address(tokens),
            address(positions),
            places,
            len(segments),
            total,
            address(hidden),
            address(rows),
            len(rows),
            address(logits) if needs_logits else None,
            address(stats),
        )
        code = self._library.lib.entmtp_forward(self._model.pointer, ctypes.byref(job))
        if code < 0:
            raise MemoryError("no memory for the attention of so long a text")
        assert code == 0, f"the core refused a job ({code})"  # noqa: S101 - our own engine's
        counts = [len(w) for w in wanted]
        kept = counts if needs_logits else [0] * len(counts)
        return TargetOutput(
            tuple(torch.split(torch.from_numpy(logits), kept)),
            tuple(torch.split(torch.from_numpy(hidden), sizes)),
            _split_stats(stats, counts),
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


def _split_stats(rows: npt.NDArray[np.void], counts: Sequence[int]) -> tuple[LogitStats, ...]:
    """Statistics of all rows of logits, cut into segments."""
    tokens, entropy, top1 = (rows[name].tolist() for name in ("argmax", "entropy", "p_max"))
    parts, end = [], 0
    for count in counts:
        start, end = end, end + count
        parts.append(LogitStats(tokens[start:end], entropy[start:end], top1[start:end]))
    return tuple(parts)
