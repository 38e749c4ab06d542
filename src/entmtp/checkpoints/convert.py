"""From any published layout to our one safetensors file."""

from pathlib import Path

import torch
from safetensors import SafetensorError

from entmtp.drafters.checkpoint import save_heads
from entmtp.errors import CheckpointError, InputError
from entmtp.loading.drafters import HeadsBase, heads_of_source
from entmtp.loading.heads_source import HeadsSource

__all__ = ["STORED_DTYPES", "convert_heads"]

STORED_DTYPES = ("keep", "float32", "float16", "bfloat16", "int8")
"""``keep`` stores what the file holds; ``int8`` stores matrices with one scale a row."""


def convert_heads(
    source: HeadsSource, base: HeadsBase, model: str, out: Path, *, dtype: str = "keep"
) -> None:
    """Write heads in our format, atomically.

    Args:
        source: where they lie.
        base: sizes, embedding and output head of the target.
        model: its name; kept in the file.
        out: ``.safetensors``, not there yet.
        dtype: one of :data:`STORED_DTYPES`.

    Raises:
        InputError: an unknown dtype.
        CheckpointError: the heads cannot be used with this model, or the file cannot be written.
    """
    if dtype not in STORED_DTYPES:
        raise InputError(f"dtype is {dtype!r}; it must be one of {', '.join(STORED_DTYPES)}")
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: the file must end in .safetensors")
    try:
        is_there = out.exists()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(
            f"{str(out)!r:.80} is no name for a file ({error}): give another"
        ) from error
    if is_there:
        raise InputError(f"{out} exists already; remove it or give another name")
    heads = heads_of_source(source, base, model)
    if dtype == "int8":
        heads = heads.float()
    elif dtype != "keep":
        heads = heads.to(getattr(torch, dtype))
    try:
        save_heads(heads, out, model, quantize=dtype == "int8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {out} ({error}): free some space or give another folder"
        ) from error
