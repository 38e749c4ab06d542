"""The trace: what calibration must know of a text and of the heads' guesses about it.

Under exact verification the emitted text does not depend on the trees, so one plain run of the
target fixes it. For every token that can be the root of a step, the trace holds the ranks of the
tokens that follow, among the proposals of each depth given the true tokens above, and the signals
that a scheduler may read there. Any tree or policy is then replayed without a model.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from entmtp.errors import TraceError
from entmtp.files import replacing
from entmtp.topology import Path

__all__ = ["MISS", "NO_COPY", "Trace", "TraceFacts", "join_traces", "load_trace", "save_trace"]

FORMAT, SCHEMA = "entmtp-trace", "3"
_KEY = "trace"
MISS = 255
"""Rank of a token that is not among the first 255, is not a hot one, or lies beyond the text."""

NO_COPY = 255
"""Class of a match where no token of the end of the text occurred before."""

_ARRAYS = (
    "tokens",
    "offsets",
    "prompt_lengths",
    "ranks",
    "entropy",
    "p0",
    "chain",
    "codes",
    "copy_match",
    "copy_hits",
    "copy_node",
)


@dataclass(frozen=True)
class TraceFacts:
    """Where a trace comes from; two traces may be joined or compared where these are equal.

    Attributes:
        model: name of the target, as the user gave it.
        model_digest: of its sizes and of a sample of its weights.
        drafter: its name, for example ``hydra``.
        drafter_digest: of a sample of its weights; of its settings for prompt lookup.
        backend: for example ``native-avx2``.
        precision: for example ``int8``.
        prompts_digest: of the prompts, in order.
        max_new_tokens: most tokens a text.
        temperature: 0 is greedy.
        seed: of the first prompt; the others derive theirs.
        depth: that was asked for; 0: as deep as the drafter goes, 4 where it has no limit.
        is_coupled: children were ranked with the noise of sampling.
        envelope: paths of the tree whose codes are traced; empty without.
        context_window: of the target, at which texts end too; 0 where it is not known.
        settings: digest of all other settings of sampling, and of the tokens that end a text.
    """

    model: str
    model_digest: str
    drafter: str
    drafter_digest: str
    backend: str
    precision: str
    prompts_digest: str
    max_new_tokens: int
    temperature: float
    seed: int
    depth: int = 0
    is_coupled: bool = False
    envelope: tuple[Path, ...] = ()
    context_window: int = 0
    settings: str = ""

    @classmethod
    def from_json(cls, text: str) -> "TraceFacts":
        """Read what :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"envelope": tuple(map(tuple, fields["envelope"]))})

    def to_json(self) -> str:
        """Compact JSON, fields in order."""
        return json.dumps(self.__dict__, separators=(",", ":"))


@dataclass(frozen=True)
class Trace:
    """Texts of a target, all end to end, and the guesses of a drafter about them.

    Text s covers positions ``offsets[s] .. offsets[s + 1] - 1``. Position j stands for the step
    whose root is ``tokens[j]``.

    Attributes:
        facts: where it comes from.
        ids: of the prompts, one a text.
        tasks: of the prompts.
        tokens: int32 ``(T,)`` emitted tokens.
        offsets: int64 ``(S + 1,)``.
        prompt_lengths: int32 ``(S,)``.
        ranks: uint8 ``(T, K)``: rank of ``tokens[j + 1 + i]`` at depth i + 1, or :data:`MISS`.
        entropy: float32 ``(T,)``, nats, of the distribution that ``tokens[j]`` was drawn from; NaN
            at the last token of a text, which is no root.
        p0: float32 ``(T,)``, top-1 probability of the same.
        chain: float16 ``(T, K)``, top-1 probabilities along the drafter's own best chain; NaN for
            a drafter that has none.
        codes: uint8 ``(T, E)`` of the log-probabilities of the nodes of the envelope given their
            parents, before any noise, in the order of its topology; see
            :data:`entmtp.growth.CODES_PER_NAT`. :data:`entmtp.growth.UNSCORED` at the last token
            of a text. E is 0 without.
        copy_match: uint8 ``(T,)`` class of the match of the copy behind each token, see
            :mod:`entmtp.drafters.copying`, or :data:`NO_COPY`.
        copy_hits: uint8 ``(T,)`` how many of its :data:`entmtp.growth.MAX_COPY` tokens are right.
        copy_node: uint8 ``(T,)`` deepest node of the envelope on the copy's path; 0 is the root.
    """

    facts: TraceFacts
    ids: tuple[str, ...]
    tasks: tuple[str, ...]
    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    prompt_lengths: npt.NDArray[np.int32]
    ranks: npt.NDArray[np.uint8]
    entropy: npt.NDArray[np.float32]
    p0: npt.NDArray[np.float32]
    chain: npt.NDArray[np.float16]
    codes: npt.NDArray[np.uint8]
    copy_match: npt.NDArray[np.uint8]
    copy_hits: npt.NDArray[np.uint8]
    copy_node: npt.NDArray[np.uint8]

    @property
    def num_texts(self) -> int:
        """S."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """K: how deep the ranks go."""
        return int(self.ranks.shape[1])

    def depth_left(self) -> npt.NDArray[np.int64]:
        """``(T,)`` depth at which the engine cuts the tree of a step: a text ends at the limit of
        its tokens or of the context window, and the last token is the target's own.
        """
        sizes = np.diff(self.offsets)
        limits = np.full(self.num_texts, self.facts.max_new_tokens, dtype=np.int64)
        if self.facts.context_window:
            limits = np.minimum(limits, self.facts.context_window - self.prompt_lengths)
        index = np.arange(self.num_tokens) - np.repeat(self.offsets[:-1], sizes)
        left: npt.NDArray[np.int64] = np.maximum(np.repeat(limits, sizes) - index - 2, 0)
        return left

    def select(self, texts: Sequence[int]) -> "Trace":
        """The trace of some texts, in that order."""
        spans = [np.arange(self.offsets[s], self.offsets[s + 1]) for s in texts]
        index = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        lengths = np.array([len(span) for span in spans], dtype=np.int64)
        return Trace(
            self.facts,
            tuple(self.ids[s] for s in texts),
            tuple(self.tasks[s] for s in texts),
            self.tokens[index],
            np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            self.prompt_lengths[list(texts)],
            self.ranks[index],
            self.entropy[index],
            self.p0[index],
            self.chain[index],
            self.codes[index],
            self.copy_match[index],
            self.copy_hits[index],
            self.copy_node[index],
        )

    def halves(self) -> tuple["Trace", "Trace"]:
        """Texts of even and of odd number within their task: one to fit on, one to report on."""
        fitting, other = self.half_texts()
        return self.select(fitting), self.select(other)

    def half_texts(self) -> tuple[list[int], list[int]]:
        """Numbers of the texts of both halves."""
        seen: dict[str, int] = {}
        parts: tuple[list[int], list[int]] = ([], [])
        for text, task in enumerate(self.tasks):
            parts[seen.get(task, 0) % 2].append(text)
            seen[task] = seen.get(task, 0) + 1
        return parts

    def by_task(self) -> dict[str, "Trace"]:
        """One trace a task, in order of first appearance."""
        texts: dict[str, list[int]] = {}
        for text, task in enumerate(self.tasks):
            texts.setdefault(task, []).append(text)
        return {task: self.select(found) for task, found in texts.items()}


def join_traces(parts: Sequence[Trace]) -> Trace:
    """One trace of the texts of several, in order; their facts must be equal."""
    first = parts[0]
    assert all(part.facts == first.facts for part in parts)  # noqa: S101 - one run makes them
    starts = np.cumsum([0, *(part.num_tokens for part in parts)])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    return Trace(
        first.facts,
        tuple(name for part in parts for name in part.ids),
        tuple(task for part in parts for task in part.tasks),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([*offsets, starts[-1:]]).astype(np.int64),
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.ranks for part in parts]),
        np.concatenate([part.entropy for part in parts]),
        np.concatenate([part.p0 for part in parts]),
        np.concatenate([part.chain for part in parts]),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("codes", "copy_match", "copy_hits", "copy_node")
        ),
    )


def save_trace(trace: Trace, file: FilePath) -> None:
    """Write a trace, atomically, with a checksum over all that it holds."""
    arrays = {name: np.ascontiguousarray(getattr(trace, name)) for name in _ARRAYS}
    names = json.dumps({"ids": trace.ids, "tasks": trace.tasks}, separators=(",", ":"))
    about = {
        "format": FORMAT,
        "schema": SCHEMA,
        "facts": trace.facts.to_json(),
        "names": names,
        "sha256": _checksum(trace.facts.to_json(), names, arrays),
    }
    metadata = {_KEY: json.dumps(about)}  # of one entry, so that equal traces are equal files
    try:
        with replacing(file) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # the writer makes a file only its owner can read
            save_file(arrays, temporary, metadata=metadata)
            temporary.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{file}: cannot be written ({error})") from error


def load_trace(file: FilePath) -> Trace:
    """Read a trace.

    Raises:
        TraceError: missing, no trace, of another version, or not what was written.
    """
    if file.is_dir():
        raise TraceError(f"{file}: a folder; name a file for the trace")
    if not file.is_file():
        raise TraceError(f"{file}: no such file; make a trace with 'entmtp trace'")
    try:
        with safe_open(file, framework="numpy") as opened:
            metadata = json.loads((opened.metadata() or {}).get(_KEY, "{}"))
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise TraceError(f"{file}: damaged, or no trace ({error}); make it again") from error
    if metadata.get("format") != FORMAT:
        raise TraceError(f"{file}: not a trace; make one with 'entmtp trace'")
    if metadata.get("schema") != SCHEMA:
        raise TraceError(
            f"{file}: a trace of schema {metadata.get('schema')!r}, this version reads {SCHEMA}; "
            "make it again"
        )
    missing = [name for name in _ARRAYS if name not in arrays]
    if missing:
        raise TraceError(f"{file}: lacks {', '.join(missing)}; make it again")
    if metadata.get("sha256") != _checksum(metadata["facts"], metadata["names"], arrays):
        raise TraceError(f"{file}: its checksum is wrong; make or copy it again")
    names = json.loads(metadata["names"])
    return Trace(
        TraceFacts.from_json(metadata["facts"]),
        tuple(names["ids"]),
        tuple(names["tasks"]),
        **arrays,
    )


def _checksum(facts: str, names: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for text in (facts, names):
        digest.update(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
