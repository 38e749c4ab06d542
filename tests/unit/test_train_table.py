"""What ``entmtp train`` shows while it works."""

import math
import re

import pytest

from entmtp.commands.train_table import TrainTable
from entmtp.train import TrainEvent
from fakes import FakeClock


def answers(done: int, num_items: int = 0, seconds_left: float = math.inf) -> TrainEvent:
    """An event of writing 100 answers."""
    return TrainEvent("answers", done, 100, num_items, "tokens", seconds_left)


def hydra(done: int, num_items: int = 0, loss: float | None = None) -> TrainEvent:
    """An event of training for 400 steps."""
    top1 = () if loss is None else (0.5, 0.25)
    return TrainEvent("hydra", done, 400, num_items, "positions", loss=loss, top1=top1)


class Shown:
    """A table, and what it wrote at each event."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *, is_terminal: bool) -> None:
        self._capsys, self._clock = capsys, FakeClock()
        self.table = TrainTable(is_terminal=is_terminal, clock=self._clock)

    def at(self, now: float, event: TrainEvent) -> str:
        self._clock.now = now
        self.table(event)
        return self.written()

    def written(self) -> str:
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err


def test_elsewhere_there_is_a_line_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At once, then at most every 30 s, and at the end of a stage; no control characters."""
    shown = Shown(capsys, is_terminal=False)
    assert shown.at(0, answers(0)) == "answers: 0/100, 0:00 elapsed\n"
    assert shown.at(29, answers(10, 2900)) == ""
    line = "answers: 20/100, 100 tokens/s, 0:30 elapsed, 2:00 left\n"
    assert shown.at(30, answers(20, 3000)) == line
    assert shown.at(31, answers(100, 9300)) == "answers: 100/100, 300 tokens/s, 0:31 elapsed\n"
    assert shown.at(32, hydra(0)) == ""
    line = (
        "hydra: 100/400, 1,000 positions/s, 1:40 elapsed, 5:00 left, loss 2.500, top-1 0.500 0.250"
    )
    assert shown.at(132, hydra(100, 100_000, 2.5)) == f"{line}\n"


def test_a_stage_that_ends_early_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """By a limit on its time, or by an error; the last that was known is shown."""
    shown = Shown(capsys, is_terminal=False)
    with shown.table:
        shown.at(0, answers(0))
        assert shown.at(10, answers(10)) == ""
        assert shown.at(11, hydra(0)) == "answers: 10/100, 0:10 elapsed, 1:30 left\n"
        assert shown.at(12, hydra(3, 12, 1.0)) == ""
    line = "hydra: 3/400, 12 positions/s, 0:01 elapsed, 2:12 left, loss 1.000, top-1 0.500 0.250\n"
    assert shown.written() == line


def test_a_run_that_goes_on_counts_its_own_pace(capsys: pytest.CaptureFixture[str]) -> None:
    """What an earlier run did took no time of this one."""
    shown = Shown(capsys, is_terminal=False)
    shown.at(0, hydra(300, 5_000_000, 2.0))
    line = shown.at(100, hydra(350, 5_001_000, 2.0))
    assert "350/400, 10 positions/s, 1:40 elapsed, 1:40 left" in line


def test_a_limit_on_time_shortens_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Answers stop then, however many are missing."""
    shown = Shown(capsys, is_terminal=False)
    shown.at(0, answers(0))
    assert "0:40 elapsed, 0:20 left" in shown.at(40, answers(1, 4, seconds_left=20.0))


def test_a_terminal_shows_a_table_in_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row a stage; each paint goes up by the lines of the one before and clears what it wrote."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = Shown(capsys, is_terminal=True)
    first = shown.at(0, answers(0))
    assert first.count("\n") == 2
    assert "\x1b[2F" not in first
    assert shown.at(0.1, answers(1, 4)) == ""
    assert shown.at(1, answers(100, 5000)).startswith("\x1b[2F\x1b[2K")
    second = shown.at(1.5, hydra(0))
    assert second.startswith("\x1b[2F\x1b[2K")
    last = shown.at(3661.5, hydra(200, 36_600_000, 2.25))
    assert last.startswith("\x1b[3F\x1b[2K")
    rows = [re.split(r" {2,}", row) for row in last.replace("\x1b[2K", "").splitlines()]
    assert rows[0] == [
        "\x1b[3Fstage",
        *["done", "speed", "elapsed", "left", "loss", "top-1 of each head"],
    ]
    assert rows[1] == ["answers", "100/100", "5,000 tokens/s", "0:01", "-", "-"]
    facts = ["10,000 positions/s", "1:01:00", "1:01:00", "2.250", "0.500 0.250"]
    assert rows[2] == ["hydra", "200/400", *facts]


def test_a_narrow_terminal_gets_narrow_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that wraps would be two, and the cursor would go up too little."""
    monkeypatch.setenv("COLUMNS", "40")
    shown = Shown(capsys, is_terminal=True).at(0, hydra(1, 1, 1.0))
    assert max(len(line) for line in shown.replace("\x1b[2K", "").splitlines()) == 39
