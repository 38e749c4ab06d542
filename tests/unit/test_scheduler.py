"""Signals and two policies: fixed, and hysteresis with its dead band and dwell."""

import dataclasses
import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entmtp.bank import Bank
from entmtp.errors import BankError, InputError
from entmtp.scheduler import (
    FixedScheduler,
    HysteresisParams,
    HysteresisScheduler,
    SchedulerDecision,
    Signal,
    SignalTracker,
    TopologyScheduler,
)
from entmtp.topology import Topology

TWO = HysteresisParams(
    levels=("none", "chain4"), up_at=(-2.0,), down_below=(-3.0,), min_dwell=1, start_level=0
)
Values = list[tuple[float, float, int]]
OBSERVED = st.lists(
    st.tuples(st.floats(0.0, 12.0), st.floats(0.0, 1.0), st.integers(0, 8)), min_size=1
)


def signal(entropy: float) -> Signal:
    """A signal whose average entropy is given; a policy on it must not look at the rest."""
    return Signal(0.5, 99.0, 0.5, entropy_ema=entropy, accepted_ema=0.0, num_steps=0)


def names(scheduler: TopologyScheduler, entropies: Sequence[float]) -> list[str]:
    """What a new request is given, step by step."""
    state = scheduler.start()
    return [scheduler.choose(state, signal(value)).name for value in entropies]


def levels(params: HysteresisParams, entropies: Sequence[float]) -> list[int]:
    """The level of every step."""
    scheduler = HysteresisScheduler(Bank.shipped(), params)
    return [params.levels.index(name) for name in names(scheduler, entropies)]


# -- signals ---------------------------------------------------------------------------------------


def average(values: Sequence[float], decay: float) -> float:
    """Weights (1 - b) b^age, divided by their sum 1 - b^t."""
    weights = [(1 - decay) * decay**age for age in reversed(range(len(values)))]
    products = (weight * value for weight, value in zip(weights, values, strict=True))
    return sum(products) / (1 - decay ** len(values))


def track(values: Values, decay: float = 0.8) -> Signal:
    """The signal after a first token and the steps after it."""
    tracker = SignalTracker(decay)
    tracker.start(*values[0][:2])
    for entropy, p0, accepted in values[1:]:
        tracker.step(entropy, p0, accepted)
    return tracker.signal()


@given(OBSERVED, st.sampled_from([0.0, 0.5, 0.8, 0.99]))
def test_averages_equal_the_direct_formula(values: Values, decay: float) -> None:
    """Bias-corrected averages of entropy and p0 run over the first token and all steps."""
    seen = track(values, decay)
    assert seen.entropy_ema == pytest.approx(average([v[0] for v in values], decay))
    assert seen.p0_ema == pytest.approx(average([v[1] for v in values], decay))


@given(OBSERVED.filter(lambda values: len(values) > 1))
def test_accepted_tokens_are_averaged_over_steps_only(values: Values) -> None:
    """The first token comes from no draft and does not count."""
    accepted = [float(v[2]) for v in values[1:]]
    assert track(values).accepted_ema == pytest.approx(average(accepted, 0.8))


@given(OBSERVED)
def test_signal_holds_the_newest_distribution(values: Values) -> None:
    """Entropy and p0 are those of the distribution that the next root was drawn from."""
    seen = track(values)
    assert (seen.entropy, seen.p0, seen.num_steps) == (*values[-1][:2], len(values) - 1)


def test_first_signal_is_unbiased() -> None:
    """After one observation the average is that observation, not a part of it."""
    seen = track([(3.0, 0.25, 0)])
    assert (seen.entropy_ema, seen.p0_ema) == (pytest.approx(3.0), pytest.approx(0.25))
    assert (seen.accepted_ema, seen.num_steps) == (0.0, 0)


# -- fixed -----------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.0, 12.0), max_size=5))
def test_fixed_never_changes(entropies: list[float]) -> None:
    """The same decision comes at every signal."""
    tree = Topology.from_paths([[0], [1]])
    scheduler = FixedScheduler("pair", tree)
    state = scheduler.start()
    chosen = {scheduler.choose(state, signal(value)) for value in [0.0, *entropies]}
    assert chosen == {SchedulerDecision("pair", tree, bin=0)}


def test_policies_state_their_names() -> None:
    """Reports say which rule was used."""
    bank = Bank.shipped()
    schedulers = (FixedScheduler.plain(), HysteresisScheduler(bank))
    assert [scheduler.policy for scheduler in schedulers] == ["fixed", "hysteresis"]


# -- hysteresis ------------------------------------------------------------------------------------


def test_two_levels() -> None:
    """Up at or below the lower entropy, down above the upper one, else no change."""
    entropies = [2.5, 2.01, 2.0, 2.5, 3.0, 3.01, 2.5, 1.0]
    assert levels(TWO, entropies) == [0, 0, 1, 1, 1, 0, 0, 1]


@given(st.lists(st.floats(2.0, 3.0, exclude_min=True), min_size=1), st.sampled_from([0, 1]))
def test_dead_band(entropies: list[float], start: int) -> None:
    """Between the thresholds nothing ever changes."""
    params = dataclasses.replace(TWO, start_level=start)
    assert set(levels(params, entropies)) == {start}


@pytest.mark.parametrize("dwell", [1, 2, 5])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_at_most_one_switch_in_a_dwell_window(dwell: int, start: int) -> None:
    """Wild noise around a constant switches no more often than ``min_dwell`` allows."""
    params = HysteresisParams(min_dwell=dwell, start_level=start)
    noise = random.Random(7)
    chosen = levels(params, [2.9 + noise.gauss(0, 2) for _ in range(2000)])
    switches = [i for i, (a, b) in enumerate(pairwise(chosen)) if a != b]
    assert len(switches) > 100
    assert min(b - a for a, b in pairwise(switches)) == dwell


def test_noise_within_the_dead_band_never_switches() -> None:
    """On a noisy constant input the average rests inside the band."""
    noise = random.Random(7)
    values = [(2.5 + noise.uniform(-1.0, 1.0), 0.5, 0) for _ in range(300)]
    entropies = [track(values[: n + 1]).entropy_ema for n in range(5, 300)]
    assert set(levels(dataclasses.replace(TWO, down_below=(-3.2,), up_at=(-1.8,)), entropies)) == {
        0
    }


@given(st.lists(st.floats(0.0, 6.0), min_size=2))
def test_one_level_a_step(entropies: list[float]) -> None:
    """A jump of the signal moves the tree by one level at a time."""
    chosen = levels(HysteresisParams(min_dwell=1), entropies)
    assert all(abs(b - a) <= 1 for a, b in pairwise([2, *chosen]))


def test_climbs_and_descends_all_levels() -> None:
    """Extreme signals lead to the outermost levels and stay there."""
    params = HysteresisParams(min_dwell=1, start_level=1)
    assert levels(params, [0.0, 0.0, 9.0, 9.0, 9.0, 0.0]) == [2, 2, 1, 0, 0, 1]


def test_the_first_step_may_move_at_once() -> None:
    """Dwell counts from a change, and the start level was not chosen by the signal."""
    params = HysteresisParams(min_dwell=3)
    assert levels(params, [9.0, 9.0, 9.0, 9.0, 9.0]) == [1, 1, 1, 0, 0]


@given(st.lists(st.floats(0.0, 6.0), max_size=30), st.integers(1, 4))
def test_decisions_are_deterministic(entropies: list[float], dwell: int) -> None:
    """Two requests with one signal get the same trees, even when they take turns."""
    scheduler = HysteresisScheduler(Bank.shipped(), HysteresisParams(min_dwell=dwell))
    one, two = scheduler.start(), scheduler.start()
    pairs = [[scheduler.choose(s, signal(e)).name for s in (one, two)] for e in entropies]
    assert [pair[0] for pair in pairs] == names(scheduler, entropies)
    assert all(first == second for first, second in pairs)


def test_decision_names_entry_plan_and_level() -> None:
    """It can be logged and replayed."""
    bank = Bank.shipped()
    scheduler = HysteresisScheduler(bank)
    decision = scheduler.choose(scheduler.start(), signal(0.0))
    assert decision == SchedulerDecision("tree16", bank.get("tree16"), bin=2)


def test_a_level_that_the_bank_lacks() -> None:
    """The scheduler is refused when made, not in the middle of a text."""
    with pytest.raises(BankError, match="no entry 'tree16'"):
        HysteresisScheduler(Bank.shipped(["chain4"]))


def test_a_single_level_is_a_fixed_tree() -> None:
    """Without thresholds there is nowhere to go."""
    params = HysteresisParams(levels=("chain4",), up_at=(), down_below=(), start_level=0)
    assert levels(params, [0.0, 9.0]) == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": ("none", "chain4")}, "2 levels need 1 pairs of thresholds, not 2 and 2"),
        ({"levels": ()}, "0 levels need"),
        ({"up_at": (-3.0,)}, "3 levels need 2 pairs of thresholds, not 1 and 2"),
        ({"down_below": (-3.6,)}, "not 2 and 1"),
        ({"up_at": (-3.0, -2.7)}, "must be below its partner"),
        ({"up_at": (-3.7, -2.2)}, "must be below its partner"),
        ({"up_at": (math.nan, -2.2)}, "must be below its partner"),
        ({"down_below": (-3.6, math.nan)}, "must be below its partner"),
        ({"start_level": 3}, "start_level must name a level"),
        ({"start_level": -1}, "start_level must name a level"),
        ({"min_dwell": 0}, "min_dwell must be at least 1"),
        ({"signal": "mood"}, "the signal is 'mood'; it must be one of entropy, p0"),
        ({"up_at": (-2.2, -3.0), "down_below": (-3.0, -3.6)}, "thresholds must be numbers that"),
    ],
)
def test_parameters_are_checked(changes: dict[str, object], message: str) -> None:
    """Thresholds must fit the levels and leave a dead band."""
    with pytest.raises(InputError, match=message):
        HysteresisParams(**changes)  # type: ignore[arg-type]
