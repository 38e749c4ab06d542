"""Package indexes: which one is configured, and which files it offers (PEP 503 and PEP 691)."""

import configparser
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from entmtp.errors import AssetError

__all__ = ["ACCEPT", "check_url", "configured_index", "find_file", "project_url", "without_secrets"]

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
"""Value of the Accept header: JSON where the index knows it."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")


def configured_index() -> str | None:
    """The default index that pip or uv is configured with, in variables or files, if any."""
    for name in _VARIABLES:
        value = os.environ.get(name, "").strip()
        if value:
            # uv allows a name before the address
            return re.sub(r"^[\w.-]+=(?=https?:)", "", value)
    for path in _pip_files():
        if path.is_file() and (index := _pip_index(path)):
            return index
    for path in _uv_files():
        if path.is_file() and (index := _uv_index(path)):
            return index
    return None


def check_url(url: str) -> None:
    """Refuse addresses that anybody on the way could change.

    Raises:
        AssetError: neither https nor a loopback host.
    """
    parts = urlsplit(url)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        return
    raise AssetError(
        f"{without_secrets(url)} is not an https address (plain http is only for this machine): "
        "give another --index-url"
    )


def without_secrets(url: str) -> str:
    """The address without user name and password, for messages."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def project_url(index_url: str, package: str) -> str:
    """Address of the page that lists a package's files."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    return f"{index_url.rstrip('/')}/{name}/"


def find_file(page: bytes, content_type: str, url: str, name: str) -> tuple[str, str | None] | None:
    """Find a file on a package's page.

    Args:
        page: the body of the answer.
        content_type: its header.
        url: where it came from; addresses on it are relative to this.
        name: of the file.

    Returns:
        The file's address and its SHA-256, if the page gives one; ``None`` if it is not listed.

    Raises:
        AssetError: the page cannot be read.
    """
    try:
        is_json = "json" in content_type
        entries = _json_files(page) if is_json else _html_files(page.decode("utf-8", "replace"))
        for filename, address, digest in entries:
            if filename == name:
                return urljoin(url, address), digest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AssetError(
            f"{without_secrets(url)} is no page of a package index ({error}): "
            "give another --index-url"
        ) from error
    return None


def _json_files(page: bytes) -> Iterator[tuple[str, str, str | None]]:
    for file in json.loads(page)["files"]:
        yield file["filename"], file["url"], file.get("hashes", {}).get("sha256")


def _html_files(page: str) -> Iterator[tuple[str, str, str | None]]:
    anchors = _Anchors()
    anchors.feed(page)
    for link in anchors.links:
        address, fragment = urldefrag(link)
        digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
        yield unquote(urlsplit(address).path.rpartition("/")[2]), address, digest


class _Anchors(HTMLParser):
    """Collects where the links of a page lead."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the target of each anchor."""
        if tag == "a":
            self.links += [value for key, value in attrs if key == "href" and value]


def _pip_files() -> list[Path]:
    """Files of pip's configuration, the strongest first."""
    name = "pip.ini" if sys.platform == "win32" else "pip.conf"
    chosen = os.environ.get("PIP_CONFIG_FILE")
    return [
        *([Path(chosen)] if chosen else []),
        Path(sys.prefix) / name,
        *(folder / "pip" / name for folder in _config_folders()),
        Path.home() / ".pip" / name,
        Path("/etc") / name,
    ]


def _uv_files() -> list[Path]:
    chosen = os.environ.get("UV_CONFIG_FILE")
    files = [folder / "uv" / "uv.toml" for folder in _config_folders()]
    return [*([Path(chosen)] if chosen else []), *files, Path("/etc/uv/uv.toml")]


def _config_folders() -> list[Path]:
    named = [os.environ.get("APPDATA"), os.environ.get("XDG_CONFIG_HOME")]
    return [*(Path(folder) for folder in named if folder), Path.home() / ".config"]


def _pip_index(path: Path) -> str | None:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return None
    for section in ("download", "global"):
        value = parser.get(section, "index-url", fallback=None)
        if value:
            return value.strip()
    return None


def _uv_index(path: Path) -> str | None:
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError):
        return None
    for index in data.get("index", []):
        if isinstance(index, dict) and index.get("default"):
            return str(index["url"]) if index.get("url") else None
    value = data.get("index-url") or data.get("pip", {}).get("index-url")
    return str(value) if value else None
