"""Intervals from a bootstrap: draws with replacement, the same ones for all that is compared."""

import numpy as np
import numpy.typing as npt

__all__ = ["CONFIDENCE", "RESAMPLES", "SEED", "draw_weights", "percentiles"]

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0

Floats = npt.NDArray[np.float64]


def draw_weights(num_items: int) -> Floats:
    """``(1 + RESAMPLES, num_items)`` weights: first every item once, then draws with replacement.

    Of fewer than two items there is no more to draw than the whole.
    """
    whole = np.ones((1, num_items))
    if num_items < 2:
        return whole
    generator = np.random.default_rng(SEED)
    shares = np.full(num_items, 1 / num_items)
    return np.concatenate([whole, generator.multinomial(num_items, shares, RESAMPLES)])


def percentiles(values: Floats) -> tuple[float, float] | None:
    """Ends of the interval of values, the first of which is not a draw; ``None`` without draws."""
    if len(values) < 2:
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values[1:], [tail, 100 - tail])
    return float(low), float(high)
