"""``entmtp heads``: inspect, convert and verify, as a user types them."""

from pathlib import Path

import pytest

from entmtp.loading.loader import load_target
from published import (
    Sizes,
    TargetArrays,
    add_to_model,
    hydra_mlp,
    hydra_prefix_mlp,
    medusa_v1,
    medusa_v2,
    mtp_deepseek,
    mtp_mimo,
    vllm_medusa,
)
from running import Run
from tiny_model import make_model_folder

LAYOUTS = {
    "v1": ("medusa-v1", "medusa", 5),
    "v2": ("medusa-v2", "medusa", 3),
    "vllm": ("medusa-vllm", "medusa", 3),
    "hydra": ("hydra-mlp", "hydra", 4),
    "hydra_plus": ("hydra-prefix-mlp", "hydra++", 4),
    "deepseek": ("mtp-deepseek", "mtp", 1),
    "mimo": ("mtp-mimo", "mtp", 1),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and heads for it in every published layout."""
    root, sizes = tmp_path_factory.mktemp("heads"), Sizes()
    model = make_model_folder(root / "model")
    target = load_target(model)
    embedding = target.embedding().double().numpy()
    arrays = TargetArrays(embedding, embedding)
    deepseek = make_model_folder(root / "deepseek")
    tensors, _ = mtp_deepseek(sizes, 2, target=arrays, with_copies=True)
    add_to_model(deepseek, tensors, num_nextn_predict_layers=1)
    mimo = make_model_folder(root / "mimo")
    tensors, _ = mtp_mimo(sizes, qkv_bias=False)
    add_to_model(mimo, tensors, num_nextn_predict_layers=1)
    return {
        "root": root,
        "model": model,
        "deepseek": deepseek,
        "mimo": mimo,
        "v1": medusa_v1(root / "v1", sizes).folder,
        "v2": medusa_v2(root / "v2", sizes).file,
        "vllm": vllm_medusa(root / "vllm", sizes, rows="truncated").folder,
        "hydra": hydra_mlp(root / "hydra", sizes, arrays, num_layers=3).file,
        "hydra_plus": hydra_prefix_mlp(root / "hydra_plus", sizes, arrays).folder,
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_inspect_tells_what_a_file_is(run: Run, files: dict[str, Path], name: str) -> None:
    """Layout, kind and heads from the tensors alone; against a model on demand."""
    layout, kind, num_heads = LAYOUTS[name]
    facts = run("heads inspect {path} --json", path=files[name]).json()
    assert (facts["layout"], facts["kind"], facts["num_heads"]) == (layout, kind, num_heads)
    assert facts["hidden_size"] == 32
    done = run("heads inspect {path} --model {model}", path=files[name], model=files["model"])
    assert done.code == 0
    assert f"fits:           {files['model']}" in done.out


def test_inspect_tells_a_wrong_config(run: Run, files: dict[str, Path]) -> None:
    """The published config says two heads; the file holds five."""
    done = run("heads inspect {v1}", **files)
    assert "num_heads:      5" in done.out
    assert "config.json says 2 heads; the file holds 5" in done.out
    assert "lmsys/vicuna-7b-v1.3" in done.out


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["keep", "int8"])
def test_converted_heads_verify_and_decode(
    run: Run, files: dict[str, Path], name: str, dtype: str
) -> None:
    """Original and converted file pass the check of the forward pass; the text does not change."""
    out = files["root"] / f"{name}-{dtype}.safetensors"
    given = {"path": files[name], "model": files["model"], "out": out}
    assert (
        run(f"heads convert {{path}} {{out}} --model {{model}} --dtype {dtype}", **given).code == 0
    )
    for path in (files[name], out):
        line = "heads verify {path} --model {model} --trees 4 --tokens 12 --prompt hi --json"
        report = run(line, path=path, model=files["model"]).json()
        assert report["kind"] == LAYOUTS[name][1]
        assert report["nodes"] == report["equal"] > 0
        assert report["wrong"] == []
    line = (
        "generate --raw --prompt hello --model {model} --drafter {out} --max-new-tokens 12 --json"
    )
    text = run(line, **given).json()
    plain = run(line, **given | {"out": "none"}).json()
    assert text["token_ids"] == plain["token_ids"]


def test_verify_finds_heads_that_are_drafted_wrongly(
    run: Run, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that ranks the other way round fails every node, with exit code 1."""
    import entmtp.drafters.picking as module

    top_k = module.stable_top_k
    monkeypatch.setattr(module, "stable_top_k", lambda logits, k: top_k(-logits, k))
    done = run("heads verify {v1} --model {model} --trees 2 --tokens 8 --prompt hi", **files)
    assert done.code == 1
    assert "equal:      0" in done.out
    assert '"expected"' in done.out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("heads inspect {root}/nowhere", "no such file or folder of heads"),
        ("heads inspect mtp --model {model}", "no multi-token module of its own"),
        ("heads inspect {model}", "no file of heads in a known layout"),
        ("heads convert {v2} {root}/new.pt --model {model}", "must end in .safetensors"),
        ("heads convert {v2} {v2} --model {model}", "exists already"),
        (
            f"heads convert {{v2}} {'x' * 300}.safetensors --model {{model}}",
            "is no name for a file",
        ),
        ("heads convert {v2} {root}/x.safetensors --model {model} --dtype int4", "int4"),
        ("heads convert {v2} {root}/no/x.safetensors --model {model}", "cannot write"),
        ("heads convert {deepseek} {root}/y.safetensors", "does not name its model"),
        ("heads verify {v1}", "lmsys/vicuna-7b-v1.3"),
        ("heads verify {v1} --model {model} --device tpu", "device"),
        ("heads verify {v1} --model {model} --prompt ''", "the prompt has 0 tokens"),
        (f"heads verify {{v1}} --model {{model}} --prompt {'x' * 300}", "the context window holds"),
    ],
)
def test_mistakes_are_one_line(run: Run, files: dict[str, Path], line: str, message: str) -> None:
    """Exit code 2, one line that says how to go on, and no file left behind."""
    done = run(line, **files)
    assert done.code == 2
    assert message in done.err
    assert done.err.count("\n") == 1
    assert not list(files["root"].glob("*.tmp"))


def test_the_shipped_heads_are_known_by_name(run: Run) -> None:
    """``hydra`` and ``medusa`` need no path."""
    for kind in ("hydra", "medusa"):
        facts = run(f"heads inspect {kind} --json").json()
        assert (facts["kind"], facts["layout"]) == (kind, "entmtp")


def test_quantising_keeps_matrices_close(files: dict[str, Path], run: Run) -> None:
    """int8 takes a quarter of the room."""
    sizes = {}
    for dtype in ("float32", "int8"):
        out = files["root"] / f"size-{dtype}.safetensors"
        line = f"heads convert {{v1}} {{out}} --model {{model}} --dtype {dtype}"
        assert run(line, out=out, v1=files["v1"], model=files["model"]).code == 0
        sizes[dtype] = out.stat().st_size
    assert sizes["int8"] < 0.4 * sizes["float32"]
