"""From runs to what is reported of a method: speed, acceptance, plans, switches, likelihood."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from entmtp.bench.methods import METHODS, PLAIN
from entmtp.bench.runs import Run, Step
from entmtp.bench.statistics import pair_ratios, speed_of, timings_of
from entmtp.bench.tasks import Task

__all__ = ["by_method", "describe_method", "summarize", "switch_cost"]

_PARTS = ("schedule", "draft", "forward", "rest")


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method, in the order in which methods were asked for."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.method, []).append(run)
    return found


def summarize(
    task: Task, runs: Sequence[Run], loaded_bytes: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``results[method]`` and ``ratios["a/b"]`` of a task, as JSON has them.

    Args:
        task: that was measured.
        runs: of all methods, plain decoding among them.
        loaded_bytes: memory that the parts of a method took, where it is known.
    """
    groups = by_method(runs)
    plain = groups[PLAIN]
    results = {
        name: describe_method(task, found, plain, loaded_bytes.get(name))
        for name, found in groups.items()
    }
    ratios = pair_ratios({name: timings_of(found) for name, found in groups.items()})
    return results, {pair: asdict(ratio) for pair, ratio in ratios.items()}


def describe_method(
    task: Task, runs: Sequence[Run], plain: Sequence[Run], loaded_bytes: int | None
) -> dict[str, Any]:
    """All numbers of one method on one task."""
    own = METHODS[runs[0].method]
    base = {run.prompt: run for run in plain if run.repeat == 0}
    same = [run.tokens == base[run.prompt].tokens for run in runs]
    speed = speed_of(timings_of(runs))
    firsts = [turn.prefill_s for run in runs for turn in run.turns]
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return {
        "tokens_per_s": speed.tokens_per_s,
        "ci95": speed.ci95,
        "tokens_per_s_by_repeat": _by_repeat(runs),
        **_acceptance(runs),
        "identical": all(same),
        "num_identical": sum(same),
        "num_runs": len(runs),
        "num_prompts": len({run.prompt for run in runs}),
        **_likelihood(runs, [base[run.prompt] for run in runs]),
        "ttft_s": median(firsts),
        "prefill_s": sum(firsts),
        "decode_s": sum(run.decode_s for run in runs),
        "title": own.title,
        "policy": runs[0].turns[0].policy or None,
        "is_peer": own.peer is not None,
        "peak_bytes": max(peaks, default=None),
        "loaded_bytes": loaded_bytes,
        **_steps([run.steps for run in runs]),
        "prompts": _prompts(task, runs, base),
    }


def switch_cost(texts: Sequence[Sequence[Step]]) -> float | None:
    """Milliseconds that a step takes longer where its plan is not that of the step before.

    Within each plan, and each number of nodes and depth of its trees: the mean step after a change
    minus the mean step without one, weighted by the number of changes to it. ``None`` where none
    has both.
    """
    times: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    for steps in texts:
        for before, step in pairwise(steps):
            has_changed = step.plan != before.plan
            times.setdefault(step.shape, ([], []))[has_changed].append(step.total_ms)
    pairs = [(stays, changes) for stays, changes in times.values() if stays and changes]
    weight = sum(len(changes) for _, changes in pairs)
    if not weight:
        return None
    total = sum(len(changes) * (fmean(changes) - fmean(stays)) for stays, changes in pairs)
    return total / weight


def _by_repeat(runs: Sequence[Run]) -> list[float]:
    """Tokens/s of each repeat on its own."""
    parts: dict[int, list[Run]] = {}
    for run in runs:
        parts.setdefault(run.repeat, []).append(run)
    return [speed_of(timings_of(part)).tokens_per_s for _, part in sorted(parts.items())]


def _acceptance(runs: Sequence[Run]) -> dict[str, Any]:
    """Of the steps themselves where they are known, else of tokens and forwards."""
    num_steps = sum(run.num_steps for run in runs)
    steps = [step for run in runs for step in run.steps]
    emitted = sum(run.num_decoded for run in runs)
    if steps:
        emitted = num_steps + sum(step.accepted for step in steps)
    drafted = sum(step.nodes for step in steps)
    accepted = sum(step.accepted for step in steps)
    return {
        "num_tokens": sum(run.num_tokens for run in runs),
        "num_decoded": sum(run.num_decoded for run in runs),
        "num_steps": num_steps,
        "mean_acceptance_length": emitted / num_steps if num_steps else 1.0,
        "acceptance_rate": accepted / drafted if drafted else None,
        "nodes_per_step": drafted / len(steps) if steps else None,
    }


def _likelihood(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Perplexity of the texts under the target, and the gap to plain texts of the same prompts."""
    own, base = _mean_nll(runs), _mean_nll(plain)
    return {"perplexity": math.exp(own), "nll_nats": own, "gap_nats": own - base}


def _mean_nll(runs: Sequence[Run]) -> float:
    return math.fsum(run.nll for run in runs) / sum(run.num_tokens for run in runs)


def _steps(texts: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Where time went, which plans were taken, how often they changed."""
    steps = [step for text in texts for step in text]
    if not steps:
        return dict.fromkeys(
            ("split_ms", "plan_shares", "num_switches", "num_resizes", "switch_cost_ms")
        )
    pairs = [pair for text in texts for pair in pairwise(text)]
    counts = Counter(step.plan for step in steps)
    return {
        "split_ms": {part: fmean(getattr(step, f"{part}_ms") for step in steps) for part in _PARTS},
        "plan_shares": {plan: count / len(steps) for plan, count in counts.most_common()},
        "num_switches": sum(a.plan != b.plan for a, b in pairs),
        "num_resizes": sum(a.nodes != b.nodes for a, b in pairs),
        "switch_cost_ms": switch_cost(texts),
    }


def _prompts(task: Task, runs: Sequence[Run], base: Mapping[int, Run]) -> list[dict[str, Any]]:
    """One line a prompt and repeat."""
    return [
        {
            "id": task.records[run.prompt].id,
            "repeat": run.repeat,
            "num_decoded": run.num_decoded,
            "decode_s": run.decode_s,
            "prefill_s": sum(turn.prefill_s for turn in run.turns),
            "num_steps": run.num_steps,
            "accepted": sum(step.accepted for step in run.steps) if run.steps else None,
            "num_switches": sum(a.plan != b.plan for a, b in pairwise(run.steps)),
            "identical": run.tokens == base[run.prompt].tokens,
            "nll_nats": run.nll,
        }
        for run in runs
    ]
