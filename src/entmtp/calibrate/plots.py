"""Pictures of what was measured on traces."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entmtp.calibrate.evaluate import TaskScore
from entmtp.plotting import new_figure, save_figure

__all__ = ["plot_scores"]

_MARKERS = "osD^vP*X"


def plot_scores(tasks: Mapping[str, TaskScore], folder: Path) -> list[Path]:
    """Draw the scores of tasks; returns the files."""
    files = [
        _plot(folder / "acceptance_by_nodes.png", _by_nodes, tasks),
        _plot(folder / "heads.png", _by_head, tasks),
        _plot(folder / "acceptance_by_entropy.png", _by_entropy, tasks),
        _plot(folder / "acceptance_by_position.png", _by_position, tasks),
    ]
    return files


def _plot(file: Path, draw: Any, tasks: Mapping[str, TaskScore]) -> Path:
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    for index, (task, score) in enumerate(tasks.items()):
        draw(axes, task, score, {"marker": _MARKERS[index % len(_MARKERS)], "color": f"C{index}"})
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, file)
    return file


def _by_nodes(axes: Any, task: str, score: TaskScore, style: dict[str, Any]) -> None:
    nodes = [budget.nodes for budget in score.budgets]
    means = [budget.mean_acceptance_length for budget in score.budgets]
    axes.plot(nodes, means, label=task, **style)
    bands = [budget.ci95 for budget in score.budgets if budget.ci95 is not None]
    if len(bands) == len(nodes):
        low, high = zip(*bands, strict=True)
        axes.fill_between(nodes, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [str(n) for n in nodes])
    axes.set_xlabel("draft nodes of the tree")
    axes.set_ylabel("tokens a step (band: 95 %)")


def _by_head(axes: Any, task: str, score: TaskScore, style: dict[str, Any]) -> None:
    depths = range(1, len(score.heads) + 1)
    axes.plot(depths, [head["top1"] for head in score.heads], label=f"{task}, first", **style)
    axes.plot(
        depths,
        [head["top4"] for head in score.heads],
        linestyle=":",
        label=f"{task}, first 4",
        **style,
    )
    axes.set_xticks(list(depths))
    axes.set_xlabel("depth")
    axes.set_ylabel("share of true tokens among the proposals")


def _by_entropy(axes: Any, task: str, score: TaskScore, style: dict[str, Any]) -> None:
    bins = [b for b in score.by_entropy if b.mean_acceptance_length is not None]
    axes.plot([b.low for b in bins], [b.mean_acceptance_length for b in bins], label=task, **style)
    axes.set_xlabel("target entropy at the root, nats (lower edge of the bin)")
    axes.set_ylabel("tokens a step, best tree of at most 16 nodes")


def _by_position(axes: Any, task: str, score: TaskScore, style: dict[str, Any]) -> None:
    bins = [b for b in score.by_position if b.mean_acceptance_length is not None]
    axes.plot([b.low for b in bins], [b.mean_acceptance_length for b in bins], label=task, **style)
    axes.set_xlabel("position in the text, prompt included (lower edge of the bin)")
    axes.set_ylabel("tokens a step, best tree of at most 16 nodes")
