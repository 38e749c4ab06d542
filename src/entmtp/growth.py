"""Growing a draft tree step by step: which nodes are worth what they cost.

Nodes come from an envelope, a tree that is larger than any that is checked. Depth by depth a
drafter scores the children of the rows that are worth it; a node's value is the probability that
it and all above it are right, from the drafter's own probabilities, corrected on traced texts
because they are not acceptance rates. In the end nodes are kept in order of their value, as many
as maximise expected tokens less the worth of the time for their rows. The value is that of EAGLE-2
(arXiv 2406.16858, section 4) up to the correction.

Beside the envelope a tree may hold a copy: a chain of the tokens that followed the same words
earlier in the text. Whether it goes on to be right is known by how long the match is, not from the
drafter, and both kinds of evidence are mixed, as in a pointer network (See et al., ACL 2017): where
the text above a row is that of the copy, a child has the probability ``(1 - mix) * head``, and
``mix`` more if it carries the copy's next token.

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
    "COPY_RANK",
    "MAX_COPY",
    "MAX_ENVELOPE",
    "NUM_CODES",
    "UNSCORED",
    "Copy",
    "CopyTable",
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

MAX_COPY = 16
"""Tokens of a copy."""

COPY_RANK = MAX_ENVELOPE
"""Child rank of copied nodes, beyond those of any envelope."""

_MAX_SUBTREES = 8192  # kept for a rule; they are made again when there are more

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Subtree:
    """Some nodes of an envelope.

    Attributes:
        topology: of them.
        nodes: int64 ``(N,)``: for each node of the topology, root included, that of the envelope.
        num_copied: nodes of the copy's own.
    """

    topology: Topology
    nodes: npt.NDArray[np.int64]
    num_copied: int


@dataclass(frozen=True)
class Copy:
    """What followed the same words earlier in the text.

    Attributes:
        match: class of the match, from 0; see :mod:`entmtp.drafters.copying`.
        tokens: that followed, at most :data:`MAX_COPY`.
    """

    match: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CopyTable:
    """What is known of copies.

    Attributes:
        hits: float64 ``(C, M)`` probability that token m + 1 is right where all before it are, by
            class of the match, where the drafter was not asked.
        mixes: float64 ``(C, M)`` the copy's weight where it was.
    """

    hits: FloatArray
    mixes: FloatArray

    def __post_init__(self) -> None:
        """Refuse tables that are no probabilities.

        Raises:
            TopologyError: says what is wrong.
        """
        if self.hits.ndim != 2 or self.hits.shape != self.mixes.shape:
            raise TopologyError(
                f"the tables of copies are {self.hits.shape} and {self.mixes.shape}; they must be "
                "of one shape"
            )
        if not 0 < self.hits.shape[1] <= MAX_COPY:
            raise TopologyError(
                f"copies have {self.hits.shape[1]} tokens; they must have 1 to {MAX_COPY}"
            )
        if not all(((table >= 0) & (table <= 1)).all() for table in (self.hits, self.mixes)):
            raise TopologyError("the probabilities of copies must lie between 0 and 1")

    @cached_property
    def length(self) -> int:
        """M."""
        return int(self.hits.shape[1])


@dataclass(frozen=True, eq=False)
class GrowthRule:
    """What is known of the nodes of an envelope.

    Attributes:
        envelope: at most :data:`MAX_ENVELOPE` nodes.
        table: float32 ``(S, E, NUM_CODES)`` probability that node e + 1 is right where its parent
            is, by class of the free signals and by code of its log-probability given its parent.
        gains: float64 ``(S, D)`` tokens that evaluating a row of each depth promises, as a share
            of the row's value.
        copies: what is known of copies; ``None``: none are drafted.
    """

    envelope: Topology
    table: npt.NDArray[np.float32]
    gains: FloatArray
    copies: CopyTable | None = None
    _subtrees: dict[tuple[int, int], Subtree] = field(default_factory=dict, repr=False)

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

    @property
    def max_nodes(self) -> int:
        """Of a grown tree: the envelope's and those of a copy."""
        return self.envelope.num_nodes + (self.copies.length if self.copies else 0)

    def subtree(self, kept: Iterable[int], attach: int = 0) -> Subtree:
        """The tree of some nodes; the same object for the same nodes.

        Args:
            kept: nodes, from 1, prefix-closed; those beyond the envelope's are the copy's own.
            attach: node of the envelope that the first of these hangs on.
        """
        nodes = sorted(kept)
        size = self.envelope.num_nodes
        key = sum(1 << node for node in nodes), attach if nodes and nodes[-1] > size else 0
        found = self._subtrees.get(key)
        if found is None:
            above = self.envelope.paths[attach - 1] if attach else ()
            first = min((node for node in nodes if node > size), default=0)
            paths = {
                self.envelope.paths[node - 1]
                if node <= size
                else (*above, *(COPY_RANK,) * (node - first + 1)): node
                for node in nodes
            }
            topology = Topology(tuple(sorted(paths, key=lambda path: (len(path), path))))
            order = [0, *(paths[path] for path in topology.paths)]
            num_copied = sum(node > size for node in nodes)
            found = Subtree(topology, np.array(order, dtype=np.int64), num_copied)
            if len(self._subtrees) >= _MAX_SUBTREES:
                self._subtrees.clear()
            self._subtrees[key] = found
        return found


@dataclass(frozen=True, eq=False)
class GrowthCosts:
    """Milliseconds, for one sequence of the batch.

    Attributes:
        rows: float64, of all but drafting, by number of drafted nodes: one more than the rule's
            ``max_nodes``.
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
        depth: deepest nodes, those of a copy included; it may lie beyond the envelope's.
    """

    rule: GrowthRule
    costs: GrowthCosts
    signal_class: int
    rate: float
    depth: int
    _cuts: dict[int, "GrowthPlan"] = field(default_factory=dict, init=False, repr=False)
    _bare: dict[tuple[int, int], Topology | None] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Refuse costs that end before the rule does, since the native core reads all of them.

        Raises:
            TopologyError: says what does not fit.
        """
        rule, costs = self.rule, self.costs
        if not 0 <= self.signal_class < rule.num_classes:
            raise TopologyError(
                f"the rule has {rule.num_classes} classes of signals; there is no class "
                f"{self.signal_class}"
            )
        depth = min(len(costs.draft), len(costs.draft_row))
        if len(costs.rows) <= rule.max_nodes or depth < rule.envelope.max_depth:
            raise TopologyError(
                f"the costs are of {len(costs.rows) - 1} nodes and {depth} depths; the rule grows "
                f"trees of {rule.max_nodes} nodes and {rule.envelope.max_depth} depths"
            )

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
        """Of the nodes that the drafter itself proposes; copies may go deeper."""
        return min(self.depth, self.rule.envelope.max_depth)

    @property
    def max_rank(self) -> int:
        """Largest child rank that the drafter itself proposes."""
        return self.rule.envelope.max_rank

    def truncate(self, max_depth: int) -> "GrowthPlan":
        """The plan for trees of at most that depth, made once; the same object if that is all."""
        if max_depth >= self.depth:
            return self
        depth = max(max_depth, 0)
        found = self._cuts.get(depth)
        if found is None:
            found = GrowthPlan(self.rule, self.costs, self.signal_class, self.rate, depth)
            self._cuts[depth] = found
        return found

    def bare(self, copy: Copy | None) -> Topology | None:
        """The tree of a step in which no row is worth being scored; ``None`` where one is.

        It holds the first tokens of the copy, as many as are worth it, maybe none. What its tokens
        are does not matter, so that it is made once.

        Args:
            copy: what followed the same words earlier.
        """
        copies = self.rule.copies
        length = min(len(copy.tokens), copies.length, self.depth) if copy and copies else 0
        key = (copy.match, length) if copy and length else (0, 0)
        if key not in self._bare:
            grower = Grower(self, copy)
            is_open = bool(grower.open_rows(0))
            self._bare[key] = None if is_open else self.rule.subtree(*grower.keep()).topology
        return self._bare[key]


class Grower:
    """One tree while it grows: the slow twin of the native core, and what replay uses.

    Nodes of the envelope have its numbers; token m of the copy, where no node of the envelope
    stands for it, is node ``envelope.num_rows + m``.
    """

    def __init__(self, plan: GrowthPlan, copy: Copy | None = None) -> None:
        """Start at the root, whose value is 1."""
        self._plan = plan
        self._table = plan.rule.lists[plan.signal_class]
        self._values: dict[int, float] = {0: 1.0}
        self._scored: set[int] = set()
        self._copied: dict[int, int] = {0: 0}  # node on the copy -> tokens of it down to there
        self._tokens: tuple[int, ...] = ()
        copies = plan.rule.copies
        if copies is not None and copy is not None:
            self._tokens = copy.tokens[: min(copies.length, plan.depth)]
            self._hits = copies.hits[copy.match].tolist()
            self._mixes = copies.mixes[copy.match].tolist()

    def open_rows(self, depth: int) -> list[int]:
        """Nodes of a depth whose children are worth being scored, in order; maybe none.

        A row is worth it where its value times the promised gain exceeds the worth of the time
        for a further row, and all of them where their surplus pays for the first row too. Where
        the copy goes on, the row promises what the copy leaves.
        """
        plan, envelope = self._plan, self._plan.rule.envelope
        if depth >= plan.max_depth:
            return []
        gain = float(plan.rule.gains[plan.signal_class, depth])
        further = plan.rate * float(plan.costs.draft_row[depth])
        first = plan.rate * float(plan.costs.draft[depth])
        chosen: list[int] = []
        surplus = 0.0
        for node in envelope.levels[depth].parents.tolist():
            if node not in self._values:
                continue
            margin = self._values[node] * self._left_by_copy(node) * gain - further
            if margin > 0:
                chosen.append(node)
                surplus += margin
        return chosen if surplus > first - further else []

    def copied(self, nodes: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Which nodes carry the copy's next token below a node that is on it."""
        return [
            token == self._next_copied(int(self._plan.rule.envelope.parents[node]))
            for node, token in zip(nodes, tokens, strict=True)
        ]

    def take(self, nodes: Sequence[int], codes: Sequence[int], copied: Sequence[bool]) -> None:
        """Value nodes whose parents were evaluated.

        Args:
            nodes: of the envelope.
            codes: of their log-probabilities given their parents.
            copied: from :meth:`copied`.
        """
        parents = self._plan.rule.envelope.parents
        for node, code, is_copied in zip(nodes, codes, copied, strict=True):
            parent = int(parents[node])
            share = self._table[node - 1][code]
            at = self._copied.get(parent)
            if at is not None and at < len(self._tokens):
                share = share * (1 - self._mixes[at])
                if is_copied:
                    share = share + self._mixes[at]
                    self._copied[node] = at + 1
            self._scored.add(parent)
            self._values[node] = self._values[parent] * share

    def keep(self) -> tuple[list[int], int]:
        """Nodes that are worth checking, best first, and the node that the copy's own hang on."""
        plan = self._plan
        attach = self._add_copy()
        nodes = sorted((n for n in self._values if n), key=lambda n: (-self._values[n], n))
        rows = plan.costs.rows
        best, best_at, tokens = -plan.rate * float(rows[0]), 0, 0.0
        for count, node in enumerate(nodes, start=1):
            tokens += self._values[node]
            worth = tokens - plan.rate * float(rows[count])
            if worth > best:
                best, best_at = worth, count
        return nodes[:best_at], attach

    def _add_copy(self) -> int:
        """Value the tokens of the copy that no node stands for."""
        attach = max(self._copied, key=lambda node: self._copied[node])
        value, first = self._values[attach], self._copied[attach]
        for at in range(first, len(self._tokens)):
            was_asked = at == first and attach in self._scored
            value = value * (self._mixes[at] if was_asked else self._hits[at])
            self._values[self._plan.rule.envelope.num_rows + at] = value
        return attach

    def _next_copied(self, node: int) -> int | None:
        at = self._copied.get(node)
        return None if at is None or at >= len(self._tokens) else self._tokens[at]

    def _left_by_copy(self, node: int) -> float:
        """Probability that the copy is wrong behind a node; 1 where it does not go on."""
        at = self._copied.get(node)
        return 1.0 if at is None or at >= len(self._tokens) else 1.0 - self._hits[at]
