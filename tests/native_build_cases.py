"""A copy of the package with another library in it, or none, and what a fresh interpreter says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import entmtp
from entmtp.kernels.build import BuildError, find_compiler, library_file

__all__ = ["copy_package", "has_compiler", "needs_compiler", "python"]

SOURCE = Path(entmtp.__file__).parent
LIBRARIES = ("*.so", "*.dylib", "*.dll", "__pycache__")


def has_compiler() -> bool:
    """Whether the library can be built here."""
    try:
        find_compiler()
    except BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def copy_package(folder: Path, library: Path | bytes | None = None) -> Path:
    """Put the package under ``folder`` with this library instead of its own.

    Returns:
        The folder to import from.
    """
    shutil.copytree(SOURCE, folder / "entmtp", ignore=shutil.ignore_patterns(*LIBRARIES))
    place = folder / "entmtp" / "kernels" / library_file().name
    if isinstance(library, bytes):
        place.write_bytes(library)
    elif library is not None:
        shutil.copyfile(library, place)
    return folder


def python(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that imports the package from ``folder``."""
    paths = os.pathsep.join((str(folder), str(Path(__file__).parent)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
