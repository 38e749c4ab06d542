"""How much a backend's arithmetic changes the model: perplexity, KL divergence, top-1 agreement.

All backends read the same texts, a chunk of rows at a time, and each row of logits is compared
with that of float32 and dropped. Intervals come from a bootstrap over texts, the same draws for
every backend, so that differences are paired.
"""

import gzip
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.bootstrap import CONFIDENCE, RESAMPLES, SEED, draw_weights, percentiles
from entmtp.errors import InputError, NumericalError, UnsupportedModelError
from entmtp.kernels.library import missing_reason
from entmtp.loading.gguf_writer import GGUF_TYPES, write_gguf
from entmtp.loading.llamacpp import LlamaCpp, missing_llama_cpp
from entmtp.loading.loader import DTYPES, load_target
from entmtp.target.base import Segment, Target
from entmtp.tokenizer import Tokenizer
from entmtp.workload import read_prompts

__all__ = [
    "BACKENDS",
    "CONFIDENCE",
    "REFERENCE",
    "RESAMPLES",
    "SEED",
    "BackendQuality",
    "Estimate",
    "Scorer",
    "Sums",
    "TargetScorer",
    "Text",
    "estimate",
    "limit_texts",
    "measure",
    "open_scorers",
    "parse_backends",
    "read_texts",
    "row_measures",
    "text_digest",
]

REFERENCE = "float32"
BACKENDS = (*DTYPES, "int8", *(f"llamacpp:{kind}" for kind in GGUF_TYPES))
CHUNK = 64  # rows whose logits are in memory together
_PROMPT_SUFFIXES = (".json", ".jsonl")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Text:
    """Tokens read together; those from index ``first`` (>= 1) on are counted."""

    tokens: tuple[int, ...]
    first: int

    @property
    def num_counted(self) -> int:
        """Tokens that are counted."""
        return len(self.tokens) - self.first


class Scorer(Protocol):
    """A backend that reads one text after another."""

    def start(self) -> None:
        """Forget the text so far."""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens whose logits nobody asks for."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; ``(N, V)`` logits of what follows each."""


@dataclass(frozen=True)
class Sums:
    """What was counted, by text.

    Attributes:
        counts: ``(T,)`` tokens counted.
        nll: ``(B, T)`` negative log-likelihood, nats, of each backend; the first is float32.
        kl: ``(B, T)`` KL divergence of the backend's distribution from that of float32, nats.
        same: ``(B, T)`` rows whose likeliest token is that of float32.
    """

    counts: Floats
    nll: Floats
    kl: Floats
    same: Floats


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; no interval where there is but one text."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class BackendQuality:
    """One backend against float32.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of a token.
        difference: perplexity over that of float32, minus one.
        kl: mean KL(float32 || backend) of a position, nats.
        agreement: share of positions with the same likeliest token.
    """

    perplexity: Estimate
    difference: Estimate
    kl: Estimate
    agreement: Estimate

    def as_dict(self) -> dict[str, object]:
        """The JSON form."""
        return asdict(self)


def parse_backends(text: str) -> tuple[str, ...]:
    """Names out of ``int8,llamacpp:Q8_0``; float32, the reference, always comes first.

    Raises:
        InputError: an unknown name.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in BACKENDS), None)
    if unknown is not None:
        raise InputError(f"backend is {unknown!r}; it must be one of {', '.join(BACKENDS)}")
    return tuple(dict.fromkeys((REFERENCE, *names)))


def read_texts(file: Path, tokenizer: Tokenizer, window: int) -> list[Text]:
    """Texts of at most ``window`` tokens.

    Args:
        file: plain text, cut into windows that are read apart; or a set of prompts (``.json``,
            ``.jsonl``, also ``.gz``), of which each reference is read behind its prompt and only
            the reference is counted. What lies beyond the window is left out.
        tokenizer: of the model.
        window: tokens, at least 2.

    Raises:
        InputError: the file cannot be read, or holds nothing to count.
    """
    if window < 2:
        raise InputError(f"window is {window}; it must be at least 2")
    start = tokenizer.encode("")
    suffixes = [suffix for suffix in file.suffixes if suffix != ".gz"]
    if suffixes and suffixes[-1] in _PROMPT_SUFFIXES:
        texts = _answers(file, tokenizer, start, window)
    else:
        texts = _windows(tokenizer.encode(_read(file)), start, window)
    if not texts:
        raise InputError(
            f"{file}: nothing to count: it needs a text of two tokens or more, or prompts with a "
            f"reference, in a window of {window} tokens"
        )
    return texts


def limit_texts(texts: Sequence[Text], limit: int | None) -> list[Text]:
    """The first texts that hold ``limit`` counted tokens, the last of them cut.

    Raises:
        InputError: the limit is below 1.
    """
    if limit is None:
        return list(texts)
    if limit < 1:
        raise InputError(f"limit is {limit}; it must be at least 1, or left out to read all")
    kept: list[Text] = []
    for text in texts:
        end = text.first + min(text.num_counted, limit)
        kept.append(Text(text.tokens[:end], text.first))
        limit -= end - text.first
        if limit == 0:
            break
    return kept


@contextmanager
def open_scorers(
    model: Path, names: Sequence[str], *, threads: int, window: int, notice: Callable[[str], None]
) -> Iterator[dict[str, Scorer]]:
    """Load backends; all are in memory together.

    Args:
        model: a Hugging Face folder or a .gguf file.
        names: of :data:`BACKENDS`.
        threads: of llama.cpp.
        window: longest text.
        notice: told in one line of each backend that cannot run here and is left out.
    """
    with TemporaryDirectory(prefix="entmtp-quality-") as temporary:
        scorers: dict[str, Scorer] = {}
        for name in names:
            try:
                scorers[name] = _open(model, name, threads, window, Path(temporary))
            except _NotHereError as error:
                notice(f"{name} left out: {error}")
        yield scorers


def measure(
    scorers: Mapping[str, Scorer],
    texts: Sequence[Text],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sums:
    """Read all texts with all backends.

    Args:
        scorers: float32 first.
        texts: what is read.
        progress: told how many texts are done, of how many.

    Raises:
        NumericalError: logits that are not finite.
    """
    shape = (len(scorers), len(texts))
    sums = Sums(
        np.array([text.num_counted for text in texts], dtype=np.float64),
        *(np.zeros(shape) for _ in range(3)),
    )
    for column, text in enumerate(texts):
        for scorer in scorers.values():
            scorer.start()
            scorer.read(text.tokens[: text.first - 1])
        for start in range(text.first - 1, len(text.tokens) - 1, CHUNK):
            _add_chunk(sums, scorers, text.tokens[start : start + CHUNK + 1], column)
        progress(column + 1, len(texts))
    return sums


def row_measures(
    reference: Tensor, logits: Tensor, following: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood, KL divergence and agreement of each row.

    Args:
        reference: ``(N, V)`` logits of float32.
        logits: ``(N, V)`` of the backend.
        following: int64 ``(N,)`` tokens that came.

    Returns:
        three float64 ``(N,)``; the last is 1 where the likeliest token is the same.
    """
    base = torch.log_softmax(reference.float(), dim=-1)
    other = torch.log_softmax(logits.float(), dim=-1)
    nll = -other.gather(1, following[:, None]).squeeze(1)
    kl = (base.exp() * (base - other)).sum(dim=-1, dtype=torch.float64)
    same = base.argmax(dim=-1) == other.argmax(dim=-1)
    return nll.double(), kl, same.double()


def estimate(sums: Sums) -> list[BackendQuality]:
    """Values and intervals of each backend, in order.

    The intervals are percentiles of a bootstrap over texts with a fixed seed. A draw gives each
    text a weight, the same for all backends.
    """
    weights = draw_weights(len(sums.counts))
    total = weights @ sums.counts
    log_base = weights @ sums.nll[0] / total
    found = []
    for row in range(len(sums.nll)):
        log_perplexity = weights @ sums.nll[row] / total
        found.append(
            BackendQuality(
                perplexity=_interval(np.exp(log_perplexity)),
                difference=_interval(np.expm1(log_perplexity - log_base)),
                kl=_interval(weights @ sums.kl[row] / total),
                agreement=_interval(weights @ sums.same[row] / total),
            )
        )
    return found


def text_digest(texts: Sequence[Text]) -> str:
    """First 16 hex digits of a hash of all tokens: names what was read."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.array([text.first, *text.tokens], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


class TargetScorer:
    """A target; implements :class:`Scorer`."""

    def __init__(self, target: Target, window: int) -> None:
        self._target, self._window = target, window
        self.start()

    def start(self) -> None:
        """Forget the text so far."""
        self._cache = self._target.new_cache(self._window)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens whose logits nobody asks for."""
        for start in range(0, len(tokens), CHUNK):
            self._forward(tokens[start : start + CHUNK], is_asked=False)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; ``(N, V)`` logits of what follows each."""
        return self._forward(tokens, is_asked=True)

    def _forward(self, tokens: Sequence[int], *, is_asked: bool) -> Tensor:
        depths = np.arange(len(tokens), dtype=np.int64)
        rows = torch.tensor(tokens)
        segment = Segment(self._cache, rows, depths, logits="all" if is_asked else "none")
        (logits,) = self._target.forward([segment]).logits
        self._cache.commit(range(len(tokens)))
        return logits


class _LlamaCppScorer:
    """llama.cpp; implements :class:`Scorer`."""

    def __init__(self, model: LlamaCpp) -> None:
        self._model = model

    def start(self) -> None:
        self._model.truncate(0)

    def read(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            self._model.forward(tokens[start : start + CHUNK], logits=False)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._model.forward(tokens)).clone()


class _NotHereError(Exception):
    """A backend cannot run here or not on this model; the message says why."""


def _open(model: Path, name: str, threads: int, window: int, folder: Path) -> Scorer:
    """Load one backend."""
    try:
        if name in DTYPES:
            return TargetScorer(load_target(model, dtype=name, backend="torch"), window)
        if name == "int8":
            reason = missing_reason()
            if reason is not None:
                raise _NotHereError(reason)
            target = load_target(model, dtype="int8", device="cpu", backend="native")
            return TargetScorer(target, window)
        reason = missing_llama_cpp()
        if reason is not None:
            raise _NotHereError(reason)
        kind = name.partition(":")[2]
        file = folder / f"{kind}.gguf"
        write_gguf(model, file, kind)
        return _LlamaCppScorer(LlamaCpp(file, threads=threads, context=window, max_rows=CHUNK))
    except UnsupportedModelError as error:
        if name == REFERENCE:
            raise
        raise _NotHereError(str(error)) from error


def _add_chunk(
    sums: Sums, scorers: Mapping[str, Scorer], tokens: Sequence[int], column: int
) -> None:
    """Read all tokens but the last, each of which is followed by the next."""
    following = torch.tensor(tokens[1:])
    reference: Tensor | None = None
    for row, (name, scorer) in enumerate(scorers.items()):
        logits = scorer.logits(tokens[:-1])
        if not bool(torch.isfinite(logits).all()):
            raise NumericalError(f"{name} gives logits that are not finite")
        reference = logits if reference is None else reference
        place = reference.device
        found = row_measures(reference, logits.to(place), following.to(place))
        for total, values in zip((sums.nll, sums.kl, sums.same), found, strict=True):
            total[row, column] += float(values.sum())


def _interval(values: Floats) -> Estimate:
    """The first value, and the percentiles of the others."""
    low, high = percentiles(values) or (None, None)
    return Estimate(float(values[0]), low, high)


def _windows(tokens: Sequence[int], start: Sequence[int], window: int) -> list[Text]:
    """A text cut into windows; each begins with the tokens that begin every text, if any do."""
    tokens = _without(tokens, start)
    size = window - len(start)
    if size < 1:
        raise InputError(f"window is {window}; it must be above {len(start)}")
    first = max(len(start), 1)
    pieces = [(*start, *tokens[at : at + size]) for at in range(0, len(tokens), size)]
    return [Text(piece, first) for piece in pieces if len(piece) > first]


def _answers(file: Path, tokenizer: Tokenizer, start: Sequence[int], window: int) -> list[Text]:
    """References behind their prompts, under the chat template; prompts that fill it left out."""
    texts = []
    for record in read_prompts(file):
        if record.reference is None:
            continue
        prompt = tokenizer.encode_chat([{"role": "user", "content": record.turns[0]}])
        answer = _without(tokenizer.encode(record.reference), start)
        if len(prompt) < window and answer:
            texts.append(Text((*prompt, *answer)[:window], len(prompt)))
    return texts


def _without(tokens: Sequence[int], start: Sequence[int]) -> Sequence[int]:
    """Tokens without those that the tokenizer puts in front of every text."""
    return tokens[len(start) :] if list(tokens[: len(start)]) == list(start) else tokens


def _read(file: Path) -> str:
    """A file of plain text, UTF-8, perhaps compressed with gzip."""
    try:
        data = file.read_bytes()
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{file}: cannot be read ({reason}); name a file of text") from error
