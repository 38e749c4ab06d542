"""A switch of trees makes nothing: all that a step reads is there when the scheduler is made."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest

from costs import linear_costs
from dynamic_params import PARAMS
from entmtp.bank import Bank
from entmtp.drafters.copying import NUM_MATCHES
from entmtp.growth import Copy, GrowthPlan
from entmtp.kernels.growth import GrowthRoom, GrowthTask, plan_shape
from entmtp.kernels.trees import held_levels, tree_shape
from entmtp.scheduler import (
    ChainEmaParams,
    ChainEmaScheduler,
    ChainThresholdParams,
    ChainThresholdScheduler,
    DynamicScheduler,
    FixedScheduler,
    HysteresisParams,
    HysteresisScheduler,
    LadderParams,
    LadderScheduler,
    SchedulerDecision,
    Signal,
    ThroughputParams,
    ThroughputScheduler,
    TopologyScheduler,
)
from entmtp.scheduler.base import prepared
from entmtp.topology import Topology, _truncate

COSTS = linear_costs(row_ms=0.5)
_RANKS = count(70_000)  # of trees that no other test has
LEVELS = ("none", "chain", "wide", "deep")


def new_bank() -> Bank:
    """Trees that nothing has been read of, in other tests either."""
    rank = next(_RANKS)
    return Bank.of(
        {
            "chain": Topology.from_paths([(0,), (0, 0), (0, 0, rank)]),
            "wide": Topology.from_paths([*((a,) for a in range(4)), (1, rank), (3, 0)]),
            "deep": Topology.from_paths([(rank,) * d for d in range(1, 7)]),
        }
    )


def throughput(bank: Bank) -> ThroughputScheduler:
    """Each class has a tree of its own."""
    tokens = tuple(tuple(9.0 * (at == level) for at in range(4)) for level in range(4))
    params = ThroughputParams(
        LEVELS, {"p0": 1.0}, (0.25, 0.5, 0.75), tokens, (1.0,) * 4, 1.0, "chain"
    )
    return ThroughputScheduler(bank, params, COSTS)


MAKERS: dict[str, Callable[[Bank], TopologyScheduler]] = {
    "fixed": lambda bank: FixedScheduler("wide", bank.get("wide")),
    "ladder": lambda bank: LadderScheduler(bank, LadderParams(LEVELS, (0.25, 0.5, 0.75))),
    "hysteresis": lambda bank: HysteresisScheduler(
        bank, HysteresisParams(LEVELS, (0.3, 0.5, 0.7), (0.2, 0.4, 0.6), 1, 0, "p0")
    ),
    "throughput": throughput,
    "chain-ema": lambda bank: ChainEmaScheduler(ChainEmaParams(1.0, 1.0, 6)),
    "chain-threshold": lambda bank: ChainThresholdScheduler(
        ChainThresholdParams(8, 4), COSTS, 100.0
    ),
    "dynamic": lambda bank: DynamicScheduler(PARAMS, COSTS),
}
NUM_PLANS = {"fixed": 1, "chain-threshold": 1, "chain-ema": 6, "dynamic": 40}


def signals() -> list[Signal]:
    """Jumps from one end to the other, in texts of any length."""
    rng = random.Random(0)
    return [
        Signal(
            rng.random(), 1.0, 0.5, 1.0, rng.uniform(0, 6), step, rng.random(), 50, 2 ** (step % 20)
        )
        for step in range(2000)
    ]


def calls_in(run: Callable[[], object]) -> Counter[str]:
    """Functions that are called, in Python and in C; those that make an object, by its class."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            name = frame.f_code.co_name
            kind = type(frame.f_locals["self"]).__name__ if name == "__init__" else ""
            found[kind + name] += 1
        elif event == "c_call":
            found[f"{getattr(value, '__module__', None) or ''}.{value.__name__}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def made_in(run: Callable[[], object]) -> dict[str, int]:
    """Objects and arrays that are made."""
    return {
        name: count
        for name, count in calls_in(run).items()
        if name.endswith(("__init__", "__new__")) or name.startswith("numpy.")
    }


def test_what_is_made_is_counted() -> None:
    """The tests below would see a tree, a decision, or an array."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    batch = signals()[0]._replace(batch=5)
    found = made_in(lambda: scheduler.choose(scheduler.start(), batch))
    assert {"GrowthPlan__init__", "GrowthCosts__init__", "numpy.array"} <= found.keys()


@pytest.mark.parametrize("policy", MAKERS)
def test_choosing_makes_nothing(policy: str) -> None:
    """Not at the first decision either; decisions are the same objects again and again."""
    scheduler, given = MAKERS[policy](new_bank()), signals()
    runs = []
    for _ in range(2):
        state, found = scheduler.start(), list[SchedulerDecision]()
        choose = (scheduler.choose(state, one) for one in given)
        assert made_in(lambda: found.extend(choose)) == {}  # noqa: B023 - called at once
        runs.append(found)
    assert all(one is other for one, other in zip(*runs, strict=True))
    assert len({id(decision.plan) for decision in runs[0]}) == NUM_PLANS.get(policy, 4)


@pytest.mark.parametrize("policy", [name for name in MAKERS if name[:3] not in ("dyn", "cha")])
def test_a_tree_of_a_bank_is_whole_when_it_is_first_taken(policy: str) -> None:
    """Also as it is cut near the end of a text; for drafters and the target, and for the core."""
    scheduler = MAKERS[policy](new_bank())
    caches = (_truncate, tree_shape, held_levels)
    before = [cache.cache_info().misses for cache in caches]
    state = scheduler.start()
    for number, one in enumerate(signals()):
        tree = scheduler.choose(state, one).plan.truncate(number % 9)
        assert isinstance(tree, Topology)
        known = set(vars(tree))
        tree.prepare()
        assert set(vars(tree)) == known
        tree_shape(tree)
    assert [cache.cache_info().misses for cache in caches] == before


def test_a_very_deep_tree_is_not_cut_beforehand() -> None:
    """A chain of a thousand nodes would be a thousand trees."""
    tree = Topology.chain(1000)
    before = _truncate.cache_info().misses
    assert prepared(tree) is tree
    assert _truncate.cache_info().misses == before
    assert "ancestor_mask" in vars(tree)


def test_plans_fill_buffers_that_are_there() -> None:
    """What the core reads of plans and copies is made once, and written where it was before."""
    scheduler, room = DynamicScheduler(PARAMS, COSTS), GrowthRoom()
    plans: list[GrowthPlan] = []
    state = scheduler.start()
    for number, one in enumerate(signals()[:300]):
        plan = scheduler.choose(state, one).plan.truncate(number % 5)
        assert isinstance(plan, GrowthPlan)
        plans.append(plan)
    copies = [None, *(Copy(match, (1, 2, 3)) for match in range(NUM_MATCHES))]
    tasks = [GrowthTask(plan, 7, copies[at % len(copies)]) for at, plan in enumerate(plans)]

    def prepare_all() -> None:
        for task in tasks:
            room.prepare([task])

    prepare_all()
    buffers = room.tokens, room.codes, room.kept, room.for_core
    shapes = [plan_shape(plan) for plan in plans]
    assert made_in(prepare_all) == {}
    assert all(
        one is other
        for one, other in zip(
            buffers, (room.tokens, room.codes, room.kept, room.for_core), strict=True
        )
    )
    assert all(plan_shape(plan) is shape for plan, shape in zip(plans, shapes, strict=True))
    assert len({id(plan) for plan in plans}) > 20
