"""llama.cpp on the CPU, for comparison: through the low-level interface of llama-cpp-python."""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.errors import AssetError, UnsupportedModelError

__all__ = ["LlamaCpp", "missing_llama_cpp"]

_quiet: list[Any] = []  # llama.cpp keeps a pointer to the function that takes its messages


def missing_llama_cpp() -> str | None:
    """Why llama.cpp cannot be used; ``None`` where it can."""
    try:
        import llama_cpp  # noqa: F401 - whether its library loads, too
    except ImportError:
        return "llama_cpp is not installed (pip install 'entmtp[peers]')"
    except (OSError, RuntimeError) as error:
        return f"llama_cpp does not load ({str(error).splitlines()[0]})"
    return None


class LlamaCpp:
    """One sequence: tokens in, a row of logits for each of them out."""

    def __init__(self, file: Path, *, threads: int, context: int, max_rows: int) -> None:
        """Load a model.

        Args:
            file: a .gguf file; its tokenizer is not used.
            threads: of every forward.
            context: most tokens of the sequence.
            max_rows: most tokens of a forward.

        Raises:
            AssetError: llama.cpp cannot be used here.
            UnsupportedModelError: it refuses the file.
        """
        reason = missing_llama_cpp()
        if reason is not None:
            raise AssetError(reason)
        import llama_cpp

        self._api = llama_cpp
        _silence(llama_cpp)
        llama_cpp.llama_backend_init()
        self._model = self._load(file)
        self._context = self._open(threads, context, max_rows)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._batch = llama_cpp.llama_batch_init(max_rows, 0, 1)
        weakref.finalize(self, _free, llama_cpp, self._model, self._context, self._batch)
        self._length = 0

    def forward(
        self, tokens: Sequence[int] | npt.NDArray[np.int64], *, logits: bool = True
    ) -> npt.NDArray[np.float32]:
        """Append tokens.

        Args:
            tokens: at most ``max_rows``.
            logits: whether the output head is evaluated.

        Returns:
            ``(N, V)`` logits, or ``(0, V)`` without them: a view that the next forward overwrites.
        """
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for index in range(count):
            batch.token[index] = int(tokens[index])
            batch.pos[index] = self._length + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = int(logits)
        code = self._api.llama_decode(self._context, batch)
        if code != 0:
            raise MemoryError(f"llama.cpp refused {count} tokens (code {code})")
        self._length += count
        if not logits:
            return np.empty((0, self._vocab_size), dtype=np.float32)
        rows = self._api.llama_get_logits(self._context)
        pointer = ctypes.cast(rows, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, shape=(count, self._vocab_size))

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, 0, length, -1)
        self._length = length

    def _load(self, file: Path) -> Any:
        settings = self._api.llama_model_default_params()
        settings.n_gpu_layers = 0
        model = self._api.llama_model_load_from_file(str(file).encode(), settings)
        if not model:
            raise UnsupportedModelError(f"llama.cpp does not load the model ({file.name})")
        return model

    def _open(self, threads: int, context: int, max_rows: int) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx = context
        settings.n_batch = settings.n_ubatch = max_rows
        settings.n_threads = settings.n_threads_batch = threads
        opened = self._api.llama_init_from_model(self._model, settings)
        if not opened:
            self._api.llama_model_free(self._model)
            raise UnsupportedModelError(f"llama.cpp has no room for {context} tokens")
        return opened


def _silence(api: Any) -> None:
    """Messages of llama.cpp go nowhere."""
    if not _quiet:
        _quiet.append(api.llama_log_callback(lambda level, text, data: None))
        api.llama_log_set(_quiet[0], ctypes.c_void_p(0))


def _free(api: Any, model: Any, context: Any, batch: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
