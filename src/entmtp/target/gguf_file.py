"""The header of a GGUF file: metadata, and where each tensor lies.

The reader of the ``gguf`` package makes two arrays for each string of the vocabulary, seconds
for a small model; this one reads the same header in a fraction of that and checks every length
against the file. Tensor types and dequantisation are still that package's.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = ["GGUFHeader", "GGUFTensor", "dequantise", "is_gguf", "read_header"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: slowest dimension first, as in numpy and torch.
        kind: number of the tensor type.
        offset: of its first byte in the file.
        num_bytes: as stored.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says before its tensor data.

    Attributes:
        num_bytes: size of the header; the tokenizer is part of it.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    num_bytes: int


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file."""
    return path.suffix.lower() == ".gguf"


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file.

    Raises:
        CheckpointError: the file is absent, truncated or damaged.
        UnsupportedModelError: another GGUF version, or a tensor type unknown to ``gguf``.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return _parse(path, view)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, struct.error, OverflowError) as error:
        raise _damaged(path, str(error)) from error


def dequantise(path: Path, tensor: GGUFTensor) -> npt.NDArray[np.float32]:
    """Read one tensor as float32, in its own memory.

    Raises:
        UnsupportedModelError: its type cannot be dequantised.
        CheckpointError: the file cannot be read.
    """
    from gguf import GGMLQuantizationType, quants

    kind = GGMLQuantizationType(tensor.kind)
    try:
        stored = np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    rows = tensor.shape[:-1]
    view = {"F32": np.float32, "F16": np.float16}.get(kind.name)
    try:
        values = quants.dequantize(
            stored.view(view).reshape(tensor.shape) if view else stored.reshape(*rows, -1), kind
        )
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{path}: tensor {tensor.name} has type {kind.name}, which cannot be dequantised here; "
            "use a file of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K"
        ) from error
    return np.ascontiguousarray(values.reshape(tensor.shape), dtype=np.float32)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a whole GGUF file ({why}): fetch it again")


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.pos = 0

    def number(self, code: str) -> Any:
        """A scalar of a numpy type code, as a Python number."""
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> list[Any]:
        """``count`` scalars."""
        values: list[Any] = np.frombuffer(self.take(np.dtype(code).itemsize * count), code).tolist()
        return values

    def size(self) -> int:
        """An unsigned 64-bit length."""
        (value,) = struct.unpack_from("<Q", self.view, self.pos)
        self.pos += 8
        return int(value)

    def string(self) -> str:
        """A length and that many bytes of UTF-8."""
        return self.take(self.size()).decode("utf-8")

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self.pos + count
        if end > len(self.view):
            raise ValueError(f"it ends at byte {len(self.view)}, before byte {end}")
        data = self.view[self.pos : end]
        self.pos = end
        return data

    def value(self, kind: int) -> Any:
        """A metadata value of a type number."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        number = self.number(_SCALARS[kind])
        return bool(number) if kind == _BOOL else number

    def array(self) -> list[Any]:
        """An array: the type of its items, their number, the items."""
        kind, count = self.number("<u4"), self.size()
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], count)
        if kind != _STRING:
            raise ValueError(f"unknown array type {kind}")
        return [self.string() for _ in range(count)]


def _parse(path: Path, view: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(view)
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with 'GGUF'")
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise UnsupportedModelError(
            f"{path}: GGUF version {version} is not supported; supported are little-endian files "
            f"of the versions {' and '.join(map(str, _VERSIONS))}"
        )
    num_tensors, num_values = cursor.size(), cursor.size()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<u4"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"alignment {alignment!r}")
    start = -(-cursor.pos // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        tensors[name] = _locate(path, (name, shape, kind), start + offset, len(view))
    return GGUFHeader(path, metadata, tensors, cursor.pos)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    num_dims = cursor.number("<u4")
    if num_dims > _MAX_DIMS:
        raise ValueError(f"tensor {name} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.numbers("<u8", num_dims)))
    return name, shape, cursor.number("<u4"), cursor.size()


def _locate(
    path: Path, info: tuple[str, tuple[int, ...], int], offset: int, file_bytes: int
) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, kind = info
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"{path}: tensor {name} has the unknown type number {kind}; "
            "use a file of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q5_K or Q6_K"
        ) from error
    count = 1
    for size in shape:
        count *= size
    if not shape or count == 0 or shape[-1] % block:
        raise ValueError(f"tensor {name} of shape {shape} cannot have type number {kind}")
    num_bytes = count // block * block_bytes
    if offset + num_bytes > file_bytes:
        raise ValueError(
            f"tensor {name} ends at byte {offset + num_bytes}, the file at byte {file_bytes}"
        )
    return GGUFTensor(name, shape, kind, offset, num_bytes)
