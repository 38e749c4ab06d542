"""Pictures of a run; matplotlib only through :mod:`entmtp.plotting` (extra ``bench``)."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from entmtp.bench.runs import Run, Step
from entmtp.plotting import new_figure

__all__ = ["draw_costs", "draw_headroom", "draw_speeds", "draw_strip", "row_costs"]

_LEAST_STEPS = 5  # of one size, for a median


def draw_speeds(results: Mapping[str, Mapping[str, Any]]) -> Any:
    """Tokens/s of every method, a panel a task."""
    names = list(dict.fromkeys(name for found in results.values() for name in found))
    figure = new_figure(2.2 + 2.8 * len(results), 1.2 + 0.28 * len(names))
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    places = {name: -at for at, name in enumerate(names)}
    for panel, (task, found) in zip(panels, results.items(), strict=True):
        for name, one in found.items():
            rate = one["tokens_per_s"]
            low, high = one["ci95"] or (rate, rate)
            panel.barh(
                places[name],
                rate,
                xerr=[[max(rate - low, 0.0)], [max(high - rate, 0.0)]],
                color="tab:gray" if one["is_peer"] else "tab:blue",
                alpha=0.75,
                error_kw={"linewidth": 1, "capsize": 2},
            )
        panel.set_title(task, fontsize="medium")
        panel.set_xlabel("tokens/s")
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0].set_yticks([places[name] for name in names], names)
    return figure


def draw_strip(run: Run) -> Any:
    """One text, step by step: entropy of the root, nodes drafted, tokens kept."""
    steps = run.steps
    figure = new_figure(max(7.0, min(2 + 0.12 * len(steps), 20.0)), 5.0)
    entropy, drafted, kept = figure.subplots(3, 1, sharex=True)
    places = list(range(1, len(steps) + 1))
    entropy.plot(places, [step.entropy for step in steps], color="tab:blue", linewidth=1)
    entropy.set_ylabel("entropy, nats")
    for at, plan in enumerate(dict.fromkeys(step.plan for step in steps)):
        own = [(place, step.nodes) for place, step in zip(places, steps, strict=True)]
        shown = [pair for pair, step in zip(own, steps, strict=True) if step.plan == plan]
        drafted.bar(*zip(*shown, strict=True), color=f"C{at % 10}", label=plan, alpha=0.75)
    drafted.set_ylabel("nodes drafted")
    drafted.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    kept.bar(places, [step.accepted for step in steps], color="dimgray", alpha=0.75)
    kept.set_ylabel("tokens kept")
    kept.set_xlabel("step")
    kept.locator_params(axis="x", integer=True)
    return figure


def draw_headroom(headroom: Mapping[str, Mapping[str, float | None]]) -> Any:
    """Share of the way from the best single tree to the clairvoyant, by task and method."""
    names = list(dict.fromkeys(name for found in headroom.values() for name in found))
    figure = new_figure(2.4 + 0.5 * len(names) * max(len(headroom), 1), 3.6)
    axes = figure.subplots()
    width = 0.8 / max(len(headroom), 1)
    for at, (task, found) in enumerate(headroom.items()):
        shown = [(x, found.get(name)) for x, name in enumerate(names)]
        known = [(x + (at + 0.5) * width - 0.4, y) for x, y in shown if y is not None]
        if known:
            axes.bar(*zip(*known, strict=True), width=width, label=task)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("share of the headroom")
    axes.legend(fontsize="small")
    return figure


def draw_costs(by_task: Mapping[str, Mapping[int, float]], tables: Mapping[str, Any]) -> Any:
    """Milliseconds of checking by rows: as decoding had them, and as the banks have them."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for at, (task, found) in enumerate(by_task.items()):
        axes.plot(
            list(found), list(found.values()), "o", color=f"C{at % 10}", markersize=4, label=task
        )
    for at, (name, costs) in enumerate(tables.items()):
        context = costs.contexts[0]
        values = [costs.forward(rows, context) + costs.rest(rows) for rows in costs.rows]
        label = f"bank {name}, context {context}".replace("bank ,", "bank,")
        axes.plot(costs.rows, values, "--", color=f"C{at % 10}", alpha=0.7, label=label)
    axes.set_xlabel("rows of the target's forward")
    axes.set_ylabel("milliseconds, forward and rest")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def row_costs(runs: Sequence[Run]) -> dict[int, float]:
    """Rows -> median milliseconds of forward and rest, over the steps of these runs."""
    found: dict[int, list[float]] = {}
    for step in _all_steps(runs):
        found.setdefault(step.nodes + 1, []).append(step.forward_ms + step.rest_ms)
    return {rows: median(ms) for rows, ms in sorted(found.items()) if len(ms) >= _LEAST_STEPS}


def _all_steps(runs: Sequence[Run]) -> list[Step]:
    return [step for run in runs for step in run.steps]
