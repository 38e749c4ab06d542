"""What a step costs on one machine: a table that was measured, and how it is read.

A step is a draft, a forward of the target and the rest (verify, commit, signals, text). Forward and
rest depend on the rows of the tree, on the context and on the sequences in the batch; a draft
depends on the rows that are evaluated at each depth. Between measured points the table is read
linearly, and beyond them along the last piece.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.errors import BankError
from entmtp.topology import Topology

__all__ = ["CostTable"]

FloatArray = npt.NDArray[np.float64]

_Place = tuple[int, int, float]
"""Two neighbouring points, and how far a value lies on the way from the first to the second."""

_FIELDS = ("rows", "contexts", "batches", "forward_ms", "rest_ms", "draft_ms", "draft_row_ms")


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of the parts of a step.

    Attributes:
        rows: R sizes of a tree with its root, increasing, from 1.
        contexts: C numbers of committed tokens, increasing.
        batches: B numbers of sequences in a step, increasing, from 1.
        forward_ms: ``(B, C, R)`` of the target's forward, over all sequences.
        rest_ms: ``(B, R)`` of what is neither draft nor forward, over all sequences.
        draft_ms: one a depth: to evaluate one row.
        draft_row_ms: one a depth: for each further row of any sequence.
        spread: largest standard error of a median, as a share of it.
        num_rounds: times that every point was visited.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    forward_ms: tuple[tuple[tuple[float, ...], ...], ...]
    rest_ms: tuple[tuple[float, ...], ...]
    draft_ms: tuple[float, ...]
    draft_row_ms: tuple[float, ...]
    spread: float = 0.0
    num_rounds: int = 0

    def __post_init__(self) -> None:
        """Refuse a table that cannot be read.

        Raises:
            BankError: says which rule is broken.
        """
        for name in ("rows", "contexts", "batches"):
            axis = getattr(self, name)
            if not axis or any(a >= b for a, b in pairwise(axis)):
                raise BankError(f"costs: {name} is {list(axis)}; it must be increasing")
        if self.rows[0] != 1 or self.batches[0] != 1:
            raise BankError("costs: rows and batches must begin with 1")
        forward, rest = np.array(self.forward_ms), np.array(self.rest_ms)
        shape = len(self.batches), len(self.contexts), len(self.rows)
        if forward.shape != shape or rest.shape != (shape[0], shape[2]):
            raise BankError(
                f"costs: forward_ms is {forward.shape} and rest_ms {rest.shape}; they must be "
                f"{shape} and {(shape[0], shape[2])}"
            )
        if len(self.draft_ms) != len(self.draft_row_ms):
            raise BankError("costs: draft_ms and draft_row_ms must be of one length")
        numbers = (forward, rest, np.array(self.draft_ms), np.array(self.draft_row_ms))
        if not all(np.isfinite(n).all() and (n >= 0).all() for n in numbers):
            raise BankError("costs: all milliseconds must be finite and at least 0")
        if not (forward > 0).all():
            raise BankError("costs: forward_ms must be above 0")

    def step_ms(self, topology: Topology, context: float, batch: int = 1) -> float:
        """A whole step of ``batch`` sequences, all with the same tree and context."""
        rows = topology.num_rows
        return (
            self.forward(rows, context, batch)
            + self.rest(rows, batch)
            + self.draft(topology, batch)
        )

    def forward(self, rows: int, context: float, batch: int = 1) -> float:
        """The target's forward over ``batch`` trees of so many rows."""
        at_rows, at_context = _place(rows, self.rows), _place(context, self.contexts)
        at_batch = _place(batch, self.batches)
        by_batch: dict[int, float] = {}
        for b in {*at_batch[:2]}:
            lines = self.forward_ms[b]
            by_context = {c: _between(at_rows, lines[c]) for c in {*at_context[:2]}}
            by_batch[b] = _between(at_context, by_context)
        return max(_between(at_batch, by_batch), 0.0)

    def rest(self, rows: int, batch: int = 1) -> float:
        """What is neither draft nor forward."""
        at_rows, at_batch = _place(rows, self.rows), _place(batch, self.batches)
        by_batch = {b: _between(at_rows, self.rest_ms[b]) for b in {*at_batch[:2]}}
        return max(_between(at_batch, by_batch), 0.0)

    def draft(self, topology: Topology, batch: int = 1) -> float:
        """Filling ``batch`` trees; depths beyond the table cost as its last one."""
        total = 0.0
        for depth, level in enumerate(topology.levels):
            at = min(depth, len(self.draft_ms) - 1)
            rows = len(level.parents) * batch
            total += self.draft_ms[at] + (rows - 1) * self.draft_row_ms[at]
        return total

    def scaled(self, rows: Sequence[int], factors: Sequence[float], draft: float) -> "CostTable":
        """The table of the same machine in another state.

        Args:
            rows: increasing sizes at which ``factors`` were found.
            factors: now over then; between sizes read linearly, beyond them constant.
            draft: the same of drafting.
        """
        by_row = np.interp(self.rows, rows, factors)
        return replace(
            self,
            forward_ms=_as_tuples(np.array(self.forward_ms) * by_row),
            rest_ms=_as_tuples(np.array(self.rest_ms) * by_row),
            draft_ms=tuple(ms * draft for ms in self.draft_ms),
            draft_row_ms=tuple(ms * draft for ms in self.draft_row_ms),
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: getattr(self, name) for name in (*_FIELDS, "spread", "num_rounds")}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "CostTable":
        """Read what :meth:`as_dict` gave.

        Raises:
            BankError: not such a table.
        """
        try:
            values = {name: _as_tuples(document[name]) for name in _FIELDS}
            spread, num_rounds = float(document["spread"]), int(document["num_rounds"])
            return cls(**values, spread=spread, num_rounds=num_rounds)
        except (KeyError, TypeError, ValueError) as error:
            raise BankError(f"costs: not a table of costs ({error!r})") from error


def _place(x: float, points: Sequence[float]) -> _Place:
    """Between which points ``x`` lies; beyond them, along the first or the last piece."""
    if len(points) == 1:
        return 0, 0, 0.0
    at = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
    return at, at + 1, (x - points[at]) / (points[at + 1] - points[at])


def _between(place: _Place, values: Sequence[float] | Mapping[int, float]) -> float:
    """Linear through what was found at the two points, and on beyond them."""
    first, second, share = place
    start = values[first]
    return float(start + share * (values[second] - start))


def _as_tuples(values: Any) -> Any:
    """Nested lists or an array as nested tuples."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return tuple(_as_tuples(value) for value in values)
    return values
