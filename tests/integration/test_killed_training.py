"""Training that is killed, again and again, ends in the weights of a run that was left alone."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from entmtp.train import DataConfig, TrainConfig, TrainEvent, train_heads
from entmtp.train import data as answer_files
from fakes import tiny_target
from training import RECIPE, write

KINDS = ("hydra", "mtp")


def train(folder: Path) -> list[str]:
    """Write answers, train a position-wise kind and a recurrent one; tells each event, flushed."""
    answer_files.SHARD_SIZE = 3
    told: list[str] = []

    def tell(event: TrainEvent) -> None:
        told.append(f"{event.stage} {event.done}")
        print(told[-1], flush=True)

    answers = DataConfig(num_prompts=16, max_new_tokens=12, batch_size=4)
    write(folder, data=answers, turns=[f"number {i} of them" for i in range(16)], progress=tell)
    recurrent = replace(RECIPE, kind="mtp", sequences_a_step=1, kl=0.5)
    config = TrainConfig("tiny", (RECIPE, recurrent), held_out=0.2, checkpoint_s=0)
    train_heads(tiny_target(1, tie_embeddings=False), folder, folder, config, tell)
    return told


def train_and_kill(folder: Path, line: str) -> None:
    """Kill a process that trains as soon as it has told a line."""
    command = [sys.executable, __file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for told in process.stdout:
            if told.strip() == line:
                process.kill()
    assert process.returncode == -9, f"the run never came to {line}"


@pytest.mark.slow
def test_a_run_killed_in_every_stage_gives_the_same_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the answers, the steps of the one kind and those of the other: bit for bit."""
    monkeypatch.setattr(answer_files, "SHARD_SIZE", 3)
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(whole)
    for line in ("answers 8", "hydra 7", "mtp 3"):
        train_and_kill(part, line)
    told = train(part)
    assert told[0] == "hydra 34"  # finished, and only read again
    assert "mtp 2" not in told
    for kind in KINDS:
        first, second = (load_file(f / f"{kind}.safetensors") for f in (whole, part))
        assert first.keys() == second.keys()
        assert all(torch.equal(second[name], value) for name, value in first.items())
    reports = [json.loads((folder / "report.json").read_text()) for folder in (whole, part)]
    assert reports[0] == reports[1]
    assert not list(part.rglob("*.tmp"))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
