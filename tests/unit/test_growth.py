"""The rule of growth: what is opened, what is kept, and what is refused."""

import random
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest

from entmtp.drafters.copying import NUM_MATCHES
from entmtp.errors import TopologyError
from entmtp.growth import (
    COPY_RANK,
    MAX_COPY,
    MAX_ENVELOPE,
    NUM_CODES,
    Copy,
    CopyTable,
    Grower,
    GrowthCosts,
    GrowthPlan,
    GrowthRule,
)
from entmtp.topology import Topology
from growing import SlowTree, grow_slowly, random_envelope, random_plan, random_rule

SMALL = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def table_of(size: int, value: float = 0.5, codes: int = NUM_CODES) -> np.ndarray:
    """One class."""
    return np.full((1, size, codes), value, dtype=np.float32)


@dataclass(frozen=True)
class Scored:
    """What a drafter would say of a whole envelope.

    Attributes:
        plan: the rule.
        codes: of all nodes but the root.
        tokens: of all nodes.
        copy: whose first tokens some path may carry.
        on_copy: nodes of that path.
    """

    plan: GrowthPlan
    codes: list[int]
    tokens: list[int]
    copy: Copy | None
    on_copy: list[int]

    def slow(self) -> SlowTree:
        """Growing written out."""
        return grow_slowly(self.plan, self.codes, self.on_copy, self.copy)


def random_scored(seed: int) -> Scored:
    """Any plan, codes and copy; siblings have different tokens."""
    rng = random.Random(seed)
    plan = random_plan(seed, random_envelope(rng))
    envelope = plan.rule.envelope
    codes = random_codes(seed, envelope.num_nodes)
    tokens = [0, *(path[-1] for path in envelope.paths)]
    on_copy = envelope.path_nodes(rng.randrange(envelope.num_rows))
    on_copy = on_copy[: rng.randint(1, len(on_copy))]
    followed = [tokens[node] for node in on_copy[1:]] + [99] * rng.randint(0, 8)
    copy = Copy(rng.randrange(NUM_MATCHES), tuple(followed[:MAX_COPY])) if followed else None
    return Scored(plan, codes, tokens, copy, on_copy)


def grown(plan: GrowthPlan, codes: list[int]) -> Grower:
    """A tree all of whose nodes are scored, whatever is worth it, without a copy."""
    grower = Grower(plan)
    grower.take(range(1, plan.rule.envelope.num_rows), codes, [False] * len(codes))
    return grower


def random_codes(seed: int, size: int) -> list[int]:
    """A code for every node."""
    return np.random.default_rng(seed).integers(0, NUM_CODES, size).tolist()


def even(rate: float, rows: list[float], depth: int = 2) -> GrowthPlan:
    """All nodes of a small envelope are as good as the root."""
    rule = GrowthRule(SMALL, np.ones((1, 5, NUM_CODES), dtype=np.float32), np.ones((1, 2)))
    return GrowthPlan(rule, GrowthCosts(np.array(rows), np.ones(2), np.ones(2)), 0, rate, depth)


@pytest.mark.parametrize("seed", range(300))
def test_trees_grow_as_the_rules_say(seed: int) -> None:
    """Rows that are opened, nodes that are kept, and what a copy's own hang on."""
    scored = random_scored(seed)
    grower, envelope = Grower(scored.plan, scored.copy), scored.plan.rule.envelope
    opened = []
    for depth in range(envelope.max_depth):
        rows = grower.open_rows(depth)
        if not rows:
            break
        opened.append(rows)
        nodes = [child for row in rows for child in envelope.children[row]]
        copied = grower.copied(nodes, [scored.tokens[node] for node in nodes])
        grower.take(nodes, [scored.codes[node - 1] for node in nodes], copied)
    slow = scored.slow()
    assert opened == slow.opened
    assert grower.keep() == (slow.kept, slow.attach)


def test_the_cases_above_are_no_empty_promise() -> None:
    """Copies hang on the root and below, on rows that were scored and on others; some are left."""
    depths, asked, kept = set(), set(), set()
    for seed in range(300):
        scored = random_scored(seed)
        slow, size = scored.slow(), scored.plan.rule.envelope.num_rows
        own = [node for node in slow.values if node >= size]
        if own:
            depths.add(min(own) - size)
            asked.add(any(slow.attach in rows for rows in slow.opened))
            kept.add((sum(node >= size for node in slow.kept) > 0) + (max(own) in slow.kept))
    assert depths >= {0, 1, 2}
    assert asked == {False, True}
    assert kept == {0, 1, 2}


@pytest.mark.parametrize("seed", range(300))
def test_kept_nodes_are_a_tree_of_the_greatest_worth(seed: int) -> None:
    """No other number of the best nodes has more tokens less the price of their rows."""
    scored = random_scored(seed)
    slow, plan = scored.slow(), scored.plan
    order = sorted(set(slow.values) - {0}, key=lambda node: (-slow.values[node], node))
    worth = [
        sum(slow.values[n] for n in order[:count]) - plan.rate * plan.costs.rows[count]
        for count in range(len(order) + 1)
    ]
    assert slow.kept == order[: len(slow.kept)]
    assert worth[len(slow.kept)] == pytest.approx(max(worth))
    found = plan.rule.subtree(slow.kept, slow.attach)
    assert found.topology == Topology.from_paths(found.topology.paths)  # no path lacks its prefix
    assert sorted(found.nodes.tolist()) == [0, *sorted(slow.kept)]


@pytest.mark.parametrize("seed", range(300))
def test_a_tree_without_scores_is_known_beforehand(seed: int) -> None:
    """Whatever the tokens of the copy are; that of the grower, and the same object again."""
    scored = random_scored(seed)
    plan, copy = scored.plan, scored.copy
    other = Copy(copy.match, tuple(token + 1 for token in copy.tokens)) if copy else None
    for asked in (copy, None, other, Copy(3, ())):
        for one in (plan, plan.truncate(1), plan.truncate(0)):
            grower = Grower(one, asked)
            is_open = grower.open_rows(0) == [0]
            expected = None if is_open else plan.rule.subtree(*grower.keep()).topology
            assert one.bare(asked) is expected
    assert plan.truncate(0).bare(copy) == Topology(())


def test_the_cases_above_are_open_bare_and_copies() -> None:
    """Each kind occurs, and a copy makes a difference."""
    kinds = set()
    for seed in range(300):
        scored = random_scored(seed)
        found = [scored.plan.bare(copy) for copy in (None, scored.copy)]
        kinds.add(tuple(-1 if tree is None else min(tree.num_nodes, 1) for tree in found))
    assert kinds == {(-1, -1), (-1, 0), (-1, 1), (0, 0), (0, 1)}


def test_rows_are_opened_down_to_the_depth_of_the_plan() -> None:
    """A plan that is cut to the end of a text evaluates nothing that could not be kept."""
    plan = even(0.0, [0.0] * 6)
    assert grown(plan, [0] * 5).open_rows(1) == [1, 2]
    assert grown(plan.truncate(1), [0] * 5).open_rows(1) == []
    assert Grower(plan.truncate(-3)).open_rows(0) == []
    assert plan.truncate(2) is plan
    assert plan.truncate(1) is plan.truncate(1)  # what is made of a plan is made once
    assert plan.truncate(-3) is plan.truncate(0)
    assert (plan.truncate(1).max_depth, plan.truncate(1).max_rank) == (1, 1)


def test_ties_go_to_the_lower_node() -> None:
    """So a node never stands before its parent; of equal counts the smaller is taken."""
    assert grown(even(1.0, [0.0, 0.1, 0.2, 0.3, 9.0, 9.1]), [0] * 5).keep() == ([1, 2, 3], 0)
    assert grown(even(1.0, [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]), [0] * 5).keep() == ([1], 0)


def test_a_rate_of_nothing_keeps_all_and_a_huge_one_nothing() -> None:
    """Time for nothing, or worth more than any token."""
    free, dear = even(0.0, [1.0] * 6), even(1e6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert grown(free, [0] * 5).keep() == ([1, 2, 3, 4, 5], 0)
    assert grown(dear, [0] * 5).keep() == ([], 0)
    assert Grower(dear).open_rows(0) == []


def test_a_whole_plan_opens_and_keeps_everything() -> None:
    """Whatever the codes."""
    plan = GrowthPlan.whole(SMALL)
    grower = grown(plan, random_codes(0, 5))
    assert [grower.open_rows(depth) for depth in range(3)] == [[0], [1, 2], []]
    assert grower.keep() == ([1, 2, 3, 4, 5], 0)


def test_nothing_scored_is_a_bare_root() -> None:
    """Plain decoding is one of the trees."""
    assert Grower(random_plan(1, SMALL)).keep() == ([], 0)
    found = random_rule(1, SMALL).subtree([])
    assert (found.topology, found.nodes.tolist()) == (Topology(()), [0])


def copying(depth: int = 9, **tables: list[list[float]]) -> GrowthPlan:
    """A plan with copies of two tokens, for which time is nothing."""
    given = {"hits": [[0.5, 0.25]], "mixes": [[0.75, 0.5]]} | tables
    copies = CopyTable(*(np.array(given[name]) for name in ("hits", "mixes")))
    rule = GrowthRule(SMALL, table_of(5), np.ones((1, 2)), copies)
    return GrowthPlan(rule, GrowthCosts(np.zeros(8), np.ones(2), np.ones(2)), 0, 0.0, depth)


def test_a_copy_alone_is_a_chain_below_the_root() -> None:
    """No longer than its table or what the plan allows."""
    copy = Copy(0, (7, 8, 9))
    assert Grower(copying(), copy).keep() == ([6, 7], 0)
    assert Grower(copying(1), copy).keep() == ([6], 0)
    assert Grower(copying(0), copy).keep() == ([], 0)
    assert Grower(copying(), Copy(0, (7,))).keep() == ([6], 0)
    assert Grower(copying()).keep() == ([], 0)
    tree = copying().rule.subtree([6, 7]).topology
    assert tree.paths == ((COPY_RANK,), (COPY_RANK, COPY_RANK))


def test_evidence_of_heads_and_of_a_copy_is_mixed() -> None:
    """A child with the copy's token gains what its siblings lose; what follows hangs on it."""
    grower = Grower(copying(), Copy(0, (7, 8)))
    copied = grower.copied([1, 2], [5, 7])
    assert copied == [False, True]
    grower.take([1, 2], [0, 0], copied)
    assert grower._values == {0: 1.0, 1: 0.5 * 0.25, 2: 0.5 * 0.25 + 0.75}
    assert grower.keep() == ([2, 7, 1], 2)  # 0.875, then 0.25 of it, then 0.125
    tree = copying().rule.subtree([1, 2, 7], 2)
    assert tree.topology.paths == ((0,), (1,), (1, COPY_RANK))
    assert tree.nodes.tolist() == [0, 1, 2, 7]


def test_a_copy_beside_scored_children_has_the_weight_of_the_mix() -> None:
    """None of them carries its token, so that it hangs beside them."""
    grower = Grower(copying(), Copy(0, (7, 8)))
    grower.take([1, 2], [0, 0], grower.copied([1, 2], [5, 6]))
    assert grower.keep() == ([6, 7, 1, 2], 0)
    assert grower._values == {0: 1.0, 1: 0.125, 2: 0.125, 6: 0.75, 7: 0.75 * 0.25}


def test_a_row_behind_a_sure_copy_is_not_worth_it() -> None:
    """It promises what the copy leaves: nothing."""
    assert Grower(copying(hits=[[1.0, 1.0]]), Copy(0, (7,))).open_rows(0) == []
    assert Grower(copying(hits=[[0.9, 1.0]]), Copy(0, (7,))).open_rows(0) == [0]


def test_the_same_copy_below_other_nodes_is_another_tree() -> None:
    """Where a tree holds none of it, it does not matter what it would hang on."""
    rule = copying().rule
    assert rule.max_nodes == 7
    assert rule.subtree([1, 2, 7], 1).topology.paths == ((0,), (1,), (0, COPY_RANK))
    assert rule.subtree([1, 2, 7], 1) is not rule.subtree([1, 2, 7], 2)
    assert rule.subtree([1, 2], 1) is rule.subtree([1, 2], 2)


def test_the_tree_of_the_same_nodes_is_the_same_object() -> None:
    """Its index arrays, and a graph captured for it, are made once."""
    rule = random_rule(0, SMALL)
    found = rule.subtree([2, 1, 4])
    assert found is rule.subtree([4, 1, 2])
    assert found.topology.paths == ((0,), (1,), (0, 1))
    assert found.nodes.tolist() == [0, 1, 2, 4]


def test_trees_are_kept_in_bounded_memory() -> None:
    """A long run over a large envelope meets ever new trees."""
    rule = random_rule(0, Topology.from_paths([(rank,) for rank in range(14)]))
    for size in range(15):
        for nodes in combinations(range(1, 15), size):
            rule.subtree(nodes)
    assert len(rule._subtrees) <= 8192


@pytest.mark.parametrize(
    ("envelope", "table", "gains", "message"),
    [
        (Topology(()), table_of(0), np.ones((1, 0)), "has 0 nodes; it must have 1 to 63"),
        (
            Topology.from_paths([(rank,) for rank in range(MAX_ENVELOPE + 1)]),
            table_of(64),
            np.ones((1, 1)),
            "has 64 nodes",
        ),
        (SMALL, table_of(4), np.ones((1, 2)), r"must be \(1, 5, 64\) and \(1, 2\)"),
        (SMALL, table_of(5, codes=63), np.ones((1, 2)), "the tables are"),
        (SMALL, table_of(5), np.ones((1, 3)), "the tables are"),
        (SMALL, table_of(5), np.ones((2, 2)), "the tables are"),
        (SMALL, table_of(5, 1.5), np.ones((1, 2)), "between 0 and 1"),
        (SMALL, table_of(5, float("nan")), np.ones((1, 2)), "between 0 and 1"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    envelope: Topology, table: np.ndarray, gains: np.ndarray, message: str
) -> None:
    """The message says what they are and what they must be."""
    with pytest.raises(TopologyError, match=message):
        GrowthRule(envelope, table, gains)


@pytest.mark.parametrize(
    ("hits", "mixes", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), "must be of one shape"),
        (np.ones(3), np.ones(3), "must be of one shape"),
        (np.ones((2, 0)), np.ones((2, 0)), "have 0 tokens; they must have 1 to 16"),
        (np.ones((2, 17)), np.ones((2, 17)), "have 17 tokens"),
        (np.ones((2, 3)), np.full((2, 3), 1.1), "between 0 and 1"),
        (np.full((2, 3), float("nan")), np.ones((2, 3)), "between 0 and 1"),
    ],
)
def test_tables_of_copies_that_make_no_sense_are_refused(
    hits: np.ndarray, mixes: np.ndarray, message: str
) -> None:
    """The message says what they must be."""
    with pytest.raises(TopologyError, match=message):
        CopyTable(hits, mixes)


@pytest.mark.parametrize(
    ("num_rows", "num_depths", "kind", "message"),
    [
        (7, 2, 0, "of 6 nodes and 2 depths; the rule grows trees of 7 nodes and 2 depths"),
        (8, 1, 0, "of 7 nodes and 1 depths"),
        (8, 2, 1, "has 1 classes of signals; there is no class 1"),
        (8, 2, -1, "no class -1"),
    ],
)
def test_plans_that_the_core_would_read_beyond_are_refused(
    num_rows: int, num_depths: int, kind: int, message: str
) -> None:
    """Costs that end too early, and classes that are not there."""
    costs = GrowthCosts(np.zeros(num_rows), np.zeros(num_depths), np.zeros(num_depths))
    with pytest.raises(TopologyError, match=message):
        GrowthPlan(copying().rule, costs, kind, 0.0, 2)
