"""Fitting of ``chain-ema`` and ``chain-threshold``: two numbers each, by replay on a grid."""

from itertools import product

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.replay import walk
from entmtp.calibrate.simulate import Automaton, Texts, simulate
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.scheduler.chains import ChainEmaParams, ChainThresholdParams
from entmtp.scheduler.dynamic import growth_costs
from entmtp.scheduler.values import SIGNALS

__all__ = [
    "chain_ema_automaton",
    "chain_threshold_ms",
    "fit_chain_ema",
    "fit_chain_threshold",
    "longest_chain",
]

FloatArray = npt.NDArray[np.float64]

_SLOPES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
_OFFSETS = (-0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
_CODES = (0, 1, 2, 3, 4, 6, 8, 11, 14, 18, 23, 30, 40, 63)


def chain_ema_automaton(params: ChainEmaParams, chains: tuple[int, ...]) -> Automaton:
    """What a policy does.

    Args:
        params: of the policy.
        chains: numbers of the chains of 0, 1, ... tokens.
    """
    weights = tuple(float(name == "accepted_ema") for name in SIGNALS)
    return Automaton(
        chains[: params.max_length + 1], weights, params.bounds, params.bounds, probe=chains[1]
    )


def fit_chain_ema(texts: Texts, chains: tuple[int, ...]) -> tuple[ChainEmaParams, float]:
    """The best parameters and their milliseconds."""
    grid = [ChainEmaParams(a, b, len(chains) - 1) for a, b in product(_SLOPES, _OFFSETS)]
    ms = simulate(texts, [chain_ema_automaton(params, chains) for params in grid])
    return grid[int(ms.argmin())], float(ms.min())


def longest_chain(trace: Trace) -> int:
    """Best children in a row that the envelope of a trace holds; 0 without."""
    envelope = set(trace.facts.envelope)
    return next(n for n in range(len(envelope) + 1) if (0,) * (n + 1) not in envelope)


def fit_chain_threshold(
    trace: Trace, costs: CostTable, context: float
) -> tuple[ChainThresholdParams, float]:
    """The best parameters and their milliseconds; the trace has codes of a chain."""
    lengths = range(1, longest_chain(trace) + 1)
    grid = [ChainThresholdParams(code, length) for code, length in product(_CODES, lengths)]
    ms = [chain_threshold_ms(trace, params, costs, context) for params in grid]
    return grid[int(np.argmin(ms))], float(min(ms))


def chain_threshold_ms(
    trace: Trace, params: ChainThresholdParams, costs: CostTable, context: float
) -> float:
    """Milliseconds of all texts: what replay finds, since no step depends on those before it."""
    length = params.max_length
    places = [trace.facts.envelope.index((0,) * depth) for depth in range(1, length + 1)]
    most = np.minimum(trace.depth_left(), length)
    drafted = np.minimum(_leading(trace.codes[:, places] <= params.max_code), most)
    kept = np.minimum(drafted, _leading(trace.ranks[:, :length] == 0))
    prices = growth_costs(costs, length, length, context, 1)
    first = np.concatenate(([0.0], np.cumsum(prices.draft)))
    ms = first[np.minimum(drafted + 1, most)] + prices.rows[drafted]
    return float(ms[walk(trace, kept).roots].sum())


def _leading(is_good: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """``(T,)`` how many columns of each row are true before the first that is not."""
    count: npt.NDArray[np.int64] = np.cumprod(is_good, axis=1, dtype=np.int64).sum(axis=1)
    return count
