"""One worker of a cluster: a process with an engine of its own."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch

from entmtp.bank import BankSource
from entmtp.calibrate.adapt import bank_source
from entmtp.calibrate.collect import trace_group
from entmtp.calibrate.groups import TraceGroup
from entmtp.calibrate.places import filler_tokens
from entmtp.calibrate.points import Point, TimedPoints
from entmtp.calibrate.timing import TimingParams, time_points
from entmtp.calibrate.trace import Trace
from entmtp.engine import Engine

__all__ = ["Worker", "WorkerFacts", "facts_here"]


@dataclass(frozen=True)
class WorkerFacts:
    """What decides whether a worker computes as the process that asks it.

    Attributes:
        host: name of its machine.
        node: of the cluster.
        versions: of the packages that compute.
        source: model, drafter and machine.
    """

    host: str
    node: str
    versions: str
    source: BankSource


def facts_here(engine: Engine, model: str, node: str = "") -> WorkerFacts:
    """Those of this process."""
    own = import_module("entmtp").__version__  # by name: the package imports what is below it
    versions = f"entmtp {own}, torch {torch.__version__}"
    return WorkerFacts(platform.node(), node, versions, bank_source(engine, model))


class Worker:
    """Loads an engine once, then does what it is asked; lives in a Ray actor."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        """Take what makes the engine; it is called by :meth:`start`."""
        self._load = load
        self._engine: Engine | None = None

    def start(self, model: str) -> WorkerFacts:
        """Load the engine.

        Args:
            model: its name.
        """
        import ray

        self._engine = self._load()
        return facts_here(self._engine, model, ray.get_runtime_context().get_node_id())

    def trace(self, group: TraceGroup) -> Trace:
        """Decode and trace a group."""
        g = group
        return trace_group(self._started, g.prompts, g.first, g.settings, g.depth, g.facts)

    def time(self, points: Sequence[Point], params: TimingParams) -> TimedPoints:
        """Time steps at some points."""
        engine = self._started
        return time_points(engine, points, filler_tokens(engine), params)

    @property
    def _started(self) -> Engine:
        assert self._engine is not None  # noqa: S101 - workers are started first
        return self._engine
