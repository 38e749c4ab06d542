"""``dynamic``: which plan a step gets, and when plans are made."""

from dataclasses import replace
from itertools import pairwise

import pytest

from costs import linear_costs
from dynamic_params import PARAMS
from entmtp.errors import BankError
from entmtp.growth import GrowthPlan
from entmtp.scheduler import Signal
from entmtp.scheduler.bands import CONTEXTS, PROBE_EVERY
from entmtp.scheduler.dynamic import DynamicScheduler, growth_costs

COSTS = linear_costs(row_ms=0.5)
QUIET = Signal(0.5, 1.0, 0.5, 1.0, accepted_ema=0.0, num_steps=0)


def plan_of(scheduler: DynamicScheduler, share: float, context: int, batch: int = 1) -> GrowthPlan:
    """For a request of which so many first tokens were right."""
    signal = QUIET._replace(hit_ema=share, num_hits=50, context=context, batch=batch)
    plan = scheduler.choose(scheduler.start(), signal).plan
    assert isinstance(plan, GrowthPlan)
    return plan


def test_a_plan_is_of_a_class_of_trust_a_context_and_a_batch() -> None:
    """Its costs are those of the end of the class of contexts; the rate falls as steps get dear."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    assert [plan_of(scheduler, s, 0).signal_class for s in (0.0, 0.5, 1.0)] == [0, 1, 2]
    for context, batch in ((0, 1), (100, 1), (100, 3)):
        plan = plan_of(scheduler, 0.5, context, batch)
        end = float(min(end for end in CONTEXTS if end > context))
        costs = growth_costs(COSTS, 2, 6, end, batch)
        for name in ("rows", "draft", "draft_row"):
            assert getattr(plan.costs, name).tolist() == getattr(costs, name).tolist()
        here = growth_costs(COSTS, 2, 6, PARAMS.context, 1).rows[2]
        assert plan.rate == PARAMS.rate * float(here) / float(costs.rows[2])
        assert plan.depth == 3


def test_after_plain_steps_the_drafter_is_asked_again() -> None:
    """By the last class, whose gain at the root is beyond any cost."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    state = scheduler.start()
    classes = [scheduler.choose(state, QUIET).bin for _ in range(15 * PROBE_EVERY)]
    assert [at for at, kind in enumerate(classes) if kind == 3] == [15, 47, 111, 175, 239]


def test_a_probe_that_changed_nothing_makes_the_next_one_rarer() -> None:
    """One that the drafter was asked in anyway does not; steps that draft begin anew."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    state, num_hits, probes = scheduler.start(), 0, []
    for at in range(200):
        decision = scheduler.choose(state, QUIET._replace(num_hits=num_hits))
        is_probe = decision.bin == 3
        probes += [at] if is_probe else []
        num_hits += is_probe or at == 150  # the drafter is asked of its own accord once
    assert probes == [15, 48, 113, 167]


def asked(scheduler: DynamicScheduler, kept: list[int]) -> list[int]:
    """Classes of the steps of a request whose drafter is trusted and asked whenever it may be.

    ``kept`` draft tokens are kept when it is; -1 where no node was worth checking. The last one
    holds for the rest of 200 steps.
    """
    state, signal, num_hits, classes = scheduler.start(), QUIET._replace(hit_ema=1.0), 50, []
    state.num_hits = num_hits
    for _ in range(200):
        signal = signal._replace(num_hits=num_hits)
        classes.append(scheduler.choose(state, signal).bin)
        is_asked = classes[-1] > 0
        num_hits += is_asked
        last = kept[min(num_hits - 51, len(kept) - 1)] if is_asked else -1
        signal = signal._replace(last_accepted=last)
    return classes


def test_asking_that_brings_nothing_ends_whatever_the_trust() -> None:
    """After 1.5 tokens' worth of time; then it is asked now and then, ever more rarely."""
    costs = growth_costs(COSTS, 2, 6, float(CONTEXTS[0]), 1)
    price = float(costs.draft[0] / costs.rows[0])
    classes = asked(DynamicScheduler(PARAMS, COSTS), [-1])
    size = int(1.5 // price) + 1
    assert classes[:size] == [2] * size
    assert set(classes[size:]) == {0, 3}
    probes = [at for at, kind in enumerate(classes) if kind == 3]
    plain = [after - before - 1 for before, after in pairwise([size - 1, *probes])]
    assert plain[:3] == [PROBE_EVERY, 2 * PROBE_EVERY, 4 * PROBE_EVERY]


def test_a_wrong_draft_costs_the_node_that_was_checked_too() -> None:
    """So text whose drafts are checked and wrong ends them sooner."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    assert asked(scheduler, [0]).count(2) < asked(scheduler, [-1]).count(2)


def test_a_draft_that_is_kept_lets_them_go_on() -> None:
    """With half the credit of the start, and without the wait of the probes before."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    stopped = asked(scheduler, [-1]).index(0)
    classes = asked(scheduler, [-1] * (stopped + 1) + [1] + [-1])
    back = [at for at, kind in enumerate(classes) if kind == 3][1] + 1  # the second one was kept
    again = classes[back:].index(0)
    assert classes[back : back + again] == [2] * again
    assert 0 < again < stopped
    assert classes[back + again :].index(3) == PROBE_EVERY


def test_drafts_that_pay_are_never_stopped() -> None:
    """One token in every second step is worth more than it costs here."""
    assert asked(DynamicScheduler(PARAMS, COSTS), [-1, 1] * 200) == [2] * 200


def test_plans_of_one_sequence_are_made_with_the_scheduler() -> None:
    """None is made between two tokens; those of larger batches are made once."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    made = dict(scheduler._places._made)
    assert made.keys() == {(context, 1) for context in range(len(CONTEXTS))}
    for context in (0, *CONTEXTS, 10**6):
        for share in (0.0, 0.5, 1.0):
            plan_of(scheduler, share, context)
    assert scheduler._places._made == made
    assert plan_of(scheduler, 0.5, 300, 7) is plan_of(scheduler, 0.5, 310, 7)


def test_classes_of_trust_share_what_steps_cost() -> None:
    """Which does not depend on them."""
    scheduler = DynamicScheduler(PARAMS, COSTS)
    for batch in (1, 4):
        plans = [plan_of(scheduler, share, 200, batch) for share in (0.0, 0.5, 1.0)]
        assert len({plan.signal_class for plan in plans}) == 3
        assert len({id(plan.costs) for plan in plans}) == 1


def test_it_says_whether_plans_hold_copies() -> None:
    """So that prompts are read for them in time, or not at all."""
    assert DynamicScheduler(PARAMS, COSTS).can_copy
    assert not DynamicScheduler(replace(PARAMS, hits=(), mixes=()), COSTS).can_copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trust_bounds": (0.3,)}, "1 bounds between 3 classes"),
        ({"mean_nodes": 7.0}, "7.0 nodes on average, of 6"),
        ({"mean_nodes": float("nan")}, "nan nodes on average"),
        ({"odds": PARAMS.odds[:2]}, "could not be broadcast"),
        ({"hits": ((0.5,),)}, "the tables of copies are"),
        (
            {"hits": ((0.5,),) * 28, "mixes": ((0.5,),) * 28},
            "28 classes of copies.*calibrate again",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    """When the scheduler is made, not in the middle of a text."""
    with pytest.raises(BankError, match=message):
        DynamicScheduler(replace(PARAMS, **changes), COSTS)  # type: ignore[arg-type]
