"""``entmtp calibrate`` and ``entmtp bank``, as a user types them."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from entmtp.bank import Bank
from entmtp.calibrate.summary import unpack_trace
from entmtp.files import holding
from entmtp.scheduler import POLICIES
from entmtp.topology import named_topologies
from running import Run
from tiny_workload import make_workload


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, heads for it, and prompts of two tasks."""
    return make_workload(tmp_path_factory.mktemp("calibrate"))


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and fitted banks go where nothing else lies."""
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "home"))


MODEL = "--model {model} --heads {heads} --backend torch"
COMMON = f"{MODEL} --prompts {{prompts}} --max-new-tokens 16 --max-nodes 6"


def test_from_prompts_to_a_bank_in_use(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Calibrated, shown, validated, compared, used."""
    file = tmp_path / "it.json"
    made = run(f"calibrate {COMMON} --quick --output {file}", **files)
    assert made.code == 0, made.err
    assert "tokens/s" in made.out
    assert not file.with_name("it.json.work").exists()
    calibration = Bank.read(file).calibration
    assert calibration is not None
    trace = unpack_trace(calibration.trace)
    assert trace.facts.envelope == named_topologies()["envelope24"].paths
    assert trace.codes.shape == (trace.num_tokens, 24)
    shown = run(f"bank show {file} --json")
    document = json.loads(shown.out)
    for entry in document["entries"]:
        assert entry["num_nodes"] == len(entry["paths"])
        assert entry["step_ms"] > 0
        assert entry["tokens_per_s"] > 0
        assert entry["accept_own"] >= 1
        assert entry["source"]
    assert document["source"]["drafter"] == "hydra"
    assert "trace" not in document
    assert run(f"bank validate {file} {MODEL}", **files).out.startswith("fits: made for")
    compared = json.loads(run(f"bank compare {file} {file} --json").out)
    assert compared[str(file)][str(file)]["share"] == 1
    line = f"generate {MODEL} --bank {file} --prompt hello --max-new-tokens 8 --json"
    used = json.loads(run(line, **files).out)
    plain = json.loads(run(f"{line} --topology none", **files).out)
    assert used["text"] == plain["text"]
    assert plain["stats"]["topology_steps"] == {"none": plain["stats"]["num_steps"]}


def test_every_policy_of_a_bank_writes_the_same_text(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """They are listed with their rates, and can be named; auto is one of them."""
    file = tmp_path / "it.json"
    assert run(f"calibrate {COMMON} --quick --output {file}", **files).code == 0
    listed = json.loads(run(f"bank show {file} --json").out)["policies"]
    table = run(f"bank show {file}").out
    assert "clairvoyant" in listed
    assert set(POLICIES) - {"auto"} < set(listed)
    assert all(found["check_tokens_per_s"] > 0 and name in table for name, found in listed.items())
    texts = set()
    for policy in POLICIES:
        line = f"generate {MODEL} --bank {file} --policy {policy} --prompt hello --json"
        made = run(f"{line} --max-new-tokens 12", **files)
        assert made.code == 0, made.err
        texts.add(json.loads(made.out)["text"])
    assert len(texts) == 1
    refused = run(f"generate {MODEL} --policy ladder --prompt hello", **files)
    assert refused.code == 2
    assert "the policy 'ladder' needs a calibrated bank" in refused.err


def test_costs_of_another_bank_make_it_reproducible(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """Nothing is timed, so the same bank comes out, byte for byte."""
    first = tmp_path / "first.json"
    line = f"calibrate {COMMON} --measure none"
    assert run(f"{line} --quick --output {first}", **files).code == 0
    texts = []
    for name in ("a", "b"):
        target = tmp_path / name / "it.json"
        assert run(f"{line} --costs {first} --output {target}", **files).code == 0
        document = json.loads(target.read_text())
        del document["calibration"]["provenance"], document["sha256"]
        texts.append(document)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_two_workers_make_the_same_bank(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Byte for byte but for its provenance, from the same trace, and nothing else is left."""
    pytest.importorskip("ray")
    first, home = tmp_path / "first.json", tmp_path / "home"
    line = f"calibrate {COMMON} --measure none"
    assert run(f"{line} --quick --output {first}", **files).code == 0
    (trace,) = (home / "traces").iterdir()
    trace.unlink()  # else it is found again
    made = tmp_path / "a" / "it.json", tmp_path / "b" / "it.json"
    line += f" --costs {first}"
    alone = run(f"{line} --output {made[0]}", **files)
    assert alone.code == 0
    local = trace.rename(tmp_path / "local.trace").read_bytes()
    made[1].parent.mkdir()
    line += f" --output {made[1]} --distributed local --workers 2"
    done = subprocess.run(  # Ray leaves signal handlers and processes that it does not wait for
        [sys.executable, "-m", "entmtp", *shlex.split(line.format(**files))],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=made[1].parent,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == alone.err
    assert trace.read_bytes() == local
    assert [file.name for file in made[1].parent.iterdir()] == ["it.json"]
    texts = [
        re.sub(r'"provenance": \{[^}]*\}|"sha256": "\w*"', "", file.read_text()) for file in made
    ]
    assert texts[0] == texts[1]


def test_two_runs_in_one_folder_of_work(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """The second is told, in one line, and nothing of the first is touched."""
    with holding(tmp_path / "it.json.work"):
        refused = run(f"calibrate {COMMON} --output {tmp_path / 'it.json'}", **files)
    assert refused.code == 2
    assert "it.json.work: another run is at work there" in refused.err
    assert refused.err.count("\n") == 1


def test_other_heads_are_refused(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Where the bank is used and where it is validated."""
    file = tmp_path / "it.json"
    assert run(f"calibrate {COMMON} --quick --output {file}", **files).code == 0
    for line in ("bank validate {file} --model {model} --backend torch --drafter lookup",):
        refused = run(line, file=file, **files)
        assert refused.code == 2
        assert "calibrated for" in refused.err
        assert refused.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--output {root}", "a folder; name a file for the bank"),
        ("--output {root}/x.json --max-nodes 0", "max_nodes is 0"),
        ("--output {root}/x.json --limit 1", "has one prompt"),
        ("--output {root}/x.json --costs {prompts}", "cannot be read as a bank"),
        ("--output {root}/x.json --drafter none", "drafter is none"),
        ("--output {root}/x.json --workers 2", "give --distributed"),
        ("--output {prompts}", "the file of the prompts"),
        ("--output {model}/config.json", "is no bank, so it is not overwritten"),
        ("--output {root}/x.json --quick --limit 0", "limit is 0"),
        ("--output {root}/x.json --max-new-tokens 1", "texts of at least 2"),
        ("--output {root}/x.json --costs code", "was calibrated for"),
        ("--output {root}/x.json --distributed --workers 0", "workers is 0"),
    ],
)
def test_bad_calls(options: str, message: str, run: Run, files: dict[str, Path]) -> None:
    """One line, before anything is decoded."""
    line = COMMON.replace(" --max-nodes 6", "") if "--max-nodes" in options else COMMON
    before = files["prompts"].read_text()
    refused = run(f"calibrate {line} {options}", **files)
    assert refused.code == 2
    assert message in refused.err
    assert files["prompts"].read_text() == before
    assert not list(files["root"].glob("*.work"))


def test_a_bare_bank_has_no_costs(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """The error says so; showing it lists the trees."""
    file = tmp_path / "bare.json"
    Bank.shipped().write(file)
    refused = run(f"calibrate {COMMON} --output {tmp_path / 'x.json'} --costs {file}", **files)
    assert refused.code == 2
    assert "not a calibrated bank" in refused.err
    assert "chain4" in run(f"bank show {file}").out
    assert run(f"bank compare {file} {file}").code == 2
    assert run(f"bank compare {file}").code == 2


def test_quick_keeps_what_was_asked_for(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Its own numbers of prompts and tokens are defaults; values that are given win."""
    file = tmp_path / "it.json"
    line = f"calibrate {MODEL} --prompts {{prompts}} --quick --max-nodes 4 --output {file}"
    sizes = {}
    for options in ("", "--limit 6 --max-new-tokens 150"):
        assert run(f"{line} {options}", **files).code == 0
        calibration = Bank.read(file).calibration
        assert calibration is not None
        trace = unpack_trace(calibration.trace)
        sizes[options] = trace.num_texts, trace.facts.max_new_tokens
    assert sizes == {"": (8, 128), "--limit 6 --max-new-tokens 150": (6, 150)}


def test_banks_with_one_best_tree_are_named(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """Else equal rows would look like a mistake."""
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    assert run(f"calibrate {COMMON} --quick --output {first}", **files).code == 0
    second.write_bytes(first.read_bytes())
    assert "one tree: a, b" in run(f"bank compare {first} {second}").out
