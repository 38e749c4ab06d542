"""Policies with levels: ladder, throughput, chain-ema; and chain-threshold, which grows a chain."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import linear_costs
from entmtp.bank import Bank
from entmtp.errors import BankError, InputError
from entmtp.growth import Grower, GrowthPlan
from entmtp.scheduler import (
    SIGNALS,
    ChainEmaParams,
    ChainEmaScheduler,
    ChainThresholdParams,
    ChainThresholdScheduler,
    LadderParams,
    LadderScheduler,
    Signal,
    SignalTracker,
    ThroughputParams,
    ThroughputScheduler,
    TopologyScheduler,
    signal_value,
)
from entmtp.scheduler.bands import CONTEXTS, MAX_PROBE_EVERY, PROBE_EVERY, context_class
from entmtp.scheduler.reading import read_params
from entmtp.scheduler.values import Score
from entmtp.topology import Topology

BANK = Bank.of(
    {
        "chain1": Topology.chain(1),
        "chain3": Topology.chain(3),
        "wide": Topology.from_paths([(a,) for a in range(4)] + [(a, 0) for a in range(4)]),
    }
)
QUIET = Signal(0.5, 1.0, 0.5, 1.0, accepted_ema=0.0, num_steps=0)
LADDER = LadderParams(("none", "chain1", "wide"), (0.3, 0.7), "p0")
TABLES = ThroughputParams(
    entries=("none", "chain1", "wide"),
    weights={"hit_ema": 1.0},
    bounds=(0.3, 0.7),
    tokens=((1.0, 1.02, 1.03), (1.0, 1.4, 1.5), (1.0, 1.9, 2.9)),
    mean_tokens=(1.0, 1.44, 1.81),
    gain=1.0,
    probe="chain1",
)
COSTS = linear_costs(row_ms=0.5)


def names(scheduler: TopologyScheduler, signals: Sequence[Signal]) -> list[str]:
    """What a new request is given, step by step."""
    state = scheduler.start()
    return [scheduler.choose(state, signal).name for signal in signals]


def trusted(share: float, **changes: int) -> Signal:
    """After many drafts, so many of them right."""
    return QUIET._replace(hit_ema=share, num_hits=50, **changes)


# -- signals as numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_larger_where_text_is_more_predictable(name: str) -> None:
    """An easy text beats a hard one."""
    easy, hard = SignalTracker(), SignalTracker()
    easy.start(0.1, 0.95)
    hard.start(3.0, 0.1)
    easy.step(0.1, 0.95, 3, True)
    hard.step(3.0, 0.1, 0, False)
    assert signal_value(easy.signal(), name) > signal_value(hard.signal(), name)


def test_hits_are_drawn_to_one_half_at_first() -> None:
    """One miss is no proof."""
    values = [
        signal_value(QUIET._replace(hit_ema=0.0, num_hits=n), "hit_ema") for n in (0, 2, 10, 99)
    ]
    assert values == [0.5, 0.25, pytest.approx(1 / 12), pytest.approx(1 / 12)]


@given(
    st.dictionaries(st.sampled_from(SIGNALS), st.floats(-3, 3)),
    st.lists(st.floats(0, 5), min_size=5, max_size=5),
    st.tuples(st.floats(0, 1), st.integers(0, 20)),
)
def test_a_score_is_the_weighted_sum_in_the_order_of_the_signals(
    weights: dict[str, float], values: list[float], hits: tuple[float, int]
) -> None:
    """To the last bit, whatever the order of the weights: replay adds them one by one."""
    entropy, p0, entropy_ema, p0_ema, accepted = values
    signal = Signal(p0, entropy, p0_ema, entropy_ema, accepted, 3, *hits)
    total = 0.0
    for name in SIGNALS:
        if name in weights:
            total += weights[name] * signal_value(signal, name)
    assert Score(weights)(signal) == total
    assert Score(dict(reversed(weights.items())))(signal) == total


def test_plain_steps_tell_nothing_of_accepted_tokens() -> None:
    """The average is over steps that drafted; it was once pulled down by all others."""
    tracker = SignalTracker()
    tracker.start(1.0, 0.5)
    tracker.step(1.0, 0.5, 2)
    for _ in range(50):
        tracker.step(1.0, 0.5, None)
    assert tracker.signal().accepted_ema == pytest.approx(2.0)
    assert tracker.signal().num_steps == 51


@given(st.integers(0, 10**6))
def test_contexts_fall_into_classes(context: int) -> None:
    """Each ends where the next begins; the last has no end."""
    at = context_class(context)
    assert at == len(CONTEXTS) - 1 or context < CONTEXTS[at]
    assert at == 0 or context >= CONTEXTS[at - 1]


# -- ladder ----------------------------------------------------------------------------------------


def test_thresholds_pick_the_tree() -> None:
    """At a threshold the upper level begins, and jumps go all the way."""
    values = [0.0, 0.29, 0.3, 0.69, 0.7, 1.0, 0.0]
    found = names(LadderScheduler(BANK, LADDER), [QUIET._replace(p0=v) for v in values])
    assert found == ["none", "none", "chain1", "chain1", "wide", "wide", "none"]


def test_one_level_is_one_tree() -> None:
    """No threshold is needed."""
    scheduler = LadderScheduler(BANK, LadderParams(("wide",), ()))
    assert names(scheduler, [QUIET] * 3) == ["wide"] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.3,)}, "3 levels need 2 thresholds, not 1"),
        ({"levels": ()}, "0 levels need"),
        ({"thresholds": (0.7, 0.3)}, "thresholds must be numbers that rise"),
        ({"thresholds": (0.3, math.nan)}, "thresholds must be numbers that rise"),
        ({"signal": "mood"}, "the signal is 'mood'; it must be one of entropy, p0"),
        ({"signal": "hit_ema"}, "the level 'none' would never be left"),
    ],
)
def test_ladders_are_checked(changes: dict[str, object], message: str) -> None:
    """The message says which rule is broken."""
    with pytest.raises(InputError, match=message):
        replace(LADDER, **changes)  # type: ignore[arg-type]


def test_a_level_that_the_bank_lacks() -> None:
    """Refused when made, not in the middle of a text."""
    with pytest.raises(BankError, match="no entry 'huge'"):
        LadderScheduler(BANK, LadderParams(("huge",), ()))


# -- throughput ------------------------------------------------------------------------------------


def test_the_class_decides() -> None:
    """Nothing pays where drafts fail; the widest tree does where they are right."""
    scheduler = ThroughputScheduler(BANK, TABLES, COSTS)
    signals = [trusted(share) for share in (0.0, 0.5, 1.0)]
    assert names(scheduler, signals)[0] == "none"
    assert names(scheduler, signals)[2] == "wide"


def test_trees_shrink_as_the_batch_grows() -> None:
    """A row costs each sequence the same in any batch, the rest is shared."""
    shared = replace(
        COSTS,
        forward_ms=tuple(
            tuple(tuple(10 + b * rows * 0.5 for rows in COSTS.rows) for _ in COSTS.contexts)
            for b in COSTS.batches
        ),
    )
    scheduler = ThroughputScheduler(BANK, TABLES, shared)
    sizes = [
        [
            scheduler.choose(scheduler.start(), trusted(share, batch=batch)).plan.num_nodes  # type: ignore[union-attr]
            for batch in (1, 4, 16, 64)
        ]
        for share in (0.0, 0.5, 1.0)
    ]
    assert all(by_batch == sorted(by_batch, reverse=True) for by_batch in sizes)
    assert sizes[1][0] > sizes[1][-1]


def test_a_long_hostile_stretch_is_left_again() -> None:
    """Plain steps bring no news, so ever rarer ones draft the probe; hits lead back."""
    scheduler, tracker = ThroughputScheduler(BANK, TABLES, COSTS), SignalTracker()
    state, found = scheduler.start(), []
    tracker.start(1.0, 0.5)
    for step in range(600):
        is_easy = step >= 300
        decision = scheduler.choose(state, tracker.signal())
        found.append(decision.name)
        is_hit = is_easy if decision.name != "none" else None
        tracker.step(1.0, 0.5, None if is_hit is None else int(is_hit), is_hit)
    hostile = found[found.index("none") : 300]
    assert set(hostile) == {"none", "chain1"}
    probes = [at for at, name in enumerate(hostile) if name == "chain1"]
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps == [2 * PROBE_EVERY, *[MAX_PROBE_EVERY] * (len(gaps) - 1)]
    assert len(gaps) > 2
    assert set(found[-50:]) == {"wide"}


def test_classes_are_kept_for_the_dwell() -> None:
    """A change waits until so many steps have passed since the last one."""
    scheduler = ThroughputScheduler(BANK, replace(TABLES, min_dwell=3), COSTS)
    signals = [trusted(share) for share in (1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0)]
    assert names(scheduler, signals) == ["wide"] * 3 + ["none"] * 3 + ["wide"]


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_requests_do_not_disturb_each_other(shares: list[float]) -> None:
    """Two that take turns get what each gets alone."""
    scheduler = ThroughputScheduler(BANK, TABLES, COSTS)
    one, two = scheduler.start(), scheduler.start()
    signals = [trusted(share) for share in shares]
    pairs = [[scheduler.choose(state, s).name for state in (one, two)] for s in signals]
    assert [pair[0] for pair in pairs] == [pair[1] for pair in pairs] == names(scheduler, signals)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"mood": 1.0}}, "the signal is 'mood'"),
        ({"bounds": (0.7, 0.3)}, "bounds is .*; thresholds must be numbers that rise"),
        ({"bounds": (0.7,)}, r"tokens are \(3, 3\).* must be \(2, 3\)"),
        ({"mean_tokens": (1.0,)}, "mean_tokens 1"),
        ({"gain": 0.0}, "gain must be above 0"),
        ({"min_dwell": 0}, "min_dwell must be at least 1"),
    ],
)
def test_tables_are_checked(changes: dict[str, object], message: str) -> None:
    """The message says which rule is broken."""
    with pytest.raises(InputError, match=message):
        replace(TABLES, **changes)  # type: ignore[arg-type]


# -- chains ----------------------------------------------------------------------------------------


@given(st.floats(0.0, 8.0), st.floats(0.1, 3.0), st.floats(-1.0, 3.0))
def test_chains_are_as_long_as_drafts_were_kept(mean: float, slope: float, offset: float) -> None:
    """``round(slope * mean + offset)`` tokens, within the limits."""
    scheduler = ChainEmaScheduler(ChainEmaParams(slope, offset, 4))
    decision = scheduler.choose(scheduler.start(), QUIET._replace(accepted_ema=mean))
    wished = slope * mean + offset
    assert abs(decision.plan.max_depth - min(max(wished, 0), 4)) <= 0.5 + 1e-9


def test_a_chain_that_faded_comes_back() -> None:
    """One token is drafted after many plain steps, and right ones lengthen the chain."""
    scheduler, tracker = ChainEmaScheduler(ChainEmaParams(2.0, 0.0, 4)), SignalTracker()
    state, found = scheduler.start(), []
    tracker.start(1.0, 0.5)
    for _ in range(100):
        length = scheduler.choose(state, tracker.signal()).plan.max_depth
        found.append(length)
        tracker.step(1.0, 0.5, length or None)
    assert found[: PROBE_EVERY - 1] == [0] * (PROBE_EVERY - 1)
    assert found[PROBE_EVERY - 1] == 1
    assert found[-1] == 4


@pytest.mark.parametrize("codes", [(0, 0, 0), (0, 9, 0), (9, 0, 0), (5, 5, 6), (5, 6, 5)])
def test_a_chain_goes_on_while_the_drafter_is_sure(codes: tuple[int, ...]) -> None:
    """A token at or below the code is drafted, and the first one above it ends the chain."""
    scheduler = ChainThresholdScheduler(ChainThresholdParams(5, 3), COSTS, 100.0)
    plan = scheduler.choose(None, QUIET).plan
    assert isinstance(plan, GrowthPlan)
    grower = Grower(plan)
    num_asked = 0
    for depth, code in enumerate(codes):
        if not grower.open_rows(depth):
            break
        num_asked += 1
        grower.take([depth + 1], [code], [False])
    length = next((n for n, code in enumerate(codes) if code > 5), 3)
    assert grower.keep()[0] == list(range(1, length + 1))
    assert num_asked == min(length + 1, 3)


def test_the_threshold_is_a_probability() -> None:
    """A token of that probability is the last that is not drafted."""
    assert ChainThresholdParams(7, 2).threshold == pytest.approx(math.exp(-1))
    assert ChainThresholdParams(63, 2).threshold == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChainEmaParams(0.0, 1.0, 4), "slope must be above 0"),
        (lambda: ChainEmaParams(1.0, math.nan, 4), "offset finite"),
        (lambda: ChainEmaParams(1.0, 1.0, 0), "max_length at least 1"),
        (lambda: ChainThresholdParams(64, 2), "between 0 and 63"),
        (lambda: ChainThresholdParams(3, 0), "max_length at least 1"),
    ],
)
def test_chains_are_checked(make: object, message: str) -> None:
    """The message says which rule is broken."""
    with pytest.raises(InputError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "document",
    [
        {"levels": ["none"], "thresholds": [], "colour": 1},
        {"levels": ["none"]},
        {"levels": ["none"], "thresholds": [1.0]},
    ],
)
def test_parameters_of_a_bank_are_checked(document: dict[str, object]) -> None:
    """The policy is named."""
    with pytest.raises(BankError, match="policy ladder: not its parameters"):
        read_params(LadderParams, "ladder", document)
