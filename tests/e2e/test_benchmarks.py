"""Benchmarks run as a user types them, on a model and heads made in a moment."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import draft_cost
import paper
import policies
import step_cost
from entmtp.calibrate.trace import save_trace
from entmtp.kernels.library import load_library
from entmtp.loading.llamacpp import missing_llama_cpp
from entmtp.loading.loader import load_target
from entmtp.topology import Topology
from published import Sizes, TargetArrays, hydra_prefix_mlp, medusa_v1
from tiny_model import make_model_folder
from traces import random_trace, with_growth


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A two-layer model in the layout of Vicuna, published heads in .pt files, three prompts."""
    root = tmp_path_factory.mktemp("paper")
    model = make_model_folder(root / "vicuna", tie_embeddings=False)
    target, sizes = load_target(model), Sizes()
    output = target.output_rows(torch.arange(sizes.vocab_size)).double().numpy()
    arrays = TargetArrays(target.embedding().double().numpy(), output)
    prompts = root / "prompts.jsonl"
    rows = [{"id": str(i), "prompt": f"hello {i}"} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return {
        "model": str(model),
        "medusa": str(medusa_v1(root / "medusa", sizes).folder),
        "hydra": str(hydra_prefix_mlp(root / "hydra", sizes, arrays).file),
        "prompts": str(prompts),
    }


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces and finished prompts go where nothing else lies."""
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "home"))


def run_paper(files: dict[str, str], work: Path, *more: str) -> list[str]:
    """Arguments of a short run."""
    named = [f"--{name}={value}" for name, value in files.items()]
    return [*named, "--max-new-tokens=16", "--backend=torch", f"--work={work}", *more]


@pytest.mark.usefixtures("own_home")
def test_exact_systems_print_one_text(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain, Medusa, Hydra, sampled: three rows, all texts identical, no perplexity gap."""
    assert paper.main(run_paper(files, tmp_path, "--temperature=0.7")) == 0
    table = capsys.readouterr().out.split("tokens/s (tokens/step)")[1]
    for name in ("AR", "Medusa", "Hydra"):
        assert f"\n{name} " in table
    assert "EntMTP-tau /" not in table
    rows = json.loads((tmp_path / "paper.json").read_text())["results"]["prompts"]
    assert list(rows) == ["plain", "medusa", "hydra"]
    for row in rows.values():
        assert row["identical"]
        assert row["num_tokens"] == rows["plain"]["num_tokens"]
        assert row["gap_nats"] == 0.0
    assert rows["hydra"]["plan_shares"].keys() == {"mc_sim_7b_63"}


@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
def test_the_systems_of_the_paper_are_calibrated(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All six stand beside the claims; typical acceptance is called lossy; the bank is kept."""
    prompts = files["prompts"]
    more = [f"--calibration={prompts}", "--quick", "--max-nodes=3", "--temperature=0.7"]
    assert paper.main(run_paper(files, tmp_path, "--verification=typical", *more)) == 0
    out = capsys.readouterr().out
    assert "LOSSY" in out
    for name in ("EntMTP*", "EntMTP-l", "EntMTP-tau", "EntMTP-tau / Hydra"):
        assert f"\n{name} " in out
    row = json.loads((tmp_path / "paper.json").read_text())["results"]["prompts"]["medusa"]
    assert row["gap_nats"] != 0.0
    (bank,) = tmp_path.glob("prompts-0.7-*.json")
    before = bank.stat().st_mtime_ns
    assert paper.main(run_paper(files, tmp_path, *more)) == 0
    assert list(tmp_path.glob("prompts-*.json")) == [bank]
    assert bank.stat().st_mtime_ns == before


def test_a_bank_is_used_again_for_the_same_calibration_alone(tmp_path: Path) -> None:
    """Task and temperature alone once named it, so that a rough bank stood for a thorough one."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "you"}')

    def name(*more: str) -> str:
        given = ["--model=m", "--hydra=h", f"--prompts={prompts}", *more]
        return paper.bank_file(paper.parse(given), "prompts", str(prompts)).name

    others = ("--quick", "--limit=1", "--seed=1", "--max-nodes=8", "--max-new-tokens=9")
    others += ("--temperature=0.7", "--threads=1", "--backend=torch", "--model=n", "--hydra=i")
    names = {name(), *map(name, others)}
    assert len(names) == 1 + len(others)
    assert {name("--repeats=2"), name("--verification=typical"), name("--medusa=g")} == {name()}
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "they"}')
    assert name() not in names


@pytest.mark.usefixtures("own_home")
def test_texts_of_one_token_have_no_speed(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is decoded after the prefill; the table once ended in a division by zero."""
    assert paper.main(run_paper(files, tmp_path, "--max-new-tokens=1")) == 0
    assert "nanx" in capsys.readouterr().out


def test_a_work_folder_that_cannot_be_made_is_one_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once ended in a traceback after the whole run."""
    (tmp_path / "file").write_text("")
    assert paper.main(run_paper(files, tmp_path / "file")) == 2
    assert capsys.readouterr().err.startswith("Error: ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--medusa={model}", "no file of heads in a known layout"),
        ("--limit=0", "limit"),
        ("--prompts=nowhere.jsonl", "nowhere.jsonl"),
        ("--temperature=-1", "temperature"),
        ("--repeats=0", "repeats is 0"),
    ],
)
@pytest.mark.usefixtures("own_home")
def test_mistakes_are_one_line(
    files: dict[str, str],
    tmp_path: Path,
    more: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong files and values end the run with exit code 2."""
    assert paper.main(run_paper(files, tmp_path, more.format(**files))) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model=m", "--prompts=p"],
        ["--model=m", "--prompts=p", "--prompts=q", "--hydra=h", "--calibration=c"],
    ],
)
def test_a_comparison_needs_heads_and_a_file_for_each_task(arguments: list[str]) -> None:
    """Refused as usage errors."""
    with pytest.raises(SystemExit, match="2"):
        paper.parse(arguments)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the native core takes."""
    sizes = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
    return make_model_folder(tmp_path_factory.mktemp("step") / "model", **sizes)


@pytest.mark.slow
def test_step_cost_times_backends_in_several_processes(
    wide_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A table, then one document with a number for every backend and number of rows."""
    file = tmp_path / "report.json"
    names = "native,torch,llamacpp:Q4_0,llamacpp:Q8_0,llamacpp:BF16,hf"
    line = f"--model {wide_model} --backends {names} --rows 1,5 --context 16 --json {file}"
    more = "--threads 1 --repeats 2 --processes 2"
    assert step_cost.main([*line.split(), *more.split()]) == 0
    captured = capfd.readouterr()
    table, document = captured.out.rsplit("\n", 2)[:2]
    report = json.loads(document)
    assert report == json.loads(file.read_text())
    left_out = (load_library() is None) + 3 * (missing_llama_cpp() is not None)
    assert captured.err.count("left out") == captured.err.count("\n") == left_out
    assert len(report["ms"]) == 6 - left_out
    for name, ms in report["ms"].items():
        assert f"\n{name} " in table
        for rows in ("1", "5"):
            low, high = report["ms_range"][name][rows]
            assert 0 < low <= ms[rows] <= high
    assert report["roofline_ms"].keys() == {"1", "5"}
    assert report["bandwidth_gb_s"] > 0
    assert (report["throughput_gop_s"] is None) == (load_library() is None)
    assert (report["processes"], report["threads"], report["context"]) == (2, 1, 16)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started end at ctrl-C, even where a background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _is_running(pid: str) -> bool:
    """Whether a process is there, other than as a zombie that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_ctrl_c_ends_every_process(wide_model: Path) -> None:
    """The one that times is not left behind, even where it has hardly begun."""
    command = [sys.executable, step_cost.__file__, "--model", str(wide_model), "--backends=torch"]
    command += ["--rows=1", "--context=8", "--threads=1", "--repeats=10000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        deadline = time.monotonic() + 60
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        (child,) = children.read_text().split()
        parent.send_signal(signal.SIGINT)
        _, err = parent.communicate(timeout=30)  # until no process holds the pipe any more
    assert (parent.returncode, err) == (130, b"Interrupted.\n")
    ended = time.monotonic() + 30  # its pipe is closed before the rest of it is gone
    while _is_running(child) and time.monotonic() < ended:
        time.sleep(0.1)
    assert not _is_running(child)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--backends=native,onnx", "backend 'onnx'"),
        ("--rows=0,4", "--rows"),
        ("--rows=129", "--rows"),
        ("--processes=0", "--processes"),
        ("--json=nowhere/report.json", "give a file in a folder that is there"),
        ("--context=200", "context is 200"),
        ("--model=nobody", "there is no model"),
    ],
)
def test_step_cost_refuses_in_one_line(
    wide_model: Path, more: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 before anything is timed."""
    try:
        code = step_cost.main(["--backends=torch", f"--model={wide_model}", more])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(load_library() is None, reason="the native library is missing")
def test_the_cost_of_a_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All kinds by the core and by torch; the last line is the report."""
    model = make_model_folder(
        tmp_path / "model", head_dim=32, hidden_size=64, intermediate_size=64, num_layers=1
    )
    arguments = ["--model", str(model), "--rows", "1,3", "--depths", "2", "--repeats", "2"]
    assert draft_cost.main([*arguments, "--hot", "50", "--context", "9"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in ("hydra", "medusa", "hydra++", "mtp"):
        entries = report["draft_ms"][kind]
        assert [(entry["rows"], entry["depth"]) for entry in entries] == [(1, 2), (3, 2)]
        assert all(entry["core_low_ms"] > 0 and entry["ratio"] > 0 for entry in entries)


@pytest.mark.parametrize(
    "arguments", [["--kinds", "eagle"], ["--rows", "0"], ["--depths", "2,x"], ["--hot", "0"]]
)
def test_what_cannot_be_timed_is_refused(arguments: list[str]) -> None:
    """As a usage error."""
    with pytest.raises(SystemExit, match="2"):
        draft_cost.parse(arguments)


def test_policies_are_replayed_at_projected_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every policy and the tree that was named, for each task and all; no model is needed."""
    trace = with_growth(random_trace(4, num_texts=24), Topology.chain(3))
    save_trace(trace, tmp_path / "it.trace")
    line = [str(tmp_path / "it.trace"), "--roofline=14,2000,250,1", "--max-nodes=4"]
    line += ["--topology=chain4", f"--json={tmp_path}/it.json"]
    assert policies.main(line) == 0
    results = json.loads((tmp_path / "it.json").read_text())["results"]
    assert results.keys() == {"a", "b", "all"}
    for rates in results.values():
        assert {"plain", "fixed", "throughput", "dynamic", "clairvoyant", "chain4"} <= rates.keys()
        assert rates["plain"] == pytest.approx(1000 / (8 + 0.15))
        assert rates["clairvoyant"] >= rates["fixed"]
    assert policies.roofline_ms((14, 2000, 250, 1), 500) == pytest.approx(29)
    assert "clairvoyant" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nowhere.trace", "nowhere.trace"),
        ("it --roofline 14,2000", "has 2 numbers; it takes 4"),
        ("it --roofline 14,2000,250,0", "above 0"),
        ("it --forward-ms 1,x", "no list of numbers"),
        ("it --rows 1,2", "--rows has 2 numbers, --forward-ms 6"),
        ("it --topology nothing", "nothing"),
    ],
)
def test_replays_that_cannot_be(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit code 2."""
    save_trace(random_trace(1, num_texts=4), tmp_path / "it")
    words = [str(tmp_path / word) if word == "it" else word for word in line.split()]
    try:
        code: object = policies.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err
