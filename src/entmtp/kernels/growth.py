"""Trees that the core grows: plans as it reads them, and room for what comes of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from entmtp.growth import MAX_COPY, MAX_ENVELOPE, UNSCORED, Copy, CopyTable, GrowthPlan, GrowthRule
from entmtp.kernels.library import CGrowth, address
from entmtp.kernels.trees import tree_shape

__all__ = ["GrowthRoom", "GrowthTask", "plan_shape"]

_ROOM = MAX_ENVELOPE + 1 + MAX_COPY


@dataclass(frozen=True)
class GrowthTask:
    """A tree that the core grows.

    Attributes:
        plan: that opens its root.
        root: token.
        copy: what followed the same words earlier.
        noise: ``(columns,)`` for each depth, where columns are ranked by noise + score * scale.
        scale: see there.
    """

    plan: GrowthPlan
    root: int
    copy: Copy | None = None
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
        self._places = [address(values) for values in self._kept]
        self.copies = _copies_of(rule)

    def write(self, place: CGrowth, plan: GrowthPlan) -> None:
        """Set what is the same whenever the plan is used."""
        place.num_nodes, place.num_levels = self.envelope.num_nodes, plan.max_depth
        place.levels, place.rate = self.envelope.levels, plan.rate
        place.table, place.rows_ms, place.draft_ms, place.draft_row_ms, place.gains = self._places

    def copy_at(self, copy: Copy | None, limit: int) -> tuple[int, int | None, int | None]:
        """How many tokens of a copy are looked at, and where their probabilities lie."""
        if copy is None or not self.copies.places:
            return 0, None, None
        length, hits, mixes = self.copies.places[copy.match]
        return min(len(copy.tokens), length, limit), hits, mixes


class _CopyShape:
    """The tables of copies as the core reads them."""

    def __init__(self, copies: CopyTable | None) -> None:
        self._kept: list[npt.NDArray[Any]] = []
        self.places: list[tuple[int, int | None, int | None]] = []
        """Length and addresses of each class."""
        for hits, mixes in zip(copies.hits, copies.mixes, strict=True) if copies else ():
            rows = [np.ascontiguousarray(row, dtype=np.float64) for row in (hits, mixes)]
            self._kept += rows
            self.places.append((len(rows[0]), address(rows[0]), address(rows[1])))


_copy_shapes: WeakKeyDictionary[GrowthRule, _CopyShape] = WeakKeyDictionary()


def _copies_of(rule: GrowthRule) -> _CopyShape:
    """Made once for a rule, which many plans share."""
    found = _copy_shapes.get(rule)
    if found is None:
        found = _copy_shapes[rule] = _CopyShape(rule.copies)
    return found


_shapes: WeakKeyDictionary[GrowthPlan, _Shape] = WeakKeyDictionary()


def plan_shape(plan: GrowthPlan) -> _Shape:
    """A plan as the core reads it, made once."""
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
        self._copied = np.empty((count, MAX_COPY), dtype=np.int32)
        self.for_core = (CGrowth * count)()
        self.places = list(self.for_core)
        """The structures themselves, which are costly to index."""
        self._plans: list[GrowthPlan | None] = [None] * count
        for index, place in enumerate(self.places):
            place.tokens = address(self.tokens[index])
            place.codes = address(self.codes[index])
            place.kept = address(self.kept[index])
            place.copied = address(self._copied[index])

    def prepare(self, tasks: Sequence[GrowthTask]) -> None:
        """Set the buffers for a call; what lay in them is gone."""
        if len(tasks) > len(self.tokens):
            self._reserve(len(tasks))
        self.codes.fill(UNSCORED)
        self._noises: list[Any] = []
        for index, task in enumerate(tasks):
            shape, place = plan_shape(task.plan), self.places[index]
            if self._plans[index] is not task.plan:
                self._plans[index] = task.plan
                shape.write(place, task.plan)
            self.tokens[index] = task.root
            length, place.hits, place.mixes = shape.copy_at(task.copy, task.plan.depth)
            place.num_copied = length
            if length and task.copy is not None:
                copied = task.copy.tokens[:length]
                self._copied[index, :length] = copied
                self.tokens[index, place.num_nodes : place.num_nodes + length] = copied
            place.noise, place.scale = self._noise(task), task.scale

    def _noise(self, task: GrowthTask) -> int | None:
        """Address of the addresses of the noise of each depth."""
        if not task.noise:
            return None
        places = np.array([address(row) for row in task.noise], dtype=np.uint64)
        assert len(places) == task.plan.max_depth  # noqa: S101 - one for each depth
        self._noises += [places, *task.noise]
        return address(places)
