"""Fitting of policies: arrays agree with replay, and nothing is worse than one tree."""

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costs import linear_costs
from entmtp.bank import Bank, BankSource, Calibration
from entmtp.calibrate import fit_dynamic as fit_dynamic_module
from entmtp.calibrate import fit_levels
from entmtp.calibrate.fit import fit_entries, mean_context
from entmtp.calibrate.fit_chains import chain_threshold_ms, longest_chain
from entmtp.calibrate.fit_dynamic import fit_dynamic
from entmtp.calibrate.fit_policies import BOUND, fit_policies, policy_rates, rescale_policies
from entmtp.calibrate.paid import paid_signal
from entmtp.calibrate.policies import PolicyReplay, replay_policy
from entmtp.calibrate.simulate import Automaton, Texts, bound_ms, simulate
from entmtp.calibrate.summary import pack_trace, shorten
from entmtp.calibrate.trace import Trace
from entmtp.drafters.base import Drafter
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.errors import BankError, InputError, TraceError
from entmtp.growth import GrowthPlan
from entmtp.scheduler import (
    POLICIES,
    SIGNALS,
    ChainThresholdParams,
    ChainThresholdScheduler,
    FixedScheduler,
    HysteresisParams,
    HysteresisScheduler,
    LadderParams,
    LadderScheduler,
    SchedulerDecision,
    Signal,
    make_scheduler,
)
from entmtp.scheduler.dynamic import DynamicScheduler
from entmtp.scheduler.registry import best_policy
from entmtp.topology import Topology
from fakes import GrowingLookup
from lively import ENVELOPE, lively_trace
from traces import cut_texts

COSTS = linear_costs(row_ms=1.5)
TREES = (
    Topology(()),
    Topology.chain(1),
    Topology.chain(3),
    Topology.from_paths([(0,), (1,), (0, 0), (1, 0)]),
    Topology.from_paths([(1,), (2,)]),
)
FITTED = tuple(policy for policy in POLICIES if policy != "auto")
SEEDS = range(6)


class OnePlan:
    """Grows by one plan at every step."""

    policy = "one"

    def __init__(self, plan: GrowthPlan) -> None:
        self._decision = SchedulerDecision("it", plan)

    def start(self) -> None:
        return None

    def choose(self, state: None, signal: Signal) -> SchedulerDecision:
        return self._decision


@lru_cache
def fitted(seed: int = 1) -> tuple[Trace, dict[str, Topology], float, dict[str, Any]]:
    """A trace, entries, the mean context and the policies."""
    trace = shorten(lively_trace(seed))
    entries, _ = fit_entries(trace, COSTS, 8)
    context = mean_context(trace.halves()[0])
    return trace, entries, context, fit_policies(trace, entries, COSTS, context)


def bank_of(policies: dict[str, Any]) -> Bank:
    """A calibrated bank."""
    trace, _, context, _ = fitted()
    entries, scores = fit_entries(trace, COSTS, 8)
    source = BankSource("m", "0", "hydra", "0", "none", "none", "none", 1)
    calibration = Calibration(source, COSTS, context, pack_trace(trace), {}, {}, policies)
    return Bank.of(entries, scores, calibration)


# -- arrays against replay -------------------------------------------------------------------------


@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("seed", SEEDS)
def test_simulated_policies_are_replayed_ones(seed: int, signal: str) -> None:
    """The same milliseconds for ladders and bands at random thresholds, trees cut at the limit."""
    trace, rng = shorten(lively_trace(seed, num_texts=5)), random.Random(seed)
    names = {f"t{at}": tree for at, tree in enumerate(TREES)}
    bank, context = Bank.of(names), 120.0
    weights = tuple(float(signal == other) for other in SIGNALS)
    automata, schedulers = [], []
    for _ in range(4):
        size = rng.randint(2, 4)
        levels = [rng.randrange(len(TREES)) for _ in range(size)]
        limits = (0.2, 0.9) if signal == "hit_ema" else (-2.0, 1.5)
        low = sorted(rng.uniform(*limits) for _ in range(size - 1))
        high = tuple(value + rng.uniform(0.01, 0.02) for value in low)
        high = tuple(sorted(high))
        dwell, start = rng.randint(1, 4), rng.randrange(size)
        entries = tuple(f"t{at}" for at in levels)
        bands = HysteresisParams(entries, high, tuple(low), dwell, start, signal)
        schedulers += [
            LadderScheduler(bank, LadderParams(entries, tuple(low), signal)),
            HysteresisScheduler(bank, bands),
        ]
        automata += [
            Automaton(tuple(levels), weights, tuple(low), tuple(low)),
            Automaton(tuple(levels), weights, high, tuple(low), dwell, jumps=False, start=start),
        ]
    texts = Texts(trace, TREES, COSTS, context)
    found = simulate(texts, automata)
    assert len(set(found.tolist())) > 2
    for scheduler, ms in zip(schedulers, found.tolist(), strict=True):
        replayed = replay_policy(trace, scheduler, lambda tree: COSTS.step_ms(tree, context))
        assert replayed.cost_ms == pytest.approx(ms, rel=1e-12)


@pytest.mark.parametrize("policy", FITTED)
@pytest.mark.parametrize("seed", [1, 2])
def test_predicted_rates_are_those_of_replay(policy: str, seed: int) -> None:
    """Through the scheduler that decoding would use, on the half that was not fitted."""
    trace, entries, context, policies = fitted(seed)
    source = BankSource("m", "0", "hydra", "0", "none", "none", "none", 1)
    calibration = Calibration(source, COSTS, context, {}, {}, {}, policies)
    bank = Bank.of(entries, {}, calibration)
    scheduler = make_scheduler(policy, GrowingLookup([]), bank)
    if policy == "dynamic":  # priced by its plans without, at the end of each class of contexts
        return
    check = trace.halves()[1]
    replayed = replay_policy(check, scheduler, lambda tree: COSTS.step_ms(tree, context))
    rate = 1000 * replayed.num_tokens / replayed.cost_ms
    assert policies[policy]["check_tokens_per_s"] == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_of_trees_beats_the_bound(seed: int) -> None:
    """Random policies, and the best single tree."""
    texts = Texts(lively_trace(seed), TREES, COSTS, 120.0)
    rng = random.Random(seed)
    automata = [
        Automaton((0, 1, 2, 3), weights, (-1.0, 0.2, 0.6), (-1.0, 0.2, 0.6))
        for weights in (tuple(rng.uniform(-1, 1) for _ in SIGNALS) for _ in range(20))
    ]
    automata += [Automaton((tree,)) for tree in range(len(TREES))]
    assert 0 < bound_ms(texts) < simulate(texts, automata).min()


def test_the_bound_of_one_tree_is_that_tree() -> None:
    """There is nothing to choose."""
    trace = lively_trace(3)
    for tree in TREES:
        texts = Texts(trace, [tree], COSTS, 120.0)
        assert bound_ms(texts) == pytest.approx(float(simulate(texts, [Automaton((0,))])[0]))


@pytest.mark.parametrize("seed", SEEDS)
def test_thresholds_on_chains_are_priced_as_grown(seed: int) -> None:
    """The sums over arrays are what replay finds step by step."""
    trace = lively_trace(seed, num_texts=4)
    rng = random.Random(seed)
    for _ in range(4):
        params = ChainThresholdParams(rng.randrange(64), rng.randint(1, 3))
        replayed = replay_policy(trace, ChainThresholdScheduler(params, COSTS, 120.0))
        ms = chain_threshold_ms(trace, params, COSTS, 120.0)
        assert ms == pytest.approx(replayed.cost_ms, rel=1e-12)


# -- an envelope that is part of the trace's -------------------------------------------------------


def test_a_part_of_the_envelope_can_be_grown() -> None:
    """Each node reads its own column; a whole part grows what a fixed tree of its shape is."""
    trace = lively_trace(2, num_texts=4)
    part = Topology.from_paths([(0,), (0, 0), (0, 1)])
    grown = replay_policy(trace, OnePlan(GrowthPlan.whole(part)))
    assert grown.counts == replay_policy(trace, FixedScheduler("it", part)).counts
    assert longest_chain(trace) == 3


def test_a_path_that_the_envelope_lacks() -> None:
    """It is named."""
    plan = GrowthPlan.whole(Topology.from_paths([(0,), (2,)]))
    with pytest.raises(TraceError, match=r"lacks the path \[2\]"):
        replay_policy(lively_trace(2), OnePlan(plan))


# -- what is fitted --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_policy_is_worse_than_the_best_tree(seed: int) -> None:
    """On the texts that were fitted, since one tree is a special case of each."""
    policies = fitted(seed)[3]
    rates = {name: found["fit_tokens_per_s"] for name, found in policies.items()}
    for name in ("ladder", "hysteresis", "throughput"):
        assert rates[name] >= rates["fixed"] * (1 - 1e-12)
    assert rates["plain"] <= rates["fixed"] < rates[BOUND]
    assert policies["fixed"]["headroom_share"] == 0.0
    assert policies[BOUND]["headroom_share"] == 1.0


@pytest.mark.parametrize("lead", [0.0, 1.0])
def test_thresholds_take_the_place_of_a_tree_where_they_lead_clearly(
    lead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they do not, ladder and hysteresis are the best single tree, on new texts too."""
    trace, entries, context, _ = fitted()
    monkeypatch.setattr(fit_levels, "_LEAST_LEAD", lead)
    policies = fit_policies(trace, entries, COSTS, context)
    rates = {name: found["check_tokens_per_s"] for name, found in policies.items()}
    for name in ("ladder", "hysteresis"):
        assert (rates[name] == rates["fixed"]) is (lead == 1.0)


def test_policies_find_the_stretches() -> None:
    """Where the text changes between easy and hard, switching pays on new texts too."""
    policies = fitted()[3]
    for name in ("ladder", "hysteresis", "throughput", "chain-threshold"):
        assert policies[name]["check_tokens_per_s"] > 1.02 * policies["fixed"]["check_tokens_per_s"]


def test_equal_texts_and_costs_give_equal_parameters() -> None:
    """To the last bit, and through JSON."""
    trace, entries, context, policies = fitted()
    calls: list[tuple[int, int]] = []
    again = fit_policies(
        trace, entries, COSTS, context, lambda done, total: calls.append((done, total))
    )
    assert again == policies == json.loads(json.dumps(policies))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1]


def test_a_trace_without_codes_has_no_policies_that_grow() -> None:
    """As prompt lookup has none."""
    trace, entries, context, _ = fitted()
    facts = trace.facts.__class__(**trace.facts.__dict__ | {"envelope": ()})
    bare = trace.__class__(
        **trace.__dict__ | {"facts": facts, "codes": np.zeros((trace.num_tokens, 0), np.uint8)}
    )
    policies = fit_policies(bare, entries, COSTS, context)
    assert set(policies) == {*FITTED, BOUND} - {"dynamic", "chain-threshold"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_texts_that_are_hardly_any(size: int) -> None:
    """Nothing to learn from is no error."""
    trace = lively_trace(1, num_texts=4)
    short = shorten(cut_texts(trace, np.full(4, size)))
    entries = {"none": Topology(()), "chain1": Topology.chain(1)}
    assert set(fit_policies(short, entries, COSTS, 100.0)) == {*FITTED, BOUND}


def test_costs_that_doubled_halve_all_rates() -> None:
    """What was fitted stays, and time is worth half as much."""
    trace, entries, context, policies = fitted()
    doubled = COSTS.scaled((1,), (2.0,), 2.0)
    scaled = rescale_policies(trace, entries, policies, (COSTS, doubled), context)
    for name, found in scaled.items():
        for key in ("fit_tokens_per_s", "check_tokens_per_s"):
            assert found[key] == pytest.approx(policies[name][key] / 2, rel=1e-6)
        assert found["headroom_share"] == pytest.approx(policies[name]["headroom_share"])
    assert scaled["dynamic"]["params"]["rate"] == pytest.approx(
        policies["dynamic"]["params"]["rate"] / 2
    )
    assert scaled["throughput"]["params"] == policies["throughput"]["params"]
    assert rescale_policies(trace, entries, {}, (COSTS, doubled), context) == {}


@pytest.mark.parametrize("factors", [(1.0, 1.4, 1.0), (1.0, 1.0, 2.5), (1.3, 1.0, 0.5)])
def test_costs_that_changed_unevenly_change_rates_as_replay_has_it(
    factors: tuple[float, float, float],
) -> None:
    """Also that of ``dynamic``, which is replayed on a few texts only."""
    trace, entries, context, policies = fitted()
    first, later, draft = factors
    changed = COSTS.scaled((1, 2), (first, later), draft)
    scaled = rescale_policies(trace, entries, policies, (COSTS, changed), context)
    check = trace.halves()[1]
    exact = policy_rates(check, entries, scaled, changed, context)
    for name, found in scaled.items():
        allowed = 0.05 if name == "dynamic" else 1e-9
        assert found["check_tokens_per_s"] == pytest.approx(exact[name], rel=allowed)


def test_the_best_policy_stays_so_until_another_leads_clearly() -> None:
    """By more than replay of a few texts may be wrong."""
    rates = {"fixed": 100.0, "dynamic": 102.0, "throughput": 104.0}
    policies = {name: {"check_tokens_per_s": rate} for name, rate in rates.items()}
    assert best_policy(policies) == "throughput"
    policies["dynamic"]["was_best"] = True
    assert best_policy(policies) == "dynamic"
    assert best_policy(policies, can_grow=False) == "throughput"
    policies["throughput"]["check_tokens_per_s"] = 106.0
    assert best_policy(policies) == "throughput"


# -- by name ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", FITTED)
def test_every_fitted_policy_can_be_made(policy: str) -> None:
    """From the bank, also once it was written and read."""
    bank = bank_of(fitted()[3])
    scheduler = make_scheduler(policy, GrowingLookup([]), bank)
    assert scheduler.policy == ("fixed" if policy == "plain" else policy)


@pytest.mark.parametrize("best", FITTED)
def test_auto_takes_the_fastest(best: str) -> None:
    """By the texts of the check; what only was fitted well is not taken."""
    policies = {
        name: found | {"check_tokens_per_s": 2.0 if name == best else 1.0}
        for name, found in fitted()[3].items()
    }
    policies[BOUND]["check_tokens_per_s"] = 9.0
    bank = bank_of(policies)
    scheduler = make_scheduler("auto", GrowingLookup([]), bank)
    assert scheduler.policy == ("fixed" if best == "plain" else best)
    if best in ("dynamic", "chain-threshold"):
        scheduler = make_scheduler("auto", PromptLookupDrafter(), bank)
        assert scheduler.policy not in ("dynamic", "chain-threshold")


def test_without_policies_auto_is_the_best_tree() -> None:
    """As of banks that were scored by decoding."""
    bank = bank_of({})
    scheduler = make_scheduler("auto", PromptLookupDrafter(), bank)
    assert scheduler.policy == "fixed"
    signal = Signal(0.5, 1.0, 0.5, 1.0, accepted_ema=0.0, num_steps=0)
    assert scheduler.choose(scheduler.start(), signal).name == bank.best


@pytest.mark.parametrize(
    ("policy", "drafter", "has_policies", "error", "message"),
    [
        ("dynamic", PromptLookupDrafter(), True, InputError, "with probabilities, which lookup"),
        ("chain-threshold", PromptLookupDrafter(), True, InputError, "draft with heads, or use"),
        ("ladder", PromptLookupDrafter(), False, BankError, "no parameters of the policy 'ladder'"),
        ("speed", PromptLookupDrafter(), True, InputError, "must be one of auto, plain, fixed"),
    ],
)
def test_policies_that_cannot_be_made(
    policy: str, drafter: Drafter, has_policies: bool, error: type[Exception], message: str
) -> None:
    """The policy, what is missing, and the way out are named."""
    bank = bank_of(fitted()[3] if has_policies else {})
    with pytest.raises(error, match=message):
        make_scheduler(policy, drafter, bank)


@pytest.mark.parametrize("policy", ["ladder", "throughput", "dynamic", "chain-ema"])
def test_fitted_policies_need_a_calibrated_bank(policy: str) -> None:
    """Shipped trees have no parameters."""
    for bank in (None, Bank.shipped()):
        with pytest.raises(InputError, match=f"'{policy}' needs a calibrated bank.*calibrate"):
            make_scheduler(policy, PromptLookupDrafter(), bank)


# -- paid signals ----------------------------------------------------------------------------------


@given(st.integers(0, 30))
def test_paid_signals_follow_the_chain(seed: int) -> None:
    """q2 changes the value of a path of depth 2 and the expected length, not the value at 1."""
    trace = lively_trace(seed, num_texts=3)
    other = trace.__class__(**trace.__dict__ | {"chain": trace.chain * np.float16([1, 0.5, 1])})
    rows = ~np.isnan(trace.entropy)
    for name, is_changed in (
        ("path_value@1", False),
        ("path_value@2", True),
        ("path_value@3", True),
        ("expected_length", True),
    ):
        before, after = (paid_signal(one, name)[rows] for one in (trace, other))
        assert (after < before).all() == is_changed
        assert is_changed or (after == before).all()
    value = paid_signal(trace, "path_value@2")[rows]
    chain = trace.chain[rows].astype(np.float64)
    assert value == pytest.approx(trace.p0[rows] * chain[:, 0] * chain[:, 1])


@pytest.mark.parametrize("name", ["path_value@9", "path_value@0", "path_value", "entropy"])
def test_unknown_paid_signals(name: str) -> None:
    """The message lists those that the chain gives."""
    with pytest.raises(InputError, match="must be expected_length or path_value@1 to path_value@3"):
        paid_signal(lively_trace(1), name)
    assert ENVELOPE.max_depth == 3


def test_the_parameters_of_dynamic_are_those_that_replay_found_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not others that follow from them and were never tried."""
    tried: dict[float, dict[str, Any]] = {}

    def watched(trace: Trace, scheduler: DynamicScheduler) -> PolicyReplay:
        found = replay_policy(trace, scheduler)
        tried.setdefault(found.cost_ms, scheduler._params.as_dict())
        return found

    monkeypatch.setattr(fit_dynamic_module, "replay_policy", watched)
    found = fit_dynamic(shorten(lively_trace(2)), COSTS, 100.0)
    assert len(tried) > 3
    assert found.as_dict() == tried[min(tried)]
