"""Rotary positions (Su et al. 2021) and the published ways to stretch them over longer texts.

The pair i of a head turns by the angle p * f_i at position p, with f_i = theta ** (-2i / head_dim).
A scaling replaces the f_i once, whatever the length of the text, so that keys stay valid as the
text grows; methods whose frequencies depend on the length (dynamic NTK) are not among them.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

__all__ = ["RopeScaling", "RotationTable", "inverse_frequencies", "rotate"]


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a model differ from the plain ones.

    Attributes:
        kind: ``linear`` (Chen et al. 2023: f / factor), ``llama3`` (Llama 3.1: long waves are
            divided by the factor, short ones kept, those between blended), ``yarn`` (Peng et al.
            2023: the same by number of turns, with a factor on cosine and sine) or ``divisors``
            (f_i / divisors[i], as GGUF files store llama3).
        factor: by which the context grows.
        original_context: positions that the model was first trained on; for llama3 and yarn.
        low_freq_factor: of llama3; waves longer than ``original_context / low`` are divided.
        high_freq_factor: of llama3; waves shorter than ``original_context / high`` are kept.
        beta_fast: of yarn; pairs that turn more often than this in the original context are kept.
        beta_slow: of yarn; pairs that turn less often than this are divided.
        attention_factor: of yarn, on cosine and sine.
        truncate: of yarn; the borders are rounded outwards to whole pairs.
        divisors: one a pair, for ``divisors``.
    """

    kind: Literal["linear", "llama3", "yarn", "divisors"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()


class _RotaryConfig(Protocol):
    """What the frequencies depend on."""

    @property
    def head_dim(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def inverse_frequencies(config: _RotaryConfig) -> Tensor:
    """float32 ``(head_dim / 2,)``: the angle that each pair turns by a position."""
    dim, scaling = config.head_dim, config.rope_scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequency = 1.0 / (config.rope_theta**exponent)
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequency, scaling)
    if scaling.kind == "yarn":
        stretched = 1.0 / (scaling.factor * config.rope_theta**exponent)
        return _yarn(frequency, stretched, scaling, config.rope_theta)
    return frequency / torch.tensor(scaling.divisors, dtype=torch.float32)


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    turns = scaling.original_context / (2 * math.pi / frequency)  # rounded as in transformers
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn(frequency: Tensor, stretched: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Blend of plain and divided frequencies, rounded as in transformers."""
    dim = 2 * len(frequency)

    def pair_that_turns(times: float) -> float:
        wave = scaling.original_context / (times * 2 * math.pi)
        return dim * math.log(wave) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    kept = 1 - divided
    return stretched * (1 - kept) + frequency * kept


class RotationTable:
    """Cosines and sines of all positions so far; grows where a later one is asked for."""

    def __init__(
        self, config: _RotaryConfig, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the table of positions ``0 .. length - 1``; angles are taken in float32."""
        self._frequencies = inverse_frequencies(config).to(device)
        scaling = config.rope_scaling
        self._scale = 1.0 if scaling is None else scaling.attention_factor
        self._dtype = dtype
        self._cos, self._sin = self._table(max(length, 1))

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(rows, 1, head_dim)``.

        Args:
            positions: int64 ``(rows,)`` on the table's device.
            end: above all of them; known to the caller, so that no device is asked.
        """
        cos, sin = self.whole(end)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def whole(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(>= end, head_dim)`` of all positions from 0 on.

        A table that grows is replaced: these tensors never change.
        """
        if end > len(self._cos):
            self._cos, self._sin = self._table(max(end, 2 * len(self._cos)))
        return self._cos, self._sin

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        position = torch.arange(length, device=self._frequencies.device).float()
        angle = torch.outer(position, self._frequencies)
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos() * self._scale, angle.sin() * self._scale
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of ``(rows, heads, d)`` by its angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
