"""Random rules of growth, and growing written out: the whole envelope first, then what is kept."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from entmtp.drafters.base import (
    Drafter,
    DrafterState,
    DraftPlan,
    DraftRequest,
    GrownTree,
    GrowRequest,
)
from entmtp.drafters.copying import NUM_MATCHES
from entmtp.growth import (
    COPY_RANK,
    MAX_COPY,
    NUM_CODES,
    UNSCORED,
    Copy,
    CopyTable,
    Grower,
    GrowthCosts,
    GrowthPlan,
    GrowthRule,
)
from entmtp.scheduler import SchedulerDecision, Signal
from entmtp.topology import Path, Topology
from exactness import random_topology

__all__ = [
    "GrowingScheduler",
    "SignalScheduler",
    "SlowTree",
    "by_hand",
    "check_tree",
    "filling",
    "grow_slowly",
    "random_copies",
    "random_copy",
    "random_envelope",
    "random_plan",
    "random_rule",
]


def random_envelope(rng: random.Random, max_nodes: int = 24, max_depth: int = 5) -> Topology:
    """Any tree of at least one node."""
    tree = random_topology(rng, max_nodes, max_depth)
    return tree if tree.num_nodes else Topology.from_paths([(rng.randrange(3),)])


def random_copies(rng: np.random.Generator) -> CopyTable | None:
    """Any tables of copies of any length; ``None`` now and then."""
    length = int(rng.integers(MAX_COPY + 1))
    shape = NUM_MATCHES, length
    return CopyTable(rng.random(shape), rng.random(shape)) if length else None


def random_rule(seed: int, envelope: Topology, num_classes: int = 2) -> GrowthRule:
    """Any tables, for every second seed such that a better code is worth more."""
    rng = np.random.default_rng(seed)
    table = rng.random((num_classes, envelope.num_nodes, NUM_CODES), dtype=np.float32)
    if seed % 2:
        table = np.ascontiguousarray(np.sort(table, axis=-1)[..., ::-1])
    gains = rng.uniform(0.2, 3.0, (num_classes, envelope.max_depth))
    return GrowthRule(envelope, table, gains, random_copies(rng))


def random_plan(seed: int, envelope: Topology) -> GrowthPlan:
    """Any tables, costs and depths, at rates under which all, some or no nodes are worth it."""
    rng = np.random.default_rng(seed)
    rule = random_rule(seed, envelope)
    size, depth = rule.max_nodes, envelope.max_depth
    rows = 1 + np.concatenate(([0.0], np.cumsum(rng.uniform(0.0, 0.2, size))))
    costs = GrowthCosts(rows, rng.uniform(0.0, 0.5, depth), rng.uniform(0.0, 0.1, depth))
    rate = float(rng.choice([0.0, 0.3, 1.0, 3.0, 100.0], p=[0.1, 0.3, 0.3, 0.2, 0.1]))
    deepest = max(depth, rule.copies.length if rule.copies else 0)
    limit = int(rng.choice([deepest + 1, rng.integers(deepest + 1)], p=[0.7, 0.3]))
    return GrowthPlan(rule, costs, int(rng.integers(rule.num_classes)), rate, limit)


def random_copy(
    drafter: Drafter, request: GrowRequest, seed: int, vocab_size: int = 40
) -> Copy | None:
    """Some tokens of a path that the drafter proposes, then others; sometimes nothing."""
    rng = random.Random(seed)
    envelope = request.plan.rule.envelope
    [whole] = drafter.draft([filling(request)])
    path = envelope.path_nodes(rng.randrange(envelope.num_rows))[1:]
    followed = whole.tokens[path].tolist()[: rng.randrange(4)]
    followed += [rng.randrange(vocab_size) for _ in range(rng.randrange(MAX_COPY - 2))]
    return Copy(rng.randrange(NUM_MATCHES), tuple(followed)) if followed else None


def filling(request: GrowRequest, plan: Topology | None = None) -> DraftRequest:
    """Ask for a shape, that of the whole envelope where none is given."""
    plan = request.plan.rule.envelope if plan is None else plan
    return DraftRequest(request.state, request.root, plan, request.coupling)


def by_hand(
    request: GrowRequest, codes: npt.NDArray[np.uint8], tokens: Sequence[int]
) -> tuple[list[list[int]], npt.NDArray[np.uint8], tuple[list[int], int]]:
    """What growing must give where the whole envelope was scored.

    Args:
        request: its plan and its copy.
        codes: of the envelope, the root's first.
        tokens: of the envelope.

    Returns:
        Rows that are opened, by depth; the codes of their children; the nodes that are kept and
        what those of the copy hang on.
    """
    grower, envelope = Grower(request.plan, request.copy), request.plan.rule.envelope
    own = np.full(envelope.num_rows, UNSCORED, dtype=np.uint8)
    opened: list[list[int]] = []
    for depth in range(envelope.max_depth):
        rows = grower.open_rows(depth)
        if not rows:
            break
        opened.append(rows)
        children = [child for row in rows for child in envelope.children[row]]
        own[children] = codes[children]
        copied = grower.copied(children, [tokens[child] for child in children])
        grower.take(children, own[children].tolist(), copied)
    return opened, own, grower.keep()


def check_tree(
    drafter: Drafter, request: GrowRequest, state: DrafterState, found: GrownTree
) -> None:
    """Nodes of the envelope hold what filling gives, the others the copy; no child twice.

    Args:
        drafter: that grew the tree.
        request: what was asked for.
        state: of the same sequence, to fill with.
        found: what came of it.
    """
    tree = found.tree
    paths = tree.topology.paths
    own = Topology(tuple(path for path in paths if COPY_RANK not in path))
    [filled] = drafter.draft([filling(replace(request, state=state), own)])
    expected = dict(zip(own.paths, filled.tokens[1:].tolist(), strict=True))
    assert int(tree.tokens[0]) == request.root
    for path, token in zip(paths, tree.tokens[1:].tolist(), strict=True):
        if COPY_RANK not in path:
            assert token == expected[path]
        else:
            assert request.copy is not None
            assert token == request.copy.tokens[len(path) - 1]
    for children in tree.topology.children:
        tokens = tree.tokens[list(children)].tolist()
        assert len(set(tokens)) == len(tokens)
    assert tree.topology.max_depth <= request.plan.depth


@dataclass(frozen=True)
class SlowTree:
    """A tree that was grown without a :class:`Grower`.

    Attributes:
        opened: nodes whose children were scored, by depth.
        values: of all nodes that are scored, and of the copy's own.
        kept: best first.
        attach: node that the copy's own hang on.
        cost_ms: of drafting and of checking what is kept.
    """

    opened: list[list[int]]
    values: dict[int, float]
    kept: list[int]
    attach: int
    cost_ms: float


def grow_slowly(
    plan: GrowthPlan, codes: Sequence[int], on_copy: Collection[int], copy: Copy | None
) -> SlowTree:
    """The rule of growth, path by path.

    Args:
        plan: the rule.
        codes: of the nodes of the envelope, the root's left out.
        on_copy: nodes of the envelope, root included, whose paths carry the copy's first tokens.
        copy: its tokens are not looked at, only their number.
    """
    rule, envelope, costs, kind = plan.rule, plan.rule.envelope, plan.costs, plan.signal_class
    hits, mixes = _beliefs(plan, copy)
    number = {(): 0} | {path: node for node, path in enumerate(envelope.paths, start=1)}
    copied = {()} | {p for p, node in number.items() if node in on_copy and len(p) <= len(hits)}
    values: dict[Path, float] = {(): 1.0}
    opened: list[list[int]] = []
    cost = 0.0
    for depth in range(min(plan.depth, envelope.max_depth)):
        further, first = (
            plan.rate * float(by_depth[depth]) for by_depth in (costs.draft_row, costs.draft)
        )
        gain, goes_on = float(rule.gains[kind, depth]), depth < len(hits)
        parents = {path[:-1] for path in envelope.paths if len(path) == depth + 1} & set(values)
        surplus = {}
        for path in sorted(parents):
            left = 1.0 - hits[depth] if path in copied and goes_on else 1.0
            surplus[path] = values[path] * left * gain - further
        rows = [path for path, worth in surplus.items() if worth > 0]
        *_, total = accumulate((surplus[path] for path in rows), initial=0.0)
        if not rows or total <= first - further:
            break
        opened.append([number[path] for path in rows])
        cost += float(costs.draft[depth]) + (len(rows) - 1) * float(costs.draft_row[depth])
        for path in envelope.paths:
            if path[:-1] in rows and len(path) == depth + 1:
                share = float(rule.table[kind, number[path] - 1, codes[number[path] - 1]])
                if path[:-1] in copied and goes_on:
                    share = share * (1 - mixes[depth]) + mixes[depth] * (path in copied)
                values[path] = values[path[:-1]] * share
    by_node = {number[path]: value for path, value in values.items()}
    attach = max(copied & set(values), key=len)
    value = values[attach]
    for at in range(len(attach), len(hits)):
        was_asked = at == len(attach) and any(number[attach] in rows for rows in opened)
        value = value * (mixes[at] if was_asked else hits[at])
        by_node[envelope.num_rows + at] = value
    kept = _worth_checking(plan, by_node)
    return SlowTree(opened, by_node, kept, number[attach], cost + float(costs.rows[len(kept)]))


def _beliefs(plan: GrowthPlan, copy: Copy | None) -> tuple[list[float], list[float]]:
    """For the tokens of a copy that are looked at, how sure they are alone and beside heads."""
    table = plan.rule.copies
    if table is None or copy is None:
        return [], []
    length = min(len(copy.tokens), plan.depth)
    return table.hits[copy.match, :length].tolist(), table.mixes[copy.match, :length].tolist()


def _worth_checking(plan: GrowthPlan, values: dict[int, float]) -> list[int]:
    """The smallest number of the best nodes whose tokens are worth most beside their rows."""
    order = sorted(set(values) - {0}, key=lambda node: (-values[node], node))
    tokens = accumulate((values[node] for node in order), initial=0.0)
    rows = plan.costs.rows
    worth = [sure - plan.rate * float(rows[count]) for count, sure in enumerate(tokens)]
    return order[: worth.index(max(worth))]


class GrowingScheduler:
    """Grows a tree at every step, by another rule each time; now and then it asks for a shape."""

    policy = "growing"

    def __init__(self, seed: int, envelopes: list[Topology], fixed_share: float = 0.0) -> None:
        self._seed, self._fixed_share = seed, fixed_share
        self._envelopes = envelopes

    def start(self) -> random.Random:
        return random.Random(self._seed)

    def choose(self, state: random.Random, signal: Signal) -> SchedulerDecision:
        envelope = state.choice(self._envelopes)
        if state.random() < self._fixed_share:
            return SchedulerDecision("fixed", envelope)
        return SchedulerDecision("grown", random_plan(state.randrange(2**32), envelope))


class SignalScheduler:
    """Some plans, in an order that follows from the signal alone.

    Entropies are looked at as a trace keeps them, so that decoding and replay see the same.
    """

    policy = "by signal"

    def __init__(self, seed: int, plans: Sequence[DraftPlan]) -> None:
        self._seed, self._plans = seed, plans

    def start(self) -> None:
        return None

    def choose(self, state: None, signal: Signal) -> SchedulerDecision:
        read = [float(np.float32(value)) for value in (signal.entropy, signal.p0)]
        counted = (signal.accepted_ema, signal.hit_ema, signal.num_hits)
        seen = (self._seed, *read, *counted, signal.num_steps, signal.context)
        index = random.Random(repr(seen)).randrange(len(self._plans))
        return SchedulerDecision(f"plan{index}", self._plans[index], index)
