"""Files that are whole or not there, and folders that one run at a time writes to.

Files are written beside their place, then moved into it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["BusyFolderError", "holding", "replacing", "write_text"]


class BusyFolderError(Exception):
    """Another run holds a folder; callers turn it into an error of their own."""


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Make a folder and keep other runs out of it; the end of the process, even by force, frees it.

    Raises:
        BusyFolderError: another run is at work there.
        OSError: it cannot be written to.
    """
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "run.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise BusyFolderError(
            f"{folder}: another run is at work there; wait for its end, or use another output"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of ``file`` once all is written.

    Raises:
        OSError: it cannot be moved there; nothing is left behind.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically; it ends with a line break.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    with replacing(file) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
