"""Folders that one run at a time writes to, and files that are there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from entmtp.errors import TrainingError

__all__ = ["open_folder", "replacing", "write_text"]

_LEFTOVERS = (
    "*.checkpoint.pt.tmp",
    "report.json.tmp",
    "settings.json.tmp",
    "text.json.tmp",
    ".*.safetensors.*.tmp",
    "answers/*.tmp",
)


@contextmanager
def open_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for one run, and remove what a killed run left half written.

    Raises:
        TrainingError: another run is at work there, or something cannot be stored.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "run.lock", blocking=False):
            for leftover in (file for name in _LEFTOVERS for file in folder.glob(name)):
                leftover.unlink()
            yield
    except Timeout as error:
        raise TrainingError(
            f"{folder}: another run is at work there; wait for its end, or use another output "
            "folder"
        ) from error
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder}: cannot store the run there ({error}); free some space or use another "
            "output folder, and run again"
        ) from error


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of ``file`` once all is written."""
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file."""
    with replacing(file) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
