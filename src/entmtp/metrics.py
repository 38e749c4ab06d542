"""Records of steps and the acceptance numbers made from them: computed here and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DecodeStats", "StepRecord"]


@dataclass(frozen=True)
class StepRecord:
    """One step of one sequence.

    Attributes:
        topology: name of the plan that the scheduler chose.
        num_nodes: draft tokens checked; fewer than the plan's where the drafter had less to offer
            or the text was about to end.
        num_accepted: draft tokens kept, before cutting at a stop.
        entropy: nats, of the target distribution that the root was drawn from.
        p0: top-1 probability of the same distribution.
        bin: the scheduler's bin, for replay.
        num_copied: those of the draft tokens that were copied from earlier in the text.
        depth: of the tree that was checked.
    """

    topology: str
    num_nodes: int
    num_accepted: int
    entropy: float
    p0: float
    bin: int
    num_copied: int = 0
    depth: int = 0


@dataclass(frozen=True)
class DecodeStats:
    """Counts and times of one finished sequence.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        num_tokens: tokens emitted, the end-of-text token included.
        prefill_s: seconds from admission to the first token.
        decode_s: seconds from the first token to the last.
        backend: of the target, for example ``torch-cpu``.
        dtype: of the target, for example ``float32``.
        drafter: name of the drafter.
        policy: name of the topology scheduler.
        verification: ``exact``, or ``typical (lossy)``.
        steps: one record a step.
    """

    num_prompt_tokens: int
    num_tokens: int
    prefill_s: float
    decode_s: float
    backend: str
    dtype: str
    drafter: str
    policy: str
    verification: str
    steps: tuple[StepRecord, ...]

    @property
    def num_steps(self) -> int:
        """Target forwards in decode."""
        return len(self.steps)

    @property
    def num_drafted(self) -> int:
        """Draft tokens checked."""
        return sum(step.num_nodes for step in self.steps)

    @property
    def num_accepted(self) -> int:
        """Draft tokens kept, before cutting at a stop."""
        return sum(step.num_accepted for step in self.steps)

    @property
    def num_copied(self) -> int:
        """Draft tokens checked that were copied from earlier in the text."""
        return sum(step.num_copied for step in self.steps)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step, bonus included: 1 + accepted / steps; 1.0 where there was no step."""
        return 1.0 + self.num_accepted / self.num_steps if self.steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; falls as trees widen, so a diagnostic only."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first one; 0.0 where only one was emitted."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def topology_steps(self) -> Mapping[str, int]:
        """How many steps each topology was chosen for."""
        counts: dict[str, int] = {}
        for step in self.steps:
            counts[step.topology] = counts.get(step.topology, 0) + 1
        return counts

    def as_dict(self) -> dict[str, object]:
        """The JSON form: counts, times and derived numbers, without the single steps."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "num_steps": self.num_steps,
            "num_drafted": self.num_drafted,
            "num_copied": self.num_copied,
            "num_accepted": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "backend": self.backend,
            "dtype": self.dtype,
            "drafter": self.drafter,
            "policy": self.policy,
            "verification": self.verification,
            "topology_steps": dict(self.topology_steps),
        }
