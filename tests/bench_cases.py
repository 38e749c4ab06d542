"""Runs made by hand, and a system that answers from a script, for tests of the bench."""

from collections.abc import Sequence

from entmtp.bench.runs import Run, Step, Turn
from entmtp.params import SamplingParams

__all__ = ["ScriptedSystem", "make_run", "make_step"]


def make_step(plan: str, total_ms: float, *, nodes: int = 2, accepted: int = 1) -> Step:
    """A step whose time is all in the forward."""
    return Step(plan, nodes, accepted, 0.5, 0.0, 0.0, total_ms, 0.0)


def make_run(
    prompt: int,
    seconds: float,
    *,
    method: str = "plain",
    repeat: int = 0,
    tokens: Sequence[int] = (5, 6, 7, 8, 9),
    steps: Sequence[Step] = (),
    nll: float = 1.0,
) -> Run:
    """One answer of a few tokens."""
    num_steps = len(steps) or len(tokens) - 1
    turn = Turn(tuple(tokens), "text", 1, 0.5, seconds, num_steps, tuple(steps), nll)
    return Run(prompt, repeat, method, (turn,))


class ScriptedSystem:
    """Echoes the last prompt token; stops like a user who loses patience at a given call."""

    def __init__(self, *, stops_at: int | None = None, seconds: float = 1.0) -> None:
        self.calls = 0
        self._stops_at, self._seconds = stops_at, seconds

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`entmtp.bench.systems.System`."""
        self.calls += 1
        if self.calls == self._stops_at:
            raise KeyboardInterrupt
        tokens = (prompt[-1],) * sampling.max_new_tokens
        return Turn(tokens, "echo", 1, 0.1, self._seconds, len(tokens) - 1)
