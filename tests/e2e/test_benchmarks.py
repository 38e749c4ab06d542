"""Benchmarks run as a user types them, on a model and heads made in a moment."""

import json
from pathlib import Path

import pytest
import torch

import paper
from entmtp.loading.loader import load_target
from published import Sizes, TargetArrays, hydra_prefix_mlp, medusa_v1
from tiny_model import make_model_folder


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


def run_paper(files: dict[str, str], *more: str) -> list[str]:
    """Arguments of a short run."""
    named = [f"--{name}={value}" for name, value in files.items()]
    return [*named, "--max-new-tokens=16", *more]


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_exact_systems_print_one_text(
    files: dict[str, str], temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain, Medusa and Hydra: three rows, all texts identical, no perplexity gap."""
    assert paper.main(run_paper(files, f"--temperature={temperature}")) == 0
    table, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["plain", "medusa", "hydra"]
    rows = json.loads(document)["configs"]
    assert list(rows) == ["plain", "medusa (medusa)", "hydra (hydra++)"]
    for row in rows.values():
        assert row["identical_to_first"] == 3
        assert row["num_tokens"] == 48
        assert row["perplexity_gap_nats"] == 0.0
    assert rows["hydra (hydra++)"]["topology_steps"].keys() == {"mc_sim_7b_63"}


def test_typical_acceptance_is_called_lossy(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The table says so, and the gap is that of other texts."""
    assert paper.main(run_paper(files, "--verification=typical", "--temperature=0.7")) == 0
    table, document = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "LOSSY" in table
    row = json.loads(document)["configs"]["medusa (medusa)"]
    assert row["verification"] == "typical (lossy)"
    assert row["perplexity_gap_nats"] != 0.0


def test_the_perplexity_is_that_of_the_text(files: dict[str, str]) -> None:
    """The mean over chunks equals one forward of everything, summed by hand."""
    target = load_target(Path(files["model"]))
    prompt, text = [5, 6, 7], [(11 * i) % 250 for i in range(200)]
    cache, whole = target.new_cache(256), torch.tensor([*prompt, *text])
    segment = paper.Segment(cache, whole[:-1], paper.np.arange(len(whole) - 1))
    log_probs = torch.log_softmax(target.forward([segment]).logits[0].double(), dim=-1)
    nll = [-log_probs[len(prompt) - 1 + i, token] for i, token in enumerate(text)]
    chunk, paper.CHUNK = paper.CHUNK, 64
    try:
        assert paper.mean_nll(target, prompt, text) == pytest.approx(float(sum(nll)) / 200, 1e-6)
    finally:
        paper.CHUNK = chunk


def test_texts_of_one_token_have_no_speed(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is decoded after the prefill; the table once ended in a division by zero."""
    assert paper.main(run_paper(files, "--max-new-tokens=1")) == 0
    assert capsys.readouterr().out.count("nanx") == 3


@pytest.mark.parametrize("path", ["nowhere/report.json", "."])
def test_a_report_that_cannot_be_written_is_refused_at_once(
    files: dict[str, str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once ended in a traceback after the whole run."""
    with pytest.raises(SystemExit) as caught:
        paper.main(run_paper(files, f"--json={path}"))
    assert caught.value.code == 2
    assert "give a file in a folder that is there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--hydra={medusa}", ""),
        ("--medusa={model}", "no file of heads in a known layout"),
        ("--limit=0", "limit"),
        ("--prompts=nowhere.jsonl", "nowhere.jsonl"),
        ("--temperature=-1", "temperature"),
    ],
)
def test_mistakes_are_one_line(
    files: dict[str, str], more: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong files and values end the run with exit code 2; any heads do for either option."""
    code = paper.main(run_paper(files, more.format(**files)))
    err = capsys.readouterr().err
    assert code == (2 if message else 0)
    assert message in err
    assert err.count("\n") <= 1
