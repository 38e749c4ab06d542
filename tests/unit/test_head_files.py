"""Files and folders that hold no usable heads are refused at once, by name, with the way out."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from entmtp.errors import AssetError, CheckpointError
from entmtp.loading.heads_source import find_heads
from entmtp.topology import Topology
from heads_cases import (
    CASES,
    LAYOUTS,
    SIZES,
    World,
    brute_force,
    needed,
    random_text,
    refusal,
    rewritten,
    tensors_of,
)
from published import Published

Made = Callable[[str], Published]

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"

every_layout = pytest.mark.parametrize("name", LAYOUTS)
zip_or_legacy = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model that the heads should be for."""
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Sound heads of a case, made once."""
    return cache(lambda name: CASES[name].build(world, tmp_path_factory.mktemp("heads")))


# -- pickles that run code -------------------------------------------------------------------------


class RunsCode:
    """An object whose pickle leaves a mark when it is loaded carelessly."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@zip_or_legacy
@pytest.mark.parametrize("is_whole", [True, False], ids=["alone", "among tensors"])
def test_a_pickle_that_would_run_code_is_refused_unrun(
    world: World, made: Made, tmp_path: Path, is_zip: bool, is_whole: bool
) -> None:
    """The message names what it would call, and nothing has been called."""
    mark, file = tmp_path / "mark", tmp_path / "medusa_lm_head.pt"
    harmful = RunsCode(mark)
    data = harmful if is_whole else {**tensors_of(made("medusa-v1")), "x": harmful}
    torch.save(data, file, _use_new_zipfile_serialization=is_zip)
    text = refusal(world, file)
    assert re.search(r"would run code \((posix|nt)\.system\).*was refused: save the plain", text)
    assert not mark.exists()


@zip_or_legacy
def test_a_pickled_module_is_refused(world: World, tmp_path: Path, is_zip: bool) -> None:
    """A whole nn.Module names classes to build; its state dict would do."""
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(nn.Linear(2, 2), file, _use_new_zipfile_serialization=is_zip)
    text = refusal(world, file)
    assert "would run code (torch.nn.modules.linear.Linear)" in text
    assert "save the plain state dict of the heads" in text


# -- damaged and foreign files ---------------------------------------------------------------------


@zip_or_legacy
@pytest.mark.parametrize("share", [0.0002, 0.003, 0.05, 0.5, 0.99, 0.9999])
def test_a_truncated_pickle_is_refused(
    world: World, made: Made, tmp_path: Path, is_zip: bool, share: float
) -> None:
    """Wherever the copy broke off."""
    file = tmp_path / "medusa_lm_head.pt"
    tensors = tensors_of(made("medusa-v1"))
    torch.save(tensors, file, _use_new_zipfile_serialization=is_zip)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert "medusa_lm_head.pt is damaged or was not copied whole" in refusal(world, file)


@pytest.mark.parametrize("share", [0.0002, 0.003, 0.05, 0.5, 0.99, 0.9999])
def test_a_truncated_safetensors_file_is_refused(
    world: World, made: Made, tmp_path: Path, share: float
) -> None:
    """In the header, between tensors, and a few bytes before the end."""
    data = made("medusa-v2").file.read_bytes()
    file = tmp_path / "medusa_lm_head.safetensors"
    file.write_bytes(data[: int(len(data) * share)])
    assert "is damaged or was not copied whole" in refusal(world, file)


@pytest.mark.parametrize("name", ["heads.pt", "heads.bin", "heads.safetensors"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty: fetch it again"),
        (POINTER, r"is a pointer of Git LFS, not the weights: .*'git lfs pull'"),
        (b'{"medusa_num_heads": 2}\n', "is damaged or was not copied whole"),
        (b"<!DOCTYPE html>\n<html>a class, a function</html>", "is damaged or was not copied"),
        (b"\x00" * 300, "is damaged or was not copied whole"),
        (b"PK\x03\x04" + b"x" * 300, "is damaged or was not copied whole"),
    ],
    ids=["empty", "lfs", "json", "html", "zeros", "zip"],
)
def test_a_file_without_weights_is_refused(
    world: World, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    """What downloads leave in the place of weights, under any usual name."""
    (tmp_path / name).write_bytes(data)
    assert re.search(rf"{re.escape(name)} {message}", refusal(world, tmp_path / name))


@zip_or_legacy
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(2), r"no state dict .* but an object of type Tensor"),
        ([torch.ones(2)], r"no state dict .* but an object of type list"),
        ({}, r"no state dict .* but an empty one"),
        ({"0.0.linear.weight": 1.5}, r"'0\.0\.linear\.weight' is an object of type float"),
        ({"state_dict": {"a": None}}, r"entry 'a' is an object of type NoneType"),
        ({7: torch.ones(2)}, r"entry 7 has no text as its name"),
        ({"a": torch.eye(2).to_sparse()}, r"entry 'a' is a sparse, nested, quantised or meta"),
        ({"a": torch.ones(2, device="meta")}, r"entry 'a' is a sparse, nested, quantised or meta"),
    ],
    ids=["tensor", "list", "nothing", "number", "inner", "numbered", "sparse", "meta"],
)
def test_a_pickle_of_something_else_is_refused(
    world: World, tmp_path: Path, is_zip: bool, data: object, message: str
) -> None:
    """Only named tensors with numbers in them are heads."""
    file = tmp_path / "heads.pt"
    torch.save(data, file, _use_new_zipfile_serialization=is_zip)
    text = refusal(world, file)
    assert re.search(message, text)
    assert text.endswith("save the plain state dict of the heads")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(world: World, tmp_path: Path) -> None:
    """It has no shape to report, which once ended in an internal error of torch."""
    file = tmp_path / "heads.pt"
    torch.save({"a": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, file)
    assert "entry 'a' is a sparse, nested, quantised or meta" in refusal(world, file)


@pytest.mark.parametrize("given", ["nothing.pt", "~nobody-of-this-name/heads", "a" * 300, "a\0b"])
def test_a_name_of_no_file_is_refused(world: World, given: str) -> None:
    """The message says what may be given; names that no file can have are among them."""
    with pytest.raises(CheckpointError, match=r"no such file or folder of heads: give hydra\+\+, "):
        world.drafter(Path(given))


# -- folders ---------------------------------------------------------------------------------------


def test_a_folder_without_heads_is_refused(world: World, tmp_path: Path) -> None:
    """The message says what it should hold."""
    (tmp_path / "README.md").write_text("nothing")
    assert "holds no file of heads: give a file, or a folder with" in refusal(world, tmp_path)


def test_a_model_without_modules_is_no_folder_of_heads(world: World) -> None:
    """The message lists what is there."""
    text = refusal(world, world.folder)
    assert re.search(r"no file of heads in a known layout; it holds lm_head\.weight, .* more", text)


def test_several_files_are_not_guessed_among(world: World, made: Made, tmp_path: Path) -> None:
    """The message lists them and asks for one."""
    for name in ("first.pt", "second.pt"):
        shutil.copy(made("medusa-v1").file, tmp_path / name)
    text = refusal(world, tmp_path)
    assert "several files that could be heads (first.pt, second.pt): name the file" in text


def test_a_usual_name_is_taken_among_several_files(
    world: World, made: Made, tmp_path: Path
) -> None:
    """Optimiser states and the like may lie beside the heads."""
    shutil.copy(made("medusa-v1").file, tmp_path / "medusa_lm_head.pt")
    torch.save({"step": 1}, tmp_path / "optimizer.pt")
    assert world.drafter(tmp_path).name == "medusa"


@every_layout
def test_heads_need_no_config(world: World, made: Made, tmp_path: Path, name: str) -> None:
    """All is read from the tensors."""
    shutil.copy(made(name).file, tmp_path / made(name).file.name)
    drafter = world.drafter(tmp_path / made(name).file.name)
    assert drafter.name == CASES[name].kind


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff\xfe{}"], ids=repr)
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_a_damaged_config_is_named(
    world: World, made: Made, tmp_path: Path, is_folder: bool, data: bytes
) -> None:
    """It is not passed over in silence, since it may tell that heads are of another kind."""
    file = Path(shutil.copy(made("medusa-v1").file, tmp_path))
    (tmp_path / "config.json").write_bytes(data)
    text = refusal(world, tmp_path if is_folder else file)
    assert re.search(r"config\.json is not (valid JSON|a JSON object)", text)


@pytest.mark.parametrize("name", ["medusa-v1", "vllm-truncated", "hydra++"])
def test_a_config_with_absurd_values_does_no_harm(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """Counts and sizes of a config are never used to allocate or to loop."""
    entries = json.loads((made(name).folder / "config.json").read_text())
    numbers = {key: 10**18 for key, value in entries.items() if type(value) is int and value}
    file = rewritten(made(name), tmp_path / "h", tensors_of(made(name)), numbers)
    assert world.drafter(file).name == CASES[name].kind


# -- the Hub ---------------------------------------------------------------------------------------


def test_a_failed_download_is_one_line() -> None:
    """Its reason is the first line of what the client says."""

    def download(repo_id: str) -> str:
        raise ConnectionError(f"no route for {repo_id}\nsome advice\nTraceback ...")

    with pytest.raises(AssetError) as caught:
        find_heads("someone/heads", download=download)
    text = str(caught.value)
    assert "someone/heads is no folder here and could not be fetched" in text
    assert "(ConnectionError: no route for someone/heads): check the id and the network" in text
    assert "\n" not in text


def test_without_a_network_an_id_is_refused() -> None:
    """What the real client says where it may not go out."""
    with pytest.raises(AssetError, match=r"^someone/heads is no folder here and could not .*"):
        find_heads("someone/heads")


def test_a_downloaded_folder_without_heads_is_refused(tmp_path: Path) -> None:
    """As a folder of one's own."""
    with pytest.raises(CheckpointError, match="holds no file of heads"):
        find_heads("someone/heads", download=lambda repo_id: str(tmp_path))


# -- afterwards ------------------------------------------------------------------------------------


@every_layout
def test_a_refusal_leaves_everything_as_it_was(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """The file, its folder and the target; sound heads load and draft as ever afterwards."""
    published = made(name)
    tensors = needed(published)
    del tensors[list(tensors)[-1]]
    file = rewritten(published, tmp_path / "h", tensors)
    before, rows = file.read_bytes(), world.target.output_rows(torch.arange(SIZES.vocab_size))
    refusal(world, file)
    assert file.read_bytes() == before
    assert {path.name for path in file.parent.iterdir()} == {file.name, "config.json"}
    assert torch.equal(world.target.output_rows(torch.arange(SIZES.vocab_size)), rows)
    drafter, plan = world.drafter(published.folder), Topology.from_paths([(0,), (1,), (1, 2)])
    text = random_text(drafter, 3)
    (tree,) = drafter.draft([text.request(plan)])
    assert tree.tokens.tolist() == brute_force(world, published, text, plan)
