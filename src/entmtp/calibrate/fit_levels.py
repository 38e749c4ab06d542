"""Fitting of ``ladder`` and ``hysteresis``: which trees, on which signal, at which thresholds.

A ladder for a signal follows from what each tree keeps in each interval of it: the assignment of
trees to intervals with the most tokens less the worth of the time, in which trees get dearer as
text gets more predictable (a dynamic programme). The best of all signals and sizes by replay is
then improved threshold by threshold. Bands and dwells of ``hysteresis`` are laid around ladders.
The best single tree is among the candidates of both, and they must lead it clearly: a lead of less
than a percent on the fitted texts is as often a loss on others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.simulate import Automaton, Texts, Visits, simulate, visit
from entmtp.scheduler.values import FEEDBACK, SIGNALS

__all__ = ["Ladder", "best_single", "fit_hysteresis", "fit_ladder", "ladders", "one_signal"]

FloatArray = npt.NDArray[np.float64]

_NUM_BINS = 12
_SIZES = (2, 3, 4)
_STEP = 1 / 24  # of the distribution of a signal, by which thresholds are moved
_WIDTHS = (0.02, 0.05, 0.1)
_DWELLS = (1, 2, 4)
_ROUNDS = 2
_LEAST_LEAD = 0.01  # over the best single tree, as a share of its time

Progress = Callable[[], None]


@dataclass(frozen=True)
class Ladder:
    """Trees by level of a signal.

    Attributes:
        signal: its name.
        trees: numbers, one a level.
        quantiles: shares of all steps that lie below each threshold.
        values: of the signal at many steps, sorted.
    """

    signal: str
    trees: tuple[int, ...]
    quantiles: tuple[float, ...]
    values: FloatArray

    def threshold(self, share: float) -> float:
        """The value below which that share of steps lies."""
        return float(np.quantile(self.values, min(max(share, 0.0), 1.0)))

    @property
    def automaton(self) -> Automaton:
        """The policy."""
        bounds = tuple(self.threshold(share) for share in self.quantiles)
        return Automaton(self.trees, one_signal(self.signal), bounds, bounds)

    def banded(self, width: float, dwell: int) -> Automaton | None:
        """With a dead band of that share of steps at either side; ``None`` where none is left."""
        up = tuple(self.threshold(share + width) for share in self.quantiles)
        down = tuple(self.threshold(share - width) for share in self.quantiles)
        if any(not low < high for low, high in zip(down, up, strict=True)):
            return None
        weights, start = one_signal(self.signal), len(self.trees) // 2
        return Automaton(self.trees, weights, up, down, dwell, jumps=False, start=start)


def one_signal(name: str) -> tuple[float, ...]:
    """Weights of a signal alone."""
    return tuple(float(name == other) for other in SIGNALS)


def best_single(texts: Texts, trees: Sequence[int]) -> Automaton:
    """The tree that is fastest where it is used at every step; the first of equals."""
    singles = [Automaton((tree,)) for tree in trees]
    return singles[int(simulate(texts, singles).argmin())]


def ladders(texts: Texts, trees: Sequence[int], single: Automaton) -> list[Ladder]:
    """Ladders for every signal and several sizes, none of a single level.

    Args:
        texts: to fit.
        trees: numbers of those to choose from.
        single: the best tree.
    """
    found: list[Ladder] = []
    for signal in SIGNALS:
        own = trees if signal not in FEEDBACK else [t for t in trees if not texts.is_plain[t]]
        policy, rate = single, _rate(texts, simulate(texts, [single]))
        for _ in range(_ROUNDS):
            visits = visit(texts, policy)
            made = _assigned(texts, visits, signal, own, rate)
            if not made:
                break
            found += made
            ms = simulate(texts, [ladder.automaton for ladder in made])
            policy, rate = made[int(ms.argmin())].automaton, _rate(texts, ms)
    return found


def fit_ladder(
    texts: Texts, found: Sequence[Ladder], single: Automaton
) -> tuple[Ladder | None, float]:
    """The best ladder and its milliseconds; ``None`` where the best tree alone is about as good."""
    single_ms = float(simulate(texts, [single])[0])
    best, best_ms = None, single_ms
    candidates = list(found)
    while candidates:
        ms = simulate(texts, [ladder.automaton for ladder in candidates])
        at = int(ms.argmin())
        if not ms[at] < best_ms:
            break
        best, best_ms = candidates[at], float(ms[at])
        candidates = _moved(best)
    return (best, best_ms) if _leads(best_ms, single_ms) else (None, single_ms)


def fit_hysteresis(
    texts: Texts, found: Sequence[Ladder], single: Automaton
) -> tuple[tuple[Ladder, Automaton] | None, float]:
    """The best bands, with the ladder they lie around, and their milliseconds.

    ``None`` where they do not lead the best tree clearly.
    """
    made = [
        (ladder, banded)
        for ladder, width, dwell in product(found, _WIDTHS, _DWELLS)
        if (banded := ladder.banded(width, dwell)) is not None
    ]
    single_ms = float(simulate(texts, [single])[0])
    if not made:
        return None, single_ms
    ms = simulate(texts, [banded for _, banded in made])
    at = int(ms.argmin())
    ladder, banded = made[at]
    starts = [replace(banded, start=start) for start in range(len(banded.choices))]
    by_start = simulate(texts, starts)
    best_ms = float(by_start.min())
    if not _leads(best_ms, single_ms):
        return None, single_ms
    return (ladder, starts[int(by_start.argmin())]), best_ms


def _leads(ms: float, single_ms: float) -> bool:
    return ms < (1 - _LEAST_LEAD) * single_ms


def _rate(texts: Texts, milliseconds: FloatArray) -> float:
    """Tokens a millisecond of the fastest policy."""
    return texts.num_tokens / max(float(milliseconds.min()), 1e-9)


def _moved(ladder: Ladder) -> list[Ladder]:
    """Ladders with one threshold elsewhere, all of them rising."""
    moved = []
    for at, by in product(range(len(ladder.quantiles)), (-2, -1, 1, 2)):
        shares = list(ladder.quantiles)
        shares[at] = min(max(shares[at] + by * _STEP, 0.0), 1.0)
        if shares == sorted(shares) and tuple(shares) != ladder.quantiles:
            moved.append(replace(ladder, quantiles=tuple(shares)))
    return moved


def _assigned(
    texts: Texts, visits: Visits, signal: str, trees: Sequence[int], rate: float
) -> list[Ladder]:
    """The best ladder of each size for what was kept at these steps."""
    values = visits.signals[SIGNALS.index(signal)]
    if len(values) < _NUM_BINS or len(trees) < 2:
        return []
    shares = np.arange(1, _NUM_BINS) / _NUM_BINS
    edges, first = np.unique(np.quantile(values, shares), return_index=True)
    bins = np.searchsorted(edges, values, side="right")
    ms = texts.step_ms()
    order = sorted(trees, key=lambda tree: (ms[tree], tree))
    worth = np.array(
        [
            np.bincount(
                bins,
                weights=texts.accepted[tree, visits.roots] + 1 - rate * ms[tree],
                minlength=len(edges) + 1,
            )
            for tree in order
        ]
    ).T
    sorted_values = np.sort(values)
    found = []
    for size in _SIZES:
        path = _best_path(worth, size)
        steps = [at for at in range(1, len(path)) if path[at] != path[at - 1]]
        if steps:
            levels = tuple(order[path[at]] for at in [0, *steps])
            quantiles = tuple(float(shares[first[at - 1]]) for at in steps)
            ladder = Ladder(signal, levels, quantiles, sorted_values)
            if ladder not in found:
                found.append(ladder)
    return found


def _best_path(worth: FloatArray, size: int) -> list[int]:
    """For each interval a column, never falling, of at most ``size`` different ones, best in sum.

    Args:
        worth: ``(intervals, columns)``.
        size: at least 1.
    """
    num_trees = worth.shape[1]
    best = np.full((size, num_trees), -np.inf)
    best[0] = worth[0]
    came: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]] = []
    for row in worth[1:]:
        lower = np.full((size, num_trees), -np.inf)
        source = np.zeros((size, num_trees), dtype=np.int64)
        for level in range(1, size):
            top = 0
            for tree in range(1, num_trees):
                if best[level - 1, tree - 1] > best[level - 1, top]:
                    top = tree - 1
                lower[level, tree], source[level, tree] = best[level - 1, top], top
        is_new = lower > best
        came.append((source, is_new))
        best = np.where(is_new, lower, best) + row
    level, tree = divmod(int(best.argmax()), num_trees)
    path = [tree]
    for source, is_new in reversed(came):
        if is_new[level, tree]:
            level, tree = level - 1, int(source[level, tree])
        path.append(tree)
    return path[::-1]
