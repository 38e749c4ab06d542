"""Folders that one run at a time writes to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from entmtp.errors import TrainingError

__all__ = ["open_folder"]

_LEFTOVERS = (".*.tmp", "*.checkpoint.pt.tmp", "answers/*.tmp")


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
