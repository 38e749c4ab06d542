"""Rotary positions as a Hugging Face ``config.json`` states them, and back.

Old files have ``rope_scaling``, with a key ``type`` or ``rope_type``; those of transformers 5 have
``rope_parameters``. Defaults of absent keys are those of transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp.decoder.rope import RopeScaling
from entmtp.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "MOST_OF_ANY",
    "Rope",
    "check_yarn",
    "positive_number",
    "read_rope",
    "rope_to_dict",
    "scaled_positions",
    "yarn_mscale",
]

MOST_OF_ANY = 1 << 53
"""Bound on every count in a file; larger ones are no exact floats."""

_DEFAULT_THETA = 10000.0
_KINDS = ("default", "linear", "llama3", "yarn")
_LEAST, _MOST = 1e-30, 1e30  # of a number; beyond, frequencies would overflow
_GROWS = "which makes the keys wrong that are already cached"
_REASONS = {
    "dynamic": f"its frequencies change with the length of the text, {_GROWS}",
    "longrope": f"its frequencies change once the text outgrows the original context, {_GROWS}",
    "su": f"its frequencies change once the text outgrows the original context, {_GROWS}",
    "mrope": "its positions have several dimensions, and a tree node has one",
    "proportional": "it rotates only part of each head",
}


@dataclass(frozen=True)
class Rope:
    """What a file says of rotary positions.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched; ``None`` is not at all.
        positions: how many they serve, the stretch included.
    """

    theta: float
    scaling: RopeScaling | None
    positions: int


def read_rope(data: Mapping[str, Any], positions: int, source: Path) -> Rope:
    """Read ``rope_scaling``, ``rope_parameters`` and ``rope_theta``.

    Args:
        data: the contents of a config.json.
        positions: its ``max_position_embeddings``.
        source: the file, for messages.

    Raises:
        CheckpointError: a value is missing or makes no sense, or two places contradict each other.
        UnsupportedModelError: a kind of scaling under which trees would be wrong.
    """
    rope = _stated(data, source)
    kind = _kind(rope)
    _refuse_unsupported(kind, rope, data, source)
    theta = positive_number({"rope_theta": _DEFAULT_THETA, **data, **rope}, "rope_theta", source)
    if kind == "default":
        return Rope(theta, None, positions)
    factor = positive_number(rope, "factor", source)
    original = _original_context(rope, data, positions, source)
    if kind == "llama3":
        return Rope(theta, _llama3(rope, factor, original, source), positions)
    scaling = RopeScaling("linear", factor)
    if kind == "yarn":
        scaling = _yarn(rope, factor, original, source)
        check_yarn(theta, scaling, source)
    return Rope(theta, scaling, scaled_positions(positions, original, factor))


def rope_to_dict(theta: float, scaling: RopeScaling | None, positions: int) -> dict[str, Any]:
    """The keys of a config.json that :func:`read_rope` and transformers 5 read.

    Args:
        theta: base of the frequencies.
        scaling: how they are stretched.
        positions: how many they are to serve.

    Returns:
        ``max_position_embeddings``, ``rope_theta`` and ``rope_parameters``.

    Raises:
        CheckpointError: no config.json can state this scaling.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    data = {"max_position_embeddings": positions, "rope_theta": theta, "rope_parameters": rope}
    if scaling is None:
        return data
    if scaling.kind == "divisors":
        raise CheckpointError(
            "a config.json cannot state rotary frequencies that are divided one by one "
            f"({len(scaling.divisors)} divisors, rope_freqs.weight of a GGUF file): "
            "use the GGUF file itself as the model"
        )
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        before = max(1, int(positions / scaling.factor)) if scaling.factor > 1 else positions
        if int(before * scaling.factor) == positions:
            data["max_position_embeddings"] = before
        else:
            rope["original_max_position_embeddings"] = before
        return data
    rope["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_freq_factor
        rope["high_freq_factor"] = scaling.high_freq_factor
    else:
        rope["beta_fast"], rope["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        rope["attention_factor"] = scaling.attention_factor
        rope["truncate"] = scaling.truncate
    return data


def scaled_positions(positions: int, original: int, factor: float) -> int:
    """Positions that linear and yarn scaling serve: the original ones times the factor.

    Never fewer than the file states anyway.
    """
    return max(positions, int(original * factor))


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Growth of cosine and sine in yarn (Peng et al. 2023, section 3.4, doubled by q and k)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def check_yarn(theta: float, scaling: RopeScaling, source: Path) -> None:
    """Check that the borders of yarn can be computed and lie in order.

    Raises:
        CheckpointError: they cannot or do not.
    """
    if theta <= 1:
        raise CheckpointError(
            f"{source}: the rotary base (rope_theta) is {theta}, but yarn needs one above 1: "
            "fetch the model again"
        )
    if scaling.beta_fast < scaling.beta_slow:
        raise CheckpointError(
            f"{source}: beta_fast is {scaling.beta_fast}, but must not be below the beta_slow of "
            f"{scaling.beta_slow}: fetch the model again"
        )


def positive_number(
    data: Mapping[str, Any], key: str, source: Path, default: float | None = None
) -> float:
    """A number above 0; an absent or null key takes the default where there is one.

    Raises:
        CheckpointError: it is something else.
    """
    value: Any = data.get(key)
    if value is None and default is not None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LEAST <= value <= _MOST:  # NaN compares as false
        state = "is missing" if key not in data else f"is {value!r}"
        raise CheckpointError(
            f"{source}: {key} {state}, but must be a number above 0 ({_LEAST:g} to {_MOST:g}): "
            "fetch the model again"
        )
    return float(value)


def _stated(data: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The contents of both places; where they share keys, these must agree."""
    both: list[dict[str, Any]] = []
    for place in ("rope_scaling", "rope_parameters"):
        value = data.get(place)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(
                f"{source}: {place} is {value!r}, not an object: fetch the model again"
            )
        if value:
            nested = [key for key, inner in value.items() if isinstance(inner, dict)]
            if nested:
                raise UnsupportedModelError(
                    f"{source}: rotary positions that differ by layer ({nested[0]!r} in {place}) "
                    "are not supported; supported are those that all layers share"
                )
            both.append({**value, "rope_type": _kind(value)})
    if len(both) == 2:
        old, new = both
        key = next((key for key in old.keys() & new.keys() if old[key] != new[key]), None)
        if key is not None:
            raise CheckpointError(
                f"{source}: rope_scaling says {key} = {old[key]!r}, but rope_parameters say "
                f"{new[key]!r}: keep the right one of the two"
            )
    return {key: value for rope in both for key, value in rope.items()}


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _refuse_unsupported(
    kind: object, rope: Mapping[str, Any], data: Mapping[str, Any], source: Path
) -> None:
    if kind not in _KINDS:
        reason = _REASONS.get(str(kind), "its frequencies are not known here")
        raise UnsupportedModelError(
            f"{source}: rotary scaling of type {kind!r} is not supported, because {reason}; "
            f"supported are {', '.join(_KINDS)}"
        )
    partial = rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1):
        raise UnsupportedModelError(
            f"{source}: a partial_rotary_factor of {partial} is not supported; supported is 1"
        )


def _original_context(
    rope: Mapping[str, Any], data: Mapping[str, Any], positions: int, source: Path
) -> int:
    """Positions of the first training; a key beside the scaling wins, as in transformers."""
    key = "original_max_position_embeddings"
    stated = (data.get(key), rope.get(key), positions)
    value = next(number for number in stated if number is not None)
    if type(value) is not int or not 0 < value < MOST_OF_ANY:
        raise CheckpointError(
            f"{source}: {key} is {value!r}, not a positive integer below {MOST_OF_ANY}: "
            "fetch the model again"
        )
    return value


def _llama3(rope: Mapping[str, Any], factor: float, original: int, source: Path) -> RopeScaling:
    low = positive_number(rope, "low_freq_factor", source)
    high = positive_number(rope, "high_freq_factor", source)
    if high <= low:
        raise CheckpointError(
            f"{source}: high_freq_factor is {high}, but must be above the low_freq_factor of "
            f"{low}: fetch the model again"
        )
    return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Mapping[str, Any], factor: float, original: int, source: Path) -> RopeScaling:
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(
            f"{source}: truncate is {truncate!r}, neither true nor false: fetch the model again"
        )
    attention = yarn_mscale(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        mscale = positive_number(rope, "mscale", source)
        attention = yarn_mscale(factor, mscale)
        attention /= yarn_mscale(factor, positive_number(rope, "mscale_all_dim", source))
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=positive_number(rope, "beta_fast", source, 32.0),
        beta_slow=positive_number(rope, "beta_slow", source, 1.0),
        attention_factor=positive_number(rope, "attention_factor", source, attention),
        truncate=truncate,
    )
