"""What step_cost.py times: backends behind one method; and the best that the machine could do."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from entmtp.kernels.library import load_library, missing_reason
from entmtp.loading.gguf_writer import GGUF_TYPES, matrix_type
from entmtp.loading.llamacpp import LlamaCpp, missing_llama_cpp
from entmtp.loading.loader import load_target
from entmtp.target.base import Segment, Target, TargetConfig
from entmtp.target.native_weights import native_obstacle
from entmtp.target.weights import read_config, tensor_shapes

MAX_ROWS = 128
BACKENDS = (
    "native",
    "torch",
    "torch:bfloat16",
    *(f"llamacpp:{kind}" for kind in GGUF_TYPES),
    "hf",
)
BYTES = {"native": 1.0, "torch": 4.0, "torch:bfloat16": 2.0, "hf": 2.0}
BYTES |= {"BF16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32}
"""Bytes of a weight, block scales included; the int8 core's few scales are left out."""

_BUFFER_BYTES = 256 << 20
_REST_S = 0.01  # in which the threads of the backend before go to sleep


class Backend(Protocol):
    """A model with a context in its cache."""

    def step(self, rows: int) -> torch.Tensor:
        """``(rows, V)`` logits of rows behind the context, which stays as it is."""


@dataclass(frozen=True)
class Tree:
    """Rows as the nodes of a binary tree: node i hangs on node (i - 1) // 2."""

    depths: np.ndarray
    mask: np.ndarray

    @classmethod
    def of(cls, rows: int) -> "Tree":
        depths, mask = np.zeros(rows, dtype=np.int64), np.eye(rows, dtype=bool)
        for node in range(1, rows):
            parent = (node - 1) // 2
            depths[node] = depths[parent] + 1
            mask[node] |= mask[parent]
        return cls(depths, mask)


class TargetBackend:
    """A target of this package."""

    def __init__(self, target: Target, context: Sequence[int]) -> None:
        self.target = target
        self._cache = target.new_cache(len(context) + MAX_ROWS)
        tokens = torch.tensor(context)
        for part in torch.split(tokens, MAX_ROWS):
            depths = np.arange(len(part), dtype=np.int64)
            target.forward([Segment(self._cache, part, depths, logits="none")])
            self._cache.commit(range(len(part)))
        self._tokens = tokens[torch.arange(MAX_ROWS) % len(tokens)]
        self._trees = {rows: Tree.of(rows) for rows in range(1, MAX_ROWS + 1)}

    def step(self, rows: int) -> torch.Tensor:
        tree = self._trees[rows]
        segment = Segment(self._cache, self._tokens[:rows], tree.depths, tree.mask)
        return self.target.forward([segment]).logits[0]


class LlamaCppBackend:
    """llama.cpp; the rows are one chain, which it checks as fast as a tree."""

    def __init__(self, file: Path, context: Sequence[int], threads: int) -> None:
        size = len(context) + MAX_ROWS
        self._model = LlamaCpp(file, threads=threads, context=size, max_rows=MAX_ROWS)
        for start in range(0, len(context), MAX_ROWS):
            self._model.forward(context[start : start + MAX_ROWS], logits=False)
        self._context = context

    def step(self, rows: int) -> torch.Tensor:
        tokens = [self._context[row % len(self._context)] for row in range(rows)]
        logits = self._model.forward(tokens)
        self._model.truncate(len(self._context))
        return torch.from_numpy(logits)


class TransformersBackend:
    """transformers in bfloat16 with its own cache, and the tree as a mask of four dimensions."""

    def __init__(self, model: Path, context: Sequence[int]) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(model, dtype=torch.bfloat16).eval()
        self._cache = transformers.DynamicCache(config=self._model.config)
        self._tokens = torch.tensor([context])
        with torch.inference_mode():
            self._model(input_ids=self._tokens, cache=self._cache, use_cache=True)

    @torch.inference_mode()
    def step(self, rows: int) -> torch.Tensor:
        tree, length = Tree.of(rows), self._tokens.shape[1]
        seen = torch.ones(1, 1, rows, length + rows, dtype=torch.bool)
        seen[..., length:] = torch.from_numpy(tree.mask)
        index = torch.arange(rows) % length
        output = self._model(
            input_ids=self._tokens[:, index],
            attention_mask=seen,
            position_ids=torch.from_numpy(tree.depths + length)[None],
            cache=self._cache,
            use_cache=True,
        )
        self._cache.crop(-rows)
        return output.logits[0]


def obstacle(name: str, model: Path, config: TargetConfig) -> str | None:
    """Why a backend cannot run; ``None`` where it can."""
    if name == "native":
        return missing_reason() or native_obstacle(config)
    if name.startswith("llamacpp"):
        return missing_llama_cpp()
    if name == "hf" and not model.is_dir():
        return "transformers needs a folder"
    return None


def open_backend(
    name: str, model: Path, gguf: dict[str, str], context: Sequence[int], threads: int
) -> Backend:
    """Load a backend and let it read the context."""
    if name == "native":
        return TargetBackend(load_target(model, backend="native", device="cpu"), context)
    if name.startswith("torch"):
        dtype = name.partition(":")[2] or "float32"
        target = load_target(model, dtype=dtype, backend="torch", device="cpu")
        return TargetBackend(target, context)
    if name == "hf":
        return TransformersBackend(model, context)
    return LlamaCppBackend(Path(gguf[name.partition(":")[2]]), context, threads)


def multiplied(config: TargetConfig) -> dict[str, int]:
    """Matrices that a forward multiplies with, and their sizes: the output head, no embedding."""
    sizes = {n: s[0] * s[1] for n, s in tensor_shapes(config).items() if len(s) == 2}
    if not config.tie_embeddings:
        del sizes["model.embed_tokens.weight"]
    return sizes


def num_weights(config: TargetConfig) -> int:
    """Weights that a forward multiplies with."""
    return sum(multiplied(config).values())


def weight_bytes(name: str, config: TargetConfig) -> float:
    """Bytes of these weights in a backend."""
    kind = name.partition(":")[2] if name.startswith("llamacpp") else None
    if kind is None:
        return num_weights(config) * BYTES[name]
    sizes = multiplied(config).items()
    return sum(size * BYTES[matrix_type(matrix, config, kind)] for matrix, size in sizes)


class Limits:
    """What the machine does where nothing is waited for, measured again and again between backends.

    Bandwidth: a large buffer read in two ways. Operations: the innermost product of the native
    core on data in the nearest memory, where that core is installed.
    """

    def __init__(self, threads: int, size: int = _BUFFER_BYTES) -> None:
        self._threads = threads
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._buffer = np.frombuffer(memory, dtype=np.uint8)
        self._buffer[:] = 0
        self._seconds: dict[str, list[float]] = {"memchr": [], "torch.sum": []}
        self._rates: list[float] = []

    def sample(self) -> None:
        """One more measurement of each."""
        self._seconds["memchr"].append(_search(self._buffer, self._threads))
        words = torch.from_numpy(self._buffer).view(torch.int64)
        started = time.perf_counter()
        words.sum()
        self._seconds["torch.sum"].append(time.perf_counter() - started)
        library = load_library()
        if library is not None:
            self._rates.append(library.dot_rate(library.isa("auto"), self._threads))

    def bandwidth_gb_s(self) -> dict[str, float]:
        """Medians by way of reading."""
        size = len(self._buffer)
        return {name: size / median(found) / 1e9 for name, found in self._seconds.items()}

    def throughput_gop_s(self) -> float | None:
        """Median of two operations a multiplication; ``None`` without the native core."""
        return 2e-9 * median(self._rates) if self._rates else None


def time_backends(
    backends: dict[str, Backend], rows: Sequence[int], repeats: int, limits: Limits
) -> dict[str, dict[int, float]]:
    """Median milliseconds; backends take turns, and before each timed step goes one that is not."""
    times: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in rows} for name in backends
    }
    names = list(backends)
    for repeat in range(repeats):
        limits.sample()
        for count in rows:
            for shift in range(len(names)):
                name = names[(repeat + shift) % len(names)]
                time.sleep(_REST_S)
                backends[name].step(count)
                started = time.perf_counter()
                backends[name].step(count)
                times[name][count].append(1e3 * (time.perf_counter() - started))
    return {name: {n: median(ms) for n, ms in found.items()} for name, found in times.items()}


def _search(buffer: np.ndarray, threads: int) -> float:
    """Seconds until threads have looked for a byte that is not there, a part each."""
    search = ctypes.CDLL(None if os.name == "posix" else "msvcrt").memchr
    search.restype = ctypes.c_void_p
    search.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    part, address = len(buffer) // threads, buffer.ctypes.data
    barrier, ends = threading.Barrier(threads + 1), [0.0] * threads

    def work(index: int) -> None:
        barrier.wait()
        search(address + index * part, 1, part)
        ends[index] = time.perf_counter()

    workers = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    started = time.perf_counter()
    for worker in workers:
        worker.join()
    return max(ends) - started


def run_worker(spec: dict[str, Any]) -> dict[str, Any]:
    """Everything that one process measures; ``spec`` is made by ``step_cost.py``."""
    torch.set_num_threads(spec["threads"])
    model = Path(spec["model"])
    config = read_config(model)
    rng = np.random.default_rng(0)
    context = [int(token) for token in rng.integers(0, config.vocab_size, spec["context"])]
    backends = {
        name: open_backend(name, model, spec["gguf"], context, spec["threads"])
        for name in spec["backends"]
    }
    limits = Limits(spec["threads"])
    ms = time_backends(backends, spec["rows"], spec["repeats"], limits)
    native = backends.get("native")
    return {
        "ms": ms,
        "bandwidth": limits.bandwidth_gb_s(),
        "throughput_gop_s": limits.throughput_gop_s(),
        "native_backend": native.target.backend if isinstance(native, TargetBackend) else None,
    }
