"""Folders that one run at a time writes to."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from entmtp.errors import TrainingError
from entmtp.files import BusyFolderError, holding

__all__ = ["open_folder"]

_LEFTOVERS = (".*.tmp", "*.checkpoint.pt.tmp", "answers/*.tmp")


@contextmanager
def open_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for one run, and remove what a killed run left half written.

    Raises:
        TrainingError: another run is at work there, or something cannot be stored.
    """
    try:
        with holding(folder):
            for leftover in (file for name in _LEFTOVERS for file in folder.glob(name)):
                leftover.unlink()
            yield
    except BusyFolderError as error:
        raise TrainingError(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise TrainingError(
            f"{folder}: cannot store the run there ({error}); free some space or use another "
            "output folder, and run again"
        ) from error
