"""Workers of a cluster: who gets which task, and what happens when one ends."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from entmtp.bank import BankSource
from entmtp.calibrate.cluster import ClusterParams, WorkerSize, import_ray, num_workers
from entmtp.calibrate.distributed import check_worker
from entmtp.calibrate.pool import WorkerPool
from entmtp.calibrate.worker import WorkerFacts
from entmtp.errors import ClusterError, InputError, TraceError
from fake_ray import FakeRay

SOURCE = BankSource("it", "d0", "hydra", "d1", "native-avx2", "int8", "a processor", 2)


def facts(node: str = "n0", versions: str = "entmtp 1, torch 2", **changes: Any) -> WorkerFacts:
    """Of a worker, all alike but for the changes."""
    return WorkerFacts(f"host-{node}", node, versions, BankSource(**SOURCE.__dict__ | changes))


class Scripted:
    """A worker whose work is a function of the task."""

    def __init__(self, work: Callable[[int], Any], node: str = "n0", *, starts: bool = True):
        self._work, self._node, self._starts = work, node, starts

    def start(self, model: str) -> WorkerFacts:
        assert model == "it"
        if not self._starts:
            raise FakeRay.Ended("out of memory\nand a long report")
        return facts(self._node)

    def do(self, task: int) -> Any:
        return self._work(task)


def pool_of(ray: FakeRay, *workers: Scripted, size: int = 2) -> WorkerPool:
    """A pool whose workers, and those that take their places, come in this order."""
    coming = iter(workers)
    return WorkerPool(ray, lambda: ray.actor(next(coming)), size, "it", lambda *_: None)


def done(pool: WorkerPool, num_tasks: int, **options: bool) -> dict[int, Any]:
    """What the tasks gave."""
    return dict(pool.run("do", [(task,) for task in range(num_tasks)], **options))


def die(task: int) -> int:
    """What a worker does whose machine is switched off."""
    raise FakeRay.Ended(f"switched off during {task}")


def square(task: int) -> int:
    """Work."""
    return task * task


def test_tasks_are_dealt_to_all_workers() -> None:
    """Each is done once, and all workers are ended with the pool."""
    ray = FakeRay()
    pool = pool_of(ray, Scripted(square), Scripted(square))
    assert done(pool, 5) == {task: task * task for task in range(5)}
    assert done(pool, 2) == {0: 0, 1: 1}
    assert ray.most_waiting == 2
    pool.close()
    assert len(ray.killed) == 2


def test_the_task_of_a_worker_that_ended_is_given_to_another() -> None:
    """A new worker takes the place."""
    ray = FakeRay()
    pool = pool_of(ray, Scripted(die), Scripted(square), Scripted(square))
    assert done(pool, 4) == {task: task * task for task in range(4)}
    assert len(ray.killed) == 1


def test_a_task_that_ends_three_workers_is_given_up() -> None:
    """The error names the last of them and what happened; it is not tried for ever."""
    pool = pool_of(FakeRay(), *(Scripted(die) for _ in range(4)), size=1)
    with pytest.raises(ClusterError, match=r"3 workers .* worker 1 on host-n0 \(switched off"):
        done(pool, 3)


def test_a_worker_that_cannot_start_is_given_up() -> None:
    """After two more tries, with the first line of the reason."""
    workers = [Scripted(square, starts=False) for _ in range(3)]
    with pytest.raises(ClusterError, match=r"worker 1 ended 3 times .* \(out of memory\)"):
        done(pool_of(FakeRay(), *workers, size=1), 1)


def test_workers_may_start_at_the_second_try() -> None:
    """As if nothing had been."""
    pool = pool_of(FakeRay(), Scripted(square, starts=False), Scripted(square), size=1)
    assert done(pool, 2) == {0: 0, 1: 1}


def test_a_cluster_without_room_is_told() -> None:
    """Waiting for a first worker ends."""
    ray = FakeRay()
    ray.is_stuck = True
    with pytest.raises(ClusterError, match="has not started in 600 seconds"):
        done(pool_of(ray, Scripted(square), size=1), 1)


def test_what_a_worker_raises_keeps_its_class() -> None:
    """A user's error gets the worker's name; a bug stays what it is."""

    def fail(task: int) -> int:
        raise TraceError("no such thing") if task else ZeroDivisionError

    pool = pool_of(FakeRay(), Scripted(fail), size=1)
    with pytest.raises(TraceError, match="worker 1 on host-n0: no such thing"):
        list(pool.run("do", [(1,)]))
    with pytest.raises(FakeRay.exceptions.RayTaskError, match="ZeroDivisionError"):
        list(pool.run("do", [(0,)]))


def test_one_worker_a_machine_works_where_others_would_disturb_it() -> None:
    """Two of three workers are on one machine."""
    ray = FakeRay()
    pool = pool_of(ray, *(Scripted(square, node) for node in ("n0", "n0", "n1")), size=3)
    assert pool.num_nodes() == 2
    ray.most_waiting = 0
    assert len(done(pool, 6, one_a_node=True)) == 6
    assert ray.most_waiting == 2


@pytest.mark.parametrize(
    ("changes", "is_timed", "message"),
    [
        ({"model_digest": "e"}, False, "worker 3 would write another trace: model_digest e, here"),
        ({"drafter_digest": "e"}, False, "drafter_digest e, here d1"),
        ({"backend": "native-avx512"}, True, "backend native-avx512, here native-avx2"),
        ({"versions": "entmtp 0, torch 2"}, False, "worker 3 has entmtp 0, torch 2, this process"),
        ({"device": "z", "threads": 9}, True, "device z, here a processor; threads 9, here 2"),
        ({"device": "z"}, False, None),
    ],
)
def test_a_worker_that_would_give_something_else_is_refused(
    changes: dict[str, Any], is_timed: bool, message: str | None
) -> None:
    """Other processors may trace, where arithmetic is the same, but not time."""
    if message is None:
        check_worker("worker 3", facts(**changes), facts(), is_timed=is_timed)
        return
    with pytest.raises(ClusterError, match=message):
        check_worker("worker 3", facts(**changes), facts(), is_timed=is_timed)


NODES = [
    {"Alive": True, "Resources": {"CPU": 5.0, "GPU": 1.0}},
    {"Alive": True, "Resources": {"CPU": 4.0}},
    {"Alive": False, "Resources": {"CPU": 64.0}},
    {"Alive": True, "Resources": {}},
]


def test_a_cluster_gets_as_many_workers_as_it_has_room_for() -> None:
    """Threads of a worker are on one machine; more than there is room for are refused."""
    ray = FakeRay(NODES)
    assert num_workers(ray, ClusterParams(), WorkerSize(2)) == 4
    assert num_workers(ray, ClusterParams(), WorkerSize(2, 1)) == 1
    assert num_workers(ray, ClusterParams(workers=3), WorkerSize(2)) == 3
    with pytest.raises(ClusterError, match="room for 4 workers of 2 CPU threads each, not for 5"):
        num_workers(ray, ClusterParams(workers=5), WorkerSize(2))
    with pytest.raises(ClusterError, match="room for 0 workers of 8 CPU threads and a GPU"):
        num_workers(ray, ClusterParams(), WorkerSize(8, 1))


@pytest.mark.parametrize(("field", "value"), [("address", ""), ("workers", 0)])
def test_settings_out_of_limits(field: str, value: object) -> None:
    """The error names the field."""
    with pytest.raises(InputError, match=field):
        ClusterParams(**{field: value})  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'entmtp\[ray\]'"):
        import_ray()
