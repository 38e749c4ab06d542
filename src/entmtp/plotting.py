"""Figures without a screen; matplotlib is imported only here (extra ``bench``)."""

from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from entmtp.errors import InputError

__all__ = ["figure_png", "make_report_folder", "new_figure", "save_figure"]

_DPI = 120


def make_report_folder(folder: Path) -> None:
    """Fail early where no picture could be drawn or stored.

    Raises:
        InputError: matplotlib is not installed, or the folder cannot be made.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "plots need matplotlib: pip install 'entmtp[bench]', or leave out --report"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"report {folder}: cannot be written ({error})") from error


def new_figure(width: float, height: float) -> Any:
    """An empty figure; sizes in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, file: Path) -> None:
    """Write a figure as PNG.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        figure.savefig(file, dpi=_DPI)
    except OSError as error:
        raise InputError(f"{file}: cannot be written ({error})") from error


def figure_png(figure: Any) -> bytes:
    """A figure as PNG, for a page that holds its pictures."""
    buffer = BytesIO()
    figure.savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()
