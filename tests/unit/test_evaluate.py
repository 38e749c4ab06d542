"""What heads are worth, against the same numbers counted one by one."""

from dataclasses import replace

import numpy as np
import pytest

from entmtp.calibrate.evaluate import BUDGETS, POSITION_EDGES, evaluate_heads
from entmtp.calibrate.grow import GrowParams, best_within, grow_all
from entmtp.calibrate.replay import accepted_lengths, self_rollout, walk
from entmtp.calibrate.trace import MISS, Trace
from entmtp.errors import InputError
from entmtp.topology import Topology
from traces import cut_texts, random_trace

PARAMS = GrowParams(max_nodes=12)


def one_task(trace: Trace) -> Trace:
    """The same texts under one name."""
    return replace(trace, tasks=("t",) * trace.num_texts)


def test_trees_grow_on_one_half_and_are_scored_on_the_other() -> None:
    """Texts of even number fit, those of odd number report."""
    trace = one_task(random_trace(1, num_texts=12))
    overall, tasks = evaluate_heads(trace, PARAMS)
    assert tasks == {"t": overall}
    fitting, other = trace.select(range(0, 12, 2)), trace.select(range(1, 12, 2))
    trees = grow_all(fitting, PARAMS)
    assert [budget.nodes for budget in overall.budgets] == [n for n in BUDGETS if n <= 12]
    for budget in overall.budgets:
        best = best_within(trees, budget.nodes)
        assert budget.paths == best.topology.to_list()
        assert budget.fitted == best.own.mean_acceptance_length
        scored = self_rollout(other, Topology.from_paths(budget.paths))
        assert budget.mean_acceptance_length == scored.mean_acceptance_length
        assert budget.ci95 is not None
        assert budget.ci95[0] < budget.mean_acceptance_length < budget.ci95[1]
    headline = self_rollout(other, best_within(trees, 16).topology)
    assert overall.mean_acceptance_length == headline.mean_acceptance_length
    assert (overall.num_prompts, overall.num_tokens) == (6, other.num_tokens)
    assert overall.mean_entropy == pytest.approx(float(np.nanmean(other.entropy)))


def test_shares_and_bins_are_counts() -> None:
    """Of the half that is reported, position by position."""
    trace = one_task(random_trace(2, num_texts=14))
    overall, _ = evaluate_heads(trace, PARAMS)
    other = trace.select(range(1, 14, 2))
    for depth, shares in enumerate(overall.heads):
        ranks = []
        for start, end in zip(other.offsets[:-1], other.offsets[1:], strict=True):
            ranks += other.ranks[start : end - depth - 1, depth].tolist() if end > start else []
        for top in (1, 2, 4, 8):
            assert shares[f"top{top}"] == pytest.approx(np.mean([rank < top for rank in ranks]))
    tree = best_within(grow_all(trace.select(range(0, 14, 2)), PARAMS), 16).topology
    accepted = accepted_lengths(other, tree)
    roots = walk(other, accepted).inner
    kept = accepted[roots]
    for depth, share in enumerate(overall.depths, start=1):
        reached = [length for length in kept if length >= depth - 1]
        assert share == pytest.approx(np.mean([length >= depth for length in reached]))
    positions = []
    for root in roots:
        text = int(np.searchsorted(other.offsets, root, side="right")) - 1
        positions.append(int(other.prompt_lengths[text] + root - other.offsets[text]))
    for found, low, high in zip(
        overall.by_position, POSITION_EDGES, [*POSITION_EDGES[1:], 10**9], strict=True
    ):
        inside = [a + 1 for a, p in zip(kept, positions, strict=True) if low <= p < high]
        assert found.num_steps == len(inside)
        assert found.mean_acceptance_length == (pytest.approx(np.mean(inside)) if inside else None)
    assert sum(found.num_steps for found in overall.by_entropy) == len(roots)


def test_tasks_are_scored_apart() -> None:
    """Each on its own texts; all together are not their mean."""
    trace = random_trace(3, num_texts=16)
    overall, tasks = evaluate_heads(trace, PARAMS)
    assert tasks.keys() == {"a", "b"}
    alone, _ = evaluate_heads(trace.select(range(0, 16, 2)), PARAMS)
    assert tasks["a"] == alone
    assert overall.num_prompts == sum(task.num_prompts for task in tasks.values())


def test_short_texts_give_gaps_instead_of_numbers() -> None:
    """No text reaches the deeper heads; one text alone has no interval; none has no score."""
    trace = one_task(random_trace(4, num_texts=4))
    short = cut_texts(trace, np.array([3, 3, 3, 1]))
    short.ranks[:] = MISS
    short.entropy[:] = 1.0
    overall, _ = evaluate_heads(short, PARAMS)
    assert overall.heads[-1] == {"top1": None, "top2": None, "top4": None, "top8": None}
    assert overall.ci95 is None
    with pytest.raises(InputError, match="too short for a step"):
        evaluate_heads(short.select([0, 3]), PARAMS)
    with pytest.raises(InputError, match="has one prompt"):
        evaluate_heads(short.select([0]), PARAMS)
