"""GGUF files through the ``gguf`` package: metadata, and the tensors as float32.

The package's reader makes arrays for every string of the vocabulary, which takes seconds; the
file read last is therefore kept.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = ["GGUFFile", "dequantise", "is_gguf", "read_gguf"]


@dataclass(frozen=True)
class GGUFFile:
    """What a GGUF file holds.

    Attributes:
        path: of the file.
        metadata: by key, as Python values.
        tensors: by name, the package's ``ReaderTensor``.
        num_header_bytes: before the tensor data; the tokenizer is part of them.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]
    num_header_bytes: int

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, slowest dimension first, as in numpy and torch."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file."""
    return path.suffix.lower() == ".gguf"


def read_gguf(path: Path) -> GGUFFile:
    """Read the metadata of a file and find its tensors; the file is mapped, not read whole.

    Raises:
        CheckpointError: the file is absent, truncated or damaged.
    """
    try:
        about = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return _read(path, about.st_size, about.st_mtime_ns)


def dequantise(file: GGUFFile, name: str) -> npt.NDArray[np.float32]:
    """One tensor as float32, in its own memory.

    Raises:
        UnsupportedModelError: its type cannot be dequantised.
    """
    from gguf import quants

    tensor = file.tensors[name]
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{file.path}: tensor {name} has type {tensor.tensor_type.name}, which cannot be "
            "dequantised here; use a file of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K"
        ) from error
    return np.array(values, dtype=np.float32).reshape(file.shape(name))


@lru_cache(maxsize=1)
def _read(path: Path, size: int, changed: int) -> GGUFFile:
    """Read a file; its size and time of change are part of the key under which it is kept."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        metadata = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
    except Exception as error:  # the reader indexes and decodes whatever it finds in the file
        raise CheckpointError(
            f"{path} is not a whole GGUF file ({type(error).__name__}: {error}): fetch it again"
        ) from error
    tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    return GGUFFile(path, metadata, tensors, int(reader.data_offset))
