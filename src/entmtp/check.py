"""``check``: is decoding through random trees the same as plain decoding, token for token?

Each prompt is decoded plainly, alone; then with a different random topology at every step, in
batches, greedy and sampled. At the first divergence both rows of logits are compared: floating
point may round a row of a tree differently from the same row alone, and a near-tie may flip. What
rounding cannot explain is a bug.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult, Request
from entmtp.errors import InputError
from entmtp.loading.loader import use_threads
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed, token_scores
from entmtp.scheduler import FixedScheduler, SchedulerDecision, Signal
from entmtp.target.base import Target
from entmtp.topology import Topology

__all__ = [
    "TOLERANCES",
    "CheckReport",
    "Choice",
    "Divergence",
    "RandomScheduler",
    "classify",
    "random_topology",
    "run_check",
]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.25, torch.bfloat16: 2.0}
"""Largest difference of two rows of logits, by dtype, that rounding may cause.

On the default model 1e-4 was seen in float32 and 1.2 in bfloat16, where logits near 35 lie 0.25
apart.
"""


@dataclass(frozen=True)
class Divergence:
    """Where a text first differs from plain decoding.

    Attributes:
        prompt_id: of the prompt.
        mode: ``greedy`` or ``sampled``.
        batch_size: sequences decoded together.
        threads: of torch.
        position: index among the emitted tokens.
        plain_token: that plain decoding emitted; ``None`` where it had ended.
        tree_token: that tree decoding emitted; ``None`` where it had ended.
        plain_logits: at both tokens, in the plain row.
        tree_logits: at both tokens, in the tree's row.
        max_logit_difference: over the whole rows.
        gap: by which the deciding scores differ in the plain row, in logits.
        kind: ``near_tie`` or ``bug``.
    """

    prompt_id: str
    mode: str
    batch_size: int
    threads: int
    position: int
    plain_token: int | None
    tree_token: int | None
    plain_logits: tuple[float, ...]
    tree_logits: tuple[float, ...]
    max_logit_difference: float
    gap: float
    kind: str


@dataclass
class CheckReport:
    """Counts over all cases; a case is one prompt in one mode, batch size and thread count."""

    cases: int = 0
    identical: int = 0
    near_ties: int = 0
    bugs: int = 0
    max_logit_difference: float = 0.0
    num_tree_tokens: int = 0
    num_tree_steps: int = 0

    def __post_init__(self) -> None:
        self.mismatches: list[Divergence] = []

    def as_dict(self) -> dict[str, object]:
        """The JSON form; a gap that is not finite becomes ``None``, as JSON has no infinity."""
        mismatches = [
            asdict(m) | {"gap": m.gap if math.isfinite(m.gap) else None} for m in self.mismatches
        ]
        return {**asdict(self), "mismatches": mismatches}


@dataclass(frozen=True)
class _Rows:
    """A finished text with the float32 rows of logits that its tokens were chosen from."""

    result: GenerationResult
    rows: list[Tensor]


class RandomScheduler:
    """A different random topology at every step: empty ones, gaps, late expansion, up to a size."""

    policy = "random"

    def __init__(self, seed: int, max_depth: int, max_rank: int, max_nodes: int) -> None:
        self._seed = seed
        self._limits = (max_depth, max_rank, max_nodes)

    def start(self) -> random.Random:
        """A generator of the request's own, so that batching does not change its trees."""
        return random.Random(self._seed)

    def choose(self, state: random.Random, signal: Signal) -> SchedulerDecision:
        """The next random tree."""
        return SchedulerDecision("random", random_topology(state, *self._limits))


def random_topology(rng: random.Random, max_depth: int, max_rank: int, max_nodes: int) -> Topology:
    """A random prefix-closed tree; low ranks and the first child are likelier, as in use."""
    sizes = (0, 1, rng.randint(0, 8), rng.randint(0, max_nodes))
    num_nodes = min(rng.choice(sizes), max_nodes)
    paths: set[tuple[int, ...]] = set()
    open_paths: list[tuple[int, ...]] = [()] if max_depth > 0 else []
    for _ in range(num_nodes * 4):
        if len(paths) >= num_nodes or not open_paths:
            break
        parent = rng.choice(open_paths[-4:] if rng.random() < 0.5 else open_paths)
        child = (*parent, min(int(rng.expovariate(0.6)), max_rank))
        if child not in paths:
            paths.add(child)
            if len(child) < max_depth:
                open_paths.append(child)
    return Topology.from_paths(paths)


@dataclass(frozen=True)
class Choice:
    """Where a token was chosen: all that decides it, besides the logits.

    Attributes:
        sampling: parameters.
        seed: of the sequence.
        position: absolute, of the token.
        history: prompt tokens, and emitted tokens before it.
    """

    sampling: SamplingParams
    seed: int
    position: int
    history: tuple[Sequence[int], Sequence[int]]


def classify(
    rows: tuple[Tensor, Tensor], tokens: tuple[int, int], choice: Choice, tolerance: float
) -> tuple[str, float, float]:
    """Tell a near-tie from a bug at the first divergence.

    A near-tie: each row by itself gives the token that was emitted from it, the rows differ by at
    most ``tolerance``, and the deciding gap is at most twice that difference, or one of the two
    tokens lies on the border of top-k, top-p or min-p.

    Args:
        rows: ``(V,)`` raw logits, plain and tree.
        tokens: emitted from them.
        choice: where.
        tolerance: of the dtype.

    Returns:
        ``near_tie`` or ``bug``, the largest difference of the rows, and the gap in logits.
    """
    difference = float((rows[0] - rows[1]).abs().max())
    sampling = choice.sampling
    scores = [
        token_scores(row, sampling, choice.seed, choice.position, choice.history) for row in rows
    ]
    own = all(int(s.argmax()) == t for s, t in zip(scores, tokens, strict=True))
    scale = 1.0 if sampling.is_greedy else sampling.temperature
    gap = float(scores[0][tokens[0]] - scores[0][tokens[1]]) * scale
    is_on_border = not all(math.isfinite(float(s[t])) for s in scores for t in tokens)
    is_close = gap <= 2 * difference or is_on_border
    kind = "near_tie" if own and difference <= tolerance and is_close else "bug"
    return kind, difference, gap


@dataclass(frozen=True)
class _Case:
    """One prompt, decoded plainly and through trees."""

    prompt_id: str
    prompt: tuple[int, ...]
    mode: str
    batch_size: int
    threads: int


class _Checker:
    """One run over all prompts."""

    def __init__(self, engine: Engine, max_new_tokens: int, seed: int) -> None:
        self._engine = engine
        greedy = SamplingParams(max_new_tokens=max_new_tokens, seed=seed)
        sampled = replace(greedy, temperature=0.8, top_p=0.95, top_k=50)
        self.modes = {"greedy": greedy, "sampled": sampled}
        self._tolerance = TOLERANCES[engine.target.dtype]
        depth, width = engine.drafter.max_depth, engine.drafter.max_width
        self._limits = (8 if depth is None else depth, 15 if width is None else min(width, 16) - 1)
        self.report = CheckReport()

    @property
    def drafter(self) -> Drafter:
        """The drafter under test."""
        return self._engine.drafter

    @property
    def target(self) -> Target:
        """The target under test."""
        return self._engine.target

    def decode(
        self, drafter: Drafter, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
    ) -> list[_Rows]:
        """Decode prompts together, with random trees where ``drafter`` can fill any."""
        engine = Engine(
            self._engine.target,
            drafter,
            FixedScheduler.plain(),
            self._engine.tokenizer,
            EngineLimits(max_batch_size=len(prompts)),
        )
        rows: dict[int, list[Tensor]] = {}

        def observe(request_id: int, index: int, row: Tensor) -> None:
            rows.setdefault(request_id, []).append(row.detach().float().cpu().clone())

        engine.logits_observer = observe
        requests = [self._request(p, sampling, drafter) for p in prompts]
        results = engine.run(requests)
        return [_Rows(result, rows[index]) for index, result in enumerate(results)]

    def _request(
        self, prompt: tuple[int, ...], sampling: SamplingParams, drafter: Drafter
    ) -> Request:
        """A prompt's seeds come from its own tokens, so they are the same in every batch."""
        seed = derive_seed(sampling.seed or 0, 1 + sum(prompt) % 1_000_003)
        if isinstance(drafter, EmptyDrafter):
            scheduler = None
        else:
            scheduler = RandomScheduler(seed, *self._limits, max_nodes=64)
        return Request(prompt, replace(sampling, seed=seed), scheduler)

    def compare(self, case: _Case, plain: _Rows, tree: _Rows) -> None:
        """Count one case."""
        self.report.cases += 1
        self.report.num_tree_tokens += tree.result.stats.num_tokens
        self.report.num_tree_steps += tree.result.stats.num_steps
        ids = (plain.result.token_ids, tree.result.token_ids)
        pairs = enumerate(zip(*ids, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), min(map(len, ids)))
        for a, b in zip(plain.rows[:first], tree.rows[:first], strict=True):
            self._widen(float((a - b).abs().max()))
        if ids[0] == ids[1] and plain.result.text == tree.result.text:
            self.report.identical += 1
        else:
            self._record(self._divergence(case, plain, tree, first))

    def _divergence(self, case: _Case, plain: _Rows, tree: _Rows, first: int) -> Divergence:
        tokens = [
            ids[first] if first < len(ids) else None
            for ids in (plain.result.token_ids, tree.result.token_ids)
        ]
        row, other = (side.rows[min(first, len(side.rows) - 1)] for side in (plain, tree))
        kind, difference, gap = "bug", float((row - other).abs().max()), math.inf
        if tokens[0] is not None and tokens[1] is not None:
            history = (case.prompt, plain.result.token_ids[:first])
            choice = Choice(
                self.modes[case.mode], plain.result.seed, len(case.prompt) + first, history
            )
            kind, difference, gap = classify(
                (row, other), (tokens[0], tokens[1]), choice, self._tolerance
            )
        shown = [token for token in tokens if token is not None]
        return Divergence(
            prompt_id=case.prompt_id,
            mode=case.mode,
            batch_size=case.batch_size,
            threads=case.threads,
            position=first,
            plain_token=tokens[0],
            tree_token=tokens[1],
            plain_logits=tuple(float(row[token]) for token in shown),
            tree_logits=tuple(float(other[token]) for token in shown),
            max_logit_difference=difference,
            gap=gap,
            kind=kind,
        )

    def _record(self, divergence: Divergence) -> None:
        self._widen(divergence.max_logit_difference)
        self.report.mismatches.append(divergence)
        if divergence.kind == "bug":
            self.report.bugs += 1
        else:
            self.report.near_ties += 1

    def _widen(self, difference: float) -> None:
        self.report.max_logit_difference = max(self.report.max_logit_difference, difference)


def run_check(  # noqa: PLR0913 - keyword-only beyond the second
    engine: Engine,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    *,
    max_new_tokens: int = 64,
    batch_sizes: Sequence[int] = (1,),
    threads: Sequence[int] = (),
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckReport:
    """Compare plain and random-tree decoding of prompts.

    Args:
        engine: target, tokenizer and the drafter to check.
        prompts: (id, token ids).
        max_new_tokens: of each text.
        batch_sizes: sequences decoded together; every prompt is decoded once a size.
        threads: of torch; empty leaves them as they are. Plain decoding is done with the first.
        seed: of sampling and of the random trees.
        progress: told the cases done and in all.

    Raises:
        InputError: no prompts, nothing to check without a drafter, or a bad number of threads.
    """
    if not prompts:
        raise InputError("there are no prompts to check")
    if isinstance(engine.drafter, EmptyDrafter):
        raise InputError("the drafter 'none' is plain decoding; there is nothing to compare")
    checker = _Checker(engine, max_new_tokens, seed)
    before = torch.get_num_threads()
    counts = tuple(threads) or (before,)
    total = len(prompts) * len(checker.modes) * len(batch_sizes) * len(counts)
    try:
        for count in threads:
            use_threads(engine.target, count)  # refuses a bad one before any work is done
        for mode, sampling in checker.modes.items():
            for start in range(0, len(prompts), max(batch_sizes)):
                group = prompts[start : start + max(batch_sizes)]
                _check_group(checker, group, mode, sampling, batch_sizes, counts)
                if progress is not None:
                    progress(checker.report.cases, total)
    finally:
        use_threads(engine.target, before)
    return checker.report


def _check_group(
    checker: _Checker,
    group: Sequence[tuple[str, tuple[int, ...]]],
    mode: str,
    sampling: SamplingParams,
    batch_sizes: Sequence[int],
    counts: Sequence[int],
) -> None:
    """Plain decoding of a few prompts, one by one, against every batch size and thread count."""
    use_threads(checker.target, counts[0])
    empty = EmptyDrafter()
    plain = [checker.decode(empty, [ids], sampling)[0] for _, ids in group]
    for count in counts:
        use_threads(checker.target, count)
        for size in batch_sizes:
            for start in range(0, len(group), size):
                part = group[start : start + size]
                trees = checker.decode(checker.drafter, [ids for _, ids in part], sampling)
                for (prompt_id, ids), row, tree in zip(part, plain[start:], trees, strict=False):
                    checker.compare(_Case(prompt_id, ids, mode, size, count), row, tree)
