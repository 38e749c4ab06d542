"""``entmtp quality`` as a user types it, on a model made in a moment."""

import json
from pathlib import Path

import pytest

from entmtp.kernels.library import load_library
from entmtp.loading.llamacpp import missing_llama_cpp
from running import Run
from tiny_model import make_model_folder

needs_core = pytest.mark.skipif(load_library() is None, reason="the native library is not built")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that the native core takes, a text and a set of prompts."""
    root = tmp_path_factory.mktemp("quality")
    sizes = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
    text, prompts = root / "text.txt", root / "prompts.jsonl"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    rows = [{"prompt": f"say {i}", "reference": "well, " * (3 + i)} for i in range(4)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    (root / "blank.txt").write_text("")
    (root / "bytes.txt").write_bytes(b"\xff\xfe")
    (root / "no_reference.jsonl").write_text('{"prompt": "hello"}')
    return {
        "root": root,
        "model": make_model_folder(root / "model", **sizes),
        "narrow": make_model_folder(root / "narrow", hidden_size=40, head_dim=10),
        "text": text,
        "prompts": prompts,
    }


@needs_core
def test_backends_are_held_against_float32(run: Run, files: dict[str, Path]) -> None:
    """int8 is near float32 and not equal; the numbers have their provenance."""
    line = "quality --model {model} --text {text} --window 64 --limit 500 --json"
    facts = run(line + " --backends bfloat16,int8", **files).json()
    assert facts["num_positions"] == 500
    assert facts["num_texts"] == 8
    found = facts["backends"]
    assert list(found) == ["float32", "bfloat16", "int8"]
    assert found["float32"]["kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    for name in ("bfloat16", "int8"):
        assert 0 < found[name]["kl"]["value"] < 0.1
        assert abs(found[name]["difference"]["value"]) < 0.2
        assert 0.7 < found[name]["agreement"]["value"] <= 1
        assert found[name]["kl"]["low"] <= found[name]["kl"]["value"] <= found[name]["kl"]["high"]


def test_references_are_read_behind_their_prompts(run: Run, files: dict[str, Path]) -> None:
    """Bytes of the references, and nothing else, are counted; the table has a line a backend."""
    line = "quality --model {model} --text {prompts} --window 128 --backends float32,bfloat16"
    facts = run(line + " --json", **files).json()
    assert facts["num_positions"] == 6 * (3 + 4 + 5 + 6)
    outcome = run(line, **files)
    assert outcome.code == 0
    assert outcome.out.startswith("108 positions of 4 texts")
    assert "the intervals are too narrow" in outcome.out
    assert [row.split()[0] for row in outcome.out.splitlines()[3:]] == ["float32", "bfloat16"]


def test_backends_that_cannot_run_are_named_and_left_out(run: Run, files: dict[str, Path]) -> None:
    """A model whose rows do not fit keeps its other backends."""
    line = "quality --model {narrow} --text {text} --window 32 --limit 40 --json"
    outcome = run(line + " --backends int8,llamacpp:Q8_0", **files)
    assert list(outcome.json()["backends"]) == ["float32"]
    assert outcome.err.count("\n") == 2
    assert "int8 left out" in outcome.err
    assert "llamacpp:Q8_0 left out" in outcome.err


@pytest.mark.skipif(missing_llama_cpp() is not None, reason="needs llama_cpp")
def test_llama_cpp_is_held_against_float32(run: Run, files: dict[str, Path]) -> None:
    """Eight bits are nearer than four."""
    line = "quality --model {model} --text {text} --window 64 --limit 300 --json"
    found = run(line + " --backends llamacpp:Q8_0,llamacpp:Q4_0", **files).json()["backends"]
    assert 0 < found["llamacpp:Q8_0"]["kl"]["value"] < found["llamacpp:Q4_0"]["kl"]["value"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--text {root}/nowhere.txt", "nowhere.txt: cannot be read"),
        ("--text {root}/nowhere.jsonl", "no such file"),
        ("--text {root}/blank.txt", "nothing to count"),
        ("--text {root}/bytes.txt", "is not UTF-8"),
        ("--text {root}/no_reference.jsonl", "nothing to count"),
        ("--text {root}", "cannot be read"),
        ("--text {text} --window 1", "window is 1"),
        ("--text {text} --window 257", "context window is 256"),
        ("--text {text} --limit 0", "limit is 0"),
        ("--text {text} --backends int4", "backend is 'int4'"),
        ("--text {text} --threads 0", "threads is 0"),
        ("--text {text} --model nobody", "there is no model"),
    ],
)
def test_mistakes_are_one_line(run: Run, files: dict[str, Path], line: str, message: str) -> None:
    """Exit code 2 and what to do."""
    model = "" if "--model" in line else "--model {model} "
    outcome = run("quality --backends float32 --window 64 " + model + line, **files)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
