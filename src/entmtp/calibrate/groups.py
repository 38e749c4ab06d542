"""What is traced: prompts, what of them, and the groups in which they go."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from entmtp.calibrate.trace import Trace, TraceFacts
from entmtp.params import SamplingParams
from entmtp.topology import Topology

__all__ = ["GroupTracer", "TraceGroup", "TracePrompt", "TraceSettings"]


@dataclass(frozen=True)
class TracePrompt:
    """One prompt.

    Attributes:
        id: unique among the prompts.
        task: of the prompt.
        tokens: token ids, at least one.
    """

    id: str
    task: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class TraceSettings:
    """What is traced besides the prompts.

    Attributes:
        sampling: of the texts; the seed must be set, texts derive theirs from it.
        depth: how deep ranks go; ``None``: all heads, and 4 where a drafter has no limit.
        envelope: whose codes are traced, for trees that are grown step by step; empty: none.
        is_coupled: rank children with the noise of sampling, as the engine does.
    """

    sampling: SamplingParams
    depth: int | None = None
    envelope: Topology = field(default_factory=lambda: Topology(()))
    is_coupled: bool = True


@dataclass(frozen=True)
class TraceGroup:
    """Prompts that are traced together.

    Attributes:
        prompts: at most :data:`GROUP`.
        first: number of the first of them among all, from which seeds follow.
        settings: what is traced.
        depth: of the ranks.
        facts: of the trace.
    """

    prompts: tuple[TracePrompt, ...]
    first: int
    settings: TraceSettings
    depth: int
    facts: TraceFacts


GroupTracer = Callable[[Sequence[TraceGroup]], Iterator[tuple[TraceGroup, Trace]]]
"""Gives each group with its trace, in any order."""
