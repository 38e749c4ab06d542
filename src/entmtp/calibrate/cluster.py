"""A Ray cluster to calibrate on: one that runs already, or one of this machine (extra ``ray``)."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp.errors import ClusterError, InputError

__all__ = ["AUTO", "ClusterParams", "WorkerSize", "import_ray", "joined", "num_workers"]

AUTO, LOCAL = "auto", "local"
_MARK = "entmtp_own"  # resource of clusters that belong to one run, so that others do not join them
_STORE_BYTES = 128 * 2**20
_QUIET = {"logging_level": "ERROR", "log_to_driver": False}
_SHORT = 24  # characters of a temporary folder below which Ray's sockets have a short enough name


@dataclass(frozen=True)
class WorkerSize:
    """What a worker takes of a machine.

    Attributes:
        threads: of the CPU.
        gpus: 0 or 1.
    """

    threads: int
    gpus: int = 0


@dataclass(frozen=True)
class ClusterParams:
    """Where workers are.

    Attributes:
        address: of a cluster; ``auto``: one that runs on this machine, else one is started;
            ``local``: one is started.
        workers: how many; ``None``: as many as there is room for.
    """

    address: str = AUTO
    workers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be had.

        Raises:
            InputError: no address, or no worker.
        """
        if not self.address:
            raise InputError("the address of the cluster is empty; give HOST:PORT, auto or local")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers is {self.workers}; it must be at least 1")


def import_ray() -> Any:
    """The package.

    Raises:
        InputError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "--distributed needs Ray: pip install 'entmtp[ray]', or leave it out"
        ) from error
    return ray


@contextmanager
def joined(params: ClusterParams, size: WorkerSize) -> Iterator[Any]:
    """Ray, connected; afterwards disconnected, and a cluster that was started is gone.

    Where the process is connected already, that cluster is used and stays.

    Raises:
        InputError: Ray is not installed.
        ClusterError: there is no such cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    folder: Path | None = None
    try:
        with _without_telemetry():
            if not _connect(ray, params.address):
                folder = _temporary_folder()
                _start(ray, params, size, folder)
        yield ray
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def num_workers(ray: Any, params: ClusterParams, size: WorkerSize) -> int:
    """How many workers the cluster gets.

    Raises:
        ClusterError: there is no room for them.
    """
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            room_here = int(node["Resources"].get("CPU", 0)) // size.threads
            if size.gpus:
                room_here = min(room_here, int(node["Resources"].get("GPU", 0)) // size.gpus)
            room += room_here
    if room < (params.workers or 1):
        what = f"{size.threads} CPU threads" + (" and a GPU" if size.gpus else "")
        raise ClusterError(
            f"the cluster has room for {room} workers of {what} each, not for "
            f"{params.workers or 1}; ask for fewer workers or --threads"
        )
    return params.workers or room


def _connect(ray: Any, address: str) -> bool:
    """Join a cluster that runs; false where one must be started."""
    if address == LOCAL:
        return False
    try:
        ray.init(address=address, **_QUIET)
    except ConnectionError as error:
        if address == AUTO and not os.environ.get("RAY_ADDRESS"):
            return False
        raise ClusterError(
            f"there is no Ray cluster at {address} ({_first_line(error)}); start one there with "
            "'ray start --head', or use --distributed local"
        ) from error
    except Exception as error:  # Ray raises many kinds, the plain one too
        raise ClusterError(
            f"the Ray cluster at {address} cannot be joined ({_first_line(error)})"
        ) from error
    if address == AUTO and ray.cluster_resources().get(_MARK):
        ray.shutdown()
        return False
    return True


def _start(ray: Any, params: ClusterParams, size: WorkerSize, folder: Path) -> None:
    """A cluster of this machine with room for the workers."""
    room = max((os.cpu_count() or 1) // size.threads, 1)
    try:
        ray.init(
            address=LOCAL,
            num_cpus=(params.workers or room) * size.threads,
            resources={_MARK: 1},
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=str(folder),
            **_QUIET,
        )
    except Exception as error:  # Ray raises many kinds, the plain one too
        raise ClusterError(f"a Ray cluster cannot be started ({_first_line(error)})") from error


def _temporary_folder() -> Path:
    """For files of a cluster; sockets below it must not have long names."""
    is_long = len(tempfile.gettempdir()) > _SHORT and os.name == "posix"
    return Path(tempfile.mkdtemp(prefix="entmtp-", dir="/tmp" if is_long else None))


@contextmanager
def _without_telemetry() -> Iterator[None]:
    """What is started in here sends nothing home."""
    name = "RAY_USAGE_STATS_ENABLED"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
