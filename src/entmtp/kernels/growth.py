"""Trees that the core grows: plans as it reads them, and room for what comes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from entmtp.growth import MAX_ENVELOPE, UNSCORED, GrowthPlan
from entmtp.kernels.library import CGrowth, address
from entmtp.kernels.trees import tree_shape

__all__ = ["GrowthRoom", "GrowthTask"]

_ROOM = MAX_ENVELOPE + 1


@dataclass(frozen=True)
class GrowthTask:
    """A tree that the core grows.

    Attributes:
        plan: that opens its root.
        root: token.
        noise: ``(V,)`` for each depth, where columns are ranked by noise + score * scale.
        scale: see there.
    """

    plan: GrowthPlan
    root: int
    noise: Sequence[npt.NDArray[np.float32]] = ()
    scale: float = 1.0


class _Shape:
    """A plan as the core reads it."""

    def __init__(self, plan: GrowthPlan) -> None:
        rule, at = plan.rule, plan.signal_class
        self.envelope = tree_shape(rule.envelope)
        self._kept: list[npt.NDArray[Any]] = [np.ascontiguousarray(rule.table[at], np.float32)]
        costs = plan.costs
        for values in (costs.rows, costs.draft, costs.draft_row, rule.gains[at]):
            self._kept.append(np.ascontiguousarray(values, dtype=np.float64))
        self.places = [address(values) for values in self._kept]


_shapes: WeakKeyDictionary[GrowthPlan, _Shape] = WeakKeyDictionary()


def _shape_of(plan: GrowthPlan) -> _Shape:
    found = _shapes.get(plan)
    if found is None:
        found = _shapes[plan] = _Shape(plan)
    return found


class GrowthRoom:
    """Buffers for the trees of a batch, used again at every step."""

    def __init__(self) -> None:
        """Room for one tree; more is made when a batch needs it."""
        self._reserve(1)

    def _reserve(self, count: int) -> None:
        self.tokens = np.empty((count, _ROOM), dtype=np.int32)
        self.codes = np.empty((count, _ROOM), dtype=np.uint8)
        self.kept = np.empty((count, _ROOM), dtype=np.int32)
        self.for_core = (CGrowth * count)()

    def prepare(self, tasks: Sequence[GrowthTask]) -> None:
        """Set the buffers for a call; what lay in them is gone."""
        if len(tasks) > len(self.tokens):
            self._reserve(len(tasks))
        self.codes.fill(UNSCORED)
        self._noises: list[Any] = []
        for index, task in enumerate(tasks):
            shape = _shape_of(task.plan)
            self.tokens[index] = task.root
            noise = None
            if task.noise:
                places = np.array([address(row) for row in task.noise], dtype=np.uint64)
                assert len(places) >= task.plan.depth  # noqa: S101 - one for each depth
                self._noises += [places, *task.noise]
                noise = address(places)
            self.for_core[index] = CGrowth(
                shape.envelope.num_nodes,
                task.plan.depth,
                shape.envelope.levels,
                *shape.places,
                task.plan.rate,
                address(self.tokens[index]),
                noise,
                task.scale,
                address(self.codes[index]),
                address(self.kept[index]),
                0,
            )

    def kept_nodes(self, index: int) -> list[int]:
        """Nodes of a tree that are worth checking, best first."""
        nodes: list[int] = self.kept[index, : self.for_core[index].num_kept].tolist()
        return nodes
