"""Files that are whole or not there: written beside their place, then moved into it."""

import os
from pathlib import Path

__all__ = ["write_text"]


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
