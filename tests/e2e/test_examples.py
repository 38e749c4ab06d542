"""Every example runs as it stands, on any model, and stays short enough to be read."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tiny_model import make_model_folder

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model folder."""
    return str(make_model_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False))


def load_module(file: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_promised_examples_exist() -> None:
    """One for each way of decoding, and one for each part that users replace."""
    names = {file.stem for file in EXAMPLES}
    assert names >= {"generate", "stream", "own_scheduler", "own_drafter"}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_runs(file: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints what it got."""
    load_module(file).main(model)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_fits_on_a_screen(file: Path) -> None:
    """Under forty lines."""
    assert len(file.read_text(encoding="utf-8").splitlines()) < 40
