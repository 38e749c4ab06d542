"""Entries decoded end to end, to hold predictions against."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from entmtp.calibrate.collect import TracePrompt
from entmtp.calibrate.pace import Pace
from entmtp.calibrate.replay import accepted_lengths
from entmtp.calibrate.trace import Trace
from entmtp.costs import CostTable
from entmtp.engine import Engine, EngineLimits, Request
from entmtp.errors import TraceError
from entmtp.files import write_text
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology

__all__ = ["Measured", "MeasuredText", "measure_entries"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MeasuredText:
    """One text under one tree.

    Attributes:
        num_tokens: after the first.
        measured_ms: of decoding them.
        predicted_ms: for the same steps, at the pace of the machine while they were decoded.
    """

    num_tokens: int
    measured_ms: float
    predicted_ms: float


@dataclass(frozen=True)
class Measured:
    """All texts under one tree.

    Attributes:
        texts: one a prompt.
    """

    texts: tuple[MeasuredText, ...]

    @property
    def tokens_per_s(self) -> float:
        """As measured."""
        return self._rate(sum(text.measured_ms for text in self.texts))

    @property
    def predicted_tokens_per_s(self) -> float:
        """As predicted for the same texts."""
        return self._rate(sum(text.predicted_ms for text in self.texts))

    @property
    def time_ratio(self) -> float:
        """Predicted over measured time, median over texts."""
        return float(np.median([text.predicted_ms / text.measured_ms for text in self.texts]))

    def _rate(self, ms: float) -> float:
        return 1000 * sum(text.num_tokens for text in self.texts) / ms


def measure_entries(  # noqa: PLR0913 - keyword-only beyond the fifth
    engine: Engine,
    trace: Trace,
    prompts: Mapping[int, TracePrompt],
    entries: Mapping[str, Topology],
    costs: CostTable,
    *,
    max_new_tokens: int,
    work: Path,
    progress: Progress | None = None,
) -> dict[str, Measured]:
    """Decode some traced texts with every entry, in turn, prompt by prompt.

    Args:
        engine: its target and drafter decode.
        trace: of the texts, with their tokens.
        prompts: text number -> its prompt.
        entries: what is measured.
        costs: what the predictions are made from, at the pace of the machine (see :class:`Pace`)
            before and after each text.
        max_new_tokens: of each text, at most as many as were traced.
        work: file of the times so far, of this trace and these entries alone; a run that was cut
            off goes on behind the last prompt.
        progress: told prompts done and their number.

    Raises:
        TraceError: the file holds something else, or a text is not the one that was traced.
    """
    done = _load(work, entries)
    rng = random.Random(0)
    is_warm = False
    with closing(Pace(engine, list(entries.values()), costs, trace.facts.temperature)) as pace:
        for number, (text, prompt) in enumerate(prompts.items()):
            order = rng.sample(list(entries), len(entries))
            if str(text) not in done:
                if not is_warm:
                    for name in order:
                        _decode(engine, trace, text, prompt, entries[name], 8)
                    is_warm = True
                before, times = pace.now(), {}
                for name in order:
                    ids, ms = _decode(engine, trace, text, prompt, entries[name], max_new_tokens)
                    times[name] = len(ids), ms
                done[str(text)] = {"pace": (before + pace.now()) / 2, "times": times}
                write_text(work, json.dumps(done))
            if progress is not None:
                progress(number + 1, len(prompts))
    size = min(max_new_tokens, trace.facts.max_new_tokens)
    cut = replace(trace, facts=replace(trace.facts, max_new_tokens=size))
    found: dict[str, Measured] = {}
    for name, tree in entries.items():
        own = {text: (*done[str(text)]["times"][name], done[str(text)]["pace"]) for text in prompts}
        texts = _predicted(cut, tree, costs, own)
        if texts:
            found[name] = Measured(texts)
    return found


def _predicted(
    trace: Trace, tree: Topology, costs: CostTable, done: Mapping[int, Sequence[float]]
) -> tuple[MeasuredText, ...]:
    """Texts of more than one token, with what their steps should have cost.

    Args:
        trace: with the limit of tokens at which decoding ended; trees were cut there.
        tree: that decoded.
        costs: of steps.
        done: text -> its tokens, milliseconds, and the pace of the machine.
    """
    left, accepted = trace.depth_left(), accepted_lengths(trace, tree)
    texts = []
    for text, (num_tokens, ms, pace) in done.items():
        start, prompt = int(trace.offsets[text]), float(trace.prompt_lengths[text])
        at, predicted = 0, 0.0
        while at < num_tokens - 1:
            depth = int(left[start + at])
            predicted += costs.step_ms(tree.truncate(depth), prompt + at)
            at += int(accepted[start + at]) + 1
        if num_tokens > 1:
            texts.append(MeasuredText(int(num_tokens) - 1, ms, pace * predicted))
    return tuple(texts)


def _decode(
    engine: Engine,
    trace: Trace,
    text: int,
    prompt: TracePrompt,
    tree: Topology,
    max_new_tokens: int,
) -> tuple[Sequence[int], float]:
    """A text, and milliseconds from its first to its last token."""
    facts = trace.facts
    size = min(max_new_tokens, facts.max_new_tokens)
    sampling = SamplingParams(
        max_new_tokens=size, temperature=facts.temperature, seed=derive_seed(facts.seed, text)
    )
    limits = EngineLimits(max_batch_size=1)
    scheduler = FixedScheduler("it", tree)
    it = Engine(engine.target, engine.drafter, scheduler, engine.tokenizer, limits)
    result = it.run([Request(prompt.tokens, sampling)])[0]
    start, end = int(trace.offsets[text]), int(trace.offsets[text + 1])
    if list(result.token_ids) != trace.tokens[start:end][:size].tolist():
        raise TraceError(
            f"prompt {prompt.id!r} gave another text than the one that was traced; was the program "
            "changed since? Give --seed another value, or delete the trace, to trace it again"
        )
    return result.token_ids, 1000 * result.stats.decode_s


def _load(work: Path, entries: Mapping[str, Topology]) -> dict[str, dict[str, Any]]:
    if not work.exists():
        return {}
    try:
        found = json.loads(work.read_text(encoding="utf-8"))
        is_same = all(set(one["times"]) == set(entries) for one in found.values())
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise TraceError(f"{work}: damaged ({error}); delete it and run again") from error
    return dict(found) if is_same else {}
