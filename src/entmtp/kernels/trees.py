"""Draft trees as the core fills them: index arrays made once, tokens and noise of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.kernels.library import CLevel, CTree, address
from entmtp.topology import Level, Topology

__all__ = ["HeldLevel", "TreeBatch", "TreeRequest", "held_levels", "tree_shape"]


@dataclass(frozen=True)
class HeldLevel:
    """The rows of one depth of a tree that a block holds: its nodes that have children.

    Attributes:
        nodes: ``(R,)``.
        above: ``(R,)`` row of each node's parent among those of the depth above.
        mask: uint8 ``(R, held + R)`` which rows of the tree each sees.
        held: int32 ``(held,)`` depths of the rows before, less 1.
    """

    nodes: npt.NDArray[np.int64]
    above: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]
    held: npt.NDArray[np.int32]


@lru_cache(maxsize=1024)
def held_levels(plan: Topology) -> tuple[HeldLevel, ...]:
    """Rows of depth 1 and below that have children."""
    found: list[HeldLevel] = []
    row_of: dict[int, int] = {}
    depths: list[int] = []
    above = np.zeros(1, dtype=np.int64)  # nodes that were rows of the depth above
    for depth, level in enumerate(plan.levels[1:], start=1):
        held, first = np.array(depths, dtype=np.int32), len(depths)
        row_of |= {node: first + row for row, node in enumerate(level.parents.tolist())}
        depths += [depth - 1] * len(level.parents)
        mask = np.zeros((len(level.parents), len(depths)), dtype=np.uint8)
        for row, path in enumerate(level.paths.tolist()):
            mask[row, [row_of[node] for node in path[1:]]] = 1
        places = np.searchsorted(above, level.paths[:, -2])
        found.append(HeldLevel(level.parents, places, mask, held))
        above = level.parents
    return tuple(found)


class _Shape:
    """A topology as the core reads it."""

    def __init__(self, plan: Topology) -> None:
        self._kept: list[npt.NDArray[Any]] = []
        self.num_nodes, self.num_levels = plan.num_rows, plan.max_depth
        self.num_held = sum(len(level.nodes) for level in held_levels(plan))
        self.width = max((level.width for level in plan.levels), default=0)
        self.levels = (CLevel * max(self.num_levels, 1))()
        for depth, level in enumerate(plan.levels):
            held = held_levels(plan)[depth - 1] if depth else None
            self.levels[depth] = self._level(level, held)

    def _level(self, level: Level, held: HeldLevel | None) -> CLevel:
        lists = [level.paths, level.children, level.parent_rows, level.ranks]
        places = [self._keep(values.astype(np.int32)) for values in lists]
        if held is not None:
            places += [self._keep(held.above.astype(np.int32)), self._keep(held.mask)]
        return CLevel(len(level.parents), len(level.children), level.width, *places)

    def _keep(self, values: npt.NDArray[Any]) -> int | None:
        self._kept.append(np.ascontiguousarray(values))
        return address(self._kept[-1])


@lru_cache(maxsize=1024)
def tree_shape(plan: Topology) -> _Shape:
    """Index arrays of a topology, made once."""
    return _Shape(plan)


@dataclass(frozen=True)
class TreeRequest:
    """A tree that the core fills with the best children.

    Attributes:
        plan: with nodes.
        root: token.
        noise: ``(columns,)`` for each depth, where columns are ranked by noise + score * scale.
        scale: see there.
    """

    plan: Topology
    root: int
    noise: Sequence[npt.NDArray[np.float32]] = ()
    scale: float = 1.0


class TreeBatch:
    """Trees for one call."""

    def __init__(self, requests: Sequence[TreeRequest]) -> None:
        """Make room for their tokens."""
        self.tokens: list[npt.NDArray[np.int32]] = []
        self.shapes = [tree_shape(request.plan) for request in requests]
        self._kept: list[npt.NDArray[Any]] = []
        self.for_core = (CTree * len(requests))()
        for index, (request, shape) in enumerate(zip(requests, self.shapes, strict=True)):
            tokens, at = np.full(shape.num_nodes, request.root, dtype=np.int32), None
            if request.noise:
                places = np.array([address(noise) for noise in request.noise], dtype=np.uint64)
                assert len(places) == shape.num_levels  # noqa: S101 - one for each depth
                self._kept += [places, *request.noise]
                at = address(places)
            self.tokens.append(tokens)
            self.for_core[index] = CTree(
                shape.num_nodes,
                shape.num_levels,
                shape.levels,
                address(tokens),
                at,
                request.scale,
            )
