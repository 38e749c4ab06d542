"""The exactness check tells rounding from bugs, and finds a target that is broken on purpose."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import entmtp
from entmtp.check import (
    CheckReport,
    Choice,
    Divergence,
    RandomScheduler,
    classify,
    random_topology,
    run_check,
)
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.engine import Engine
from entmtp.errors import InputError
from entmtp.params import SamplingParams
from entmtp.scheduler import FixedScheduler, Signal
from entmtp.target.base import Segment, TargetOutput
from entmtp.target.llama import LlamaTarget
from entmtp.topology import Topology
from fakes import ByteTokenizer, tiny_target
from tiny_model import make_model_folder

PROMPTS = [("a", (1, 2, 3, 1, 2)), ("b", (9, 8, 9, 8)), ("c", (5,) * 6)]
GREEDY = SamplingParams()
TOLERANCE = 1e-3
SIGNAL = Signal(0.5, 2.0, 0.5, 2.0, 0.0, 1)


class NoisyTarget:
    """A target whose rows depend on what is computed beside them: the bug that is looked for."""

    def __init__(self, target: LlamaTarget, size: float) -> None:
        self._target, self._size = target, size
        self.config, self.device, self.dtype = target.config, target.device, target.dtype
        self.has_own_threads = target.has_own_threads
        self.backend, self.new_cache = target.backend, target.new_cache
        self.precision = target.precision
        self.weights_digest = target.weights_digest
        self.embedding, self.output_rows = target.embedding, target.output_rows

    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        """Add noise to the logits of draft trees, leave single tokens and prompts as they are."""
        output = self._target.forward(segments, needs_logits=needs_logits)
        generator = torch.Generator().manual_seed(len(segments))
        logits = [
            rows
            if segment.mask is None
            else rows + self._size * torch.randn(rows.shape, generator=generator)
            for rows, segment in zip(output.logits, segments, strict=True)
        ]
        return TargetOutput(tuple(logits), output.hidden)


def make_engine(noise: float = 0.0) -> Engine:
    """Prompt lookup on a tiny target with flat distributions, broken where there is noise."""
    target = tiny_target(3, scale=0.1, tie_embeddings=False)
    return Engine(
        NoisyTarget(target, noise) if noise else target,
        PromptLookupDrafter(),
        FixedScheduler.plain(),
        ByteTokenizer(),
    )


def choice(sampling: SamplingParams = GREEDY) -> Choice:
    """Some place in a text."""
    return Choice(sampling, seed=1, position=4, history=((1, 2, 3), (4,)))


def rows(plain: list[float], tree: list[float]) -> tuple[Tensor, Tensor]:
    """Two rows of logits."""
    return torch.tensor(plain), torch.tensor(tree)


def test_a_flip_within_rounding_is_a_near_tie() -> None:
    """Both rows give their own token, and they are closer than the tolerance."""
    pair = rows([1.0001, 1.0, 0.0], [1.0, 1.0001, 0.0])
    kind, difference, gap = classify(pair, (0, 1), choice(), TOLERANCE)
    assert kind == "near_tie"
    assert (difference, gap) == pytest.approx((1e-4, 1e-4), rel=0.01)


def test_rows_that_differ_beyond_rounding_are_a_bug() -> None:
    """The same flip, with rows further apart than the dtype's rounding."""
    pair = rows([1.01, 1.0, 0.0], [1.0, 1.01, 0.0])
    assert classify(pair, (0, 1), choice(), TOLERANCE)[0] == "bug"
    assert classify(pair, (0, 1), choice(), 0.1)[0] == "near_tie"


def test_a_distant_difference_does_not_hide_behind_a_tie() -> None:
    """The whole rows are compared, not only the two tokens in question."""
    pair = rows([1.0001, 1.0, 0.0], [1.0, 1.0001, -2.0])
    assert classify(pair, (0, 1), choice(), TOLERANCE)[0] == "bug"


@pytest.mark.parametrize("tokens", [(0, 1), (1, 0), (0, 2), (2, 0)])
def test_a_token_that_its_own_row_does_not_give_is_a_bug(tokens: tuple[int, int]) -> None:
    """With equal rows nothing is left to rounding: one side took a wrong token."""
    kind, difference, gap = classify(
        rows([1.0, 0.2, 0.0], [1.0, 0.2, 0.0]), tokens, choice(), TOLERANCE
    )
    assert (kind, difference) == ("bug", 0.0)
    assert gap != 0


def test_a_token_on_the_border_of_the_nucleus_is_a_near_tie() -> None:
    """Rounding may move a token over the border; its score is then minus infinity in one row."""
    sampling = SamplingParams(temperature=1.0, top_k=1)
    pair = rows([1.0001, 1.0, 0.0], [1.0, 1.0001, 0.0])
    kind, _, gap = classify(pair, (0, 1), choice(sampling), TOLERANCE)
    assert (kind, gap) == ("near_tie", float("inf"))
    assert classify(pair, (0, 1), choice(sampling), 1e-5)[0] == "bug"


def test_the_gap_of_a_sampled_token_is_told_in_logits() -> None:
    """Scores are divided by the temperature; the gap is not."""
    cold, hot = (SamplingParams(temperature=t) for t in (0.01, 0.02))
    pair = rows([3.0, 1.0, 0.0], [3.0, 1.0, 0.0])
    gaps = [classify(pair, (0, 1), choice(s), TOLERANCE)[2] for s in (cold, hot)]
    assert gaps == pytest.approx([2.0, 2.0], abs=0.2)


@given(
    st.integers(0, 2**32),
    st.tuples(st.integers(0, 9), st.integers(0, 20), st.integers(0, 64)),
)
def test_random_trees_are_legal_and_within_their_limits(
    seed: int, limits: tuple[int, int, int]
) -> None:
    """Every tree can be built and filled, and the same seed gives the same tree."""
    tree = random_topology(random.Random(seed), *limits)
    assert tree == random_topology(random.Random(seed), *limits)
    assert Topology.from_paths(tree.to_list()) == tree
    assert tree.max_depth <= limits[0]
    assert tree.num_nodes <= limits[2]
    assert tree.num_nodes == 0 or tree.max_rank <= limits[1]


def test_random_trees_are_of_every_kind() -> None:
    """Empty ones, gaps in the ranks, expansion below a later child, and large ones all occur."""
    scheduler = RandomScheduler(0, 8, 15, 64)
    state = scheduler.start()
    trees = [scheduler.choose(state, SIGNAL).plan for _ in range(200)]
    assert any(tree.num_nodes == 0 for tree in trees)
    assert any(tree.num_nodes >= 48 for tree in trees)
    assert any((2,) in tree.paths and (1,) not in tree.paths for tree in trees)
    assert any({len(p) for p in tree.paths if p[0] > 0} > {1} for tree in trees)


def test_each_request_sees_the_same_trees_in_any_batch() -> None:
    """The generator is the request's own."""
    scheduler = RandomScheduler(7, 4, 5, 20)
    states = [scheduler.start(), scheduler.start()]
    plans = [[scheduler.choose(state, SIGNAL).plan for state in states] for _ in range(20)]
    assert all(first == second for first, second in plans)


def test_sound_decoding_is_found_identical(tmp_path: Path) -> None:
    """A model from files: a case is a prompt in a mode, a batch size and a number of threads."""
    engine = entmtp.load(
        str(make_model_folder(tmp_path / "m", tie_embeddings=False)), "lookup", threads=1
    )
    seen: list[tuple[int, int]] = []
    report = run_check(
        engine,
        PROMPTS,
        max_new_tokens=12,
        batch_sizes=(1, 2),
        threads=(1, 1),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert report.cases == len(PROMPTS) * 2 * 2 * 2
    assert (report.identical, report.near_ties, report.bugs) == (report.cases, 0, 0)
    assert report.max_logit_difference < TOLERANCE
    assert report.num_tree_steps < report.num_tree_tokens == 12 * report.cases
    assert seen[-1] == (report.cases, report.cases)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_broken_target_is_found(batch_size: int) -> None:
    """Rows that depend on their neighbours are a bug, with the first divergence and its numbers."""
    report = run_check(
        make_engine(noise=0.5), PROMPTS, max_new_tokens=20, batch_sizes=(batch_size,)
    )
    assert report.bugs > 0
    assert report.identical + report.near_ties + report.bugs == report.cases
    first = report.mismatches[0]
    assert first.kind == "bug"
    assert first.plain_token != first.tree_token
    assert len(first.plain_logits) == len(first.tree_logits) == 2
    assert first.max_logit_difference > 0.1
    assert report.max_logit_difference >= first.max_logit_difference


def test_noise_below_the_tolerance_is_not_a_bug() -> None:
    """What could be rounding gives near-ties at most."""
    assert run_check(make_engine(noise=1e-5), PROMPTS, max_new_tokens=16).bugs == 0


def test_the_report_is_plain_json() -> None:
    """Counts are integers, and no gap is Infinity, which JSON lacks and other readers refuse."""
    report = run_check(make_engine(noise=0.5), PROMPTS[:1], max_new_tokens=8)
    end = Divergence("a", "greedy", 1, 1, 8, None, 3, (0.5,), (0.5,), 0.0, float("inf"), "bug")
    report.mismatches.append(end)
    facts = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    names = ("cases", "identical", "near_ties", "bugs")
    assert all(type(facts[name]) is int for name in names)
    assert type(facts["max_logit_difference"]) is float
    assert facts["mismatches"][-1]["gap"] is None
    assert facts["mismatches"][-1]["plain_token"] is None


def test_an_empty_report_has_no_mismatches() -> None:
    """Two reports do not share their lists."""
    assert CheckReport().as_dict()["mismatches"] == []
    assert CheckReport().mismatches is not CheckReport().mismatches


def test_nothing_to_check_is_refused() -> None:
    """No prompts, or plain decoding against itself, would report success about nothing."""
    engine = make_engine()
    with pytest.raises(InputError, match="no prompts"):
        run_check(engine, [])
    engine.drafter = EmptyDrafter()
    with pytest.raises(InputError, match="nothing to compare"):
        run_check(engine, PROMPTS)


@pytest.mark.parametrize("threads", [0, 1025, 10**12])
def test_a_bad_number_of_threads_is_refused(threads: int) -> None:
    """Before any work; torch itself fails with an error of its own on the last one."""
    with pytest.raises(InputError, match=f"threads is {threads}"):
        run_check(make_engine(), PROMPTS, threads=(1, threads))


def test_the_number_of_threads_is_put_back() -> None:
    """A check leaves the process as it was."""
    before = torch.get_num_threads()
    run_check(make_engine(), PROMPTS[:1], max_new_tokens=2, threads=(before + 1,), batch_sizes=(1,))
    assert torch.get_num_threads() == before
