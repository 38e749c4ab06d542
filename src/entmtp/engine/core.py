"""The decoding loop: signal, choose, draft, forward, verify, commit."""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import index

import numpy as np
import torch
from torch import Tensor

from entmtp.drafters.base import (
    AnyRequest,
    Drafter,
    DraftPlan,
    DraftRequest,
    DraftTree,
    GrowRequest,
    check_depth,
)
from entmtp.engine.results import GenerationResult, Request, StepTimes, StreamChunk
from entmtp.engine.sequence import ActiveSequence
from entmtp.engine.text import OutputText
from entmtp.errors import InputError, NumericalError
from entmtp.growth import GrowthPlan
from entmtp.params import SamplingParams, TypicalParams
from entmtp.sampling import derive_seed, draw_seed, entropy_and_top1
from entmtp.scheduler import TopologyScheduler
from entmtp.target.base import Segment, Target, TargetOutput
from entmtp.tokenizer import Message, Tokenizer
from entmtp.verify import VerifyResult

__all__ = ["Engine", "EngineLimits"]

Prompt = str | Sequence[int]

LogitsObserver = Callable[[int, int, Tensor], None]
"""``(request_id, index of the emitted token, (V,) raw logits it was chosen from)``."""

_MAX_CHECKED = 1024  # plans that are remembered as checked

_Emitted = list[tuple[ActiveSequence, tuple[int, ...]]]


@dataclass(frozen=True)
class EngineLimits:
    """Bounds on the work of one step.

    Attributes:
        max_batch_size: sequences decoded at once; others wait.
        prefill_chunk: prompt tokens read in one step, over all sequences.
        spare_rows: cache rows beyond prompt and answer that a draft tree may use before the cache
            has to grow.
    """

    max_batch_size: int = 32
    prefill_chunk: int = 512
    spare_rows: int = 65

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could run."""
        if self.max_batch_size < 1 or self.prefill_chunk < 1 or self.spare_rows < 0:
            raise InputError(f"limits must be positive: {self}")


class Engine:
    """Decodes sequences, one step at a time, with the output that plain decoding would give."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        scheduler: TopologyScheduler,
        tokenizer: Tokenizer,
        limits: EngineLimits | None = None,
    ) -> None:
        """Join the parts; :func:`entmtp.load` does it from names and files."""
        self.target = target
        self.drafter = drafter
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.limits = limits or EngineLimits()
        self.logits_observer: LogitsObserver | None = None
        self.couples_drafts = True
        """Rank drafts with the noise of sampling: more are accepted, and no text changes."""
        self.times_observer: Callable[[StepTimes], None] | None = None
        self._checked: dict[int, tuple[DraftPlan, Drafter]] = {}
        self._next_id = 0
        self._waiting: deque[tuple[int, Request]] = deque()
        self._running: list[ActiveSequence] = []
        self._held: list[StreamChunk] = []  # made while another request was asked for

    # -- whole texts ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        scheduler: TopologyScheduler | None = None,
        typical: TypicalParams | None = None,
    ) -> GenerationResult:
        """Decode one prompt to its end.

        Args:
            prompt: raw text, or token ids (:meth:`chat_prompt` makes them from messages).
            sampling: default: greedy, 256 tokens.
            scheduler: replaces the engine's for this call.
            typical: **lossy** typical acceptance instead of exact verification.

        Raises:
            InputError: the prompt is empty or longer than the context window.
        """
        return self.generate_batch([prompt], sampling, scheduler=scheduler, typical=typical)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        scheduler: TopologyScheduler | None = None,
        typical: TypicalParams | None = None,
    ) -> list[GenerationResult]:
        """Decode several prompts together; each gets the tokens that it gets alone.

        Row i is seeded with ``derive_seed(seed, i)``, which its result reports.
        """
        sampling = sampling or SamplingParams()
        seed = draw_seed() if sampling.seed is None else sampling.seed
        requests = [
            Request(
                prompt=self.encode(prompt),
                sampling=replace(sampling, seed=derive_seed(seed, number)),
                scheduler=scheduler,
                typical=typical,
            )
            for number, prompt in enumerate(prompts)
        ]
        for request in requests:
            self._check(request)
        return self.run(requests)

    def run(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Decode requests to their ends; results in the same order."""
        ids = [self.submit(request) for request in requests]
        results: dict[int, GenerationResult] = {}
        try:
            while not all(i in results for i in ids):
                for chunk in self._step_for(ids):
                    if chunk.result is not None:
                        results[chunk.request_id] = chunk.result
        finally:
            for i in ids:
                if i not in results:
                    self.cancel(i)
        return [results[i] for i in ids]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        scheduler: TopologyScheduler | None = None,
        typical: TypicalParams | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Decode one prompt; yields a chunk a step, the last one with the result.

        Closing the iterator cancels the request. Arguments and errors as :meth:`generate`.
        """
        request = Request(self.encode(prompt), sampling or SamplingParams(), scheduler, typical)
        self._check(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[StreamChunk, None, None]:
        request_id = self.submit(request)
        try:
            while self._knows(request_id):
                yield from self._step_for([request_id])
        finally:
            self.cancel(request_id)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of raw text; token ids are passed through.

        Raises:
            InputError: neither text nor whole numbers.
        """
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        try:
            return tuple(index(token) for token in prompt)
        except TypeError as error:
            raise InputError(f"a prompt is text or a list of token ids ({error})") from error

    def chat_prompt(self, messages: str | Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation under the model's chat template.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``, or one user turn as text.

        Raises:
            InputError: the model has no chat template, or a turn is empty.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not messages or not all(m.get("content", "").strip() for m in messages):
            raise InputError("the prompt is empty; give it at least one word")
        return tuple(self.tokenizer.encode_chat(messages))

    # -- steps ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id.

        Raises:
            InputError: the prompt is empty, too long, or holds ids outside the vocabulary.
        """
        self._check(request)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._waiting.append((request_id, request))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Drop a request, wherever it is; unknown and finished ones are ignored."""
        self._waiting = deque(item for item in self._waiting if item[0] != request_id)
        self._running = [s for s in self._running if s.request_id != request_id]
        self._held = [chunk for chunk in self._held if chunk.request_id != request_id]

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running, or a chunk has not been given out."""
        return bool(self._waiting or self._running or self._held)

    def step(self) -> list[StreamChunk]:
        """One target forward: a step of every decoding sequence, and a chunk of waiting prompts.

        Raises:
            NumericalError: the logits are not finite; no sequence has changed.
        """
        with _torch_threads(self.target):
            return self._step()

    def _step(self) -> list[StreamChunk]:
        self._admit()
        decoding = [s for s in self._running if s.is_prefilled]
        prefilling = [s for s in self._running if not s.is_prefilled]
        marks = [self._now()]
        for sequence in decoding:
            sequence.choose_plan(len(decoding))
        marks.append(self._now())
        requests = [self._request(sequence) for sequence in decoding]
        trees = self.drafter.draft(requests) if requests else []
        marks.append(self._now())
        chunks = self._prompt_chunks(prefilling)
        segments = [_tree_segment(s, t) for s, t in zip(decoding, trees, strict=True)]
        segments += [_chunk_segment(s, tokens) for s, tokens in chunks]
        emitted: _Emitted = []
        if segments:
            output = self.target.forward(segments, needs_logits=self._needs_logits)
            marks.append(self._now())
            verdicts = [
                s.verify(t, output.logits[i], _argmax(output, i))
                for i, (s, t) in enumerate(zip(decoding, trees, strict=True))
            ]
            signals = self._signals(output, _last_rows(verdicts, segments))
            emitted += self._commit(decoding, trees, verdicts, output, signals)
            emitted += self._end_chunks([s for s, _ in chunks], len(decoding), output, signals)
            self._report_times(marks, segments, len(decoding))
        held, self._held = self._held, []
        return held + [self._emit(sequence, tokens) for sequence, tokens in emitted]

    @property
    def _needs_logits(self) -> bool:
        """Whether someone looks at more of the logits than their arg-max and statistics."""
        return self.logits_observer is not None or any(s.reads_logits for s in self._running)

    def _step_for(self, ids: Sequence[int]) -> list[StreamChunk]:
        """Chunks of these requests; those of others wait for the next call of :meth:`step`."""
        chunks = self.step()
        self._held = [chunk for chunk in chunks if chunk.request_id not in ids]
        return [chunk for chunk in chunks if chunk.request_id in ids]

    def _knows(self, request_id: int) -> bool:
        return (
            any(waiting_id == request_id for waiting_id, _ in self._waiting)
            or any(sequence.request_id == request_id for sequence in self._running)
            or any(chunk.request_id == request_id for chunk in self._held)
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.limits.max_batch_size:
            request_id, request = self._waiting.popleft()
            size, window = len(request.prompt), self.target.config.context_window
            num_tokens = min(request.sampling.max_new_tokens, window - size)
            sequence = ActiveSequence(
                request_id,
                request,
                self.target.new_cache(size + num_tokens + self.limits.spare_rows),
                OutputText(self.tokenizer, request.sampling, num_tokens),
                request.scheduler or self.scheduler,
                self.target.config.vocab_size,
            )
            self._running.append(sequence)

    def _request(self, sequence: ActiveSequence) -> AnyRequest:
        plan, state = sequence.plan, sequence.drafter_state
        self._check_plan(plan)
        coupling = sequence.coupling if self.couples_drafts else None
        if isinstance(plan, GrowthPlan):
            return GrowRequest(state, sequence.root, plan, coupling, sequence.find_copy(plan))
        return DraftRequest(state, sequence.root, plan, coupling)

    def _check_plan(self, plan: DraftPlan) -> None:
        """:func:`check_depth`, once for each plan and drafter."""
        if self._checked.get(id(plan)) == (plan, self.drafter):
            return
        check_depth(self.drafter, plan)
        if len(self._checked) >= _MAX_CHECKED:
            self._checked.clear()
        self._checked[id(plan)] = plan, self.drafter

    def _now(self) -> float:
        """Seconds; where someone takes times of a GPU, once it has caught up."""
        if self.times_observer is not None and self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _report_times(
        self, marks: Sequence[float], segments: Sequence[Segment], num_decoding: int
    ) -> None:
        if self.times_observer is None:
            return
        start, chosen, drafted, evaluated = marks
        parts = chosen - start, drafted - chosen, evaluated - drafted, self._now() - evaluated
        num_rows = sum(segment.tokens.numel() for segment in segments)
        self.times_observer(StepTimes(num_decoding, len(segments) - num_decoding, num_rows, *parts))

    def _prompt_chunks(
        self, sequences: Sequence[ActiveSequence]
    ) -> list[tuple[ActiveSequence, tuple[int, ...]]]:
        chunks, left = [], self.limits.prefill_chunk
        for sequence in sequences:
            if left > 0:
                tokens = sequence.next_chunk(left)
                chunks.append((sequence, tokens))
                left -= len(tokens)
        return chunks

    def _commit(
        self,
        sequences: Sequence[ActiveSequence],
        trees: Sequence[DraftTree],
        verdicts: Sequence[VerifyResult],
        output: TargetOutput,
        signals: Iterator[tuple[float, float]],
    ) -> _Emitted:
        """Keep the accepted rows of each draft tree, in the caches and in the drafter."""
        emitted: _Emitted = []
        for row, (sequence, verdict) in enumerate(zip(sequences, verdicts, strict=True)):
            nodes, tokens = list(verdict.nodes), verdict.tokens
            if self.logits_observer is not None:
                self._observe(sequence, output.logits[row][nodes])
            sequence.cache.commit(nodes)
            hidden = _rows_at(output.hidden[row], nodes)
            self.drafter.commit(sequence.drafter_state, hidden, tokens)
            sequence.record_step(trees[row], len(tokens) - 1, *next(signals))
            emitted.append((sequence, tokens))
        return emitted

    def _end_chunks(
        self,
        sequences: Sequence[ActiveSequence],
        offset: int,
        output: TargetOutput,
        signals: Iterator[tuple[float, float]],
    ) -> _Emitted:
        """Keep the rows of each prompt chunk; emit the first token where the prompt is read."""
        emitted: _Emitted = []
        for row, sequence in enumerate(sequences, start=offset):
            if sequence.end_chunk(output.hidden[row]):
                logits = output.logits[row]
                self._observe(sequence, logits)
                token = sequence.first_token(logits, _argmax(output, row), self.drafter)
                emitted.append((sequence, (token,)))
                sequence.record_start(*next(signals))
        return emitted

    def _observe(self, sequence: ActiveSequence, rows: Tensor) -> None:
        """Show the rows ``(n, V)`` that the next n tokens were chosen from to the observer."""
        if self.logits_observer is not None:
            for position, row in enumerate(rows, start=len(sequence.output.token_ids)):
                self.logits_observer(sequence.request_id, position, row)

    def _signals(
        self, output: TargetOutput, rows: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[float, float]]:
        """Entropy and top-1 probability of raw logits, one small transfer for all sequences."""
        if not rows:
            return iter(())
        if output.stats is None:
            picked = torch.stack([output.logits[segment][row] for segment, row in rows])
            values = torch.stack(entropy_and_top1(picked), dim=1).tolist()
        else:
            stats = [(output.stats[segment], row) for segment, row in rows]
            values = [(s.entropy[r], s.top1[r]) for s, r in stats]
        if not all(math.isfinite(entropy) and math.isfinite(p0) for entropy, p0 in values):
            advice = "check the weights"
            if self.target.dtype == torch.float16:
                advice = "use bfloat16 or float32, or " + advice
            raise NumericalError(
                f"the target produced logits that are not finite in {self.target.precision}; "
                f"{advice}"
            )
        return iter([(entropy, p0) for entropy, p0 in values])

    def _emit(self, sequence: ActiveSequence, tokens: tuple[int, ...]) -> StreamChunk:
        text, taken = sequence.output.push(tokens)
        if sequence.output.finish_reason is None:
            return StreamChunk(sequence.request_id, text, taken)
        self._running.remove(sequence)
        target = self.target
        result = sequence.result(target.backend, target.precision, self.drafter.name)
        return StreamChunk(sequence.request_id, text, taken, result)

    def _check(self, request: Request) -> None:
        window, size = self.target.config.context_window, len(request.prompt)
        if size == 0:
            raise InputError("the prompt is empty; give it at least one token")
        if size >= window:
            reason = ""
            if self.target.config.is_window_capped:
                reason = ", the reach of the model's sliding window"
            raise InputError(
                f"the prompt has {size} tokens, but the context window holds {window} with the "
                f"answer{reason}; shorten the prompt"
            )
        low, high = min(request.prompt), max(request.prompt)
        if low < 0 or high >= self.target.config.vocab_size:
            raise InputError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of "
                f"{self.target.config.vocab_size}; was the prompt made with another tokenizer?"
            )


@contextmanager
def _torch_threads(target: Target) -> Iterator[None]:
    """One thread of torch beside a target that has its own.

    What is left to torch then is small, and its idle threads would spin in the way of the target's.
    """
    num_threads = torch.get_num_threads()
    if not target.has_own_threads or num_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _tree_segment(sequence: ActiveSequence, tree: DraftTree) -> Segment:
    topology = tree.topology
    mask = topology.ancestor_mask if topology.num_nodes else None
    return Segment(sequence.cache, tree.tokens, topology.depths, mask)


def _rows_at(hidden: Tensor, nodes: list[int]) -> Tensor:
    """Rows of rising nodes from the root on; a view where none is left out."""
    return hidden[: len(nodes)] if nodes[-1] < len(nodes) else hidden[nodes]


def _argmax(output: TargetOutput, segment: int) -> list[int] | None:
    """Greedy tokens of a segment's rows, where the target gave them."""
    return None if output.stats is None else output.stats[segment].tokens


def _last_rows(
    verdicts: Sequence[VerifyResult], segments: Sequence[Segment]
) -> list[tuple[int, int]]:
    """Segment and row behind the newest token of each draft tree, then of each prompt read."""
    trees = [(index, verdict.nodes[-1]) for index, verdict in enumerate(verdicts)]
    chunks = enumerate(segments[len(verdicts) :], start=len(verdicts))
    return trees + [(index, 0) for index, segment in chunks if segment.logits == "last"]


def _chunk_segment(sequence: ActiveSequence, tokens: tuple[int, ...]) -> Segment:
    is_last = sequence.cache.length + len(tokens) == len(sequence.request.prompt)
    return Segment(
        sequence.cache,
        torch.tensor(tokens, dtype=torch.int64),
        np.arange(len(tokens), dtype=np.int64),
        logits="last" if is_last else "none",
    )
