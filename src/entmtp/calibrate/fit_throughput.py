"""Fitting of ``throughput``: what each tree gives by class of the free signals.

The signal that is divided into classes is one of the free ones, or the linear combination of them
that foretells the tokens of the best tree. In each class a mean is drawn to that of all classes
where there are few examples, and means do not fall as text gets more predictable. Lambda follows
from the rate that the policy itself reaches.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.simulate import Automaton, Texts, Visits, simulate, visit
from entmtp.scheduler.bands import CONTEXTS
from entmtp.scheduler.throughput import ThroughputParams, best_trees
from entmtp.scheduler.values import SIGNALS

__all__ = ["fit_throughput", "retuned", "throughput_automaton"]

FloatArray = npt.NDArray[np.float64]

_NUM_CLASSES = (4, 8, 12)
_DWELLS = (1, 2, 4)
_SHRINK = 20.0  # examples that the mean of all classes is worth
_ROUNDS = 3
_RIDGE = 1e-3
_FACTORS = (1.0, 0.75, 0.85, 0.92, 1.06)  # on the gain; the first of equals is taken

Weights = tuple[float, ...]


def throughput_automaton(
    texts: Texts, params: ThroughputParams, numbers: dict[str, int]
) -> Automaton:
    """What a policy does on texts, one sequence a step.

    Args:
        texts: with the trees of its entries.
        params: of the policy.
        numbers: entry -> its tree's number.
    """
    trees = [numbers[name] for name in params.entries]
    choices = []
    for context in CONTEXTS:
        ms = np.array([texts.costs.step_ms(texts.trees[tree], context) for tree in trees])
        choices.append(tuple(trees[at] for at in best_trees(params, ms)))
    weights = tuple(params.weights.get(name, 0.0) for name in SIGNALS)
    bounds = params.bounds
    return Automaton(
        tuple(choices), weights, bounds, bounds, params.min_dwell, probe=numbers[params.probe]
    )


def fit_throughput(
    texts: Texts, numbers: dict[str, int], single: Automaton
) -> tuple[ThroughputParams, float]:
    """The best parameters and their milliseconds.

    Args:
        texts: to fit.
        numbers: entry -> its tree's number; plain decoding among them.
        single: the best tree.
    """
    visits = visit(texts, single)
    static_ms = float(simulate(texts, [single])[0])
    if not len(visits.roots):
        return _only(texts, numbers, single), static_ms
    candidates = [
        _tables(texts, visits, numbers, weights, num_classes)
        for weights, num_classes in product(_weightings(texts, visits, single), _NUM_CLASSES)
    ]
    best, best_ms = _only(texts, numbers, single), static_ms
    for _ in range(_ROUNDS):
        ms = simulate(texts, [throughput_automaton(texts, one, numbers) for one in candidates])
        at = int(ms.argmin())
        if ms[at] < best_ms:
            best, best_ms = candidates[at], float(ms[at])
        candidates = [
            replace(one, gain=static_ms / max(float(own), 1e-9))
            for one, own in zip(candidates, ms, strict=True)
        ]
    dwelling = [replace(best, min_dwell=dwell) for dwell in _DWELLS]
    ms = simulate(texts, [throughput_automaton(texts, one, numbers) for one in dwelling])
    best = retuned(texts, dwelling[int(ms.argmin())], numbers)
    return best, float(simulate(texts, [throughput_automaton(texts, best, numbers)])[0])


def retuned(texts: Texts, params: ThroughputParams, numbers: dict[str, int]) -> ThroughputParams:
    """The parameters with the gain that is best of those near it.

    Where plain steps are cheap, the gain that follows from the rate can leave a policy in a class
    in which nothing is drafted, and so nothing is learned.

    Args:
        texts: to fit, with the costs of now.
        params: fitted before, maybe under other costs.
        numbers: entry -> its tree's number.
    """
    for _ in range(_ROUNDS):
        candidates = [replace(params, gain=params.gain * factor) for factor in _FACTORS]
        ms = simulate(texts, [throughput_automaton(texts, one, numbers) for one in candidates])
        at = int(ms.argmin())
        params = candidates[at]
        if at == 0:
            break
    return params


def _only(texts: Texts, numbers: dict[str, int], single: Automaton) -> ThroughputParams:
    """A single class: the best tree, wherever costs are those of the fit."""
    names = list(numbers)
    visits = visit(texts, single)
    weights = dict.fromkeys(SIGNALS[:1], 1.0)
    return _made(texts, numbers, names, weights, (), _means(texts, visits, numbers)[None])


def _tables(
    texts: Texts, visits: Visits, numbers: dict[str, int], weights: Weights, num_classes: int
) -> ThroughputParams:
    """Classes of equal numbers of steps."""
    names = list(numbers)
    value = np.zeros(len(visits.roots))
    for weight, signal in zip(weights, visits.signals, strict=True):
        if weight:
            value += weight * signal
    bounds = np.unique(np.quantile(value, np.arange(1, num_classes) / num_classes))
    classes = np.searchsorted(bounds, value, side="right")
    sizes = np.bincount(classes, minlength=len(bounds) + 1)
    means = _means(texts, visits, numbers)
    rows = np.array([numbers[name] for name in names])
    kept = texts.accepted[rows][:, visits.roots] + 1
    sums = np.array([np.bincount(classes, own, minlength=len(sizes)) for own in kept])
    shrunk = (sums + _SHRINK * means[:, None]) / (sizes + _SHRINK)
    tokens = np.array([_rising(own, sizes + 1.0) for own in shrunk]).T
    named = {name: weight for name, weight in zip(SIGNALS, weights, strict=True) if weight}
    return _made(texts, numbers, names, named, tuple(bounds.tolist()), tokens)


def _made(
    texts: Texts,
    numbers: dict[str, int],
    names: list[str],
    weights: dict[str, float],
    bounds: tuple[float, ...],
    tokens: FloatArray,
) -> ThroughputParams:
    means = tokens.mean(axis=0)
    return ThroughputParams(
        entries=tuple(names),
        weights=weights,
        bounds=bounds,
        tokens=tuple(tuple(row) for row in tokens.tolist()),
        mean_tokens=tuple(means.tolist()),
        gain=1.0,
        probe=_probe(texts, numbers),
    )


def _probe(texts: Texts, numbers: dict[str, int]) -> str:
    """The cheapest entry that drafts anything."""
    drafting = [name for name, number in numbers.items() if texts.trees[number].num_nodes]
    ms = texts.step_ms()
    return min(drafting or numbers, key=lambda name: ms[numbers[name]])


def _means(texts: Texts, visits: Visits, numbers: dict[str, int]) -> FloatArray:
    """``(E,)`` tokens of a step with each entry, over all these steps."""
    kept = texts.accepted[list(numbers.values())][:, visits.roots]
    means: FloatArray = kept.mean(axis=1) + 1 if len(visits.roots) else np.ones(len(numbers))
    return means


def _weightings(texts: Texts, visits: Visits, single: Automaton) -> list[Weights]:
    """Each signal alone, and their combinations that foretell what some trees keep."""
    found: list[Weights] = [tuple(float(name == other) for other in SIGNALS) for name in SIGNALS]
    features = visits.signals - visits.signals.mean(axis=1, keepdims=True)
    spread = np.maximum(features.std(axis=1), 1e-9)
    scaled = features / spread[:, None]
    gram = scaled @ scaled.T / scaled.shape[1] + _RIDGE * np.eye(len(SIGNALS))
    own = int(np.array(single.choices).ravel()[0])
    for tree in dict.fromkeys((own, int(texts.ms[:, -1].argmax()))):
        kept = texts.accepted[tree, visits.roots].astype(np.float64)
        slopes = np.linalg.solve(gram, scaled @ (kept - kept.mean()) / len(kept)) / spread
        if np.abs(slopes).max() > 0:
            found.append(tuple(float(slope) for slope in slopes))
    return found


def _rising(values: Sequence[float] | FloatArray, sizes: npt.NDArray[Any]) -> list[float]:
    """The closest values that do not fall: neighbours that do are pooled."""
    blocks: list[tuple[float, float, int]] = []
    for value, size in zip(values, sizes, strict=True):
        block = float(value), float(size), 1
        while blocks and blocks[-1][0] > block[0]:
            mean, weight, count = blocks.pop()
            total = weight + block[1]
            block = (mean * weight + block[0] * block[1]) / total, total, count + block[2]
        blocks.append(block)
    return [mean for mean, _, count in blocks for _ in range(count)]
