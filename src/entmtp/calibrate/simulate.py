"""Many policies at once over all texts: what :func:`replay_policy` finds, to the step, in arrays.

Every policy over fixed trees that has levels, thresholds, a dwell and a probe is an
:class:`Automaton`; a search by replay tries hundreds. All texts of all automata go on together, a
step each, so that the work of a step is done by a few dozen operations on arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.replay import accepted_lengths
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.scheduler.bands import CONTEXTS, MAX_PROBE_EVERY, PROBE_EVERY
from entmtp.scheduler.signals import DECAY, HIT_DECAY
from entmtp.scheduler.values import KNOWN_STEPS, PRIOR_HIT, PRIOR_STEPS, SIGNALS
from entmtp.topology import Topology

__all__ = ["Automaton", "Texts", "Visits", "bound_ms", "simulate", "visit"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_NO_PROBE = -1


@dataclass(frozen=True)
class Automaton:
    """A policy over numbered trees.

    Attributes:
        choices: tree by level; or a row of these for each class of contexts.
        weights: of :data:`entmtp.scheduler.values.SIGNALS`.
        up: as in :class:`entmtp.scheduler.bands.Bands`.
        down: the same.
        min_dwell: the same.
        jumps: the same.
        start: level of the first step.
        probe: tree after many plain steps; -1: none.
    """

    choices: tuple[int, ...] | tuple[tuple[int, ...], ...]
    weights: tuple[float, ...] = (0.0,) * len(SIGNALS)
    up: tuple[float, ...] = ()
    down: tuple[float, ...] = ()
    min_dwell: int = 1
    jumps: bool = True
    start: int = 0
    probe: int = _NO_PROBE


@dataclass(frozen=True)
class Visits:
    """Steps of one automaton.

    Attributes:
        roots: int64 ``(n,)`` positions.
        signals: ``(6, n)`` values before each step, in the order of ``SIGNALS``.
    """

    roots: IntArray
    signals: FloatArray


class Texts:
    """What some trees do at every root of a trace, and what they cost."""

    def __init__(
        self, trace: Trace, trees: Sequence[Topology], costs: CostTable, context: float
    ) -> None:
        """Look everything up once.

        Args:
            trace: the texts.
            trees: by number; the empty tree among them.
            costs: of steps.
            context: committed tokens at which all steps are priced.

        Raises:
            TraceError: a tree is deeper than the trace.
        """
        self.trees, self.costs, self.context = tuple(trees), costs, context
        self.accepted: IntArray = np.stack([accepted_lengths(trace, tree) for tree in trees])
        deepest = max(tree.max_depth for tree in trees)
        self.ms: FloatArray = np.array(
            [
                [costs.step_ms(tree.truncate(d), context) for d in range(deepest + 1)]
                for tree in trees
            ]
        )
        self.entropy = np.nan_to_num(trace.entropy.astype(np.float64))
        self.p0 = np.nan_to_num(trace.p0.astype(np.float64))
        self.is_hit: BoolArray = trace.ranks[:, 0] == 0
        self.is_plain: BoolArray = np.array([not tree.num_nodes for tree in trees])
        self.has_best: BoolArray = np.array([tree.paths[:1] == ((0,),) for tree in trees])
        sizes = np.diff(trace.offsets)
        index = np.arange(trace.num_tokens) - np.repeat(trace.offsets[:-1], sizes)
        contexts = index + np.repeat(trace.prompt_lengths.astype(np.int64), sizes)
        classes = np.searchsorted(CONTEXTS, contexts, side="right")
        self.context_class: IntArray = np.minimum(classes, len(CONTEXTS) - 1)
        self.depth_left: IntArray = trace.depth_left()
        has_step = sizes > 1
        self.starts: IntArray = trace.offsets[:-1][has_step]
        self.ends: IntArray = trace.offsets[1:][has_step] - 1
        self.num_tokens = int((sizes[has_step] - 1).sum())

    def plain(self) -> int:
        """Number of the empty tree."""
        return int(self.is_plain.argmax())

    def step_ms(self) -> FloatArray:
        """Milliseconds of a step with each tree, uncut."""
        return self.ms[:, -1]


def simulate(texts: Texts, automata: Sequence[Automaton]) -> FloatArray:
    """Milliseconds of each policy over all texts."""
    batch = _Batch(texts, automata)
    while batch.is_running.any():
        batch.step()
    total: FloatArray = batch.ms.sum(axis=1)
    return total


def visit(texts: Texts, automaton: Automaton) -> Visits:
    """The steps of one policy."""
    batch = _Batch(texts, [automaton])
    roots, signals = [], []
    while batch.is_running.any():
        running = batch.is_running[0]
        roots.append(batch.at[0][running])
        signals.append(batch.signals()[:, 0, running])
        batch.step()
    if not roots:
        return Visits(np.zeros(0, dtype=np.int64), np.zeros((len(SIGNALS), 0)))
    return Visits(np.concatenate(roots), np.concatenate(signals, axis=1))


def bound_ms(texts: Texts) -> float:
    """Least milliseconds in which any choice of the trees emits all texts: the shortest path.

    As :func:`entmtp.calibrate.replay.clairvoyant_cost`, with trees cut at the limit of tokens.
    """
    starts, ends = texts.starts, texts.ends
    if not len(starts):
        return 0.0
    value = np.zeros(int(ends.max()) + 1)
    for back in range(1, int((ends - starts).max()) + 1):
        own = ends - back >= starts
        at, end = ends[own] - back, ends[own]
        after = np.minimum(at + texts.accepted[:, at] + 1, end)
        cut = np.minimum(texts.depth_left[at], texts.ms.shape[1] - 1)
        value[at] = (texts.ms[:, cut] + value[after]).min(axis=0)
        value[end] = 0.0
    return float(value[starts].sum())


class _Batch:
    """P automata on S texts; the arrays of their states are ``(P, S)``."""

    def __init__(self, texts: Texts, automata: Sequence[Automaton]) -> None:
        self._texts = texts
        shape = len(automata), len(texts.starts)
        self._weights = np.array([a.weights for a in automata])
        most = max(len(a.up) for a in automata)
        self._up, self._down = (
            np.array([[*getattr(a, name), *[np.inf] * (most - len(a.up))] for a in automata])
            for name in ("up", "down")
        )
        self._choices = _choices(automata, most + 1)
        columns = {name: [getattr(a, name) for a in automata] for name in ("min_dwell", "jumps")}
        self._dwell = np.array(columns["min_dwell"])[:, None]
        self._jumps = np.array(columns["jumps"])[:, None]
        self._probe = np.array([a.probe for a in automata])[:, None]
        self.at: IntArray = np.tile(texts.starts, (shape[0], 1))
        self.is_running: BoolArray = np.ones(shape, dtype=np.bool_)
        self.ms: FloatArray = np.zeros(shape)
        self._level = np.tile(np.array([a.start for a in automata])[:, None], (1, shape[1]))
        self._here = np.tile(self._dwell, (1, shape[1]))
        self._num_plain = np.zeros(shape, dtype=np.int64)
        self._probe_at = np.full(shape, PROBE_EVERY)
        self._entropy, self._p0 = _Mean(shape, DECAY), _Mean(shape, DECAY)
        self._accepted, self._hits = _Mean(shape, DECAY), _Mean(shape, HIT_DECAY)
        self._num_hits = np.zeros(shape, dtype=np.int64)
        self._observe()

    def step(self) -> None:
        """One step of every text that has not reached its end."""
        texts, at = self._texts, self.at
        tree = self._choose()
        accepted = texts.accepted[tree, at]
        cut = np.minimum(texts.depth_left[at], texts.ms.shape[1] - 1)
        self.ms += np.where(self.is_running, texts.ms[tree, cut], 0.0)
        self._accepted.push(accepted, ~texts.is_plain[tree])
        has_best = texts.has_best[tree]
        self._hits.push(texts.is_hit[at], has_best)
        self._num_hits += has_best
        after = at + accepted + 1
        self.is_running &= after < texts.ends
        self.at = np.where(self.is_running, after, texts.ends)
        self._observe()

    def signals(self) -> FloatArray:
        """``(6, P, S)`` values, larger where more predictable."""
        known = np.minimum(self._num_hits, KNOWN_STEPS)
        hits = (known * self._hits.value() + PRIOR_STEPS * PRIOR_HIT) / (known + PRIOR_STEPS)
        entropy, p0 = self._texts.entropy[self.at], self._texts.p0[self.at]
        averages = (-self._entropy.value(), self._p0.value(), self._accepted.value(), hits)
        return np.stack((-entropy, p0, *averages))

    def _choose(self) -> IntArray:
        """Trees of this step, as :meth:`entmtp.scheduler.bands.Bands.move` has it."""
        value = np.zeros(self.at.shape)
        for weights, signal in zip(self._weights.T, self.signals(), strict=True):
            if weights.any():
                value += weights[:, None] * signal
        reached = (self._up[:, :, None] <= value[:, None]).sum(axis=1)
        held = (self._down[:, :, None] <= value[:, None]).sum(axis=1)
        level = self._level
        target = np.minimum(np.maximum(level, reached), held)
        moved = np.where(self._jumps, target, level + np.sign(target - level))
        moved = np.where(self._here >= self._dwell, moved, level)
        self._here = np.where(moved == level, self._here + 1, 1)
        self._level = moved
        rows = np.arange(len(moved))[:, None]
        tree: IntArray = self._choices[rows, self._texts.context_class[self.at], moved]
        is_plain = self._texts.is_plain[tree] & (self._probe != _NO_PROBE)
        self._num_plain = np.where(is_plain, self._num_plain + 1, 0)
        self._probe_at[~is_plain] = PROBE_EVERY
        is_probe = self._num_plain >= self._probe_at
        self._num_plain[is_probe] = 0
        self._probe_at[is_probe] = np.minimum(2 * self._probe_at[is_probe], MAX_PROBE_EVERY)
        return np.where(is_probe, self._probe, tree)

    def _observe(self) -> None:
        self._entropy.push(self._texts.entropy[self.at])
        self._p0.push(self._texts.p0[self.at])


class _Mean:
    """Bias-corrected moving averages, as in :mod:`entmtp.scheduler.signals`."""

    def __init__(self, shape: tuple[int, int], decay: float) -> None:
        self._decay = decay
        self._mean, self._weight = np.zeros(shape), np.zeros(shape)

    def push(self, values: npt.NDArray[Any], is_known: BoolArray | bool = True) -> None:
        decay = self._decay
        mean = decay * self._mean + (1 - decay) * values
        weight = decay * self._weight + (1 - decay)
        self._mean = np.where(is_known, mean, self._mean)
        self._weight = np.where(is_known, weight, self._weight)

    def value(self) -> FloatArray:
        empty = self._weight == 0
        return np.where(empty, 0.0, self._mean / np.where(empty, 1.0, self._weight))


def _choices(automata: Sequence[Automaton], num_levels: int) -> IntArray:
    """``(P, contexts, levels)`` trees."""
    table = np.zeros((len(automata), len(CONTEXTS), num_levels), dtype=np.int64)
    for at, automaton in enumerate(automata):
        own = np.array(automaton.choices)
        table[at, :, : own.shape[-1]] = own
    return table
