"""Pictures of a calibration; matplotlib only through :mod:`entmtp.plotting` (extra ``bench``)."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.bank import NONE, Bank
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

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_PUBLISHED = "mc_sim_7b_63"
_NUM_RANKS = 16
_MAX_TREES = 12
_ENTROPY_BINS = 8
_BIN_POSITIONS = 30  # least positions in a bin
_BATCH_ROWS = 8  # batches are timed at few sizes, so larger trees there are mostly extrapolated
_LABELS_FROM = 0.84  # of the height
_LABEL_GAP = 0.13  # doublings of a size
_LEAST_SHARE = 0.003  # what the darkest colour stands for


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
    """Tokens a step by nodes; below, how much the joint score promises too much."""
    figure = new_figure(8, 6.5)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _dots(axes, run.candidates, [c.accept_own for c in run.candidates])
    promised = _joint_frontier(run.candidates)
    sizes = [c.topology.num_nodes for c in promised]
    axes.plot(sizes, [c.joint for c in promised], "--", color="tab:orange", label="joint score")
    frontier = acceptance_frontier(run.candidates)
    axes.plot(
        [c.topology.num_nodes for c in frontier],
        [c.accept_own for c in frontier],
        color="tab:blue",
        label="own rollout",
    )
    tree, label = _published(run)
    fitting, _ = run.trace.halves()
    value = self_rollout(fitting, tree).mean_acceptance_length
    axes.plot(tree.num_nodes, value, "*", color="tab:red", markersize=12, label=label)
    too_much = [100 * ((c.joint or 0.0) / c.accept_own - 1) for c in promised]
    below.plot(sizes, too_much, "o-", color="tab:orange", markersize=3)
    below.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("tokens a step")
    below.set_ylabel("optimism of the\njoint score, %")
    below.set_xlabel("draft nodes")
    axes.set_title("Acceptance frontiers, fitting half", fontsize="medium")
    axes.legend(loc="lower right")
    for panel in (axes, below):
        panel.grid(alpha=0.3)
    return figure


def _joint_frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """By number of nodes, grown trees that were promised more than all smaller ones."""
    grown = [c for c in candidates if c.joint is not None and c.topology.num_nodes]
    kept: list[Candidate] = []
    for one in sorted(grown, key=lambda c: (c.topology.num_nodes, -(c.joint or 0.0))):
        if not kept or (one.joint or 0.0) > (kept[-1].joint or 0.0):
            kept.append(one)
    return kept


def _draw_throughput(run: CalibrationRun) -> Any:
    """Tokens/s by nodes: candidates, the frontier, entries, and what was decoded."""
    figure, axes = _axes("draft nodes", "tokens/s", width=10, height=6)
    _dots(axes, run.candidates, [c.tokens_per_s for c in run.candidates])
    frontier = throughput_frontier(run.candidates)
    axes.plot(
        [c.topology.num_nodes for c in frontier],
        [c.tokens_per_s for c in frontier],
        color="tab:blue",
        label="throughput frontier, predicted",
    )
    scores = run.bank.scores
    axes.axhline(
        scores[NONE].tokens_per_s, color="black", linestyle=":", label="plain decoding, predicted"
    )
    tree, label = _published(run)
    fitting, _ = run.trace.halves()
    rate = predicted_rate(fitting, tree, _costs(run))
    axes.plot(tree.num_nodes, rate, "*", color="tab:red", markersize=12, label=label)
    places = {n: (run.bank.entries[n].num_nodes, scores[n].tokens_per_s or 0.0) for n in scores}
    x, y = zip(*places.values(), strict=True)
    axes.plot(x, y, "o", color="tab:blue", markersize=5, label="entries of the bank, predicted")
    if run.measured:
        axes.plot(
            [places[name][0] for name in run.measured],
            [one.tokens_per_s for one in run.measured.values()],
            "x",
            color="tab:green",
            label="entries, decoded (check texts)",
        )
    _scale_nodes(axes, max(tree.num_nodes, *(c.topology.num_nodes for c in run.candidates)))
    _label_entries(axes, places, run.bank.best)
    axes.set_title("Throughput, fitting half", fontsize="medium")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    return figure


def _label_entries(axes: Any, places: Mapping[str, tuple[int, float]], best: str) -> None:
    """Names upright in a row above all points, each with a line to its own."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, low + (high - low) / _LABELS_FROM)
    right = -1.0
    for name, (nodes, rate) in sorted(places.items(), key=lambda item: (item[1][0], -item[1][1])):
        right = max(right + _LABEL_GAP, float(np.log2(1 + nodes)))
        axes.annotate(
            name,
            (nodes, rate),
            xytext=(2**right - 1, _LABELS_FROM + 0.01),
            textcoords=axes.get_xaxis_transform(),
            rotation=90,
            ha="center",
            va="bottom",
            fontsize="x-small",
            fontweight="bold" if name == best else "normal",
            arrowprops={"arrowstyle": "-", "color": "tab:blue", "alpha": 0.35, "linewidth": 0.7},
        )


def _scale_nodes(axes: Any, largest: int) -> None:
    """Small trees lie close together, so sizes about double from tick to tick."""
    axes.set_xscale("function", functions=(np.log1p, np.expm1))
    ticks = [0, *(2**k for k in range(int(largest).bit_length()))]
    axes.set_xlim(-0.2, 1.15 * largest)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _draw_costs(run: CalibrationRun) -> Any:
    """Milliseconds by rows, by batch, and of drafting by depth."""
    costs = _costs(run)
    figure = new_figure(13, 4)
    by_context, by_batch, by_depth = figure.subplots(1, 3)
    for context in costs.contexts:
        values = [costs.forward(rows, context) + costs.rest(rows) for rows in costs.rows]
        by_context.plot(costs.rows, values, "o-", markersize=3, label=f"context {context}")
    for batch in costs.batches:
        rows = [r for r in costs.rows if r <= _BATCH_ROWS]
        values = [costs.forward(r, costs.contexts[0], batch) + costs.rest(r, batch) for r in rows]
        label = f"{batch} sequence{'s' if batch > 1 else ''}"
        by_batch.plot(rows, values, "o-", markersize=3, label=label)
    depths = range(1, len(costs.draft_ms) + 1)
    by_depth.bar([d - 0.2 for d in depths], costs.draft_ms, 0.4, label="one row")
    by_depth.bar([d + 0.2 for d in depths], costs.draft_row_ms, 0.4, label="each further row")
    by_depth.set_xticks(list(depths))
    for axes, label in ((by_context, "rows"), (by_batch, "rows a sequence"), (by_depth, "depth")):
        axes.set_xlabel(label)
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])  # room for the legend
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", fontsize="small", ncols=2)
    by_context.set_title("Forward and rest, one sequence", fontsize="medium")
    by_batch.set_title(f"Forward and rest, context {costs.contexts[0]}", fontsize="medium")
    by_depth.set_title("Drafting", fontsize="medium")
    by_context.set_ylabel("milliseconds a step")
    by_depth.set_ylabel("milliseconds a depth")
    return figure


def _draw_ranks(run: CalibrationRun) -> Any:
    """Share of positions whose true token has a rank, by depth, one map a task."""
    tasks = {task: _rank_shares(trace) for task, trace in run.trace.by_task().items()}
    columns = min(len(tasks), 2)
    rows = -(-len(tasks) // columns)
    figure = new_figure(6.5 * columns + 1, (0.45 * run.trace.max_depth + 1) * rows)
    grid = figure.subplots(rows, columns, squeeze=False)
    top = max(2 * _LEAST_SHARE, *(float(shares.max()) for shares in tasks.values()))
    image = None
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (task, shares) in zip(grid.flat, tasks.items(), strict=False):
        axes.set_axis_on()
        seen = shares.clip(_LEAST_SHARE)
        image = axes.imshow(seen, norm="log", vmin=_LEAST_SHARE, vmax=top, aspect="auto")
        for (depth, rank), share in np.ndenumerate(shares):
            color = "black" if share > 0.12 * top else "white"
            axes.text(
                rank, depth, _percent(share), color=color, fontsize=7, ha="center", va="center"
            )
        axes.set_title(task, fontsize="medium")
        axes.set_yticks(range(len(shares)), [str(d + 1) for d in range(len(shares))])
        axes.set_xticks(range(_NUM_RANKS))
        axes.set_xlabel("rank of the true token")
        axes.set_ylabel("depth")
    _percent_bar(figure, image, grid, top, "positions, %")
    return figure


def _rank_shares(trace: Trace) -> FloatArray:
    """``(K, 16)``, of the positions that have a token so far ahead."""
    left = _tokens_left(trace)
    shares = np.zeros((trace.max_depth, _NUM_RANKS))
    for depth in range(trace.max_depth):
        ranks = trace.ranks[left > depth + 1, depth]
        counts = np.bincount(ranks, minlength=_NUM_RANKS)[:_NUM_RANKS]
        shares[depth] = counts / max(len(ranks), 1)
    return shares


def _tokens_left(trace: Trace) -> IntArray:
    """``(T,)`` tokens of the text from each position to its end, its own included."""
    return np.repeat(trace.offsets[1:], np.diff(trace.offsets)) - np.arange(trace.num_tokens)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.0995 else f"{100 * share:.1f}"


def _percent_bar(figure: Any, image: Any, grid: Any, top: float, label: str) -> None:
    ticks = [t for t in (0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0) if t <= top]
    bar = figure.colorbar(image, ax=grid, label=label, ticks=ticks, aspect=30)
    bar.ax.set_yticklabels([f"{100 * tick:g}" for tick in ticks])
    bar.ax.set_yticks([], minor=True)


def _draw_trees(run: CalibrationRun) -> Any:
    """The fastest trees of the bank; nodes coloured by the share of steps that keep them."""
    fitting, _ = run.trace.halves()
    trees = _fastest_trees(run.bank)
    shares = {name: _kept_shares(fitting, tree) for name, tree in trees.items()}
    top = max(2 * _LEAST_SHARE, *(max(share[1:]) for share in shares.values()))
    columns = min(len(trees), 4)
    rows = -(-len(trees) // columns)
    figure = new_figure(3.6 * columns + 1, 2.6 * rows + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False)
    points = None
    for axes in grid.flat:
        axes.set_axis_off()
    deepest = max(tree.max_depth for tree in trees.values())
    for axes, (name, tree) in zip(grid.flat, trees.items(), strict=False):
        is_best = name == run.bank.best
        title = f"{name}, {run.bank.scores[name].tokens_per_s:.4g} tokens/s"
        weight = "bold" if is_best else "normal"
        axes.set_title(title, fontsize="small", fontweight=weight)
        axes.set_ylim(-deepest - 0.4, 0.4)
        points = _draw_tree(axes, tree, shares[name], top)
    _percent_bar(figure, points, grid, top, "steps that keep the node, %" + _how(run))
    return figure


def _fastest_trees(bank: Bank) -> dict[str, Topology]:
    """At most 12 that are not empty, smallest first."""
    rates = {name: score.tokens_per_s or 0.0 for name, score in bank.scores.items()}
    names = [name for name in rates if bank.entries[name].num_nodes]
    kept = sorted(names, key=lambda name: -rates[name])[:_MAX_TREES]
    return {name: bank.entries[name] for name in names if name in kept}


def _draw_tree(axes: Any, tree: Topology, shares: Sequence[float], top: float) -> Any:
    """Root on top, hollow, as every step keeps it; children below in order of rank."""
    x = _leaf_positions(tree)
    depth = tree.depths
    for node in range(1, tree.num_rows):
        parent = int(tree.parents[node])
        axes.plot(
            [x[parent], x[node]], [-depth[parent], -depth[node]], color="0.7", linewidth=1, zorder=1
        )
    size = max(10.0, 80.0 - tree.num_nodes)
    axes.scatter(x[0], 0, s=size, facecolors="white", edgecolors="0.3", zorder=2)
    seen = np.clip(shares[1:], _LEAST_SHARE, None)
    half = max(1.5, 0.5 * max(x) + 0.5)
    axes.set_xlim(0.5 * max(x) - half, 0.5 * max(x) + half)
    return axes.scatter(
        x[1:], -depth[1:], c=seen, s=size, norm="log", vmin=_LEAST_SHARE, vmax=top, zorder=2
    )


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
    figure, axes = _axes(
        "entropy of the root, nats (mean of the bin)",
        f"accepted draft tokens{_how(run)}",
        width=8,
        height=5,
    )
    for task, trace in run.trace.by_task().items():
        accepted = accepted_lengths(trace, best)
        texts = np.repeat(np.arange(trace.num_texts), np.diff(trace.offsets))
        is_whole = _tokens_left(trace) > best.max_depth  # not cut by the end of the text
        usable = np.flatnonzero(is_whole & ~np.isnan(trace.entropy))
        if not len(usable):
            continue
        order = usable[np.argsort(trace.entropy[usable], kind="stable")]
        num_bins = min(_ENTROPY_BINS, max(len(order) // _BIN_POSITIONS, 1))
        parts = np.array_split(order, num_bins)
        middle = [float(trace.entropy[part].mean()) for part in parts]
        mean = [float(accepted[part].mean()) for part in parts]
        error = [_half_interval(accepted[part], texts[part]) for part in parts]
        axes.errorbar(middle, mean, yerr=error, fmt="o-", markersize=4, capsize=3, label=task)
    axes.set_xscale("symlog", linthresh=0.1)
    ticks = (0, 0.1, 0.3, 1, 3)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(left=0)
    title = f"Best tree: {best.num_nodes} nodes, depth {best.max_depth} (bars: 95 %, over texts)"
    axes.set_title(title, fontsize="medium")
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return figure


def _half_interval(values: IntArray, texts: IntArray) -> float:
    """Half the 95 % interval of a mean; positions of one text depend on each other.

    NaN, which draws no bar, where all positions are of one text.
    """
    names, index = np.unique(texts, return_inverse=True)
    if len(names) < 2:
        return float("nan")
    sums = np.bincount(index, weights=values - values.mean())
    variance = float((sums**2).sum()) * len(names) / (len(names) - 1)
    return 1.96 * math.sqrt(variance) / len(values)


def _published(run: CalibrationRun) -> tuple[Topology, str]:
    """The shipped tree as deep as the trace allows, and what to call it."""
    whole = named_topologies()[_PUBLISHED]
    tree = whole.truncate(run.trace.max_depth)
    cut = "" if tree == whole else f", cut to depth {tree.max_depth}"
    return tree, f"{_PUBLISHED}{cut}{_how(run)}"


def _how(run: CalibrationRun) -> str:
    """Replay is exact; said where the scores of the candidates are not."""
    assert run.bank.calibration is not None  # noqa: S101 - a run makes a calibrated bank
    is_typical = run.bank.calibration.settings.get("verification") == "typical"
    return " (exact acceptance)" if is_typical else ""


def _axes(x: str, y: str, *, width: float, height: float) -> tuple[Any, Any]:
    figure = new_figure(width, height)
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
