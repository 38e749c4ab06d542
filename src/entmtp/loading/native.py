"""A model in the native core: packed once, kept on disk, checked when it is read again."""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from entmtp.errors import InputError
from entmtp.kernels.library import Library, load_library, missing_reason
from entmtp.loading.catalog import home
from entmtp.loading.outline import ModelOutline
from entmtp.target.base import TargetConfig
from entmtp.target.native import NativeTarget
from entmtp.target.native_weights import Array, check_native, pack_model
from entmtp.target.weights import iter_tensors

__all__ = ["load_native", "native_library", "packed_file"]

SCHEMA = 2
_log = logging.getLogger("entmtp")


def native_library() -> Library:
    """The compiled core.

    Raises:
        InputError: it is missing; the message says why.
    """
    library = load_library()
    if library is None:
        raise InputError(f"the native backend cannot run: {missing_reason()}; use --backend torch")
    return library


def load_native(path: Path, config: TargetConfig, *, threads: int, isa: str) -> NativeTarget:
    """A target in the native core.

    Args:
        path: a Hugging Face folder or a .gguf file.
        config: its sizes.
        threads: of the core.
        isa: instruction set, or ``auto``.

    Raises:
        InputError: the core is missing, or an unknown instruction set.
        UnsupportedModelError: a shape that the core does not compute.
        CheckpointError: damaged weights.
    """
    library = native_library()
    isa = library.isa(isa)
    check_native(config)
    file = packed_file(path, library.layout(isa))
    arrays = _read(file)
    if arrays is None:
        arrays = pack_model(config, iter_tensors(path, config), library, isa)
        _write(file, arrays)
    return NativeTarget(config, arrays, _Matrices(path), library, threads=threads, isa=isa)


def packed_file(path: Path, layout: int) -> Path:
    """Where the packed weights of a model are kept; another file once the model's files change."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    config = path / "config.json"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    key = json.dumps([SCHEMA, layout, facts, text])
    return home() / "native" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"


class _Matrices:
    """Embedding and output head, read from the model's own files when a drafter asks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outline: ModelOutline | None = None

    def embedding(self) -> Tensor:
        return self._read().embedding().float()

    def output_rows(self, ids: Tensor) -> Tensor:
        return self._read().output_rows(ids).float()

    def _read(self) -> ModelOutline:
        if self._outline is None:
            self._outline = ModelOutline(self._path)
        return self._outline


def _read(file: Path) -> dict[str, Array] | None:
    """The arrays of a file, mapped; ``None`` where there is none, or a damaged one."""
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="np") as reader:
            sums: dict[str, int] = json.loads((reader.metadata() or {}).get("crc32", "{}"))
            arrays: dict[str, Array] = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError):
        sums, arrays = {}, {}
    if not arrays or {name: _checksum(a) for name, a in arrays.items()} != sums:
        _log.warning("%s is damaged and is made again", file)
        return None
    return arrays


def _write(file: Path, arrays: Mapping[str, Array]) -> None:
    """Keep packed weights; a model that cannot be kept is packed again at the next start."""
    metadata = {"crc32": json.dumps({name: _checksum(a) for name, a in arrays.items()})}
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()}
        save_file(tensors, part, metadata=metadata)
        part.replace(file)
    except (OSError, SafetensorError) as error:
        _log.warning("packed weights cannot be kept under %s (%s)", file.parent, error)
    finally:
        with suppress(OSError):
            part.unlink()


def _checksum(array: Array) -> int:
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)
