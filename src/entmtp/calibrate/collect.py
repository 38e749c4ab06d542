"""Making a trace: the target writes each text once, then the drafter is led along it.

Prompts go in groups. A group is decoded plainly, all its texts at once; then the drafter's state
follows each text token by token, as it would when decoding, and at every root it is asked three
things: the ranks of the tokens that do follow, its confidence along its own best chain, and, where
wanted, the codes of the log-probabilities of a whole envelope. Finished groups are files, so a run
that was cut off goes on behind the last one.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.calibrate.copied import TextCopies, node_on_copy
from entmtp.calibrate.groups import GroupTracer, TraceGroup, TracePrompt, TraceSettings
from entmtp.calibrate.trace import (
    MISS,
    NO_COPY,
    Trace,
    TraceFacts,
    join_traces,
    load_trace,
    save_trace,
)
from entmtp.drafters.base import (
    Coupling,
    Drafter,
    DraftRequest,
    GrownTree,
    GrowRequest,
    check_depth,
)
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.picking import ScoredRows, coupled_scores, set_best_children
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.drafters.recording import RecordingDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult, Request
from entmtp.errors import InputError, TraceError
from entmtp.files import BusyFolderError, holding
from entmtp.growth import UNSCORED, GrowthPlan
from entmtp.noise import NoiseSource
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.topology import Topology

__all__ = [
    "GROUP",
    "GroupTracer",
    "TraceGroup",
    "TracePrompt",
    "TraceSettings",
    "collect_trace",
    "trace_group",
]

GROUP = 32
"""Prompts that are decoded together; a run that is cut off loses at most one such group."""

Progress = Callable[[int, int], None]


def collect_trace(  # noqa: PLR0913 - the last is keyword-only
    engine: Engine,
    prompts: Sequence[TracePrompt],
    settings: TraceSettings,
    facts: TraceFacts,
    output: Path,
    progress: Progress,
    *,
    tracer: GroupTracer | None = None,
) -> Trace:
    """Trace prompts into a file; a file or parts of the same facts are used again.

    Args:
        engine: its target writes, its drafter is traced; the scheduler is not asked.
        prompts: at least one, no id twice.
        settings: what is traced.
        facts: of the trace.
        output: file to write; groups lie in a folder beside it until it is whole.
        progress: told the prompts done and their number.
        tracer: of the groups that are not there yet; ``None``: this process.

    Raises:
        TraceError: a trace of other facts lies there, or another run is at work on this one.
        InputError: there is nothing to trace.
    """
    depth = trace_depth(engine.drafter, settings)
    folder = output.with_name(f"{output.name}.parts")
    if output.exists():
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was cut off at its very end
        return _of_same_facts(load_trace(output), facts, output)
    groups = [
        TraceGroup(tuple(prompts[first : first + GROUP]), first, settings, depth, facts)
        for first in range(0, len(prompts), GROUP)
    ]
    with ExitStack() as stack:
        try:
            stack.enter_context(holding(folder))
        except BusyFolderError as error:
            raise TraceError(str(error)) from error
        except OSError as error:
            raise TraceError(
                f"{folder}: cannot be written ({error}); name another output"
            ) from error
        trace = join_traces(_parts(engine, groups, folder, tracer, progress))
        save_trace(trace, output)
        shutil.rmtree(folder, ignore_errors=True)
    return trace


def _parts(
    engine: Engine,
    groups: Sequence[TraceGroup],
    folder: Path,
    tracer: GroupTracer | None,
    progress: Progress,
) -> list[Trace]:
    """The traces of all groups, in order; those that lie in the folder are not made again."""
    parts: dict[int, Trace] = {}
    total, done = sum(len(group.prompts) for group in groups), 0
    for group in groups:
        file = _part_file(folder, group)
        if file.exists():
            parts[group.first] = _of_same_facts(load_trace(file), group.facts, folder)
            done += len(group.prompts)
            progress(done, total)
    missing = [group for group in groups if group.first not in parts]
    for group, part in _trace_here(engine, missing) if tracer is None else tracer(missing):
        save_trace(part, _part_file(folder, group))
        parts[group.first] = part
        done += len(group.prompts)
        progress(done, total)
    return [parts[group.first] for group in groups]


def _trace_here(engine: Engine, groups: Sequence[TraceGroup]) -> Iterator[tuple[TraceGroup, Trace]]:
    for g in groups:
        yield g, trace_group(engine, g.prompts, g.first, g.settings, g.depth, g.facts)


def _part_file(folder: Path, group: TraceGroup) -> Path:
    return folder / f"{group.first // GROUP:05d}"


def trace_depth(drafter: Drafter, settings: TraceSettings) -> int:
    """How deep a drafter is traced.

    Raises:
        InputError: it proposes nothing, or is not that deep.
        TopologyError: it cannot grow trees in the envelope.
    """
    if isinstance(drafter, EmptyDrafter):
        raise InputError("drafter is none, which proposes nothing to trace; name heads or lookup")
    limit = drafter.max_depth
    depth = settings.depth or limit or 4
    if limit is not None and depth > limit:
        raise InputError(f"depth goes to depth {depth}; the {drafter.name} drafter to {limit}")
    if settings.envelope.num_nodes:
        check_depth(drafter, GrowthPlan.whole(settings.envelope))
    if not isinstance(drafter, PromptLookupDrafter) and not hasattr(drafter, "fill"):
        raise InputError(f"the drafter {drafter.name} has no heads, so it cannot be traced")
    return depth


def trace_group(
    engine: Engine,
    prompts: Sequence[TracePrompt],
    first: int,
    settings: TraceSettings,
    depth: int,
    facts: TraceFacts,
) -> Trace:
    """Decode some prompts together and lead the drafter along the texts.

    Args:
        engine: see :func:`collect_trace`.
        prompts: of the group.
        first: number of its first prompt, from which seeds follow.
        settings: what is traced.
        depth: of the ranks.
        facts: of the trace.
    """
    is_lookup = isinstance(engine.drafter, PromptLookupDrafter)
    recorder = EmptyDrafter() if is_lookup else RecordingDrafter()
    plain = Engine(
        engine.target,
        recorder,
        FixedScheduler.plain(),
        engine.tokenizer,
        EngineLimits(max_batch_size=len(prompts)),
    )
    base = settings.sampling.seed or 0
    requests = [
        Request(p.tokens, replace(settings.sampling, seed=derive_seed(base, first + i)))
        for i, p in enumerate(prompts)
    ]
    results = plain.run(requests)
    texts = [
        _Text(prompt.tokens, result, _states(recorder, prompt, result, engine.target.device))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    if isinstance(engine.drafter, PromptLookupDrafter):
        columns = [_trace_lookup(engine.drafter, text, depth) for text in texts]
    else:
        vocab_size = engine.target.config.vocab_size
        columns = _trace_heads(engine.drafter, texts, settings, depth, vocab_size)
    return _as_trace(prompts, texts, columns, facts)


def _states(
    recorder: EmptyDrafter, prompt: TracePrompt, result: GenerationResult, device: torch.device
) -> Tensor:
    """Recorded hidden states of a text, where the drafter wants them; none for prompt lookup."""
    if not isinstance(recorder, RecordingDrafter):
        return torch.empty(0)
    return recorder.take([*prompt.tokens, *result.token_ids]).to(device)


@dataclass(frozen=True)
class _Text:
    """One text and the hidden states of all its tokens but the last."""

    prompt: tuple[int, ...]
    result: GenerationResult
    hidden: Tensor

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.result.token_ids

    @property
    def num_roots(self) -> int:
        """Positions with a token behind them."""
        return len(self.tokens) - 1

    def state_at(self, position: int) -> Tensor:
        """``(1, H)`` state that emitted token ``position`` was chosen from."""
        row = len(self.prompt) - 1 + position
        return self.hidden[row : row + 1]


@dataclass
class _Columns:
    """What is traced at the positions of one text."""

    ranks: npt.NDArray[np.uint8]
    chain: npt.NDArray[np.float16]
    codes: npt.NDArray[np.uint8]
    copy_match: npt.NDArray[np.uint8]
    copy_hits: npt.NDArray[np.uint8]
    copy_node: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls, size: int, depth: int, num_nodes: int) -> "_Columns":
        return cls(
            np.full((size, depth), MISS, dtype=np.uint8),
            np.full((size, depth), np.nan, dtype=np.float16),
            np.full((size, num_nodes), UNSCORED, dtype=np.uint8),
            np.full(size, NO_COPY, dtype=np.uint8),
            np.zeros(size, dtype=np.uint8),
            np.zeros(size, dtype=np.uint8),
        )


class _TruePath:
    """Follows the text instead of the best children, and notes how they are ranked.

    Its trees are chains, so every request has one row a depth.
    """

    takes_best = False

    def __init__(self, paths: npt.NDArray[np.int64], column: Tensor) -> None:
        """Take the true tokens ``(B, K)``, -1 beyond a text, and the column of each token."""
        self._paths, self._column = torch.from_numpy(paths), column
        self.ranks = np.full(paths.shape, MISS, dtype=np.uint8)

    def pick(self, rows: ScoredRows) -> None:
        """Set the true child; where there is none, any token, whose rank is not looked at."""
        wanted = self._paths[list(rows.indices), rows.depth]
        for tree, token in zip(rows.trees, wanted.clamp(min=0).tolist(), strict=True):
            tree[rows.depth + 1] = token
        column = self._column[wanted.clamp(min=0)]
        is_scored = (wanted >= 0) & (column >= 0)
        if not bool(is_scored.any()):
            return
        scores, column = coupled_scores(rows).cpu()[is_scored], column[is_scored]
        own = scores.gather(1, column[:, None])
        is_before = (scores > own) | (
            (scores == own) & (torch.arange(scores.shape[1]) < column[:, None])
        )
        ranks = is_before.sum(dim=1).clamp(max=MISS).to(torch.uint8).numpy()
        self.ranks[np.array(rows.indices)[is_scored.numpy()], rows.depth] = ranks


class _WithLogProbs:
    """Takes the best children and notes their log-probabilities given their parents."""

    takes_best = False  # it does more

    def __init__(self, num_requests: int, num_nodes: int) -> None:
        self.values = np.full((num_requests, num_nodes), np.nan, dtype=np.float16)

    def pick(self, rows: ScoredRows) -> None:
        """See :class:`BestChildren`."""
        order = set_best_children(rows)
        scores = torch.log_softmax(rows.scores.to(torch.float32), dim=-1).gather(1, order)
        parts = torch.split(scores.to(torch.float16).cpu(), list(rows.counts))
        for at, index in enumerate(rows.indices):
            level = rows.levels[at]
            own = parts[at].numpy()[rows.parent_rows[at], level.ranks]
            self.values[index, level.children - 1] = own


def _trace_heads(
    drafter: Any, texts: Sequence[_Text], settings: TraceSettings, depth: int, vocab_size: int
) -> list[_Columns]:
    """Lead a drafter with trained modules along all texts at once."""
    envelope = settings.envelope
    columns = [_Columns.empty(len(t.tokens), depth, envelope.num_nodes) for t in texts]
    whole = GrowthPlan.whole(envelope) if envelope.num_nodes else None
    copies = [TextCopies(t.prompt, t.tokens) for t in texts]
    states = [
        drafter.prefill(t.prompt, t.hidden[: len(t.prompt)], t.tokens[0]) if t.num_roots else None
        for t in texts
    ]
    column = _column_of_tokens(drafter.hot_ids, vocab_size)
    noises = _noises(texts, settings, vocab_size)
    chain = Topology.from_paths([(0,) * d for d in range(1, depth + 1)])
    for position in range(max((t.num_roots for t in texts), default=0)):
        active = [i for i, text in enumerate(texts) if position < text.num_roots]
        requests = [
            DraftRequest(
                states[i],
                texts[i].tokens[position],
                chain,
                _coupling(noises[i], texts[i], position, settings),
            )
            for i in active
        ]
        true = _TruePath(_paths_ahead([texts[i] for i in active], position, depth), column)
        drafter.fill(requests, true)
        best = _WithLogProbs(len(active), depth)
        drafter.fill([replace(request, coupling=None) for request in requests], best)
        for at, i in enumerate(active):
            columns[i].ranks[position] = true.ranks[at]
            columns[i].chain[position] = np.exp(best.values[at])
        if whole is not None:
            growing = [GrowRequest(r.state, r.root, whole, r.coupling) for r in requests]
            for i, tree in zip(active, drafter.grow(growing), strict=True):
                columns[i].codes[position] = tree.codes[1:]
                _note_copy(columns[i], position, copies[i], tree)
        for i in active:
            text = texts[i]
            if position + 1 < text.num_roots:
                token = text.tokens[position + 1]
                drafter.commit(states[i], text.state_at(position + 1), [token])
    return columns


def _note_copy(columns: _Columns, position: int, copies: TextCopies, tree: GrownTree) -> None:
    copy = copies.at(position)
    if copy is not None:
        columns.copy_match[position] = copy.match
        columns.copy_hits[position] = copies.hits(position, copy)
        columns.copy_node[position] = node_on_copy(tree.plan.rule.envelope, tree, copy)


def _trace_lookup(drafter: PromptLookupDrafter, text: _Text, depth: int) -> _Columns:
    """Lead prompt lookup along one text."""
    columns = _Columns.empty(len(text.tokens), depth, 0)
    if not text.num_roots:
        return columns
    state = drafter.prefill(text.prompt, text.hidden, text.tokens[0])
    for position in range(text.num_roots):
        path = text.tokens[position + 1 : position + 1 + depth]
        columns.ranks[position, : len(path)] = drafter.path_ranks(state, path, MISS)
        if position + 1 < text.num_roots:
            drafter.commit(state, text.hidden, [text.tokens[position + 1]])
    return columns


def _noises(
    texts: Sequence[_Text], settings: TraceSettings, vocab_size: int
) -> list[NoiseSource | None]:
    """Of each text, where children are ranked by it."""
    if not settings.is_coupled or settings.sampling.is_greedy:
        return [None] * len(texts)
    return [NoiseSource(text.result.seed, vocab_size) for text in texts]


def _coupling(
    noise: NoiseSource | None, text: _Text, position: int, settings: TraceSettings
) -> Coupling | None:
    """Noise of the tokens behind a root."""
    if noise is None:
        return None
    return Coupling(noise, settings.sampling.temperature, len(text.prompt) + position + 1)


def _paths_ahead(texts: Sequence[_Text], position: int, depth: int) -> npt.NDArray[np.int64]:
    """``(B, depth)`` tokens behind the root of each text, -1 beyond its end."""
    paths = np.full((len(texts), depth), -1, dtype=np.int64)
    for row, text in enumerate(texts):
        ahead = text.tokens[position + 1 : position + 1 + depth]
        paths[row, : len(ahead)] = ahead
    return paths


def _column_of_tokens(hot_ids: Tensor, vocab_size: int) -> Tensor:
    """int64 ``(V,)``: column of each token in the scores, -1 where it has none."""
    ids = hot_ids.cpu()
    column = torch.full((vocab_size,), -1, dtype=torch.int64)
    column[ids] = torch.arange(len(ids))
    return column


def _as_trace(
    prompts: Sequence[TracePrompt],
    texts: Sequence[_Text],
    columns: Sequence[_Columns],
    facts: TraceFacts,
) -> Trace:
    sizes = [len(text.tokens) for text in texts]
    signals = [
        [(step.entropy, step.p0) for step in text.result.stats.steps] + [(np.nan, np.nan)]
        for text in texts
    ]
    flat = np.array([pair for rows in signals for pair in rows], dtype=np.float32).reshape(-1, 2)
    return Trace(
        facts,
        tuple(prompt.id for prompt in prompts),
        tuple(prompt.task for prompt in prompts),
        np.array([token for text in texts for token in text.tokens], dtype=np.int32),
        np.cumsum([0, *sizes]).astype(np.int64),
        np.array([len(text.prompt) for text in texts], dtype=np.int32),
        np.concatenate([c.ranks for c in columns]),
        flat[:, 0].copy(),
        flat[:, 1].copy(),
        np.concatenate([c.chain for c in columns]),
        *(
            np.concatenate([getattr(c, name) for c in columns])
            for name in ("codes", "copy_match", "copy_hits", "copy_node")
        ),
    )


def _of_same_facts(trace: Trace, facts: TraceFacts, file: Path) -> Trace:
    if trace.facts == facts:
        return trace
    other = next(k for k, value in facts.__dict__.items() if getattr(trace.facts, k) != value)
    raise TraceError(
        f"{file} holds a trace with {other} = {getattr(trace.facts, other)!r:.80}, not "
        f"{getattr(facts, other)!r:.80}; delete it or name another output"
    )
