"""The work file of a run: finished prompts, a line each, found again by the same command."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entmtp.bench.runs import Run
from entmtp.errors import InputError

__all__ = ["WorkFile", "open_work"]


class WorkFile:
    """Runs by task; each append is one line, so a line that was cut off is as if it never was."""

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        """Read what is there, or begin.

        Args:
            file: of these settings alone.
            settings: written in front.

        Raises:
            InputError: it cannot be read or written, or holds something else.
        """
        self._file = file
        self._done: dict[tuple[str, int, int], tuple[Run, ...]] = {}
        try:
            self.num_processes = 1 + self._read()
            self._append({"settings": settings} if self.num_processes == 1 else {"resumed": True})
        except OSError as error:
            raise InputError(f"{file}: cannot be used for work ({error}); name --work") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}: damaged ({error!r}); delete it, or use --fresh") from error

    @property
    def num_done(self) -> int:
        """Prompts, once for each repeat."""
        return len(self._done)

    def get(self, task: str, prompt: int, repeat: int) -> tuple[Run, ...] | None:
        """The runs of a prompt, one a method."""
        return self._done.get((task, prompt, repeat))

    def policies(self, task: str) -> dict[str, str]:
        """What methods of this program came down to in the rows that are there."""
        rows = (run for key, runs in self._done.items() if key[0] == task for run in runs)
        return {run.method: turn.policy for run in rows for turn in run.turns if turn.policy}

    def add(self, task: str, runs: Sequence[Run]) -> None:
        """Keep the runs of a prompt.

        Raises:
            InputError: they cannot be written.
        """
        try:
            self._append({"task": task, "runs": [run.as_dict() for run in runs]})
        except OSError as error:
            raise InputError(
                f"{self._file}: cannot be written ({error}); what is in it is kept"
            ) from error
        self._keep(task, tuple(runs))

    def remove(self) -> None:
        """All is reported: the next run starts anew."""
        self._file.unlink(missing_ok=True)

    def _keep(self, task: str, runs: tuple[Run, ...]) -> None:
        self._done[task, runs[0].prompt, runs[0].repeat] = runs

    def _read(self) -> int:
        """How many processes have worked on it; what was cut off is taken away."""
        if not self._file.exists():
            return 0
        data = self._file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._file, whole)
        num_processes = 0
        for line in data[:whole].splitlines():
            document = json.loads(line)
            if "task" in document:
                self._keep(document["task"], tuple(map(Run.from_dict, document["runs"])))
            else:
                num_processes += 1
        return num_processes

    def _append(self, document: Mapping[str, Any]) -> None:
        with self._file.open("ab") as file:
            file.write(json.dumps(document, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def open_work(
    folder: Path, digest: str, settings: Mapping[str, Any], *, is_fresh: bool = False
) -> Iterator[WorkFile]:
    """The work file of some settings, for one process at a time.

    Args:
        folder: made where it is missing.
        digest: of the settings.
        settings: for whoever looks into the file.
        is_fresh: whether what is there is thrown away.

    Raises:
        InputError: the folder cannot be used, or another process is at it.
    """
    from filelock import FileLock, Timeout

    file = folder / f"{digest}.jsonl"
    held = file.with_name(f".{digest}.lock")
    lock = FileLock(held, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise InputError(
            f"{file}: another process runs the same comparison; wait for it, or name another --work"
        ) from error
    except OSError as error:
        raise InputError(f"work {folder}: cannot be used ({error}); name --work") from error
    try:
        if is_fresh:
            file.unlink(missing_ok=True)
        yield WorkFile(file, settings)
    finally:
        if not file.exists():  # all is done; who waits for a lock that is gone takes a new one
            held.unlink(missing_ok=True)
        lock.release()
