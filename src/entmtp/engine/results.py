"""What goes into the engine and what comes out."""

from dataclasses import dataclass, field

from entmtp.metrics import DecodeStats
from entmtp.params import SamplingParams, TypicalParams
from entmtp.scheduler import TopologyScheduler

__all__ = ["GenerationResult", "Request", "StreamChunk"]


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids.
        sampling: how tokens are chosen.
        scheduler: replaces the engine's for this sequence.
        typical: switches from exact to typical acceptance, which is **lossy**.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    scheduler: TopologyScheduler | None = None
    typical: TypicalParams | None = None


@dataclass(frozen=True)
class GenerationResult:
    """A finished sequence.

    Attributes:
        text: without special tokens, cut before a stop string.
        token_ids: emitted tokens; includes the end-of-text token, and the tokens that complete a
            stop string.
        finish_reason: ``stop`` (end of text or stop string) or ``length`` (token limit or window).
        seed: that was used; running the prompt alone with it gives the same tokens.
        stats: counts and times.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    stats: DecodeStats


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to one sequence.

    Attributes:
        request_id: as given by ``Engine.submit``.
        text: new text; may be empty while a character or a stop string is incomplete.
        token_ids: new tokens.
        result: the whole, with the last chunk only.
    """

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
