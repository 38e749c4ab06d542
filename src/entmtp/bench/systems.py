"""How this program decodes for the bench: one engine a method, with the times of its steps."""

from collections.abc import Sequence
from typing import Protocol

from entmtp.bench.runs import Step, Turn
from entmtp.engine import Engine, StepTimes
from entmtp.metrics import StepRecord
from entmtp.params import SamplingParams, TypicalParams

__all__ = ["EngineSystem", "System"]


class System(Protocol):
    """Something that decodes a prompt and tells how long it took."""

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """Answer a prompt of token ids; the seed of the sampling is set."""


class EngineSystem:
    """An engine of this program; implements :class:`System`."""

    def __init__(self, engine: Engine, typical: TypicalParams | None = None) -> None:
        """Take over the engine's times observer.

        Args:
            engine: decodes one sequence at a time.
            typical: lossy typical acceptance; exact without.
        """
        self._engine, self._typical = engine, typical
        self._times: list[StepTimes] = []
        engine.times_observer = self._times.append

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """See :class:`System`."""
        self._times.clear()
        result = self._engine.generate(prompt, sampling, typical=self._typical)
        times = [one for one in self._times if one.num_decoding]
        stats = result.stats
        return Turn(
            tokens=result.token_ids,
            text=result.text,
            num_first=1,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            num_steps=stats.num_steps,
            steps=tuple(_step(*pair) for pair in zip(stats.steps, times, strict=True)),
        )


def _step(record: StepRecord, times: StepTimes) -> Step:
    seconds = (times.schedule_s, times.draft_s, times.forward_s, times.rest_s)
    return Step(
        record.topology,
        record.num_nodes,
        record.num_accepted,
        round(record.entropy, 4),
        *(round(1000 * one, 4) for one in seconds),
    )
