"""Fitting of the policy ``dynamic``: from traced texts to its tables, by counting and by replay.

Log-odds of nodes come from a logistic regression on the drafter's own probability and on trust;
those of copies from counts, classes with few examples drawn to larger ones; gains, which say when
it pays to ask the drafter, from a search by replay.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import accepted_lengths, deepest_nodes, walk
from entmtp.calibrate.trace import NO_COPY, Trace
from entmtp.costs import CostTable
from entmtp.drafters.copying import MATCH_LENGTHS, NUM_MATCHES, SHARES
from entmtp.growth import MAX_COPY, UNSCORED
from entmtp.scheduler.dynamic import DynamicParams, DynamicScheduler, odds_features, trust_of
from entmtp.scheduler.signals import HIT_DECAY, Ema
from entmtp.topology import Topology

__all__ = ["fit_dynamic"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_TRUST_BOUNDS = (0.04, 0.08, 0.16, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75)
_PRIOR_STEPS = 2.0
_SHRINK = 8.0  # examples that the estimate of a larger class is worth
_SHORT = 2  # classes of matches that are often by chance
_RIDGE = 1.0
_ROOT_GAINS = (0.25, 0.35, 0.5, 0.7, 1.0)
_DEEP_GAINS = (0.15, 0.25, 0.35, 0.5, 0.7)

Progress = Callable[[int, int], None]


def fit_dynamic(
    trace: Trace, costs: CostTable, context: float, progress: Progress = lambda done, total: None
) -> DynamicParams:
    """Parameters for texts like these on a machine like this.

    Args:
        trace: with codes of an envelope.
        costs: of steps.
        context: committed tokens of the mean step.
        progress: told the replays done and their number.
    """
    examples = _Examples(trace)
    odds, slopes = _fit_odds(examples)
    hits = _copy_hits(trace)
    envelope = examples.envelope
    centres = _logit(np.array(_centres()))
    trust_odds = centres[:, None] * slopes[None, :] - slopes[None, :] * _logit(examples.prior)
    params = DynamicParams(
        envelope=envelope.paths,
        odds=_tuples(odds),
        trust_bounds=_TRUST_BOUNDS,
        trust_odds=_tuples(trust_odds),
        prior=examples.prior,
        prior_steps=_PRIOR_STEPS,
        gains=_tuples(np.ones((len(_TRUST_BOUNDS) + 1, envelope.max_depth))),
        hits=_tuples(hits),
        mixes=_tuples(hits),
        rate=_first_rate(trace, costs, context),
        context=context,
        mean_nodes=4.0,
    )
    params = replace(params, mixes=_tuples(_copy_mixes(trace, examples, params, hits)))
    return _search_gains(trace, costs, params, examples, progress)


class _Examples:
    """Positions of the texts, which nodes are right there, and how far the drafter was trusted."""

    def __init__(self, trace: Trace) -> None:
        self.envelope = Topology(trace.facts.envelope)
        self.roots = np.flatnonzero(~np.isnan(trace.entropy))
        deepest = deepest_nodes(trace, self.envelope)[self.roots]
        mask = self.envelope.ancestor_mask
        self.is_right: BoolArray = mask[deepest]  # (R, E + 1)
        self.codes = trace.codes[self.roots].astype(np.int64)
        is_hit = trace.ranks[:, 0] == 0
        self.prior = float(is_hit[self.roots].mean())
        self.trust = _trust(trace, is_hit, self.prior)[self.roots]

    def of(self, node: int) -> IntArray:
        """Rows in which the parent of a node is right and the node was scored."""
        parent = int(self.envelope.parents[node])
        return np.flatnonzero(self.is_right[:, parent] & (self.codes[:, node - 1] != UNSCORED))


def _trust(trace: Trace, is_hit: BoolArray, prior: float) -> FloatArray:
    """``(T,)`` trust at every position, had a chain of two been drafted at each step before."""
    depth = min(2, trace.max_depth)
    chain = Topology.chain(depth)
    steps = walk(trace, accepted_lengths(trace, chain))
    trust = np.full(trace.num_tokens, prior)
    hits, text, known, last = Ema(HIT_DECAY), -1, 0, 0
    for root, own in zip(steps.roots.tolist(), steps.texts.tolist(), strict=True):
        if own != text:
            hits, text, known, last = Ema(HIT_DECAY), own, 0, root
        trust[last : root + 1] = trust_of(hits.value, known, prior, _PRIOR_STEPS)
        hits.push(bool(is_hit[root]))
        known, last = known + 1, root + 1
    return trust


def _fit_odds(examples: _Examples) -> tuple[FloatArray, FloatArray]:
    """Weights ``(E, 4)`` of the nodes, and ``(D,)`` of trust by depth.

    Nodes of one depth and rank share their weights, those of ranks from 3 on too.
    """
    envelope = examples.envelope
    groups: dict[tuple[int, int], list[int]] = {}
    for node, path in enumerate(envelope.paths, start=1):
        groups.setdefault((len(path), min(path[-1], 3)), []).append(node)
    odds = np.zeros((envelope.num_nodes, 4))
    slopes, sizes = np.zeros(envelope.max_depth), np.zeros(envelope.max_depth)
    for (depth, _), nodes in groups.items():
        features, targets = [], []
        for node in nodes:
            rows = examples.of(node)
            trust = _logit(examples.trust[rows]) - _logit(examples.prior)
            own = odds_features(examples.codes[rows, node - 1])
            features.append(np.column_stack((own, trust)))
            targets.append(examples.is_right[rows, node])
        weights = _logistic(np.concatenate(features), np.concatenate(targets))
        for node in nodes:
            odds[node - 1] = weights[:4]
        size = sum(len(target) for target in targets)
        slopes[depth - 1] += size * max(float(weights[4]), 0.0)
        sizes[depth - 1] += size
    return odds, slopes / np.maximum(sizes, 1)


def _logistic(features: FloatArray, targets: BoolArray) -> FloatArray:
    """Weights of a logistic regression with a small ridge, by Newton's method."""
    weights = np.zeros(features.shape[1])
    ridge = _RIDGE * np.eye(features.shape[1])
    for _ in range(30):
        share = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        gradient = features.T @ (share - targets) + ridge @ weights
        hessian = (features * (share * (1 - share))[:, None]).T @ features + ridge
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if float(np.abs(step).max()) < 1e-6:
            break
    return weights


def _copy_hits(trace: Trace) -> FloatArray:
    """``(NUM_MATCHES, MAX_COPY)`` how often the next token of a copy is right."""
    match, hits = trace.copy_match, trace.copy_hits.astype(np.int64)
    length_of = np.arange(NUM_MATCHES) // (len(SHARES) + 1)
    first, later = np.zeros((NUM_MATCHES, 2)), np.zeros((NUM_MATCHES, 2))
    for at in range(NUM_MATCHES):
        own = hits[match == at]
        first[at] = (own > 0).sum(), len(own)
        later[at] = np.maximum(own - 1, 0).sum(), np.minimum(own, MAX_COPY - 1).sum()
    table, bounds = np.zeros((NUM_MATCHES, MAX_COPY)), (*SHARES, 1.0)
    for at in range(NUM_MATCHES):
        siblings = length_of == length_of[at]
        expected = _shrunk(first[siblings].sum(axis=0), 0.5)
        if length_of[at] < _SHORT:  # by chance; then copies go on to be as wrong as they were
            expected = min(expected, bounds[at % len(bounds)])
        table[at, 0] = _shrunk(first[at], expected)
        table[at, 1:] = _shrunk(later[at], _shrunk(later.sum(axis=0), 0.5))
    return table


def _shrunk(counts: Iterable[float], other: float) -> float:
    right, total = counts
    return float((right + _SHRINK * other) / (total + _SHRINK))


def _copy_mixes(
    trace: Trace, examples: _Examples, params: DynamicParams, hits: FloatArray
) -> FloatArray:
    """``(NUM_MATCHES, MAX_COPY)`` weights of the copy beside the drafter, by likelihood.

    The first token of a copy decides; deeper ones keep the ratio of weight and hits.
    """
    table = params.rule().table[(len(params.gains) - 1) // 2]
    roots = examples.roots
    match = trace.copy_match[roots]
    right = trace.copy_hits[roots] > 0
    first = _first_on_copy(examples.envelope, trace.copy_node[roots])
    own = np.zeros(len(roots))
    has_node = first > 0
    rows = np.flatnonzero(has_node)
    own[rows] = table[first[rows] - 1, np.minimum(examples.codes[rows, first[rows] - 1], 63)]
    grid = np.linspace(0.0, 0.98, 50)
    mixes = hits.copy()
    for at in range(len(MATCH_LENGTHS)):
        for share in range(len(SHARES) + 1):
            number = at * (len(SHARES) + 1) + share
            is_own = match == number
            chance = (1 - grid[:, None]) * own[is_own][None] + grid[:, None]
            chance = np.clip(chance, 1e-4, 1 - 1e-4)
            likelihood = np.where(right[is_own][None], np.log(chance), np.log(1 - chance))
            expected = hits[number, 0]
            prior = expected * np.log(np.clip(grid, 1e-4, 1)) + (1 - expected) * np.log(1 - grid)
            best = grid[int(np.argmax(likelihood.sum(axis=1) + prior))]
            mixes[number] = hits[number] * min(best / max(expected, 1e-6), 1.0)
            mixes[number, 0] = best
    assert not (match[match != NO_COPY] >= NUM_MATCHES).any()  # noqa: S101 - one module makes both
    return mixes


def _first_on_copy(envelope: Topology, nodes: npt.NDArray[np.uint8]) -> IntArray:
    """Node of depth 1 above each node; 0 for the root."""
    first = np.zeros(envelope.num_rows, dtype=np.int64)
    for node in range(1, envelope.num_rows):
        first[node] = envelope.path_nodes(node)[1]
    return first[nodes]


def _first_rate(trace: Trace, costs: CostTable, context: float) -> float:
    """Tokens a millisecond of the best short chain."""
    rates = []
    for depth in range(trace.max_depth + 1):
        chain = Topology.chain(depth)
        steps = walk(trace, accepted_lengths(trace, chain)).num_steps
        num_tokens = trace.num_tokens - trace.num_texts
        rates.append(num_tokens / max(steps * costs.step_ms(chain, context), 1e-9))
    return max(rates)


@dataclass(frozen=True)
class _Trial:
    """Gains that were tried, and what came of them.

    Attributes:
        root: gain at the root, as a share.
        deep: the same below.
        ms: of replay.
        params: that were replayed.
        better: the same with the rate and the size of trees that replay found.
    """

    root: float
    deep: float
    ms: float
    params: DynamicParams
    better: DynamicParams


def _search_gains(
    trace: Trace,
    costs: CostTable,
    params: DynamicParams,
    examples: _Examples,
    progress: Progress,
) -> DynamicParams:
    """The gains and the rate under which replay takes the least time."""
    total, done = len(_ROOT_GAINS) + len(_DEEP_GAINS) + 2, 0

    def run(root: float, deep: float, params: DynamicParams) -> _Trial:
        nonlocal done
        trial = replace(params, gains=_gains(examples, root, deep))
        replayed = replay_policy(trace, DynamicScheduler(trial, costs))
        sizes = [step.tree.num_nodes for text in replayed.steps for step in text]
        done += 1
        progress(done, total)
        rate = replayed.num_tokens / max(replayed.cost_ms, 1e-9)
        found = replace(trial, rate=rate, mean_nodes=float(np.mean(sizes or [0])))
        return _Trial(root, deep, replayed.cost_ms, trial, found)

    best = run(_ROOT_GAINS[2], _DEEP_GAINS[2], params)
    for root in _ROOT_GAINS:
        best = min(best, run(root, best.deep, best.better), key=lambda trial: trial.ms)
    for deep in _DEEP_GAINS:
        best = min(best, run(best.root, deep, best.better), key=lambda trial: trial.ms)
    return min(best, run(best.root, best.deep, best.better), key=lambda trial: trial.ms).params


def _gains(examples: _Examples, root: float, deep: float) -> tuple[tuple[float, ...], ...]:
    """Gains that are shares of how often the best child is right, at the root by trust."""
    own = _best_child_shares(examples)
    table = np.tile(own * deep, (len(_TRUST_BOUNDS) + 1, 1))
    table[:, 0] = np.array(_centres()) * root
    return _tuples(table)


def _best_child_shares(examples: _Examples) -> FloatArray:
    """``(D,)`` how often the best child is right where its parent on the best path is."""
    shares = np.zeros(examples.envelope.max_depth)
    for node, path in enumerate(examples.envelope.paths, start=1):
        if not any(path):
            rows = examples.of(node)
            shares[len(path) - 1] = examples.is_right[rows, node].mean() if len(rows) else 0.0
    return shares


def _centres() -> list[float]:
    """Middle of each class of trust."""
    bounds = [0.0, *_TRUST_BOUNDS, 1.0]
    return [(low + high) / 2 for low, high in pairwise(bounds)]


def _logit(share: FloatArray | float) -> FloatArray:
    clipped = np.clip(np.asarray(share, dtype=np.float64), 0.01, 0.99)
    return np.log(clipped / (1 - clipped))


def _tuples(values: Sequence[Sequence[float]] | FloatArray) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(v) for v in row) for row in np.asarray(values))
