"""What goes into the engine and what comes out."""

from dataclasses import dataclass, field

from entmtp.metrics import DecodeStats
from entmtp.params import SamplingParams, TypicalParams
from entmtp.scheduler import TopologyScheduler

__all__ = ["GenerationResult", "Request", "StepTimes", "StreamChunk"]


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


@dataclass(frozen=True)
class StepTimes:
    """Where the time of one engine step went, over all sequences.

    Attributes:
        num_decoding: sequences that drafted and checked a tree.
        num_prefilling: sequences that read a chunk of their prompt.
        num_rows: rows of the target's forward.
        schedule_s: seconds to choose the plans: signals, decisions and cuts.
        draft_s: to search for copies, and to fill or grow the trees.
        forward_s: of the target's forward, the making of its inputs included.
        rest_s: to verify, to commit and to read the signals.
    """

    num_decoding: int
    num_prefilling: int
    num_rows: int
    schedule_s: float
    draft_s: float
    forward_s: float
    rest_s: float

    @property
    def total_s(self) -> float:
        """The whole step, but for making text of tokens."""
        return self.schedule_s + self.draft_s + self.forward_s + self.rest_s
