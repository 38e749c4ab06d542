"""``entmtp bench`` as a user types it, on a model and heads made in a moment."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import schedule_cost
from entmtp.bench.vllm import find_vllm
from entmtp.kernels.library import load_library
from entmtp.loading.llamacpp import missing_llama_cpp
from fake_vllm import VERSION, write_fake_vllm
from running import Run
from tiny_model import make_model_folder
from tiny_workload import make_workload

METHODS = "hydra,hydra-best,fixed,ladder,hysteresis,throughput,dynamic,auto,chain-ema"
METHODS += ",chain-threshold,lookup"
MODEL = "--model {model} --drafter {heads} --hydra-heads {heads} --backend torch"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, heads, prompts, and a bank that was calibrated on them."""
    root = tmp_path_factory.mktemp("bench")
    made = make_workload(root)
    bank = root / "bank.json"
    line = [sys.executable, "-m", "entmtp", "calibrate", "--model", str(made["model"])]
    line += ["--heads", str(made["heads"]), "--backend", "torch", "--quick", "--max-nodes", "4"]
    line += ["--max-new-tokens", "16", "--prompts", str(made["prompts"]), "--output", str(bank)]
    environment = {**os.environ, "ENTMTP_HOME": str(root / "home")}
    subprocess.run(line, check=True, capture_output=True, env=environment)
    (root / "empty.jsonl").write_text("")
    (root / "file").write_text("")
    questions = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter."]},
        {"question_id": 161, "category": "translation", "turns": ["Translate."]},
    ]
    (root / "question.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return {**made, "bank": bank, "questions": root / "question.jsonl"}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Traces, banks and finished prompts go where nothing else lies."""
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Page(HTMLParser):
    """What a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note sources and links."""
        self.tags.add(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_all_methods_side_by_side(
    run: Run, files: dict[str, Path], tmp_path: Path, own_home: Path
) -> None:
    """Everything identical; table, document and page agree; nothing is left of the work."""
    line = f"bench {{prompts}} {MODEL} --bank {{bank}} --max-new-tokens 12 --limit 4 --repeats 2"
    line += f" --methods {METHODS} --json {tmp_path}/new/it.json --report {tmp_path}/report"
    outcome = run(line, **files)
    assert outcome.code == 0, outcome.err
    document = json.loads((tmp_path / "new" / "it.json").read_text())
    names = ["plain", *METHODS.split(",")]
    results = document["results"]["prompts"]
    assert list(results) == names
    for name, one in results.items():
        assert f"\n{name} " in outcome.out
        assert_described(one)
        assert_plans(name, one)
    assert results["plain"]["mean_acceptance_length"] == 1.0
    assert results["plain"]["policy"] == "plain"
    assert results["hydra"]["policy"] == "fixed:mc_sim_7b_63"
    for name in ("ladder", "hysteresis", "throughput", "dynamic", "chain-ema"):
        assert results[name]["policy"] == name
    assert results["auto"]["policy"] not in ("auto", "", None)
    costs = document["bank_costs"][""]
    assert len(costs["check_ms"]) == len(costs["as_calibrated"]["check_ms"]) == len(costs["rows"])
    pairs = {f"{a}/{b}" for a in names for b in names if a != b}
    assert document["ratios"]["prompts"].keys() == pairs
    for ratio in document["ratios"]["prompts"].values():
        assert ratio["ci95"][0] <= ratio["median"] <= ratio["ci95"][1]
    own = [name for name in names if name not in ("plain", "hydra", "lookup")]
    assert list(document["headroom"]["prompts"]) == own
    assert document["replay"]["prompts"]["fixed"]["bound_tokens_per_s"] > 0
    for key in ("schema", "argv", "entmtp", "torch", "cpu", "threads", "device", "dtype"):
        assert key in document
    assert document["settings"]["tasks"]["prompts"]
    page = Page()
    html = (tmp_path / "report" / "bench.html").read_text()
    page.feed(html)
    assert {"html", "table", "img"} <= page.tags
    assert not page.tags & {"script", "link", "iframe"}
    assert len(page.sources) >= 3
    assert "<li><b>hydra</b> (fixed:mc_sim_7b_63): mc_sim_7b_63 100.0%</li>" in html
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert list((own_home / "bench").glob("*.jsonl")) == []


def assert_described(one: dict[str, Any]) -> None:
    """What every method of this program says of itself."""
    assert one["identical"] is True
    assert one["num_runs"] == one["num_identical"] == 8
    assert one["ci95"][0] <= one["tokens_per_s"] <= one["ci95"][1]
    assert len(one["tokens_per_s_by_repeat"]) == 2
    assert one["mean_acceptance_length"] >= 1
    assert one["perplexity"] >= 1
    assert one["gap_nats"] == 0.0
    assert one["split_ms"].keys() == {"schedule", "draft", "forward", "rest"}
    assert sum(one["plan_shares"].values()) == pytest.approx(1)
    assert len(one["prompts"]) == 8


def assert_plans(name: str, one: dict[str, Any]) -> None:
    """One tree is never left; texts that repeat themselves make trees of many sizes grow."""
    shares, num_switches = one["plan_shares"], one["num_switches"]
    assert num_switches == sum(row["num_switches"] for row in one["prompts"])
    if name in ("plain", "hydra", "hydra-best", "fixed", "lookup"):
        assert len(shares) == 1
    if name == "dynamic":
        assert len(shares) > 1
        assert num_switches > 0
    if len(shares) == 1:
        assert num_switches == 0


def test_other_programs_are_compared_on_their_prompts(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """transformers in float32 writes the same; what is missing is named and left out."""
    if find_vllm(None) is not None:
        pytest.skip("vLLM is not missing here")
    line = f"bench {{prompts}} {MODEL} --max-new-tokens 12 --peer-limit 2 --no-headroom"
    line += f" --methods hf:float32,hf-lookup:float32,vllm --json {tmp_path}/it.json"
    outcome = run(line, **files)
    assert outcome.code == 0, outcome.err
    assert "vllm left out" in outcome.err
    document = json.loads((tmp_path / "it.json").read_text())
    results = document["results"]["prompts"]
    assert list(results) == ["plain", "hf:float32", "hf-lookup:float32"]
    for name in ("hf:float32", "hf-lookup:float32"):
        one = results[name]
        assert (one["num_runs"], one["identical"], one["is_peer"]) == (2, True, True)
        assert 0 < one["num_steps"] <= one["num_decoded"] < one["num_tokens"]
        assert document["ratios"]["prompts"][f"{name}/plain"]["num_prompts"] == 2
    assert results["hf:float32"]["mean_acceptance_length"] == 1.0
    assert results["plain"]["num_runs"] == 8
    assert results["hf:float32"]["policy"] is None
    assert "vllm" in document["left_out"]


def test_vllm_decodes_in_a_process_of_its_own(
    run: Run, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts may differ; its version is that of its environment."""
    write_fake_vllm(tmp_path / "packages")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    line = f"bench {{prompts}} {MODEL} --max-new-tokens 12 --limit 2 --no-headroom --vllm-python"
    line += f" {python} --methods vllm,vllm-ngram --json {tmp_path}/it.json"
    outcome = run(line, **files)
    assert outcome.code == 0, outcome.err
    document = json.loads((tmp_path / "it.json").read_text())
    results = document["results"]["prompts"]
    assert list(results) == ["plain", "vllm", "vllm-ngram"]
    assert document["versions"]["vllm"] == document["settings"]["versions"]["vllm"] == VERSION
    assert (results["vllm"]["num_runs"], results["vllm"]["is_peer"]) == (2, True)
    assert results["vllm"]["loaded_bytes"] is None
    assert results["vllm-ngram"]["mean_acceptance_length"] > 1.0


def test_sampled_texts_of_other_programs_may_differ(run: Run, files: dict[str, Path]) -> None:
    """It is reported, and no failure; those of this program are identical."""
    line = f"bench {{prompts}} {MODEL} --max-new-tokens 8 --limit 2 --no-headroom"
    outcome = run(f"{line} --methods lookup,hf --temperature 0.9", **files)
    assert outcome.code == 0, outcome.err


@pytest.mark.skipif(load_library() is None, reason="the native library is missing")
@pytest.mark.skipif(missing_llama_cpp() is not None, reason="needs llama_cpp")
@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_llama_cpp(run: Run, files: dict[str, Path], tmp_path: Path, temperature: str) -> None:
    """It decodes the same prompts; bfloat16 is near the text of int8 or not."""
    sizes = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
    model = make_model_folder(tmp_path / "model", **sizes)
    line = f"bench {{prompts}} --model {model} --drafter none --max-new-tokens 8 --limit 2"
    line += f" --methods llamacpp:BF16 --temperature {temperature} --json {tmp_path}/it.json"
    assert run(line, **files).code == 0
    found = json.loads((tmp_path / "it.json").read_text())["results"]["prompts"]["llamacpp:BF16"]
    assert found["num_runs"] == 2
    assert found["tokens_per_s"] > 0


def test_typical_acceptance_is_called_lossy(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """Texts that differ are no failure then; the gap is shown."""
    line = f"bench {{prompts}} {MODEL} --max-new-tokens 12 --methods hydra"
    line += f" --verification typical --temperature 0.7 --json {tmp_path}/it.json"
    outcome = run(line, **files)
    assert outcome.code == 0, outcome.err
    assert "LOSSY" in outcome.out
    document = json.loads((tmp_path / "it.json").read_text())
    assert document["settings"]["verification"] == "typical (lossy)"
    assert document["results"]["prompts"]["hydra"]["identical"] is False
    assert document["results"]["prompts"]["hydra"]["gap_nats"] != 0.0


def test_spec_bench(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """Its groups are printed, and its answer format is written, both turns of a question."""
    line = f"bench {{questions}} {MODEL} --max-new-tokens 8 --methods lookup"
    outcome = run(f"{line} --spec-bench {tmp_path}/answers --json {tmp_path}/it.json", **files)
    assert outcome.code == 0, outcome.err
    assert re.search(r"method +mt_bench +translation +overall\n", outcome.out)
    assert sorted(file.name for file in (tmp_path / "answers").iterdir()) == [
        "model-lookup.jsonl",
        "model-plain.jsonl",
    ]
    lines = (tmp_path / "answers" / "model-lookup.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    assert (first["question_id"], first["category"]) == (81, "writing")
    assert (second["question_id"], second["model_id"]) == (161, "model-lookup")
    (choice,) = first["choices"]
    assert choice["index"] == 0
    for field in ("turns", "decoding_steps", "new_tokens", "wall_time"):
        assert len(choice[field]) == 2
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    assert sum(choice["accept_lengths"]) >= sum(choice["new_tokens"]) - 2
    measures = json.loads((tmp_path / "it.json").read_text())["spec_bench"]
    assert measures["plain"]["overall"] == {"speed_up": 1.0, "mean_accepted_tokens": 1.0}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that are started end at ctrl-C, even where a background job ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_goes_on(
    run: Run, files: dict[str, Path], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """What is finished is kept, files for other programs are not; the same command then gives the
    rows of a whole run."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    line = f"bench {{prompts}} {MODEL} --max-new-tokens 32 --repeats 3 --methods lookup"
    line += " --no-headroom"
    work, file = tmp_path / "work", tmp_path / "it.json"
    words = f"{line} --work {work} --json {file}".format(**files).split()
    with subprocess.Popen(
        [sys.executable, "-m", "entmtp", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as process:
        deadline = time.monotonic() + 120
        while count_lines(work) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"the same command goes on" in err
    assert not list(scratch.glob("entmtp-bench-*"))
    assert not file.exists()
    resumed = run(f"{line} --work {work} --json {file}", **files)
    assert resumed.code == 0
    assert "prompts were done before" in resumed.err
    found = json.loads(file.read_text())
    assert found["num_processes"] == 2
    assert run(f"{line} --json {tmp_path / 'whole.json'}", **files).code == 0
    assert counts(found) == counts(json.loads((tmp_path / "whole.json").read_text()))


def count_lines(work: Path) -> int:
    """Of the work file."""
    return sum(file.read_bytes().count(b"\n") for file in work.glob("*.jsonl"))


def counts(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows without their times."""
    return {
        name: [{k: v for k, v in row.items() if not k.endswith("_s")} for row in one["prompts"]]
        for name, one in document["results"]["prompts"].items()
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompts} --methods plain,turbo", "method is 'turbo'; it must be one of plain, medusa"),
        ("{prompts} --methods hydra,hydra", "occurs twice"),
        ("{prompts} --methods ladder", "needs a calibrated bank"),
        ("{prompts} --methods medusa", "no medusa heads are shipped"),
        ("{prompts} --methods dynamic --drafter none", "it needs heads"),
        ("{prompts} --repeats 0", "repeats is 0"),
        ("{prompts} --peer-limit 0", "peer_limit is 0"),
        ("{prompts} --limit 0", "limit is 0"),
        ("{prompts} --max-new-tokens 0", "max_new_tokens is 0"),
        ("{prompts} --temperature nan", "temperature is nan"),
        ("{prompts} --temperature inf", "temperature is inf"),
        ("{prompts} {prompts}", "reported as 'prompts'"),
        ("{root}/empty.jsonl", "no prompts in it"),
        ("{root}/nowhere.jsonl", "no such file"),
        ("nowhere", "neither a task"),
        ("{prompts} --json {root}", "a folder; name a file"),
        ("{prompts} --json {root}/file/it.json", "cannot be written"),
        ("{prompts} --report {root}/file/it", "cannot be written"),
        ("{prompts} --spec-bench {root}/file/it", "cannot be written"),
        ("{prompts} --work {root}/file/it", "cannot be used"),
        ("{prompts} --spec-bench {root}/answers", "none of Spec-Bench"),
        ("{questions} {prompts} --spec-bench {root}/answers", "one file of questions"),
        ("{prompts} --methods vllm --vllm-python {root}/nowhere", "does not exist"),
        ("{prompts} --methods lookup --vllm-python /bin/false", "is no Python that runs"),
        ("{prompts} --bank other={bank}", "is for task 'other'"),
        ("{prompts} --bank {root}/no.json", "neither a file"),
        ("{prompts} --bank {bank} --bank {bank}", "has a bank already"),
        ("{prompts} --bank {bank} --drafter none", "fills no trees"),
        ("{prompts} --bank {bank} --drafter lookup", "calibrated for"),
    ],
)
def test_mistakes_are_one_line(run: Run, files: dict[str, Path], line: str, message: str) -> None:
    """Exit code 2, and what to do."""
    model = MODEL.replace("--drafter {heads}", "") if "--drafter" in line else MODEL
    chosen = "" if "--methods" in line else " --methods lookup"
    outcome = run(f"bench {line} {model}{chosen}", **files)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("Error") == 1


def test_what_choosing_costs_is_measured_for_every_policy(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``benchmarks/schedule_cost.py`` prints a table, and a document with all fitted policies."""
    line = [str(files["bank"]), f"--model={files['model']}", f"--heads={files['heads']}"]
    line += [f"--prompts={files['prompts']}", "--limit=2", "--max-new-tokens=12"]
    assert schedule_cost.main([*line, "--backend=torch", f"--json={tmp_path}/it.json"]) == 0
    table, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    report = json.loads(document)
    assert report == json.loads((tmp_path / "it.json").read_text())
    bank = json.loads(files["bank"].read_text())
    fitted = bank["calibration"]["policies"].keys() - {"plain", "clairvoyant"}
    assert report["policies"].keys() == {"fixed", *fitted}
    for name, row in report["policies"].items():
        assert f"\n{name} " in table
        assert 0 < row["median_us"] <= row["high_us"]
        params = bank["calibration"]["policies"].get(name, {}).get("params", {})
        assert (row["search_us"] is not None) == bool(params.get("hits"))
    assert report["policies"]["fixed"]["over_fixed_us"] == 0
    assert report["prompts"] == 2
