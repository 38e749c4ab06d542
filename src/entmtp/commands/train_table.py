"""How ``entmtp train`` shows where it is: a table on a terminal, a line now and then elsewhere."""

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from entmtp.train import TrainEvent

__all__ = ["TrainTable"]

_REPAINT_S = 0.25
_LINE_S = 30.0
_COLUMNS = (
    f"{'stage':<11}{'done':>17}{'speed':>21}{'elapsed':>10}{'left':>10}{'loss':>8}"
    "  top-1 of each head"
)


@dataclass
class _Row:
    """One stage: its first and newest event, and when they came."""

    first: "TrainEvent"
    last: "TrainEvent"
    started: float
    now: float

    @property
    def is_done(self) -> bool:
        return self.last.done >= self.last.total

    @property
    def elapsed(self) -> str:
        return _duration(self.now - self.started)

    @property
    def speed(self) -> str:
        """Tokens or positions a second, of this run alone."""
        made, passed = self.last.num_items - self.first.num_items, self.now - self.started
        return f"{made / passed:,.0f} {self.last.unit}/s" if made and passed > 0 else "-"

    @property
    def left(self) -> str:
        """Time to the end of the stage, at the pace of this run."""
        made, missing = self.last.done - self.first.done, self.last.total - self.last.done
        if not missing:
            return "-"
        pace = (self.now - self.started) / made if made else math.inf
        left = min(pace * missing, max(self.last.seconds_left, 0.0))
        return _duration(left) if left < math.inf else "-"

    @property
    def loss(self) -> str:
        return "-" if self.last.loss is None else f"{self.last.loss:.3f}"

    @property
    def top1(self) -> str:
        return " ".join(f"{share:.3f}" for share in self.last.top1)

    def cells(self) -> str:
        """As a row of the table."""
        done = f"{self.last.done}/{self.last.total}"
        return (
            f"{self.last.stage:<11}{done:>17}{self.speed:>21}{self.elapsed:>10}{self.left:>10}"
            f"{self.loss:>8}  {self.top1}"
        ).rstrip()

    def line(self) -> str:
        """As a line of its own."""
        parts = [f"{self.last.stage}: {self.last.done}/{self.last.total}"]
        facts = {"": self.speed, " elapsed": self.elapsed, " left": self.left}
        parts += [f"{value}{name}" for name, value in facts.items() if value != "-"]
        if self.last.loss is not None:
            parts.append(f"loss {self.loss}")
        if self.last.top1:
            parts.append(f"top-1 {self.top1}")
        return ", ".join(parts)


class TrainTable:
    """Takes the events of a run; shows them until it is closed."""

    def __init__(self, *, is_terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing yet.

        Args:
            is_terminal: whether the cursor can be moved on standard error.
            clock: in seconds.
        """
        self._is_terminal, self._clock = is_terminal, clock
        self._rows: dict[str, _Row] = {}
        self._shown = -math.inf
        self._stale: _Row | None = None
        self._height = 0

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Show the newest event, where it was not shown."""
        self._flush()

    def __call__(self, event: "TrainEvent") -> None:
        """Take an event."""
        now = self._clock()
        row = self._rows.get(event.stage)
        if row is None:
            self._flush()
            row = self._rows[event.stage] = _Row(event, event, now, now)
        row.last, row.now = event, now
        self._stale = row
        if row.is_done or now - self._shown >= (_REPAINT_S if self._is_terminal else _LINE_S):
            self._flush()

    def _flush(self) -> None:
        if self._stale is None:
            return
        if self._is_terminal:
            self._paint()
        else:
            click.echo(self._stale.line(), err=True)
        self._shown, self._stale = self._clock(), None

    def _paint(self) -> None:
        """Write the table over the one before."""
        width = shutil.get_terminal_size().columns - 1
        lines = [_COLUMNS, *(row.cells() for row in self._rows.values())]
        up = f"\x1b[{self._height}F" if self._height else ""
        body = "".join(f"\x1b[2K{line[:width]}\n" for line in lines)
        click.echo(up + body, nl=False, err=True, color=True)
        self._height = len(lines)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
