"""Calibration on several workers: groups of prompts are traced, and points timed, by any of them.

The trace is that of a local run, bit for bit: groups are the same, and a worker whose model, heads
or arithmetic differ is refused. Costs belong to one kind of machine, so steps are timed on workers
with the processor and the threads of this process only, and by one worker a machine at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import torch

from entmtp.bank import BankSource
from entmtp.calibrate.cluster import ClusterParams, WorkerSize, joined, num_workers
from entmtp.calibrate.groups import TraceGroup
from entmtp.calibrate.points import Point, TimedPoints, join_timed, split_points
from entmtp.calibrate.pool import WorkerPool
from entmtp.calibrate.timing import TimingParams
from entmtp.calibrate.trace import Trace
from entmtp.calibrate.worker import Worker, WorkerFacts, facts_here
from entmtp.engine import Engine
from entmtp.errors import ClusterError

__all__ = ["Cluster", "check_worker", "open_cluster"]

_OF_MACHINE = ("device", "threads")
_OF_TRACE = tuple(f.name for f in fields(BankSource) if f.name not in _OF_MACHINE)

Progress = Callable[[int, int], None]


class Cluster:
    """Workers that calibrate; see :func:`open_cluster`."""

    def __init__(self, pool: WorkerPool) -> None:
        """Use workers."""
        self._pool = pool

    def trace_groups(self, groups: Sequence[TraceGroup]) -> Iterator[tuple[TraceGroup, Trace]]:
        """Each group with its trace, as they are finished.

        Raises:
            ClusterError: no worker can be had, one is unlike this process, or one group has ended
                three of them.
        """
        for number, trace in self._pool.run("trace", [(group,) for group in groups]):
            yield groups[number], trace

    def time_points(
        self, points: Sequence[Point], params: TimingParams, progress: Progress | None = None
    ) -> TimedPoints:
        """Time points, dealt to the machines of the cluster, by one worker of each.

        Args:
            points: as :func:`entmtp.calibrate.timing.timing_points` gives them.
            params: how much is measured.
            progress: told shares of the points that are done and their number.

        Raises:
            ClusterError: as :meth:`trace_groups`.
        """
        shares = split_points(points, self._pool.num_nodes())
        parts: dict[int, TimedPoints] = {}
        tasks = [(share, params) for share in shares]
        for number, timed in self._pool.run("time", tasks, one_a_node=True):
            parts[number] = timed
            if progress is not None:
                progress(len(parts), len(shares))
        return join_timed([parts[number] for number in range(len(shares))])


@contextmanager
def open_cluster(
    params: ClusterParams,
    engine: Engine,
    model: str,
    load: Callable[[], Engine],
    *,
    is_timed: bool,
) -> Iterator[Cluster]:
    """Start workers; they are ended afterwards.

    Args:
        params: where they are.
        engine: of this process; workers must compute as it does.
        model: its name.
        load: makes the same engine; it is sent to the workers.
        is_timed: they must be of the same kind of machine, too.

    Raises:
        InputError: Ray is not installed.
        ClusterError: no cluster, or no room in it.
    """
    size = WorkerSize(torch.get_num_threads(), int(engine.target.device.type == "cuda"))
    here = facts_here(engine, model)
    with joined(params, size) as ray:
        count = num_workers(ray, params, size)
        actor = ray.remote(num_cpus=size.threads, num_gpus=size.gpus)(Worker)
        pool = WorkerPool(
            ray,
            lambda: actor.remote(load),
            count,
            model,
            lambda name, there: check_worker(name, there, here, is_timed=is_timed),
        )
        try:
            yield Cluster(pool)
        finally:
            pool.close()


def check_worker(name: str, there: WorkerFacts, here: WorkerFacts, *, is_timed: bool) -> None:
    """Refuse a worker whose trace, or whose times, would be others.

    Args:
        name: of the worker.
        there: its facts.
        here: those of this process.
        is_timed: its times are wanted, too.

    Raises:
        ClusterError: names the worker and what differs.
    """
    if there.versions != here.versions:
        raise ClusterError(f"{name} has {there.versions}, this process {here.versions}")
    differing = _differences(there, here, _OF_TRACE)
    if differing:
        raise ClusterError(
            f"{name} would write another trace: {differing}; give all machines the same model and "
            "heads, and choose --backend, --isa and --dtype that all of them have"
        )
    differing = _differences(there, here, _OF_MACHINE) if is_timed else ""
    if differing:
        raise ClusterError(
            f"{name} is another kind of machine: {differing}; costs belong to one kind, so use "
            "workers of this one, or give --costs"
        )


def _differences(there: WorkerFacts, here: WorkerFacts, names: Sequence[str]) -> str:
    return "; ".join(
        f"{name} {getattr(there.source, name)}, here {getattr(here.source, name)}"
        for name in names
        if getattr(there.source, name) != getattr(here.source, name)
    )
