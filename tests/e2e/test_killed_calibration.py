"""Calibration that is killed at random moments goes on, and ends in the bank of a run in one go."""

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entmtp.bank import Bank
from tiny_workload import make_workload

NUM_KILLS = 6
SHORTEST = 0.1  # seconds in which no run ends


def run_for(seconds: float | None, command: list[str], home: Path) -> int:
    """Start a calibration and kill it after a while; the exit status."""
    environment = {**os.environ, "ENTMTP_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@pytest.mark.slow
def test_a_calibration_killed_at_random_gives_the_same_bank(tmp_path: Path) -> None:
    """With the costs of another bank, since times differ from run to run."""
    files = make_workload(tmp_path)
    options = shlex.split(
        f"--model {files['model']} --heads {files['heads']} --backend torch --max-new-tokens 48 "
        f"--prompts {files['prompts']} --max-nodes 16 --measure none"
    )
    start = [sys.executable, "-m", "entmtp", "calibrate", *options]
    costs, whole, cut = (tmp_path / f"{name}.json" for name in ("costs", "whole", "cut"))
    assert run_for(None, [*start, "--output", str(costs)], tmp_path / "home") == 0
    start += ["--costs", str(costs)]
    began = time.perf_counter()
    assert run_for(None, [*start, "--output", str(whole)], tmp_path / "other") == 0
    most = time.perf_counter() - began
    moments, num_killed = random.Random(0), 0
    while num_killed < NUM_KILLS and most > SHORTEST:
        seconds = moments.uniform(0, most)
        code = run_for(seconds, [*start, "--output", str(cut)], tmp_path / "third")
        assert code in (0, -signal.SIGKILL)
        num_killed += code != 0
        most = min(most, seconds) if code == 0 else most  # it ended before that
    assert num_killed == NUM_KILLS
    assert run_for(None, [*start, "--output", str(cut)], tmp_path / "third") == 0
    first, second = Bank.read(whole), Bank.read(cut)
    assert first.entries == second.entries
    assert first.scores == second.scores
    assert first.calibration is not None
    assert second.calibration is not None
    for name in ("source", "costs", "context", "trace", "settings", "policies"):
        assert getattr(first.calibration, name) == getattr(second.calibration, name)
    assert not list(tmp_path.glob("*.work*"))
    assert not list(tmp_path.rglob("*.tmp"))
