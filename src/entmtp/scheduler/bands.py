"""What policies share: levels with thresholds, a dwell and a probe; classes of contexts."""

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from entmtp.errors import InputError

__all__ = [
    "CONTEXTS",
    "MAX_PROBE_EVERY",
    "PROBE_EVERY",
    "Bands",
    "LevelState",
    "Places",
    "check_rising",
    "context_class",
    "is_probe",
]

CONTEXTS = tuple(64 * 2**i for i in range(12))
"""Committed tokens up to which steps cost alike."""

PROBE_EVERY, MAX_PROBE_EVERY = 16, 64
"""Plain steps in a row after which something is drafted all the same, since they tell nothing of
it; twice as many after each such probe that changed nothing, up to the second number.
"""


_Made = TypeVar("_Made")


def context_class(context: int) -> int:
    """Index in :data:`CONTEXTS`."""
    return min(bisect_right(CONTEXTS, context), len(CONTEXTS) - 1)


class Places(Generic[_Made]):
    """What is made once for each class of contexts and size of a batch.

    One sequence stays at a place for many steps, so the last one is looked at first.
    """

    def __init__(self, make: Callable[[int, int], _Made]) -> None:
        """Make those of one sequence, which then never waits.

        Args:
            make: of an index in :data:`CONTEXTS` and a number of sequences.
        """
        self._make = make
        self._made = {(at, 1): make(at, 1) for at in range(len(CONTEXTS))}
        self._low, self._high, self._batch = 0, CONTEXTS[0], 1
        self._last = self._made[0, 1]

    def at(self, context: int, batch: int) -> _Made:
        """That of a step of ``batch`` sequences after ``context`` tokens."""
        if self._low <= context < self._high and batch == self._batch:
            return self._last
        place = context_class(context), batch
        found = self._made.get(place)
        if found is None:
            found = self._made[place] = self._make(*place)
        self._low = CONTEXTS[place[0] - 1] if place[0] else 0
        self._high = CONTEXTS[place[0]] if place[0] < len(CONTEXTS) - 1 else sys.maxsize
        self._batch, self._last = batch, found
        return found


@dataclass(slots=True)
class LevelState:
    """State of one request.

    Attributes:
        level: of the last step.
        num_steps_here: since it was reached.
        num_plain: plain steps in a row.
        probe_at: so many of them lead to a probe.
    """

    level: int
    num_steps_here: int
    num_plain: int = 0
    probe_at: int = PROBE_EVERY


@dataclass(frozen=True)
class Bands:
    """When a signal moves a request from level to level.

    Attributes:
        up: rising; entry i: level i + 1 is reached where the signal is at or above it.
        down: rising; entry i: level i + 1 is left where the signal is below it; at most ``up[i]``.
        min_dwell: steps at a level before the next change.
        jumps: go all the way at once; else one level a step.
    """

    up: tuple[float, ...]
    down: tuple[float, ...]
    min_dwell: int = 1
    jumps: bool = True

    def start(self, level: int = 0) -> LevelState:
        """At a level, free to leave it at once."""
        return LevelState(level, self.min_dwell)

    def move(self, state: LevelState, value: float) -> int:
        """The level of the next step; changes the state."""
        level = state.level
        if state.num_steps_here >= self.min_dwell:
            target = max(level, bisect_right(self.up, value))
            target = min(target, bisect_right(self.down, value))
            level = target if self.jumps else level + (target > level) - (target < level)
        state.num_steps_here = state.num_steps_here + 1 if level == state.level else 1
        state.level = level
        return level


def is_probe(state: LevelState, is_plain: bool) -> bool:
    """Whether a step that would be plain drafts instead; counts plain steps in a row."""
    if not is_plain:
        state.num_plain, state.probe_at = 0, PROBE_EVERY
        return False
    state.num_plain += 1
    if state.num_plain < state.probe_at:
        return False
    state.num_plain, state.probe_at = 0, min(2 * state.probe_at, MAX_PROBE_EVERY)
    return True


def check_rising(name: str, values: Sequence[float]) -> None:
    """Refuse thresholds that do not rise.

    Raises:
        InputError: names them.
    """
    if any(not low <= high for low, high in pairwise(values)) or any(v != v for v in values):
        raise InputError(f"{name} is {list(values)}; thresholds must be numbers that rise")
