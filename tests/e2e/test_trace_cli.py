"""``entmtp trace`` and ``entmtp heads evaluate``, as a user types them."""

import json
from pathlib import Path

import pytest

from entmtp.calibrate.trace import load_trace
from running import Run
from tiny_workload import make_workload


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, heads for it, and prompts of two tasks."""
    return make_workload(tmp_path_factory.mktemp("trace"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces go where nothing else lies."""
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "home"))


COMMON = "--model {model} --drafter {heads} --prompts {prompts} --max-new-tokens 20 --backend torch"


def test_a_trace_is_made_once(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """The second command finds the file; other settings are told from it."""
    line = f"trace {COMMON} --output {tmp_path / 'a.trace'}"
    made = run(line, **files)
    assert made.code == 0
    assert "8 texts" in made.out
    trace = load_trace(tmp_path / "a.trace")
    assert set(trace.tasks) == {"code", "chat"}
    assert trace.codes.shape[1] == 0
    before = (tmp_path / "a.trace").stat().st_mtime_ns
    assert run(line, **files).code == 0
    assert (tmp_path / "a.trace").stat().st_mtime_ns == before
    other = run(f"{line} --envelope chain4", **files)
    assert other.code == 2
    assert "envelope = (), not ((0,), (0, 0), (0, 0, 0)" in other.err
    assert other.err.count("\n") == 1


def test_envelope_and_sampling_are_options(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """They are in the facts of the file."""
    line = f"trace {COMMON} --output {tmp_path / 'b.trace'} --limit 2"
    (tmp_path / "tree.json").write_text("[[0], [2], [2, 1]]")
    more = f"--envelope {tmp_path / 'tree.json'} --temperature 0.7 --uncoupled --depth 2"
    assert run(f"{line} {more}", **files).code == 0
    trace = load_trace(tmp_path / "b.trace")
    facts = trace.facts
    assert (facts.envelope, facts.temperature) == (((0,), (2,), (2, 1)), 0.7)
    assert trace.codes.shape == (trace.num_tokens, 3)
    assert (facts.is_coupled, facts.depth) == (False, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--depth 9", "depth goes to depth 9"),
        ("--envelope tree99", "no topology 'tree99'"),
        ("--envelope {prompts}", "not a JSON list of paths"),
        ("--envelope chain4 --drafter lookup", "the lookup drafter has no probabilities"),
        ("--drafter none", "proposes nothing"),
        ("--output {root}", "a folder; name a file"),
        ("--output {prompts}/x", "cannot be written"),
        ("--max-new-tokens 0", "max_new_tokens"),
        ("--limit 0", "limit is 0"),
        ("--prompts {root}/none.jsonl", "no such file"),
        ("--prompts poems", "'poems' is neither a task"),
    ],
)
def test_wrong_options_are_one_line(
    run: Run, files: dict[str, Path], tmp_path: Path, options: str, message: str
) -> None:
    """Exit code 2, and the value in the message."""
    result = run(f"trace {COMMON} --output {tmp_path / 'c.trace'} {options}", **files)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_evaluate_prints_every_task(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Tables for people, one object for programs, pictures in a folder."""
    table = run(f"heads evaluate {COMMON}", **files)
    assert table.code == 0
    assert table.out.count("\ncode ") == table.out.count("\nall ") >= 5
    line = f"heads evaluate {COMMON} --json --score own --report {tmp_path / 'plots'}"
    found = json.loads(run(line, **files).out)
    assert found["tasks"].keys() == {"code", "chat"}
    assert found["mean_acceptance_length"] >= 1
    for task in found["tasks"].values():
        low, high = task["ci95"]
        assert low <= task["mean_acceptance_length"] <= high
        assert [budget["nodes"] for budget in task["budgets"]] == [1, 2, 4, 8, 16, 32, 64]
        assert all(len(budget["paths"]) <= budget["nodes"] for budget in task["budgets"])
        assert sum(bin_["num_steps"] for bin_ in task["by_entropy"]) == sum(
            bin_["num_steps"] for bin_ in task["by_position"]
        )
    assert len(list((tmp_path / "plots").glob("*.png"))) == len(found["plots"]) == 4


def test_a_task_of_one_prompt_is_refused(run: Run, files: dict[str, Path]) -> None:
    """There would be nothing to score on."""
    result = run(f"heads evaluate {COMMON} --limit 1", **files)
    assert result.code == 2
    assert "has one prompt" in result.err
