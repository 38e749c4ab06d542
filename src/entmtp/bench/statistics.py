"""Tokens a second and their ratios, with intervals over prompts.

A prompt has one number of tokens and one time, the median of its repeats. Tokens/s of a method is
the ratio of the sums over prompts, so long texts weigh more than short ones, as they do for whoever
waits. Intervals are percentiles of a bootstrap over prompts; a draw weighs the prompts alike for
all methods, so ratios are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import numpy.typing as npt

from entmtp.bench.runs import Run
from entmtp.bootstrap import draw_weights, percentiles

__all__ = ["Ratio", "Speed", "Timings", "pair_ratios", "speed_of", "timings_of"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timings:
    """Prompts of one method.

    Attributes:
        prompts: their numbers, rising.
        tokens: decoded ones of each.
        seconds: of decoding them.
    """

    prompts: tuple[int, ...]
    tokens: Floats
    seconds: Floats

    def select(self, prompts: Sequence[int]) -> "Timings":
        """Those of some of its prompts."""
        at = [self.prompts.index(prompt) for prompt in prompts]
        return Timings(tuple(prompts), self.tokens[at], self.seconds[at])


@dataclass(frozen=True)
class Speed:
    """Tokens a second.

    Attributes:
        tokens_per_s: over all prompts; 0 where nothing was decoded.
        ci95: its interval; ``None`` for fewer than two prompts.
    """

    tokens_per_s: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True)
class Ratio:
    """Tokens/s of one method over that of another, on the prompts of both.

    Attributes:
        value: over all these prompts.
        median: of the draws; the value where there are none.
        ci95: their interval; ``None`` for fewer than two prompts.
        num_prompts: of both.
    """

    value: float
    median: float
    ci95: tuple[float, float] | None
    num_prompts: int


def timings_of(runs: Sequence[Run]) -> Timings:
    """Runs of one method, repeats and all; prompts without a decoded token are left out."""
    by_prompt: dict[int, list[Run]] = {}
    for run in runs:
        if run.num_decoded > 0 and run.decode_s > 0:
            by_prompt.setdefault(run.prompt, []).append(run)
    prompts = tuple(sorted(by_prompt))
    rates = [[run.decode_s / run.num_decoded for run in by_prompt[p]] for p in prompts]
    tokens = np.array([by_prompt[p][0].num_decoded for p in prompts], dtype=np.float64)
    seconds = np.array([float(np.median(each)) for each in rates], dtype=np.float64) * tokens
    return Timings(prompts, tokens, seconds)


def speed_of(timings: Timings) -> Speed:
    """Tokens/s of one method."""
    if not timings.prompts:
        return Speed(0.0, None)
    rates = _rates(timings, draw_weights(len(timings.prompts)))
    return Speed(float(rates[0]), percentiles(rates))


def pair_ratios(by_method: Mapping[str, Timings]) -> dict[str, Ratio]:
    """``a/b`` -> ratio, for every ordered pair of methods with a prompt in common."""
    ratios: dict[str, Ratio] = {}
    for a, b in permutations(by_method, 2):
        common = sorted(set(by_method[a].prompts) & set(by_method[b].prompts))
        if common:
            weights = draw_weights(len(common))
            over, under = (_rates(by_method[name].select(common), weights) for name in (a, b))
            ratios[f"{a}/{b}"] = _ratio(over / under, len(common))
    return ratios


def _ratio(values: Floats, num_prompts: int) -> Ratio:
    draws = values[1:] if len(values) > 1 else values
    return Ratio(float(values[0]), float(np.median(draws)), percentiles(values), num_prompts)


def _rates(timings: Timings, weights: Floats) -> Floats:
    """Of the whole and of each draw."""
    rates: Floats = (weights @ timings.tokens) / (weights @ timings.seconds)
    return rates
