"""Text that defeats all drafts: policies fade to plain decoding, and come back."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from costs import linear_costs
from entmtp.bank import Bank, BankSource, Calibration
from entmtp.calibrate.fit import fit_entries, mean_context
from entmtp.calibrate.fit_policies import fit_policies
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.summary import pack_trace, shorten
from entmtp.calibrate.trace import MISS, NO_COPY, Trace
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal, make_scheduler
from entmtp.scheduler.bands import CONTEXTS, MAX_PROBE_EVERY, PROBE_EVERY, context_class
from entmtp.scheduler.guard import GuardedScheduler
from entmtp.topology import Topology
from fakes import GrowingLookup
from lively import lively_trace

COSTS = linear_costs(row_ms=0.4)
TREE = Topology.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (0, 1)])
QUIET = Signal(0.5, 1.0, 0.5, 1.0, accepted_ema=0.0, num_steps=0)
PRICE = COSTS.step_ms(TREE, 64) / COSTS.step_ms(Topology(()), 64) - 1


@lru_cache
def bank() -> tuple[Bank, Trace]:
    """Fitted to text that can be drafted."""
    trace = shorten(lively_trace(1, num_texts=12))
    entries, scores = fit_entries(trace, COSTS, 8)
    context = mean_context(trace.halves()[0])
    policies = fit_policies(trace, entries, COSTS, context)
    source = BankSource("m", "0", "hydra", "0", "none", "none", "none", 1)
    calibration = Calibration(source, COSTS, context, pack_trace(trace), {}, {}, policies)
    return Bank.of(entries, scores, calibration), trace


def hostile(trace: Trace, copy_class: int) -> Trace:
    """One text of 400 tokens in which no draft is right, however sure the heads are of it."""
    size = 400
    at = np.resize(np.arange(trace.num_tokens), size)
    columns = {
        name: getattr(trace, name)[at]
        for name in ("tokens", "entropy", "p0", "chain", "codes", "copy_node")
    }
    return replace(
        trace,
        facts=replace(trace.facts, max_new_tokens=1000),
        ids=("hostile",),
        tasks=("hostile",),
        offsets=np.array([0, size]),
        prompt_lengths=trace.prompt_lengths[:1],
        ranks=np.full((size, trace.max_depth), MISS, dtype=np.uint8),
        copy_match=np.full(size, copy_class, dtype=np.uint8),
        copy_hits=np.zeros(size, dtype=np.uint8),
        **columns,
    )


@pytest.mark.parametrize("copy_class", [NO_COPY, 0])
@pytest.mark.parametrize("policy", ["auto", "throughput", "dynamic"])
def test_text_that_defeats_drafts_costs_hardly_more_than_plain_decoding(
    policy: str, copy_class: int
) -> None:
    """The heads were right half of the time when the bank was made, and are never right here."""
    made, trace = bank()
    text = hostile(trace, copy_class)
    drafter = GrowingLookup([]) if policy == "dynamic" else PromptLookupDrafter()
    scheduler = make_scheduler(policy, drafter, made)
    found = replay_policy(text, scheduler, lambda tree: COSTS.step_ms(tree, 200))
    plain = replay_policy(text, FixedScheduler.plain(), lambda tree: COSTS.step_ms(tree, 200))
    if policy == "dynamic":  # priced by its plans, at the end of each class of contexts
        plain_ms = sum(_plain_ms(trace, at) for at in range(len(found.steps[0])))
    else:
        plain_ms = plain.cost_ms
    assert len(found.steps[0]) == len(plain.steps[0])
    assert plain_ms / found.cost_ms >= 0.98


def _plain_ms(trace: Trace, at: int) -> float:
    context = float(CONTEXTS[context_class(int(trace.prompt_lengths[0]) + at)])
    return COSTS.step_ms(Topology(()), context)


def played(kept: list[int]) -> list[str]:
    """Names of the decisions where drafts keep so many tokens, step by step."""
    scheduler = GuardedScheduler(FixedScheduler("tree", TREE), COSTS)
    state, names, last = scheduler.start(), [], -1
    for tokens in kept:
        decision: SchedulerDecision = scheduler.choose(state, QUIET._replace(last_accepted=last))
        names.append(decision.name)
        last = -1 if decision.name == "none" else tokens
    return names


def test_drafts_stop_when_they_have_lost_their_credit() -> None:
    """After as many steps as their price allows; then probes, ever rarer."""
    names = played([0] * 300)
    allowed = int(1.5 / PRICE) + 1
    assert names[:allowed] == ["tree"] * allowed
    assert set(names[allowed:]) == {"none", "chain1"}
    probes = [at - allowed + 1 for at, name in enumerate(names) if name == "chain1"]
    gaps = np.diff([0, *probes]).tolist()
    assert gaps == [PROBE_EVERY, 2 * PROBE_EVERY, *[MAX_PROBE_EVERY] * (len(gaps) - 2)]


def test_a_probe_that_is_kept_gives_the_policy_its_way() -> None:
    """As long as it earns its price again."""
    names = played([0] * 30 + [1] * 100)
    assert "none" in names[:30]
    assert set(names[60:]) == {"tree"}


def test_drafts_that_pay_are_never_stopped() -> None:
    """Not by a bad stretch that gains before it have paid for."""
    bad = int(3.0 / PRICE) - 1
    assert set(played(([1, 2] * 10 + [0] * bad) * 3)) == {"tree"}
