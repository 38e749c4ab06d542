"""Fitting of all policies by replay: on one half of the texts, with numbers for both.

All are priced alike: a step with a tree costs what it does at the mean context of the texts. The
clairvoyant bound is that of the bank's own trees; a policy that grows trees or copies is not bound
by it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from entmtp.bank import NONE, Bank
from entmtp.calibrate.fit_chains import (
    chain_ema_automaton,
    chain_threshold_ms,
    fit_chain_ema,
    fit_chain_threshold,
    longest_chain,
)
from entmtp.calibrate.fit_dynamic import fit_dynamic
from entmtp.calibrate.fit_levels import (
    Ladder,
    best_single,
    fit_hysteresis,
    fit_ladder,
    ladders,
    one_signal,
)
from entmtp.calibrate.fit_throughput import fit_throughput, retuned, throughput_automaton
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.simulate import Automaton, Texts, bound_ms, simulate
from entmtp.calibrate.trace import Trace, join_traces
from entmtp.costs import CostTable
from entmtp.growth import GrowthCosts, GrowthRule
from entmtp.scheduler.chains import ChainEmaParams, ChainThresholdParams
from entmtp.scheduler.dynamic import DynamicParams, DynamicScheduler, growth_costs
from entmtp.scheduler.guard import GuardedScheduler
from entmtp.scheduler.hysteresis import HysteresisParams
from entmtp.scheduler.ladder import LadderParams
from entmtp.scheduler.reading import read_params
from entmtp.scheduler.registry import best_policy
from entmtp.scheduler.throughput import ThroughputParams, ThroughputScheduler
from entmtp.topology import Topology

__all__ = ["BOUND", "fit_policies", "policy_rates", "rescale_policies"]

BOUND = "clairvoyant"
"""Name of the bound among the policies of a bank; nobody can decode by it."""

Progress = Callable[[int, int], None]
Params = Mapping[str, Any]

_NUM_STAGES = 7
_REPLAYED = 24  # texts on which dynamic is replayed where costs have changed a little


@dataclass(frozen=True)
class _Ground:
    """What policies are replayed on."""

    trace: Trace
    texts: Texts
    numbers: dict[str, int]
    chains: tuple[int, ...]

    @classmethod
    def of(
        cls, trace: Trace, entries: Mapping[str, Topology], costs: CostTable, context: float
    ) -> "_Ground":
        """Trees are those of the bank and all chains."""
        chains = [Topology.chain(length) for length in range(trace.max_depth + 1)]
        trees = list(dict.fromkeys([*entries.values(), *chains]))
        numbers = {name: trees.index(tree) for name, tree in entries.items()}
        texts = Texts(trace, trees, costs, context)
        return cls(trace, texts, numbers, tuple(trees.index(tree) for tree in chains))

    def rate(self, ms: float) -> float:
        """Tokens a second."""
        return 1000 * self.texts.num_tokens / max(ms, 1e-9)

    def name(self, number: int) -> str:
        """Of an entry."""
        return next(name for name, other in self.numbers.items() if other == number)


def fit_policies(
    trace: Trace,
    entries: Mapping[str, Topology],
    costs: CostTable,
    context: float,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Parameters and tokens a second of every policy that the trace allows, as JSON has them.

    Args:
        trace: in its short form.
        entries: of the bank, the empty tree too.
        costs: of steps.
        context: committed tokens of the mean step.
        progress: told the stages done and their number.
    """
    halves = trace.halves()
    fitting, check = (_Ground.of(half, entries, costs, context) for half in halves)
    found: dict[str, Params] = {}
    for stage, fitted in enumerate(_fits(fitting)):
        found |= fitted
        progress(min(stage + 1, _NUM_STAGES - 1), _NUM_STAGES)
    rates = [_rates(ground, found) for ground in (fitting, check)]
    policies = {
        name: {
            "params": params,
            "fit_tokens_per_s": rates[0][name],
            "check_tokens_per_s": rates[1][name],
            "headroom_share": _share(rates[1], name),
        }
        for name, params in found.items()
    }
    progress(_NUM_STAGES, _NUM_STAGES)
    normal: dict[str, Any] = json.loads(json.dumps(policies))
    return normal


def policy_rates(
    trace: Trace,
    entries: Mapping[str, Topology],
    policies: Mapping[str, Any],
    costs: CostTable,
    context: float,
) -> dict[str, float]:
    """Tokens a second of fitted policies on other texts, the bound among them."""
    ground = _Ground.of(trace, entries, costs, context)
    return _rates(ground, {name: found["params"] for name, found in policies.items()})


def rescale_policies(
    trace: Trace,
    entries: Mapping[str, Topology],
    policies: Mapping[str, Any],
    costs: tuple[CostTable, CostTable],
    context: float,
) -> dict[str, Any]:
    """The policies of a bank whose costs have changed a little; little is fitted again.

    ``throughput`` has its gain tuned. ``dynamic`` is replayed on a few texts only, before and now;
    its rates change as these do. The policy that was best keeps the mark ``was_best``, so that
    ``auto`` leaves it for a clear lead.

    Args:
        trace: of all texts.
        entries: of the bank.
        policies: of the bank.
        costs: before and now.
        context: committed tokens of the mean step.
    """
    if not policies:
        return {}
    ratio = 1.0
    was_best = best_policy(policies)
    new = {name: dict(found) for name, found in policies.items()}
    others = {name: found for name, found in new.items() if name != "dynamic"}
    if "dynamic" in policies:
        before = DynamicParams.from_dict(policies["dynamic"]["params"])
        pace = _mean_step_ms(before, costs[0]) / _mean_step_ms(before, costs[1])
        now = replace(before, rate=before.rate * pace)
        part = _some_texts(trace)
        ms = [
            _dynamic_ms(part, params, table, context)
            for params, table in zip((before, now), costs, strict=True)
        ]
        ratio = ms[0] / max(ms[1], 1e-9)
        new["dynamic"]["params"] = json.loads(json.dumps(now.as_dict()))
    fitting, check = (_Ground.of(half, entries, costs[1], context) for half in trace.halves())
    single = best_single(fitting.texts, list(fitting.numbers.values()))
    others["fixed"]["params"] = {"entry": fitting.name(_first(single))}
    if "throughput" in others:
        old = read_params(ThroughputParams, "throughput", others["throughput"]["params"])
        tuned = retuned(fitting.texts, old, fitting.numbers)
        others["throughput"]["params"] = json.loads(json.dumps(asdict(tuned)))
    for ground, key in ((fitting, "fit_tokens_per_s"), (check, "check_tokens_per_s")):
        rates = _rates(ground, {name: found["params"] for name, found in others.items()})
        if "dynamic" in policies:
            rates["dynamic"] = policies["dynamic"][key] * ratio
        for name, rate in rates.items():
            new[name][key] = rate
    for name in new:  # the check half came last
        new[name]["headroom_share"] = _share(rates, name)
    new[was_best]["was_best"] = True
    return new


def _fits(ground: _Ground) -> Iterator[dict[str, Params]]:
    """Parameters, stage by stage."""
    texts, numbers, trace = ground.texts, ground.numbers, ground.trace
    trees = list(numbers.values())
    single = best_single(texts, trees)
    best = ground.name(_first(single))
    yield {"plain": {}, "fixed": {"entry": best}, BOUND: {}}
    found = ladders(texts, trees, single)
    yield {"ladder": _ladder_params(ground, single, found)}
    yield {"hysteresis": _hysteresis_params(ground, single, found)}
    yield {"throughput": asdict(fit_throughput(texts, numbers, single)[0])}
    yield {"chain-ema": asdict(fit_chain_ema(texts, ground.chains)[0])}
    costs, context = texts.costs, texts.context
    if longest_chain(trace):
        yield {"chain-threshold": asdict(fit_chain_threshold(trace, costs, context)[0])}
    if trace.facts.envelope:
        yield {"dynamic": fit_dynamic(trace, costs, context).as_dict()}


def _first(single: Automaton) -> int:
    """The tree of a policy with one."""
    tree = single.choices[0]
    assert isinstance(tree, int)  # noqa: S101 - made with trees by level
    return tree


def _ladder_params(ground: _Ground, single: Automaton, found: list[Ladder]) -> Params:
    ladder, _ = fit_ladder(ground.texts, found, single)
    if ladder is None:
        return asdict(LadderParams((ground.name(_first(single)),), ()))
    names = tuple(ground.name(tree) for tree in ladder.trees)
    return asdict(LadderParams(names, ladder.automaton.up, ladder.signal))


def _hysteresis_params(ground: _Ground, single: Automaton, found: list[Ladder]) -> Params:
    best, _ = fit_hysteresis(ground.texts, found, single)
    if best is None:
        name = ground.name(_first(single))
        return asdict(HysteresisParams((name,), (), (), min_dwell=1, start_level=0))
    ladder, banded = best
    names = tuple(ground.name(tree) for tree in ladder.trees)
    return asdict(
        HysteresisParams(
            names, banded.up, banded.down, banded.min_dwell, banded.start, ladder.signal
        )
    )


def _rates(ground: _Ground, found: Mapping[str, Params]) -> dict[str, float]:
    """Tokens a second of each policy."""
    texts, trace = ground.texts, ground.trace
    automata = {
        name: automaton
        for name, params in found.items()
        if (automaton := _automaton(ground, name, params)) is not None
    }
    ms = dict(zip(automata, simulate(texts, list(automata.values())).tolist(), strict=True))
    if BOUND in found:
        ms[BOUND] = _bound_of_entries(ground)
    if "chain-threshold" in found:
        chain = read_params(ChainThresholdParams, "chain-threshold", found["chain-threshold"])
        ms["chain-threshold"] = chain_threshold_ms(trace, chain, texts.costs, texts.context)
    if "throughput" in found:
        ms["throughput"] = _guarded_ms(ground, found["throughput"])
    if "dynamic" in found:
        dynamic = DynamicParams.from_dict(found["dynamic"])
        ms["dynamic"] = _dynamic_ms(trace, dynamic, texts.costs, texts.context)
    return {name: ground.rate(ms[name]) for name in found}


def _guarded_ms(ground: _Ground, params: Params) -> float:
    """Milliseconds of ``throughput`` as it decodes, behind its guard."""
    texts = ground.texts
    bank = Bank.of({name: texts.trees[number] for name, number in ground.numbers.items()})
    tables = read_params(ThroughputParams, "throughput", params)
    scheduler = GuardedScheduler(ThroughputScheduler(bank, tables, texts.costs), texts.costs)
    price = lru_cache(lambda tree: texts.costs.step_ms(tree, texts.context))
    return replay_policy(ground.trace, scheduler, price).cost_ms


def _automaton(ground: _Ground, name: str, params: Params) -> Automaton | None:
    """A policy over fixed trees as arrays have it; ``None`` for the others."""
    numbers = ground.numbers
    if name in ("plain", "fixed"):
        return Automaton((numbers[params.get("entry", NONE)],))
    if name == "ladder":
        ladder = read_params(LadderParams, name, params)
        levels = tuple(numbers[level] for level in ladder.levels)
        bounds = ladder.thresholds
        return Automaton(levels, one_signal(ladder.signal), bounds, bounds)
    if name == "hysteresis":
        bands = read_params(HysteresisParams, name, params)
        return Automaton(
            tuple(numbers[level] for level in bands.levels),
            one_signal(bands.signal),
            tuple(bands.up_at),
            tuple(bands.down_below),
            bands.min_dwell,
            jumps=False,
            start=bands.start_level,
        )
    if name == "throughput":
        tables = read_params(ThroughputParams, name, params)
        return throughput_automaton(ground.texts, tables, numbers)
    if name == "chain-ema":
        return chain_ema_automaton(read_params(ChainEmaParams, name, params), ground.chains)
    return None


def _bound_of_entries(ground: _Ground) -> float:
    """Milliseconds of the clairvoyant over the bank's own trees."""
    trees = [ground.texts.trees[number] for number in ground.numbers.values()]
    return bound_ms(Texts(ground.trace, trees, ground.texts.costs, ground.texts.context))


def _share(rates: Mapping[str, float], name: str) -> float | None:
    """Of the way from the best single tree to the bound; ``None`` where there is none."""
    way = rates[BOUND] - rates["fixed"]
    return (rates[name] - rates["fixed"]) / way if way > 1e-6 * rates[BOUND] else None


def _prices(costs: CostTable, context: float) -> Callable[[GrowthRule], GrowthCosts]:
    """Steps with grown trees at one context."""
    return lambda rule: growth_costs(
        costs, rule.envelope.max_depth, rule.max_nodes, context, batch=1
    )


def _dynamic_ms(trace: Trace, params: DynamicParams, costs: CostTable, context: float) -> float:
    """Milliseconds of all texts, by replay."""
    scheduler = DynamicScheduler(params, costs)
    return replay_policy(trace, scheduler, prices=_prices(costs, context)).cost_ms


def _some_texts(trace: Trace) -> Trace:
    """A few texts of the check half, as many of each task as may be."""
    by_task = trace.halves()[1].by_task().values()
    each = max(1, _REPLAYED // max(len(by_task), 1))
    parts = [part.select(range(0, part.num_texts, -(-part.num_texts // each))) for part in by_task]
    return join_traces(parts)


def _mean_step_ms(params: DynamicParams, costs: CostTable) -> float:
    size = round(params.mean_nodes)
    prices = growth_costs(costs, 1, size, params.context, 1)
    return float(prices.rows[size] + prices.draft[0])
