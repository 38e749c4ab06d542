"""Rotary positions as the metadata and tensors of a GGUF file state them.

The meaning of the keys is that of llama.cpp: without a type, a factor means linear scaling.
"""

from typing import Any

import numpy as np

from entmtp.decoder.rope import RopeScaling
from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.gguf_file import GGUFFile, dequantise
from entmtp.target.hf_rope import (
    Rope,
    check_yarn,
    positive_number,
    scaled_positions,
    yarn_mscale,
)

__all__ = ["ROPE_TENSORS", "decimal", "gguf_rope"]

ROPE_TENSORS = ("rope_freqs.weight",)
"""Tensors that hold frequencies, not weights."""

_UNSUPPORTED = {
    "alpha": None,
    "yarn_ext_factor": 1,
    "yarn_attn_factor": 1,
    "yarn_log_multiplier": 0,
}
"""Keys below ``rope.scaling`` that change the frequencies, and where they do not."""


def gguf_rope(file: GGUFFile, arch: str, head_dim: int, positions: int) -> Rope:
    """Read base, scaling and divisors of the frequencies.

    Args:
        file: with the metadata.
        arch: under which the keys lie.
        head_dim: of a head.
        positions: the file's ``context_length``.

    Raises:
        CheckpointError: a value is missing or makes no sense.
        UnsupportedModelError: a kind of scaling that the reference target lacks.
    """
    theta = decimal(file, f"{arch}.rope.freq_base", 10000.0)
    kind, factor = _kind(file, arch)
    prefix = f"{arch}.rope.scaling"
    growth = decimal(file, f"{prefix}.attn_factor", 1.0)
    if kind != "yarn" and growth != 1:
        raise UnsupportedModelError(
            f"{file.path}: {prefix}.attn_factor = {growth} with rotary scaling of type {kind!r} is "
            "not supported; supported is 1, or the type 'yarn'"
        )
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise UnsupportedModelError(
                f"{file.path}: rope_freqs.weight together with rotary scaling of type {kind!r} is "
                "not supported; supported is one of the two"
            )
        scaling = RopeScaling("divisors", divisors=_divisors(file, head_dim))
        return Rope(theta, scaling, positions)
    if kind == "none":
        return Rope(theta, None, positions)
    original = _original_context(file, f"{prefix}.original_context_length", positions)
    scaling = RopeScaling("linear", factor)
    if kind == "yarn":
        scaling = RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=decimal(file, f"{prefix}.yarn_beta_fast", 32.0),
            beta_slow=decimal(file, f"{prefix}.yarn_beta_slow", 1.0),
            attention_factor=growth * yarn_mscale(factor),
        )
        check_yarn(theta, scaling, file.path)
    return Rope(theta, scaling, scaled_positions(positions, original, factor))


def decimal(file: GGUFFile, key: str, default: float | None = None) -> float:
    """A float32 as the decimal it was written from: 1e-05, not 9.999999747378752e-06.

    Raises:
        CheckpointError: it is no number above 0.
    """
    return float(str(np.float32(positive_number(file.metadata, key, file.path, default))))


def _kind(file: GGUFFile, arch: str) -> tuple[str, float]:
    """The type, ``none`` where it changes nothing, and the factor."""
    prefix = f"{arch}.rope.scaling"
    known = {name: file.metadata.get(f"{prefix}.{name}") for name in _UNSUPPORTED}
    for name, neutral in _UNSUPPORTED.items():
        if known[name] not in (None, neutral):
            raise UnsupportedModelError(
                f"{file.path}: {prefix}.{name} = {known[name]} is not supported; supported are "
                "files without this key"
            )
    old_key = f"{arch}.rope.scale_linear"
    key = f"{prefix}.factor" if f"{prefix}.factor" in file.metadata else old_key
    has_factor = key in file.metadata
    kind = file.metadata.get(f"{prefix}.type", "linear" if has_factor else "none")
    if kind == "none":
        return "none", 1.0
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rotary scaling of type {kind!r} is not supported; supported are 'none', "
            "'linear', 'yarn' and the frequencies in a tensor rope_freqs.weight (llama3)"
        )
    factor = decimal(file, key if has_factor else f"{prefix}.factor")
    return ("none" if kind == "linear" and factor == 1 else kind), factor


def _original_context(file: GGUFFile, key: str, positions: int) -> int:
    value: Any = file.metadata.get(key, positions)
    if type(value) is not int or value <= 0:
        raise CheckpointError(
            f"{file.path}: {key} is {value!r}, not a positive integer: fetch the file again"
        )
    return value


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...]:
    """One divisor of a frequency for each pair of a head's dimensions."""
    shape = file.shape("rope_freqs.weight")
    if shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path}: tensor rope_freqs.weight has shape {shape}, but heads of {head_dim} "
            f"dimensions ask for ({head_dim // 2},): fetch the file again"
        )
    values = [float(value) for value in dequantise(file, "rope_freqs.weight")]
    wrong = next((value for value in values if not 0 < value < np.inf), None)
    if wrong is not None:
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight holds {wrong}, but must hold numbers above 0: "
            "fetch the file again"
        )
    return tuple(values)
