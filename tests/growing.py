"""Random rules of growth, and growing written out: the whole envelope first, then what is kept."""

import random

import numpy as np
import numpy.typing as npt

from entmtp.drafters.base import GrownTree
from entmtp.growth import NUM_CODES, UNSCORED, Grower, GrowthCosts, GrowthPlan, GrowthRule
from entmtp.scheduler import SchedulerDecision, Signal
from entmtp.topology import Topology
from exactness import random_topology

__all__ = ["GrowingScheduler", "by_hand", "random_envelope", "random_plan", "random_rule"]


def random_envelope(rng: random.Random, max_nodes: int = 24, max_depth: int = 5) -> Topology:
    """Any tree of at least one node."""
    tree = random_topology(rng, max_nodes, max_depth)
    return tree if tree.num_nodes else Topology.from_paths([(rng.randrange(3),)])


def random_rule(seed: int, envelope: Topology, num_classes: int = 2) -> GrowthRule:
    """Any tables."""
    rng = np.random.default_rng(seed)
    table = rng.random((num_classes, envelope.num_nodes, NUM_CODES)).astype(np.float32)
    gains = rng.uniform(0.2, 3.0, (num_classes, envelope.max_depth))
    return GrowthRule(envelope, table, gains)


def random_plan(seed: int, envelope: Topology) -> GrowthPlan:
    """Any tables and costs, at rates under which all, some or no nodes are worth it."""
    rng = np.random.default_rng(seed)
    size, depth = envelope.num_nodes, envelope.max_depth
    rows = 1 + np.concatenate(([0.0], np.cumsum(rng.uniform(0.0, 0.2, size))))
    costs = GrowthCosts(rows, rng.uniform(0.0, 0.5, depth), rng.uniform(0.0, 0.1, depth))
    rule = random_rule(seed, envelope)
    rate = float(rng.choice([0.0, 0.3, 1.0, 3.0, 100.0], p=[0.1, 0.3, 0.3, 0.2, 0.1]))
    return GrowthPlan(rule, costs, int(rng.integers(rule.num_classes)), rate, depth)


def by_hand(
    plan: GrowthPlan, whole: GrownTree
) -> tuple[list[list[int]], npt.NDArray[np.uint8], list[int]]:
    """What growing must give where the whole envelope was scored.

    Returns:
        Rows that are opened, by depth; the codes of their children; the nodes that are kept.
    """
    grower, envelope = Grower(plan), plan.rule.envelope
    codes = np.full(envelope.num_rows, UNSCORED, dtype=np.uint8)
    opened: list[list[int]] = []
    for depth in range(envelope.max_depth):
        rows = grower.open_rows(depth)
        if not rows:
            break
        opened.append(rows)
        children = [child for row in rows for child in envelope.children[row]]
        codes[children] = whole.codes[children]
        grower.take(children, codes[children].tolist())
    return opened, codes, grower.keep()


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
