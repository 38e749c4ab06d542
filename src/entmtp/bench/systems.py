"""How this program decodes for the bench: one engine a method, with the times of its steps."""

from collections.abc import Sequence
from typing import Protocol

from entmtp.bank import NONE
from entmtp.bench.methods import PLAIN
from entmtp.bench.runs import Step, Turn, size_class
from entmtp.engine import Engine, StepTimes
from entmtp.metrics import StepRecord
from entmtp.params import SamplingParams, TypicalParams
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.scheduler.registry import GROWING

__all__ = ["EngineSystem", "System", "policy_of"]


class System(Protocol):
    """Something that decodes a prompt and tells how long it took."""

    def decode(self, prompt: Sequence[int], sampling: SamplingParams) -> Turn:
        """Answer a prompt of token ids; the seed of the sampling is set."""


def policy_of(scheduler: TopologyScheduler) -> str:
    """The policy, with the name of its one tree: ``dynamic``, ``fixed:tree16``, ``plain``."""
    if not isinstance(scheduler, FixedScheduler):
        return scheduler.policy
    return PLAIN if scheduler.name == NONE else f"{scheduler.policy}:{scheduler.name}"


class EngineSystem:
    """An engine of this program; implements :class:`System`."""

    def __init__(self, engine: Engine, typical: TypicalParams | None = None) -> None:
        """Take over the engine's times observer.

        Args:
            engine: decodes one sequence at a time.
            typical: lossy typical acceptance; exact without.
        """
        self._engine, self._typical = engine, typical
        self._policy = policy_of(engine.scheduler)
        self._is_growing = engine.scheduler.policy in GROWING
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
            steps=tuple(self._step(*pair) for pair in zip(stats.steps, times, strict=True)),
            policy=self._policy,
        )

    def _step(self, record: StepRecord, times: StepTimes) -> Step:
        seconds = (times.schedule_s, times.draft_s, times.forward_s, times.rest_s)
        return Step(
            size_class(record.num_nodes) if self._is_growing else record.topology,
            record.num_nodes,
            record.depth,
            record.num_accepted,
            round(record.entropy, 4),
            *(round(1000 * one, 4) for one in seconds),
        )
