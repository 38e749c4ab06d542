"""Pictures of a calibration; matplotlib only through :mod:`entmtp.plotting` (extra ``bench``)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from entmtp.bank import NONE
from entmtp.calibrate.build import CalibrationRun
from entmtp.calibrate.pareto import (
    Candidate,
    acceptance_frontier,
    predicted_rate,
    throughput_frontier,
)
from entmtp.calibrate.replay import accepted_lengths, deepest_nodes, self_rollout, walk
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.plotting import new_figure, save_figure
from entmtp.topology import Topology, named_topologies

__all__ = ["write_report"]

_PUBLISHED = "mc_sim_7b_63"
_MAX_RANK = 16
_MAX_TREES = 12
_ENTROPY_BINS = 8


def write_report(run: CalibrationRun, folder: Path) -> list[Path]:
    """Draw frontiers, costs, ranks, trees and entropy; returns the files."""
    draws: dict[str, Callable[[CalibrationRun], Any]] = {
        "acceptance_frontier.png": _draw_acceptance,
        "throughput_frontier.png": _draw_throughput,
        "costs.png": _draw_costs,
        "ranks.png": _draw_ranks,
        "trees.png": _draw_trees,
        "entropy.png": _draw_entropy,
    }
    files = []
    for name, draw in draws.items():
        save_figure(draw(run), folder / name)
        files.append(folder / name)
    return files


def _draw_acceptance(run: CalibrationRun) -> Any:
    """Tokens a step by nodes; how much the joint score promises too much."""
    figure, axes = _axes("draft nodes", "tokens a step")
    fitting, _ = run.trace.halves()
    _dots(axes, run.candidates, [c.accept_own for c in run.candidates])
    grown = [c for c in run.candidates if c.joint is not None]
    sizes = sorted({c.topology.num_nodes for c in grown})
    joint = [max(c.joint or 0 for c in grown if c.topology.num_nodes <= size) for size in sizes]
    axes.plot(sizes, joint, "--", color="tab:orange", label="joint score, frontier")
    frontier = acceptance_frontier(run.candidates)
    axes.plot(
        [c.topology.num_nodes for c in frontier],
        [c.accept_own for c in frontier],
        color="tab:blue",
        label="own rollout, frontier",
    )
    tree = named_topologies()[_PUBLISHED].truncate(fitting.max_depth)
    value = self_rollout(fitting, tree).mean_acceptance_length
    axes.plot(tree.num_nodes, value, "*", color="tab:red", markersize=12, label=_PUBLISHED)
    axes.legend()
    return figure


def _draw_throughput(run: CalibrationRun) -> Any:
    """Tokens/s by nodes: candidates, the frontier, entries, and what was decoded."""
    figure, axes = _axes("draft nodes", "tokens/s")
    fitting, _ = run.trace.halves()
    costs = _costs(run)
    _dots(axes, run.candidates, [c.tokens_per_s for c in run.candidates])
    frontier = throughput_frontier(run.candidates)
    axes.plot(
        [c.topology.num_nodes for c in frontier],
        [c.tokens_per_s for c in frontier],
        color="tab:blue",
        label="throughput frontier",
    )
    plain = run.bank.scores[NONE].tokens_per_s
    axes.axhline(plain, color="black", linestyle=":", label="plain decoding")
    tree = named_topologies()[_PUBLISHED].truncate(fitting.max_depth)
    rate = predicted_rate(fitting, tree, costs)
    axes.plot(tree.num_nodes, rate, "*", color="tab:red", markersize=12, label=_PUBLISHED)
    entries = {n: t for n, t in run.bank.entries.items() if n in run.bank.scores}
    axes.plot(
        [tree.num_nodes for tree in entries.values()],
        [run.bank.scores[name].tokens_per_s for name in entries],
        "o",
        color="tab:blue",
        label="entries of the bank",
    )
    best = run.bank.best
    at = entries[best].num_nodes, run.bank.scores[best].tokens_per_s
    axes.annotate(best, at, xytext=(8, 8), textcoords="offset points", color="tab:blue")
    if run.measured:
        axes.plot(
            [entries[name].num_nodes for name in run.measured],
            [one.tokens_per_s for one in run.measured.values()],
            "x",
            color="tab:green",
            label="decoded, on the check texts",
        )
    axes.legend()
    return figure


def _draw_costs(run: CalibrationRun) -> Any:
    """Milliseconds by rows, by batch, and of drafting by depth."""
    costs = _costs(run)
    figure = new_figure(13, 4)
    by_context, by_batch, by_depth = figure.subplots(1, 3)
    for context in costs.contexts:
        values = [costs.forward(rows, context) + costs.rest(rows) for rows in costs.rows]
        by_context.plot(costs.rows, values, "o-", markersize=3, label=f"context {context}")
    for batch in costs.batches:
        rows = [r for r in costs.rows if r <= 8]
        values = [costs.forward(r, costs.contexts[0], batch) + costs.rest(r, batch) for r in rows]
        by_batch.plot(rows, values, "o-", markersize=3, label=f"{batch} sequences")
    depths = range(1, len(costs.draft_ms) + 1)
    by_depth.bar([d - 0.2 for d in depths], costs.draft_ms, 0.4, label="one row")
    by_depth.bar([d + 0.2 for d in depths], costs.draft_row_ms, 0.4, label="each further row")
    by_depth.set_xticks(list(depths))
    for axes, label in ((by_context, "rows"), (by_batch, "rows a sequence"), (by_depth, "depth")):
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    by_context.set_ylabel("milliseconds without drafting")
    by_depth.set_ylabel("milliseconds of drafting")
    return figure


def _draw_ranks(run: CalibrationRun) -> Any:
    """Share of positions whose true token has a rank, by depth, one map a task."""
    tasks = run.trace.by_task()
    columns = min(len(tasks), 4)
    rows = -(-len(tasks) // columns)
    figure = new_figure(3.4 * columns + 1, 2.4 * rows + 1)
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for place, (task, trace) in enumerate(tasks.items()):
        axes = grid[place // columns][place % columns]
        shares = np.stack([(trace.ranks == rank).mean(axis=0) for rank in range(_MAX_RANK)], axis=1)
        image = axes.imshow(shares, vmin=0, vmax=0.7, aspect="auto", cmap="viridis")
        axes.set_title(task)
        axes.set_yticks(range(trace.max_depth), [str(d + 1) for d in range(trace.max_depth)])
        axes.set_xlabel("rank of the true token")
        axes.set_ylabel("depth")
    for place in range(len(tasks), rows * columns):
        grid[place // columns][place % columns].set_axis_off()
    figure.colorbar(image, ax=grid, label="share of positions")
    return figure


def _draw_trees(run: CalibrationRun) -> Any:
    """The trees of the bank; nodes coloured by the share of steps that keep them."""
    fitting, _ = run.trace.halves()
    trees = [(n, t) for n, t in run.bank.entries.items() if t.num_nodes][:_MAX_TREES]
    columns = min(len(trees), 4)
    rows = -(-len(trees) // columns)
    figure = new_figure(3.2 * columns + 1, 2.6 * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    points = None
    for place in range(rows * columns):
        axes = grid[place // columns][place % columns]
        axes.set_axis_off()
        if place < len(trees):
            name, tree = trees[place]
            axes.set_title(name)
            points = _draw_tree(axes, tree, _kept_shares(fitting, tree))
    figure.colorbar(points, ax=grid, label="share of steps that keep the node")
    return figure


def _draw_tree(axes: Any, tree: Topology, shares: Sequence[float]) -> Any:
    """Root on top, children below in order of rank."""
    x = _leaf_positions(tree)
    depth = tree.depths
    for node in range(1, tree.num_rows):
        parent = int(tree.parents[node])
        axes.plot(
            [x[parent], x[node]], [-depth[parent], -depth[node]], color="0.7", linewidth=1, zorder=1
        )
    size = max(8.0, 90.0 - tree.num_nodes)
    return axes.scatter(x, -depth, c=shares, s=size, cmap="viridis", vmin=0, vmax=1, zorder=2)


def _leaf_positions(tree: Topology) -> list[float]:
    """Leaves side by side, every other node above the middle of its children."""
    x = [0.0] * tree.num_rows
    order: list[int] = []

    def visit(node: int) -> None:
        for child in tree.children[node]:
            visit(child)
        if not tree.children[node]:
            x[node] = float(len(order))
            order.append(node)
        else:
            x[node] = sum(x[child] for child in tree.children[node]) / len(tree.children[node])

    visit(0)
    return x


def _kept_shares(trace: Trace, tree: Topology) -> list[float]:
    """For every node, the share of steps that keep it."""
    nodes = deepest_nodes(trace, tree)
    roots = walk(trace, tree.depths[nodes]).inner
    counts = np.bincount(nodes[roots], minlength=tree.num_rows).astype(np.float64)
    for node in range(tree.num_rows - 1, 0, -1):  # a step that keeps a node keeps its ancestors
        counts[int(tree.parents[node])] += counts[node]
    return (counts / max(len(roots), 1)).tolist()  # type: ignore[no-any-return]


def _draw_entropy(run: CalibrationRun) -> Any:
    """What the best tree keeps, by the entropy of the root, one line a task."""
    best = max(
        (c for c in run.candidates if c.topology.num_nodes), key=lambda c: c.tokens_per_s
    ).topology
    figure, axes = _axes("entropy of the root, nats", f"accepted of {best.num_nodes} nodes")
    for task, trace in run.trace.by_task().items():
        accepted = accepted_lengths(trace, best)
        usable = np.flatnonzero(~np.isnan(trace.entropy))
        if len(usable) < _ENTROPY_BINS:
            continue
        parts = np.array_split(usable[np.argsort(trace.entropy[usable])], _ENTROPY_BINS)
        middle = [float(trace.entropy[part].mean()) for part in parts]
        mean = [float(accepted[part].mean()) for part in parts]
        error = [1.96 * float(accepted[part].std()) / len(part) ** 0.5 for part in parts]
        axes.errorbar(middle, mean, yerr=error, fmt="o-", markersize=4, capsize=3, label=task)
    axes.legend()
    return figure


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _dots(axes: Any, candidates: Sequence[Candidate], values: Sequence[float]) -> None:
    sizes = [c.topology.num_nodes for c in candidates]
    axes.plot(sizes, values, ".", color="0.75", markersize=4, zorder=0, label="candidates")


def _costs(run: CalibrationRun) -> CostTable:
    assert run.bank.calibration is not None  # noqa: S101 - a run makes a calibrated bank
    return run.bank.calibration.costs
