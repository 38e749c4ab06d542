"""One text, step by step: what was known, what was chosen, what came of it, and what it cost."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from entmtp.engine import Engine, GenerationResult, StepTimes
from entmtp.metrics import StepRecord
from entmtp.params import SamplingParams
from entmtp.plotting import new_figure, save_figure

__all__ = ["ExplainedStep", "Explanation", "explain", "plot_explanation"]


@dataclass(frozen=True)
class ExplainedStep:
    """One step of decoding.

    Attributes:
        text: that became certain.
        record: what was known and chosen, and what was kept.
        schedule_ms: choosing the plan.
        draft_ms: filling or growing the tree.
        forward_ms: the target's forward.
        rest_ms: verifying, committing, reading the signals.
    """

    text: str
    record: StepRecord
    schedule_ms: float
    draft_ms: float
    forward_ms: float
    rest_ms: float

    @property
    def total_ms(self) -> float:
        """The whole step."""
        return self.schedule_ms + self.draft_ms + self.forward_ms + self.rest_ms

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        times = {name: getattr(self, name) for name in _TIMES}
        return {"text": self.text, **asdict(self.record), **times, "total_ms": self.total_ms}


_TIMES = ("schedule_ms", "draft_ms", "forward_ms", "rest_ms")


@dataclass(frozen=True)
class Explanation:
    """A text and its steps.

    Attributes:
        result: as decoding gives it.
        first: the text of the first token, which the prompt's own forward gave.
        steps: in order.
    """

    result: GenerationResult
    first: str
    steps: tuple[ExplainedStep, ...]


def explain(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Explanation:
    """Decode a prompt and keep what happened at each step.

    Args:
        engine: its times observer is set for the while.
        prompt: token ids.
        sampling: as for decoding.

    Raises:
        InputError: the prompt is empty or too long.
    """
    times: list[StepTimes] = []
    before, engine.times_observer = engine.times_observer, times.append
    texts: list[str] = []
    result = None
    try:
        for chunk in engine.stream(prompt, sampling):
            texts.append(chunk.text)
            result = chunk.result
    finally:
        engine.times_observer = before
    assert result is not None  # noqa: S101 - a stream ends with its result
    decoding = [t for t in times if t.num_decoding]
    steps = [
        ExplainedStep(
            text,
            record,
            *(1000 * seconds for seconds in (t.schedule_s, t.draft_s, t.forward_s, t.rest_s)),
        )
        for text, record, t in zip(
            texts[-len(decoding) :] if decoding else (), result.stats.steps, decoding, strict=True
        )
    ]
    first = "".join(texts[: len(texts) - len(decoding)])
    return Explanation(result, first, tuple(steps))


def plot_explanation(explanation: Explanation, file: Path) -> None:
    """Draw entropy, drafted and kept tokens, and the time of each step.

    Raises:
        InputError: the file cannot be written.
    """
    steps = explanation.steps
    figure = new_figure(max(7.0, min(0.12 * len(steps) + 2, 24.0)), 6.4)
    entropy, tokens, times = figure.subplots(3, 1, sharex=True)
    places = list(range(1, len(steps) + 1))
    records = [step.record for step in steps]
    entropy.plot(places, [r.entropy for r in records], color="C0", linewidth=1)
    entropy.set_ylabel("entropy of the\nroot, nats")
    own = [r.num_nodes - r.num_copied for r in records]
    tokens.bar(places, own, color="C0", alpha=0.35, label="drafted by heads")
    copied = [r.num_copied for r in records]
    tokens.bar(places, copied, bottom=own, color="C2", alpha=0.35, label="copied")
    kept = [r.num_accepted for r in records]
    tokens.plot(places, kept, "o", color="C3", markersize=3, label="kept")
    tokens.set_ylabel("draft tokens")
    tokens.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    bottom = [0.0] * len(steps)
    for index, name in enumerate(_TIMES):
        values = [getattr(step, name) for step in steps]
        times.bar(places, values, bottom=bottom, color=f"C{index}", label=name[:-3])
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    times.set_ylabel("ms")
    times.set_xlabel("step")
    times.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    stats = explanation.result.stats
    figure.suptitle(
        f"{stats.policy}, {stats.drafter}, {stats.backend}: {stats.num_tokens} tokens in "
        f"{stats.num_steps} steps"
    )
    save_figure(figure, file)
