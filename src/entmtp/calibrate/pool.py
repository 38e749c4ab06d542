"""Workers of a Ray cluster that are replaced when they end.

Each worker has a place in the pool. Where its process or its machine ends, a new one takes the
place, and the task that it had is given out again.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from entmtp.calibrate.worker import WorkerFacts
from entmtp.errors import ClusterError, EntmtpError

__all__ = ["WorkerPool"]

_MORE_TRIES = 2  # of a task whose worker ended, and of a worker that ended while it started
_START_S = 600.0  # without any worker


@dataclass(eq=False)
class _Place:
    """A place in the pool and the worker that has it."""

    number: int
    actor: Any
    facts: WorkerFacts | None = None
    num_failed_starts: int = 0

    def __str__(self) -> str:
        host = f" on {self.facts.host}" if self.facts else ""
        return f"worker {self.number}{host}"


class WorkerPool:
    """Gives tasks to workers."""

    def __init__(
        self,
        ray: Any,
        make: Callable[[], Any],
        size: int,
        model: str,
        check: Callable[[str, WorkerFacts], None],
    ) -> None:
        """Begin to start the workers.

        Args:
            ray: the package, connected to a cluster.
            make: a new actor of :class:`entmtp.calibrate.worker.Worker`.
            size: number of workers.
            model: its name.
            check: told the name and the facts of each worker that has started; raises where it
                must not be used.
        """
        self._ray, self._make, self._model, self._check = ray, make, model, check
        self._running: dict[Any, tuple[_Place, int | None]] = {}
        self._waiting: deque[int] = deque()
        self._tries: Counter[int] = Counter()
        self._places = [_Place(number + 1, make()) for number in range(size)]
        for place in self._places:
            self._start(place)

    def run(
        self, method: str, tasks: Sequence[tuple[Any, ...]], *, one_a_node: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Do all tasks.

        Args:
            method: of the workers.
            tasks: its arguments.
            one_a_node: no two workers of one machine at once, for tasks that others would disturb.

        Yields:
            the number of a task and what it gave, as they end.

        Raises:
            ClusterError: no worker can be had, or one task has ended three of them.
        """
        self._waiting = deque(range(len(tasks)))
        self._tries.clear()
        while self._waiting or self._has_tasks():
            for place in self._free(one_a_node)[: len(self._waiting)]:
                task = self._waiting.popleft()
                self._running[getattr(place.actor, method).remote(*tasks[task])] = place, task
            done = self._turn()
            if done is not None:
                yield done

    def num_nodes(self) -> int:
        """Number of machines with workers; waits for all that have not started yet."""
        while any(place.facts is None for place in self._places):
            self._turn()
        return len({place.facts.node for place in self._places if place.facts})

    def close(self) -> None:
        """End all workers, whatever they do."""
        for place in self._places:
            self._ray.kill(place.actor)
        self._running.clear()

    def _start(self, place: _Place) -> None:
        self._running[place.actor.start.remote(self._model)] = place, None

    def _has_tasks(self) -> bool:
        return any(task is not None for _, task in self._running.values())

    def _free(self, one_a_node: bool) -> list[_Place]:
        """Workers that have started and do nothing."""
        at_work = [place for place, _ in self._running.values()]
        nodes = {place.facts.node for place in at_work if place.facts}
        free = []
        for place in self._places:
            if place.facts is None or place in at_work:
                continue
            if not one_a_node or place.facts.node not in nodes:
                nodes.add(place.facts.node)
                free.append(place)
        return free

    def _turn(self) -> tuple[int, Any] | None:
        """Wait for the next call that ends; what it gave if it was a task."""
        timeout = None if self._has_tasks() else _START_S
        ended, _ = self._ray.wait(list(self._running), timeout=timeout)
        if not ended:
            raise ClusterError(
                f"a worker has not started in {_START_S:.0f} seconds: the cluster may be busy "
                "with other work; wait for its end, or use fewer workers or threads"
            )
        place, task = self._running.pop(ended[0])
        try:
            value = self._ray.get(ended[0])
        except self._ray.exceptions.RayTaskError as error:
            raise _of_worker(place, error) from error
        except self._ray.exceptions.RayError as error:
            self._replace(place, task, error)
            return None
        if task is not None:
            return task, value
        place.facts, place.num_failed_starts = value, 0
        self._check(str(place), value)
        return None

    def _replace(self, place: _Place, task: int | None, error: Exception) -> None:
        """A new worker for the place of one that ended; its task is given out again."""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        if task is None:
            place.num_failed_starts += 1
            if place.num_failed_starts > _MORE_TRIES:
                raise ClusterError(
                    f"{place} ended {place.num_failed_starts} times while it loaded the model "
                    f"({reason}); is there enough memory, and entmtp, on all machines?"
                ) from error
        else:
            self._tries[task] += 1
            if self._tries[task] > _MORE_TRIES:
                raise ClusterError(
                    f"{self._tries[task]} workers ended over the same task, the last was {place} "
                    f"({reason}); is there enough memory? What was finished is kept"
                ) from error
            self._waiting.appendleft(task)
        self._ray.kill(place.actor)
        place.actor, place.facts = self._make(), None
        self._start(place)


def _of_worker(place: _Place, error: Any) -> Exception:
    """What a worker raised, with its name where the user can do something about it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EntmtpError):
        return type(cause)(f"{place}: {cause}")
    return error if isinstance(error, Exception) else RuntimeError(str(error))
