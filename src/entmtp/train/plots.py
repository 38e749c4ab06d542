"""A picture of how heads got better while they were trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from entmtp.plotting import new_figure, save_figure
from entmtp.train.accuracy import Measurement

__all__ = ["plot_history"]

_WIDTH, _HEIGHT = 4.0, 5.2


def plot_history(histories: Mapping[str, Sequence[Measurement]], folder: Path) -> Path:
    """Draw top-1 accuracy by head, and the loss below, one column a kind; returns the file.

    Args:
        histories: measurements by kind.
        folder: that is there.

    Raises:
        InputError: the file cannot be written.
    """
    figure = new_figure(max(6.4, _WIDTH * len(histories)), _HEIGHT)
    axes = figure.subplots(
        2,
        len(histories),
        sharex="col",
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": (2, 1)},
    )
    for column, (kind, history) in enumerate(histories.items()):
        _draw_accuracy(axes[0][column], kind, history)
        _draw_loss(axes[1][column], history)
    axes[0][0].set_ylabel("top-1 accuracy on held-out answers")
    axes[1][0].set_ylabel("training loss")
    axes[0][0].set_ylim(bottom=0)
    file = folder / "training.png"
    save_figure(figure, file)
    return file


def _draw_accuracy(axes: Any, kind: str, history: Sequence[Measurement]) -> None:
    seen = _thousands(history)
    for head in range(len(history[-1].top)):
        shares = [measurement.top[head][0] for measurement in history]
        label = f"head {head + 1}: {shares[-1]:.2f}"
        axes.plot(seen, shares, marker="o", markersize=3, label=label)
    axes.set_title(kind)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2, fontsize="small", title="at the end")


def _draw_loss(axes: Any, history: Sequence[Measurement]) -> None:
    points = zip(_thousands(history), history, strict=True)
    seen, losses = zip(*((x, m.loss) for x, m in points if m.loss is not None), strict=True)
    axes.plot(seen, losses, marker="o", markersize=3, color="0.35")
    axes.set_xlabel("positions trained on, thousands")
    axes.grid(alpha=0.3)


def _thousands(history: Sequence[Measurement]) -> list[float]:
    return [measurement.positions_seen / 1000 for measurement in history]
