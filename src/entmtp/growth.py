"""Growing a draft tree step by step: which nodes are worth what they cost.

Nodes come from an envelope, a tree that is larger than any that is checked. Depth by depth a
drafter scores the children of the rows that are worth it; a node's value is the probability that
it and all above it are right, from the drafter's own probabilities, corrected on traced texts
because they are not acceptance rates. In the end nodes are kept in order of their value, as many
as maximise expected tokens less the worth of the time for their rows. The value is that of EAGLE-2
(arXiv 2406.16858, section 4) up to the correction.

A low probability can be no more than :data:`NUM_CODES` - 1 eighths of a nat below 1: probabilities
are read in such steps, so that decoding and replay look into the same table.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from entmtp.errors import TopologyError
from entmtp.topology import Topology

__all__ = [
    "CODES_PER_NAT",
    "MAX_ENVELOPE",
    "NUM_CODES",
    "UNSCORED",
    "Grower",
    "GrowthCosts",
    "GrowthPlan",
    "GrowthRule",
    "Subtree",
]

NUM_CODES = 64
"""Steps in which the probability of a child is read."""

CODES_PER_NAT = 8
"""Steps a nat; the code of a log-probability l is ``floor(-8 l)``, at most ``NUM_CODES - 1``."""

UNSCORED = 255
"""Code of a node whose parent was not evaluated."""

MAX_ENVELOPE = 63
"""Nodes of an envelope; ranks are below that too."""

_MAX_SUBTREES = 8192  # kept for a rule; they are made again when there are more

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Subtree:
    """Some nodes of an envelope.

    Attributes:
        topology: of them.
        nodes: int64 ``(N,)``: for each node of the topology, root included, that of the envelope.
    """

    topology: Topology
    nodes: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GrowthRule:
    """What is known of the nodes of an envelope.

    Attributes:
        envelope: at most :data:`MAX_ENVELOPE` nodes.
        table: float32 ``(S, E, NUM_CODES)`` probability that node e + 1 is right where its parent
            is, by class of the free signals and by code of its log-probability given its parent.
        gains: float64 ``(S, D)`` tokens that evaluating a row of each depth promises, as a share
            of the row's value.
    """

    envelope: Topology
    table: npt.NDArray[np.float32]
    gains: FloatArray
    _subtrees: dict[int, Subtree] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Refuse tables that do not fit the envelope.

        Raises:
            TopologyError: says what does not fit.
        """
        size, depth = self.envelope.num_nodes, self.envelope.max_depth
        if not 0 < size <= MAX_ENVELOPE:
            raise TopologyError(f"an envelope has {size} nodes; it must have 1 to {MAX_ENVELOPE}")
        if self.envelope.max_rank >= MAX_ENVELOPE:
            raise TopologyError(
                f"an envelope has child rank {self.envelope.max_rank}; ranks must be below "
                f"{MAX_ENVELOPE}"
            )
        classes = self.table.shape[0]
        if self.table.shape != (classes, size, NUM_CODES) or self.gains.shape != (classes, depth):
            raise TopologyError(
                f"the tables are {self.table.shape} and {self.gains.shape}; they must be "
                f"{(classes, size, NUM_CODES)} and {(classes, depth)}"
            )
        if not ((self.table >= 0) & (self.table <= 1)).all():
            raise TopologyError("the probabilities of a growth rule must lie between 0 and 1")

    @property
    def num_classes(self) -> int:
        """S."""
        return int(self.table.shape[0])

    @cached_property
    def lists(self) -> list[list[list[float]]]:
        """The table as nested lists, for code that reads single values."""
        values: list[list[list[float]]] = self.table.astype(np.float64).tolist()
        return values

    def subtree(self, kept: Iterable[int]) -> Subtree:
        """The tree of some nodes; the same object for the same nodes.

        Args:
            kept: nodes of the envelope, from 1, prefix-closed.
        """
        nodes = sorted(kept)
        key = sum(1 << node for node in nodes)
        found = self._subtrees.get(key)
        if found is None:
            paths = tuple(self.envelope.paths[node - 1] for node in nodes)
            found = Subtree(Topology(paths), np.array([0, *nodes], dtype=np.int64))
            if len(self._subtrees) >= _MAX_SUBTREES:
                self._subtrees.clear()
            self._subtrees[key] = found
        return found


@dataclass(frozen=True, eq=False)
class GrowthCosts:
    """Milliseconds, for one sequence of the batch.

    Attributes:
        rows: float64 ``(E + 1,)`` of all but drafting, by number of drafted nodes.
        draft: float64 ``(D,)`` of evaluating a first row, by depth.
        draft_row: float64 ``(D,)`` of each further row.
    """

    rows: FloatArray
    draft: FloatArray
    draft_row: FloatArray


@dataclass(frozen=True, eq=False)
class GrowthPlan:
    """How to grow the tree of a step.

    Attributes:
        rule: what is known of the nodes.
        costs: what they cost.
        signal_class: row of the rule's tables.
        rate: tokens that a millisecond is worth.
        depth: deepest nodes; at most the envelope's.
    """

    rule: GrowthRule
    costs: GrowthCosts
    signal_class: int
    rate: float
    depth: int

    @classmethod
    def whole(cls, envelope: Topology) -> "GrowthPlan":
        """Evaluate and keep every node."""
        size, depth = envelope.num_nodes, envelope.max_depth
        rule = GrowthRule(
            envelope, np.ones((1, size, NUM_CODES), dtype=np.float32), np.ones((1, depth))
        )
        costs = GrowthCosts(np.zeros(size + 1), np.zeros(depth), np.zeros(depth))
        return cls(rule, costs, 0, 0.0, depth)

    @property
    def max_depth(self) -> int:
        """Of any tree that may be grown."""
        return self.depth

    @property
    def max_rank(self) -> int:
        """Largest child rank of any tree that may be grown."""
        return self.rule.envelope.max_rank

    @cached_property
    def opens_root(self) -> bool:
        """Whether the root's children are worth being scored: else this is plain decoding."""
        return bool(Grower(self).open_rows(0))

    def truncate(self, max_depth: int) -> "GrowthPlan":
        """The plan for trees of at most that depth; the same object where it changes nothing."""
        if max_depth >= self.depth:
            return self
        depth = max(max_depth, 0)
        return GrowthPlan(self.rule, self.costs, self.signal_class, self.rate, depth)


class Grower:
    """One tree while it grows: the slow twin of the native core, and what replay uses."""

    def __init__(self, plan: GrowthPlan) -> None:
        """Start at the root, whose value is 1."""
        self._plan = plan
        self._table = plan.rule.lists[plan.signal_class]
        self._values: dict[int, float] = {0: 1.0}

    def open_rows(self, depth: int) -> list[int]:
        """Nodes of a depth whose children are worth being scored, in order; maybe none.

        A row is worth it where its value times the promised gain exceeds the worth of the time
        for a further row, and all of them where their surplus pays for the first row too.
        """
        plan, envelope = self._plan, self._plan.rule.envelope
        if depth >= plan.depth:
            return []
        gain = float(plan.rule.gains[plan.signal_class, depth])
        further = plan.rate * float(plan.costs.draft_row[depth])
        first = plan.rate * float(plan.costs.draft[depth])
        chosen: list[int] = []
        surplus = 0.0
        for node in envelope.levels[depth].parents.tolist():
            margin = self._values.get(node, 0.0) * gain - further
            if margin > 0:
                chosen.append(node)
                surplus += margin
        return chosen if surplus > first - further else []

    def take(self, nodes: Sequence[int], codes: Sequence[int]) -> None:
        """Value nodes whose parents were evaluated.

        Args:
            nodes: of the envelope.
            codes: of their log-probabilities given their parents.
        """
        parents = self._plan.rule.envelope.parents
        for node, code in zip(nodes, codes, strict=True):
            above = self._values[int(parents[node])]
            self._values[node] = above * self._table[node - 1][code]

    def keep(self) -> list[int]:
        """Nodes that are worth checking, best first."""
        plan = self._plan
        nodes = sorted((n for n in self._values if n), key=lambda n: (-self._values[n], n))
        rows = plan.costs.rows
        best, best_at, tokens = -plan.rate * float(rows[0]), 0, 0.0
        for count, node in enumerate(nodes, start=1):
            tokens += self._values[node]
            worth = tokens - plan.rate * float(rows[count])
            if worth > best:
                best, best_at = worth, count
        return nodes[:best_at]
