"""Named tensors out of a file: safetensors, or a pickle of tensors that can run no code."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entmtp.errors import CheckpointError

__all__ = ["SUFFIXES", "holds_any", "is_pickle", "read_metadata", "read_tensors"]

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
_POINTER = b"version https://git-lfs"
_WRAPPERS = ("state_dict", "model", "module")


def is_pickle(file: Path) -> bool:
    """Whether a file is read as a pickle: by its name."""
    return file.suffix != ".safetensors"


def read_metadata(file: Path) -> dict[str, str]:
    """The text entries of a safetensors file; none of a pickle.

    Raises:
        CheckpointError: missing or damaged.
    """
    _check_present(file)
    if is_pickle(file):
        return {}
    with _open_safetensors(file) as reader:
        return dict(reader.metadata() or {})


def holds_any(file: Path, only: re.Pattern[str]) -> bool:
    """Whether a safetensors file has a tensor of such a name; reads its header alone.

    Raises:
        CheckpointError: missing or damaged.
    """
    _check_present(file)
    with _open_safetensors(file) as reader:
        return any(only.match(name) for name in reader.keys())  # noqa: SIM118


def read_tensors(file: Path, only: re.Pattern[str] | None = None) -> dict[str, Tensor]:
    """All tensors of a file by name, mapped from the disk where the format allows.

    Args:
        file: ``.safetensors``, or a file that ``torch.save`` wrote.
        only: names to read; all without.

    Raises:
        CheckpointError: missing, truncated, no file of tensors, or a pickle that would run code.
    """
    _check_present(file)
    if is_pickle(file):
        found = _read_pickle(file)
        return {n: t for n, t in found.items() if only is None or only.match(n)}
    try:
        with _open_safetensors(file) as reader:
            names = [n for n in reader.keys() if only is None or only.match(n)]  # noqa: SIM118
            return {name: reader.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise _damaged(file, error) from error


def _check_present(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    if not start:
        raise CheckpointError(f"{file} is empty: fetch it again")
    if start == _POINTER:
        raise CheckpointError(
            f"{file} is a pointer of Git LFS, not the weights: fetch the file itself "
            "('git lfs pull' in its repository)"
        )


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    """A file that cannot be read; the first sentence of the reader's reason, without its advice."""
    text = " ".join(str(error).split())
    if (inner := re.search(r"WeightsUnpickler error: (.+)", text)) is not None:
        text = inner.group(1)
    reason = re.split(r"\. (?=[A-Z])| Please file| Check the doc", text)[0]
    if not reason or isinstance(error, KeyError):
        reason = type(error).__name__
    return CheckpointError(
        f"{file} is damaged or was not copied whole ({reason:.160}): fetch it again and compare "
        "its size"
    )


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):  # of old pickle protocols
            data = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
    except pickle.UnpicklingError as error:
        raise _refused(file, error) from error
    except Exception as error:  # the reader of zip files and pickles raises many kinds
        raise _damaged(file, error) from error
    return _state_dict(data, file)


def _refused(file: Path, error: Exception) -> CheckpointError:
    """A pickle that is damaged, or one that names something to call."""
    named = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
    if named is None:
        return _damaged(file, error)
    return CheckpointError(
        f"{file} is a pickle that would run code ({named.group(1)}) when it is loaded, and was "
        "refused: save the plain state dict of the heads, or convert it to safetensors where you "
        "trust it"
    )


def _state_dict(data: object, file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, or of one that lies under a usual key."""
    if isinstance(data, Mapping):
        for key in _WRAPPERS:
            if isinstance(data.get(key), Mapping):
                data = data[key]
                break
    if not isinstance(data, Mapping) or not data:
        raise CheckpointError(
            f"{file} holds no state dict (name -> tensor) but {_kind(data)}: save the plain state "
            "dict of the heads"
        )
    for name, value in data.items():
        if not isinstance(name, str):
            fault = "has no text as its name"
        elif not isinstance(value, Tensor):
            fault = f"is {_kind(value)}, not a tensor"
        elif not _is_plain(value):
            fault = "is a sparse, nested, quantised or meta tensor, not a plain one"
        else:
            continue
        raise CheckpointError(
            f"{file}: entry {name!r:.80} {fault}: save the plain state dict of the heads"
        )
    return dict(data)


def _is_plain(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return is_dense and not tensor.is_quantized and tensor.device.type == "cpu"


def _kind(value: object) -> str:
    return "an empty one" if value in ({}, []) else f"an object of type {type(value).__name__}"
