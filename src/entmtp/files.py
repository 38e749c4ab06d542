"""Files that are whole or not there: written beside their place, then moved into it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_text"]


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
