"""The rule of growth: what is opened, what is kept, and what is refused."""

import random
from itertools import combinations

import numpy as np
import pytest

from entmtp.errors import TopologyError
from entmtp.growth import (
    MAX_ENVELOPE,
    NUM_CODES,
    Grower,
    GrowthCosts,
    GrowthPlan,
    GrowthRule,
)
from entmtp.topology import Topology
from growing import random_envelope, random_plan, random_rule

SEEDS = range(60)
SMALL = Topology.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])


def values_of(plan: GrowthPlan, codes: list[int]) -> list[float]:
    """Value of every node where all of them are scored, the root's first."""
    envelope, table = plan.rule.envelope, plan.rule.table[plan.signal_class]
    values = [1.0]
    for node in range(1, envelope.num_rows):
        above = values[int(envelope.parents[node])]
        values.append(above * float(table[node - 1, codes[node - 1]]))
    return values


def grown(plan: GrowthPlan, codes: list[int]) -> Grower:
    """A tree all of whose nodes are scored, whatever is worth it."""
    grower = Grower(plan)
    grower.take(range(1, plan.rule.envelope.num_rows), codes)
    return grower


def random_codes(seed: int, size: int) -> list[int]:
    """A code for every node."""
    return np.random.default_rng(seed).integers(0, NUM_CODES, size).tolist()


def even(rate: float, rows: list[float], depth: int = 2) -> GrowthPlan:
    """All nodes of a small envelope are as good as the root."""
    rule = GrowthRule(SMALL, np.ones((1, 5, NUM_CODES), dtype=np.float32), np.ones((1, 2)))
    return GrowthPlan(rule, GrowthCosts(np.array(rows), np.ones(2), np.ones(2)), 0, rate, depth)


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_nodes_are_a_tree_of_the_greatest_worth(seed: int) -> None:
    """No other number of the best nodes has more tokens less the price of their rows."""
    plan = random_plan(seed, random_envelope(random.Random(seed)))
    codes = random_codes(seed, plan.rule.envelope.num_nodes)
    kept, values = grown(plan, codes).keep(), values_of(plan, codes)
    order = sorted(range(1, len(values)), key=lambda node: (-values[node], node))
    worth = [
        sum(values[n] for n in order[:count]) - plan.rate * plan.costs.rows[count]
        for count in range(len(values))
    ]
    assert kept == order[: len(kept)]
    assert worth[len(kept)] == pytest.approx(max(worth))
    paths = [plan.rule.envelope.paths[node - 1] for node in kept]
    assert plan.rule.subtree(kept).topology == Topology.from_paths(paths)


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_opened_where_they_pay(seed: int) -> None:
    """Each by its own gain, and all of a depth by what they gain together."""
    plan = random_plan(seed, random_envelope(random.Random(seed)))
    codes = random_codes(seed, plan.rule.envelope.num_nodes)
    grower, values = grown(plan, codes), values_of(plan, codes)
    for depth, level in enumerate(plan.rule.envelope.levels):
        gain = plan.rule.gains[plan.signal_class, depth]
        price = plan.rate * plan.costs.draft_row[depth]
        paying = [node for node in level.parents.tolist() if values[node] * gain > price]
        total = sum(values[node] * gain for node in paying)
        costs = plan.rate * plan.costs.draft[depth] + price * (len(paying) - 1)
        assert grower.open_rows(depth) == (paying if total > costs else [])


def test_rows_are_opened_down_to_the_depth_of_the_plan() -> None:
    """A plan that is cut to the end of a text evaluates nothing that could not be kept."""
    plan = even(0.0, [0.0] * 6)
    assert grown(plan, [0] * 5).open_rows(1) == [1, 2]
    assert grown(plan.truncate(1), [0] * 5).open_rows(1) == []
    assert Grower(plan.truncate(-3)).open_rows(0) == []
    assert plan.truncate(2) is plan
    assert (plan.truncate(1).max_depth, plan.truncate(1).max_rank) == (1, 1)


def test_ties_go_to_the_lower_node() -> None:
    """So a node never stands before its parent; of equal counts the smaller is taken."""
    assert grown(even(1.0, [0.0, 0.1, 0.2, 0.3, 9.0, 9.1]), [0] * 5).keep() == [1, 2, 3]
    assert grown(even(1.0, [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]), [0] * 5).keep() == [1]


def test_a_rate_of_nothing_keeps_all_and_a_huge_one_nothing() -> None:
    """Time for nothing, or worth more than any token."""
    free, dear = even(0.0, [1.0] * 6), even(1e6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert grown(free, [0] * 5).keep() == [1, 2, 3, 4, 5]
    assert grown(dear, [0] * 5).keep() == []
    assert Grower(dear).open_rows(0) == []


def test_a_whole_plan_opens_and_keeps_everything() -> None:
    """Whatever the codes."""
    plan = GrowthPlan.whole(SMALL)
    grower = grown(plan, random_codes(0, 5))
    assert [grower.open_rows(depth) for depth in range(3)] == [[0], [1, 2], []]
    assert grower.keep() == [1, 2, 3, 4, 5]


def test_nothing_scored_is_a_bare_root() -> None:
    """Plain decoding is one of the trees."""
    assert Grower(random_plan(1, SMALL)).keep() == []
    found = random_rule(1, SMALL).subtree([])
    assert (found.topology, found.nodes.tolist()) == (Topology(()), [0])


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


def table_of(size: int, value: float = 0.5, codes: int = NUM_CODES) -> np.ndarray:
    """One class."""
    return np.full((1, size, codes), value, dtype=np.float32)


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
