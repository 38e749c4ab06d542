"""State of one sequence inside the engine."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from entmtp.drafters.base import Coupling, Drafter, DrafterState, DraftPlan, DraftTree
from entmtp.drafters.copying import CopyIndex
from entmtp.engine.results import GenerationResult, Request
from entmtp.engine.text import OutputText
from entmtp.growth import Copy, GrowthPlan
from entmtp.metrics import DecodeStats, StepRecord
from entmtp.noise import NoiseSource
from entmtp.sampling import choose_token, draw_seed, greedy_tokens
from entmtp.scheduler import SchedulerDecision, SignalTracker, TopologyScheduler
from entmtp.target.base import KVCache
from entmtp.topology import Path, Topology
from entmtp.verify import VerifyResult, verify_exact, verify_typical

__all__ = ["ActiveSequence"]


class ActiveSequence:
    """A request being decoded: its tokens, its caches, its signals and its records."""

    def __init__(
        self,
        request_id: int,
        request: Request,
        cache: KVCache,
        output: OutputText,
        scheduler: TopologyScheduler,
        vocab_size: int,
    ) -> None:
        """Admit a request whose prompt fits the window; draws a seed where it has none."""
        self.request_id = request_id
        self.request = request
        self.cache = cache
        self.output = output
        self.scheduler = scheduler
        self.seed = draw_seed() if request.sampling.seed is None else request.sampling.seed
        self._noise = NoiseSource(self.seed, vocab_size)
        self.drafter_state: DrafterState = None
        self.plan: DraftPlan = Topology(())
        self._prompt_hidden: list[Tensor] = []
        self._tracker = SignalTracker()
        self._is_hit: bool | None = None
        self._copies: CopyIndex | None = None
        self._scheduler_state = scheduler.start()
        self._decision = SchedulerDecision("none", self.plan)
        self._steps: list[StepRecord] = []
        self._started = self._first = self._last = time.perf_counter()

    @property
    def is_prefilled(self) -> bool:
        """True once the first token is out."""
        return bool(self.output.token_ids)

    @property
    def coupling(self) -> Coupling | None:
        """The noise that the next tokens will be drawn with; ``None`` where none is."""
        sampling = self.request.sampling
        if sampling.is_greedy or self.request.typical is not None:
            return None
        position = len(self.request.prompt) + len(self.output.token_ids)
        return Coupling(self._noise, sampling.temperature, position)

    @property
    def reads_logits(self) -> bool:
        """Whether tokens are chosen by more of the logits than their arg-max."""
        sampling = self.request.sampling
        is_greedy = sampling.is_greedy and not sampling.has_penalties
        return self.request.typical is not None or not is_greedy

    @property
    def root(self) -> int:
        """The newest emitted token, not yet in the cache."""
        return self.output.token_ids[-1]

    def choose_plan(self, batch: int) -> None:
        """Ask the scheduler, for a step of ``batch`` sequences; cut to what may still be emitted.

        A step emits at most depth + 1 tokens, so no draft token lies beyond the token limit or
        the context window, and the sequence ends where plain decoding ends.
        """
        signal = self._tracker.signal(self.cache.length, batch)
        self._decision = self.scheduler.choose(self._scheduler_state, signal)
        self.plan = self._decision.plan.truncate(self.output.num_left - 1)

    def find_copy(self, plan: GrowthPlan) -> Copy | None:
        """What followed the newest words earlier in the text, where the plan can use it."""
        if plan.rule.copies is None:
            return None
        prompt, generated = self.request.prompt, self.output.token_ids
        if self._copies is None:
            self._copies = CopyIndex(prompt)
        self._copies.extend(generated[len(self._copies) - len(prompt) :])
        return self._copies.find(min(plan.rule.copies.length, max(plan.depth, 1)))

    def next_chunk(self, size: int) -> tuple[int, ...]:
        """The next prompt tokens to prefill."""
        done = self.cache.length
        return self.request.prompt[done : done + size]

    def end_chunk(self, hidden: Tensor) -> bool:
        """Commit a prompt chunk ``(n, H)``; true when it was the last one."""
        self.cache.commit(range(len(hidden)))
        self._prompt_hidden.append(hidden)
        return self.cache.length == len(self.request.prompt)

    def first_token(self, logits: Tensor, argmax: list[int] | None, drafter: Drafter) -> int:
        """Choose the token after the prompt; start the drafter's state and the index of copies.

        Args:
            logits: ``(1, V)`` of the target.
            argmax: of the logits, where the target gave it.
            drafter: whose state begins here.
        """
        if self.reads_logits and self.request.typical is None:
            token = self._choose(logits[0], [])
        else:
            token = argmax[0] if argmax is not None else int(greedy_tokens(logits)[0])
        hidden = torch.cat(self._prompt_hidden)
        self._prompt_hidden.clear()
        self.drafter_state = drafter.prefill(self.request.prompt, hidden, token)
        if getattr(self.scheduler, "can_copy", False):
            self._copies = CopyIndex(self.request.prompt)
        self._first = self._last = time.perf_counter()
        return token

    def verify(
        self, tree: DraftTree, logits: Tensor, argmax: list[int] | None = None
    ) -> VerifyResult:
        """Check a draft tree.

        Args:
            tree: of N rows.
            logits: ``(N, V)`` of the target.
            argmax: of each row of the logits, where the target gave it.
        """
        topology, drafted = tree.topology, tree.tokens.tolist()
        verdict = self._verify(topology, drafted, logits, argmax)
        has_best = topology.num_nodes > 0 and topology.paths[0] == (0,)
        first = drafted[1] if has_best else tree.first
        self._is_hit = None if first is None else first == verdict.tokens[0]
        if first is None and _shape(self.plan)[:1] == ((0,),):
            self._is_hit = False  # it was asked, and had none
        return verdict

    def _verify(
        self, topology: Topology, drafted: list[int], logits: Tensor, argmax: list[int] | None
    ) -> VerifyResult:
        sampling, typical = self.request.sampling, self.request.typical
        if typical is not None:
            return verify_typical(topology, drafted, logits, sampling.temperature, typical)
        if not self.reads_logits:
            targets = greedy_tokens(logits).tolist() if argmax is None else argmax
            return verify_exact(topology, drafted, lambda node, _: targets[node])
        return verify_exact(
            topology, drafted, lambda node, emitted: self._choose(logits[node], emitted)
        )

    def record_start(self, entropy: float, p0: float) -> None:
        """Take the signals of the distribution that the first token was drawn from."""
        self._tracker.start(entropy, p0)

    def record_step(self, tree: DraftTree, num_accepted: int, entropy: float, p0: float) -> None:
        """Log a step; take the signals of the distribution its bonus token was drawn from."""
        entropy_before, p0_before = self._tracker.last
        self._steps.append(
            StepRecord(
                topology=self._decision.name,
                num_nodes=tree.topology.num_nodes,
                num_accepted=num_accepted,
                entropy=entropy_before,
                p0=p0_before,
                bin=self._decision.bin,
                num_copied=tree.num_copied,
                depth=tree.topology.max_depth,
            )
        )
        was_asked = tree.topology.num_nodes > 0 or len(_shape(self.plan)) > 0
        self._tracker.step(entropy, p0, num_accepted if was_asked else None, self._is_hit)
        self._last = time.perf_counter()

    def result(self, backend: str, dtype: str, drafter: str) -> GenerationResult:
        """The finished sequence."""
        typical = self.request.typical is not None
        return GenerationResult(
            text=self.output.text,
            token_ids=tuple(self.output.token_ids),
            finish_reason=self.output.finish_reason or "length",
            seed=self.seed,
            stats=DecodeStats(
                num_prompt_tokens=len(self.request.prompt),
                num_tokens=len(self.output.token_ids),
                prefill_s=self._first - self._started,
                decode_s=self._last - self._first,
                backend=backend,
                dtype=dtype,
                drafter=drafter,
                policy=self.scheduler.policy,
                verification="typical (lossy)" if typical else "exact",
                steps=tuple(self._steps),
            ),
        )

    def _choose(self, logits: Tensor, emitted: Sequence[int]) -> int:
        """The target's own token after the prompt, the text so far and ``emitted``."""
        prompt, generated = self.request.prompt, self.output.token_ids
        position = len(prompt) + len(generated) + len(emitted)
        history: tuple[Sequence[int], Sequence[int]] = ((), ())
        if self.request.sampling.has_penalties:
            history = (prompt, [*generated, *emitted])
        return choose_token(
            logits, self.request.sampling, self.seed, position, history, self._noise
        )


def _shape(plan: DraftPlan) -> tuple[Path, ...]:
    """Paths of a fixed plan; none where a tree is grown."""
    return plan.paths if isinstance(plan, Topology) else ()
