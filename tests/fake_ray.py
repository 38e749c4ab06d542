"""A stand-in for the package ray: calls run when they are waited for, in the order of their making.

Actors are of one class of the test; one that raises ``Ended`` has died.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["FakeRay"]


class _RayError(Exception):
    """As ``ray.exceptions.RayError``: a worker ended."""


class _TaskError(_RayError):
    """As ``ray.exceptions.RayTaskError``: a worker raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::Worker raised\n{cause!r}")
        self.cause = cause


class _Actor:
    """Every method has ``remote``, which gives a reference."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> SimpleNamespace:
        method = getattr(self._worker, name)
        return SimpleNamespace(remote=lambda *given: _Reference(lambda: method(*given)))


class _Reference:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call


class FakeRay:
    """What the pool uses of the package."""

    exceptions = SimpleNamespace(RayError=_RayError, RayTaskError=_TaskError)
    Ended = _RayError

    def __init__(self, nodes: list[dict[str, Any]] | None = None) -> None:
        self.killed: list[_Actor] = []
        self.most_waiting = 0
        self.is_stuck = False
        self._nodes = nodes or []

    def actor(self, worker: Any) -> _Actor:
        return _Actor(worker)

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes

    def wait(
        self, references: list[_Reference], timeout: float | None
    ) -> tuple[list[_Reference], list[_Reference]]:
        if self.is_stuck:
            assert timeout is not None, "this would wait for ever"
            return [], references
        self.most_waiting = max(self.most_waiting, len(references))
        return references[:1], references[1:]

    def get(self, reference: _Reference) -> Any:
        try:
            return reference.call()
        except _RayError:
            raise
        except Exception as error:
            raise _TaskError(error) from error

    def kill(self, actor: _Actor) -> None:
        self.killed.append(actor)
