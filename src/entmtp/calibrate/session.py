"""From a loaded engine and prompt records to a trace file, made once and found again."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from entmtp.calibrate.collect import (
    GroupTracer,
    Progress,
    TracePrompt,
    TraceSettings,
    collect_trace,
)
from entmtp.calibrate.trace import Trace, TraceFacts
from entmtp.drafters.base import Drafter
from entmtp.engine import Engine
from entmtp.errors import InputError, TraceError
from entmtp.params import SamplingParams
from entmtp.target.digest import model_digest
from entmtp.tokenizer import Tokenizer
from entmtp.topology import Topology, named_topologies
from entmtp.workload import PromptRecord

__all__ = [
    "encode_records",
    "forget_traces",
    "trace_facts",
    "trace_file_name",
    "trace_prompts",
    "usual_envelope",
]

_ENVELOPE = "envelope24"
_MOST_BYTES = 256 * 2**20


def encode_records(engine: Engine, records: Sequence[PromptRecord]) -> list[TracePrompt]:
    """The first turn of each record under the chat template; as raw text where there is none.

    Raises:
        InputError: a prompt occurs twice, leaves no room for an answer, or is refused by the
            template.
    """
    prompts, seen = [], set()
    has_template = _has_chat_template(engine)
    for record in records:
        turn = record.turns[0]
        tokens = engine.chat_prompt(turn) if has_template else engine.encode(turn)
        if (record.task, record.id, tokens) in seen:
            raise InputError(
                f"prompt {record.id!r} of task {record.task!r} occurs twice; name each task and "
                "file once, and mixed without its parts"
            )
        seen.add((record.task, record.id, tokens))
        window = engine.target.config.context_window
        if len(tokens) >= window:
            raise InputError(
                f"prompt {record.id!r} has {len(tokens)} tokens, but the context window holds "
                f"{window} with the answer; leave it out"
            )
        prompts.append(TracePrompt(record.id, record.task, tokens))
    return prompts


def _has_chat_template(engine: Engine) -> bool:
    try:
        engine.chat_prompt("Hello")
    except InputError:
        return False
    return True


def trace_facts(
    engine: Engine, model: str, prompts: Sequence[TracePrompt], settings: TraceSettings
) -> TraceFacts:
    """What a trace of these prompts would say about itself."""
    sampling = settings.sampling
    return TraceFacts(
        model=model,
        model_digest=model_digest(engine.target),
        drafter=engine.drafter.name,
        drafter_digest=engine.drafter.digest,
        backend=engine.target.backend,
        precision=engine.target.precision,
        prompts_digest=_prompts_digest(prompts),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed or 0,
        depth=settings.depth or 0,
        is_coupled=settings.is_coupled and not sampling.is_greedy,
        envelope=settings.envelope.paths,
        context_window=engine.target.config.context_window,
        settings=_settings_digest(sampling, engine.tokenizer),
    )


def usual_envelope(drafter: Drafter) -> Topology:
    """The shipped envelope as far as a drafter reaches; the empty tree where it cannot grow any."""
    if not hasattr(drafter, "grow"):
        return Topology(())
    depth, width = drafter.max_depth, drafter.max_width
    paths = named_topologies()[_ENVELOPE].paths
    return Topology(
        tuple(
            path
            for path in paths
            if (depth is None or len(path) <= depth) and (width is None or max(path) < width)
        )
    )


def trace_prompts(  # noqa: PLR0913 - keyword-only beyond the fifth
    engine: Engine,
    model: str,
    records: Sequence[PromptRecord],
    settings: TraceSettings,
    progress: Progress,
    *,
    output: Path | None = None,
    folder: Path | None = None,
    tracer: GroupTracer | None = None,
) -> Trace:
    """Trace records; what was made before of the same model, heads and settings is used again.

    Args:
        engine: see :func:`collect_trace`.
        model: its name.
        records: at least one.
        settings: what is traced.
        progress: told the prompts done and their number.
        output: file to write.
        folder: instead of ``output``: where files are named after what they hold.
        tracer: see :func:`collect_trace`.
    """
    prompts = encode_records(engine, records)
    facts = trace_facts(engine, model, prompts, settings)
    if output is None:
        assert folder is not None  # noqa: S101 - one of the two is given
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"{folder}: cannot be written ({error})") from error
        output = folder / trace_file_name(facts)
    trace = collect_trace(engine, prompts, settings, facts, output, progress, tracer=tracer)
    if folder is not None:
        forget_traces(folder, output)
    return trace


def forget_traces(folder: Path, kept: Path, max_bytes: int = _MOST_BYTES) -> None:
    """Delete the traces in a folder that were not used for longest, where all are too much.

    Args:
        folder: of traces that can be made again.
        kept: the one in use, which stays.
        max_bytes: of all of them.
    """
    with suppress(OSError):
        os.utime(kept)
    files = []
    for file in folder.glob("*.trace"):
        with suppress(OSError):
            files.append((file.stat().st_mtime, file.stat().st_size, file))
    total = 0
    for _, size, file in sorted(files, reverse=True):
        total += size
        if total > max_bytes and file != kept:
            with suppress(OSError):
                file.unlink()


def trace_file_name(facts: TraceFacts) -> str:
    """A name that differs where the facts do."""
    digest = hashlib.sha256(facts.to_json().encode()).hexdigest()[:16]
    return f"{facts.drafter}-{digest}.trace"


def _settings_digest(sampling: SamplingParams, tokenizer: Tokenizer) -> str:
    """Of what decides about texts beside the facts that have a name of their own."""
    others = asdict(replace(sampling, max_new_tokens=1, temperature=0.0, seed=None))
    return hashlib.sha256(json.dumps([others, sorted(tokenizer.eos_ids)]).encode()).hexdigest()[:16]


def _prompts_digest(prompts: Sequence[TracePrompt]) -> str:
    text = json.dumps([[p.task, p.id, p.tokens] for p in prompts], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
