"""Runs made by hand, and a system that answers from a script, for tests of the bench."""

from collections.abc import Sequence

from entmtp.bench.runs import Run, Step, Turn
from entmtp.params import SamplingParams

__all__ = ["ScriptedSystem", "make_run", "make_step"]


def make_step(
    plan: str, total_ms: float, *, nodes: int = 2, depth: int = 1, accepted: int = 1
) -> Step:
    """A step whose time is all in the forward."""
    return Step(plan, nodes, depth, accepted, 0.5, 0.0, 0.0, total_ms, 0.0)


def make_run(
    prompt: int,
    seconds: float,
    *,
    method: str = "plain",
    repeat: int = 0,
    tokens: Sequence[int] = (5, 6, 7, 8, 9),
    steps: Sequence[Step] = (),
    nll: float = 1.0,
    policy: str = "",
) -> Run:
    """One answer of a few tokens."""
    num_steps = len(steps) or len(tokens) - 1
    turn = Turn(tuple(tokens), "text", 1, 0.5, seconds, num_steps, tuple(steps), nll, policy)
    return Run(prompt, repeat, method, (turn,))


class ScriptedSystem:
    """Echoes the last prompt token; stops like a user who loses patience at a given call.

    Attributes:
        sizes: tokens of each text that was asked for.
    """

    def __init__(
        self,
        *,
        stops_at: int | None = None,
        name: str = "",
        log: list[tuple[str, int]] | None = None,
    ) -> None:
        """Answer nothing yet.

        Args:
            stops_at: call, from 1.
            name: for the log.
            log: shared by systems; takes the name and the size of each text.
        """
        self.sizes: list[int] = []
        self._stops_at, self._name = stops_at, name
        self._log = [] if log is None else log

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`entmtp.bench.systems.System`."""
        self.sizes.append(sampling.max_new_tokens)
        self._log.append((self._name, sampling.max_new_tokens))
        if len(self.sizes) == self._stops_at:
            raise KeyboardInterrupt
        tokens = (prompt[-1],) * sampling.max_new_tokens
        return Turn(tokens, "echo", 1, 0.1, 1.0, len(tokens) - 1)
