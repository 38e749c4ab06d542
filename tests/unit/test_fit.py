"""From a trace and costs to entries: frontiers, winners of bins, predictions, the short form."""

import json
from dataclasses import replace

import numpy as np
import pytest

from costs import linear_costs
from entmtp.bank import Bank
from entmtp.calibrate.compare import compare_banks
from entmtp.calibrate.fit import find_candidates, fit_entries, mean_context, timing_trees
from entmtp.calibrate.grow import GrowParams, grow_all
from entmtp.calibrate.pareto import (
    NUM_BINS,
    acceptance_frontier,
    predicted_ms,
    predicted_rate,
    select_entries,
    throughput_frontier,
)
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import accepted_lengths, rollout_cost
from entmtp.calibrate.summary import pack_trace, shorten, unpack_trace
from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import BankError
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology
from traces import cut_texts, random_trace, with_growth

COSTS = linear_costs()


def fitted(trace: Trace) -> dict[str, Topology]:
    """Entries only."""
    return fit_entries(trace, COSTS, 12)[0]


@pytest.mark.parametrize("window", [0, 60])
def test_the_prediction_is_that_of_replay(window: int) -> None:
    """Step by step, trees cut at the limit of tokens and at the context window."""
    trace = random_trace(1, num_texts=80)
    if window:
        sizes = np.clip(window - trace.prompt_lengths, 1, np.diff(trace.offsets))
        trace = cut_texts(trace, sizes)
        trace = replace(trace, facts=replace(trace.facts, context_window=window))
    flat = replace(COSTS, contexts=(100,), forward_ms=tuple(t[:1] for t in COSTS.forward_ms))
    tree = Topology.from_paths([[0], [1], [0, 0]])
    replayed = replay_policy(trace, FixedScheduler("it", tree), lambda t: flat.step_ms(t, 0))
    assert predicted_ms(trace, tree, flat) == pytest.approx(replayed.cost_ms)
    whole = rollout_cost(trace, tree, lambda t: flat.step_ms(t, 0))
    assert replayed.cost_ms < whole


def test_the_best_tree_of_every_task_is_an_entry() -> None:
    """As it would be in a bank of that task alone."""
    trace = random_trace(3, num_texts=20)
    candidates = find_candidates(trace, grow_all(trace, GrowParams(max_nodes=10)), COSTS)
    entries, scores = select_entries(trace, candidates, COSTS)
    winners = {entries[name] for name, one in scores.items() if "task" in one.source}
    trees = [c.topology for c in candidates if c.topology.num_nodes]
    for part in trace.by_task().values():
        rates = {tree: predicted_rate(part, tree, COSTS) for tree in trees}
        assert max(rates, key=lambda tree: rates[tree]) in winners


@pytest.mark.parametrize("seed", range(5))
def test_frontiers_improve_strictly(seed: int) -> None:
    """By nodes; and nothing that is left out beats what is kept at its size."""
    trace = random_trace(seed)
    candidates = find_candidates(trace, grow_all(trace, GrowParams(max_nodes=10)), COSTS)
    for frontier, value in (
        (acceptance_frontier(candidates), lambda c: c.accept_own),
        (throughput_frontier(candidates), lambda c: c.tokens_per_s),
    ):
        sizes = [c.topology.num_nodes for c in frontier]
        assert sizes == sorted(set(sizes))
        values = [value(c) for c in frontier]
        assert values == sorted(set(values))
        for candidate in candidates:
            if candidate.topology.num_nodes:
                smaller = [
                    value(c)
                    for c in frontier
                    if c.topology.num_nodes <= candidate.topology.num_nodes
                ]
                assert max(smaller) >= value(candidate)


def test_entries_hold_the_best_of_every_bin() -> None:
    """Also trees that the throughput frontier drops."""
    trace = random_trace(3, num_texts=20)
    candidates = find_candidates(trace, grow_all(trace, GrowParams(max_nodes=10)), COSTS)
    entries, scores = select_entries(trace, candidates, COSTS)
    assert entries["none"] == Topology(())
    assert scores["none"].source == ("plain",)
    winners = {n for n, one in scores.items() if "signal" in one.source}
    rate = max(c.tokens_per_s for c in candidates) / 1000
    usable = ~np.isnan(trace.entropy)
    edges = np.quantile(trace.entropy[usable], np.linspace(0, 1, NUM_BINS + 1)[1:-1])
    bins = np.digitize(trace.entropy, edges)
    for number in range(NUM_BINS):
        here = usable & (bins == number)
        gain = {
            c.topology: (accepted_lengths(trace, c.topology)[here] + 1).mean() - rate * c.step_ms
            for c in candidates
        }
        best = max(gain.values())
        assert any(gain[entries[name]] == pytest.approx(best) for name in winners)
    assert sum("best" in one.source for one in scores.values()) == 1


def test_cheaper_rows_give_larger_trees() -> None:
    """The same texts on two machines."""
    trace = random_trace(4, num_texts=30)
    small, large = (
        Bank.of(*fit_entries(trace, linear_costs(row_ms), 12)) for row_ms in (20.0, 0.01)
    )
    assert small.entries[small.best].num_nodes < large.entries[large.best].num_nodes


def test_fitting_depends_on_one_half_only() -> None:
    """Other ranks in the check half change nothing; in the fitting half they do."""
    trace = random_trace(5, num_texts=12)

    def spoiled(texts: list[int]) -> Trace:
        ranks = trace.ranks.copy()
        for text in texts:
            ranks[trace.offsets[text] : trace.offsets[text + 1]] = MISS
        return replace(trace, ranks=ranks)

    keep, check = trace.half_texts()
    assert fitted(spoiled(check)) == fitted(trace)
    assert fitted(spoiled(keep)) != fitted(trace)


def test_the_short_form_keeps_what_fitting_reads() -> None:
    """Ranks and lengths exactly, signals nearly; and shortening again changes nothing."""
    trace = random_trace(6)
    short = shorten(trace)
    assert np.array_equal(short.ranks, trace.ranks)
    assert np.array_equal(short.offsets, trace.offsets)
    assert np.allclose(short.entropy, trace.entropy, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert pack_trace(short) == pack_trace(shorten(short))
    assert mean_context(short) == mean_context(trace)


ENVELOPE = Topology.from_paths([(0,), (1,), (0, 0)])


def test_the_short_form_keeps_the_codes_of_the_envelope_and_the_copies() -> None:
    """Exactly, and says which nodes they are of."""
    trace = with_growth(random_trace(6), ENVELOPE)
    short = unpack_trace(json.loads(json.dumps(pack_trace(trace))))
    for name in ("codes", "copy_match", "copy_hits", "copy_node"):
        assert np.array_equal(getattr(short, name), getattr(trace, name))
    assert short.facts == trace.facts
    assert pack_trace(shorten(short)) == pack_trace(short)


@pytest.mark.parametrize("field", ["ranks", "entropy", "facts", "depth", "codes", "copy_node"])
def test_a_damaged_short_form_is_refused(field: str) -> None:
    """The error says what it should have been."""
    document = pack_trace(with_growth(random_trace(7), ENVELOPE)) | {field: "?"}
    with pytest.raises(BankError, match="not the short form of a trace"):
        unpack_trace(document)
    del document[field]
    with pytest.raises(BankError, match="not the short form of a trace"):
        unpack_trace(document)


def test_timed_trees_cover_sizes_and_depths() -> None:
    """Chains of every depth, small and large trees, none twice."""
    trace = random_trace(8, num_texts=20)
    trees = timing_trees(grow_all(trace, GrowParams(max_nodes=24)))
    assert len(trees) == len(set(trees))
    assert {1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23} <= {tree.num_nodes for tree in trees}
    assert {t.max_depth for t in trees} == {1, 2, 3}


def test_fewer_large_trees_are_timed_in_a_hurry() -> None:
    """One a size, the deepest; the largest of all is among them."""
    grown = grow_all(random_trace(8, num_texts=20), GrowParams(max_nodes=24))
    every, few = timing_trees(grown), timing_trees(grown, is_quick=True)
    sizes = [tree.num_nodes for tree in few if tree.num_nodes > 15]
    assert sizes == [24]
    assert few[-1].max_depth == max(t.topology.max_depth for t in grown[23:])
    assert {tree for tree in few if tree.num_nodes <= 15} == {t for t in every if t.num_nodes <= 15}


def test_bare_banks_cannot_be_compared() -> None:
    """They have no texts."""
    with pytest.raises(BankError, match="not calibrated"):
        compare_banks({"a": Bank.shipped(), "b": Bank.shipped()})
