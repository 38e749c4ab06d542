"""What a module computes in training is what its drafter computes when it decodes."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from entmtp.calibrate.collect import TracePrompt, TraceSettings, collect_trace
from entmtp.calibrate.session import trace_facts
from entmtp.calibrate.trace import MISS
from entmtp.drafters.heads import Heads
from entmtp.drafters.recording import RecordingDrafter
from entmtp.engine import Engine
from entmtp.loading.drafters import make_drafter as attach_heads
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment
from entmtp.train.batches import IGNORED, Batch, ExampleMaker
from entmtp.train.data import Answers, collect_answers, load_answers
from entmtp.train.jobs import AnswerJob
from entmtp.train.losses import FeatureReader, heads_loss, reads_text
from entmtp.train.prompts import Draw
from entmtp.workload import PromptRecord
from exactness import random_heads
from fakes import ByteTokenizer, tiny_target
from training import whole_output

VOCAB, DEPTHS = 12, 4
TARGET = tiny_target(seed=5, dtype=torch.float32, vocab_size=VOCAB, context_window=512)
KINDS = ["medusa", "hydra", "hydra++", "mtp"]
PROMPTS = [tuple((3 * i + 5 * j) % VOCAB for j in range(2 + 3 * i)) for i in range(5)]


def written(folder: Path) -> Answers:
    """Twenty tokens to each prompt."""
    jobs = [
        AnswerJob(
            prompt,
            SamplingParams(max_new_tokens=20, seed=derive_seed(0, row)),
            row,
            Draw(PromptRecord(f"p{row}", "t", ("turn",))),
        )
        for row, prompt in enumerate(PROMPTS)
    ]
    engine = Engine(TARGET, RecordingDrafter(), FixedScheduler.plain(), ByteTokenizer())
    assert collect_answers(engine, jobs, folder, "answers", lambda *_: None)
    return in_full(load_answers(folder))


def in_full(answers: Answers) -> Answers:
    """The states in float32 instead of the float16 of the files, in which near scores may swap."""
    hidden = answers.hidden.to(torch.float32)
    for first, end in itertools.pairwise(answers.offsets.tolist()):
        rows = answers.tokens[first : end - 1]
        segment = Segment(TARGET.new_cache(len(rows)), rows, np.arange(len(rows)))
        hidden[first + 1 : end] = TARGET.forward([segment]).hidden[0]
    torch.testing.assert_close(hidden, answers.hidden.float(), rtol=2e-3, atol=2e-3)
    return replace(answers, hidden=hidden)


def heads_of(kind: str) -> Heads:
    """Random weights and the target's output rows, as training has them."""
    heads = random_heads(kind, TARGET, 4)
    heads.attach_output(TARGET.output_rows(heads.hot_ids))
    return heads


def maker_of(answers: Answers, heads: Heads) -> ExampleMaker:
    """Examples over the heads' hot vocabulary."""
    index = torch.full((VOCAB,), IGNORED, dtype=torch.int64)
    index[heads.hot_ids] = torch.arange(len(heads.hot_ids))
    return ExampleMaker(answers, index, DEPTHS, with_teacher=True)


def batch_of(answers: Answers, heads: Heads) -> Batch:
    """All examples."""
    sequences, maker = range(answers.num_sequences), maker_of(answers, heads)
    make = maker.in_text if reads_text(heads) else maker.at
    return make(answers.positions(sequences))


@pytest.mark.parametrize("kind", KINDS)
def test_some_examples_are_read_as_all_are(kind: str, tmp_path: Path) -> None:
    """Whatever stands beside an example in its batch, and in whatever order."""
    answers, heads = written(tmp_path), heads_of(kind)
    positions = answers.positions(range(answers.num_sequences))
    some = torch.randperm(len(positions), generator=torch.Generator().manual_seed(1))[:9]
    maker = maker_of(answers, heads)
    reader = FeatureReader(heads, TARGET.embedding(), DEPTHS)
    make = maker.in_text if reads_text(heads) else maker.at
    with torch.no_grad():
        whole, part = (list(reader.read(make(chosen))) for chosen in (positions, positions[some]))
    for all_rows, rows in zip(whole, part, strict=True):
        torch.testing.assert_close(all_rows[some], rows, rtol=1e-4, atol=1e-5)


def features_of(
    answers: Answers, heads: Heads, reader_type: type[FeatureReader] = FeatureReader
) -> list[Tensor]:
    """Of every depth."""
    reader = reader_type(heads, TARGET.embedding(), DEPTHS)
    with torch.no_grad():
        return list(reader.read(batch_of(answers, heads)))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_in_training_are_those_of_a_trace(kind: str, tmp_path: Path) -> None:
    """Every depth at every position of every answer, prompts of several lengths."""
    (tmp_path / "answers").mkdir()
    answers = written(tmp_path / "answers")
    drafter = attach_heads(random_heads(kind, TARGET, 4), TARGET)
    engine = Engine(TARGET, drafter, FixedScheduler.plain(), ByteTokenizer())
    prompts = [TracePrompt(f"p{row}", "t", prompt) for row, prompt in enumerate(PROMPTS)]
    settings = TraceSettings(SamplingParams(max_new_tokens=20, seed=0), depth=DEPTHS)
    facts = trace_facts(engine, "tiny", prompts, settings)
    trace = collect_trace(engine, prompts, settings, facts, tmp_path / "t", lambda *_: None)
    assert answers.answer_tokens().tolist() == trace.tokens.tolist()

    heads = heads_of(kind)
    batch = batch_of(answers, heads)
    has_next = torch.ones(len(trace.tokens), dtype=torch.bool)
    has_next[torch.from_numpy(trace.offsets[1:]) - 1] = False
    num_compared = 0
    for depth, features in enumerate(features_of(answers, heads)):
        scores = heads.logits(0 if kind == "mtp" else depth, features)
        targets = batch.targets[:, depth]
        own = scores.gather(1, targets.clamp(min=0)[:, None])
        ranks = (scores > own).sum(dim=1)
        ranks[targets == IGNORED] = MISS
        assert ranks.tolist() == trace.ranks[has_next.numpy(), depth].tolist()
        num_compared += int((targets != IGNORED).sum())
    assert num_compared > 60


class TokensOneTooFar(FeatureReader):
    """A hand-made leak: every depth reads the draft tokens of the next example."""

    def read(self, batch: Batch) -> Iterator[Tensor]:
        yield from super().read(replace(batch, above=batch.above.roll(-1, dims=0)))


class StatesOneTooFar(FeatureReader):
    """A hand-made leak: every example reads the state or the row of the next one."""

    def read(self, batch: Batch) -> Iterator[Tensor]:
        text = batch.text and replace(batch.text, index=batch.text.index.roll(-1))
        yield from super().read(replace(batch, hidden=batch.hidden.roll(-1, dims=0), text=text))


def is_blind(
    kind: str, depth: int, folder: Path, reader_type: type[FeatureReader] = FeatureReader
) -> bool:
    """Whether the features of a depth stay where all from its target on is something else."""
    answers, heads = written(folder), heads_of(kind)
    root = int(answers.starts[2]) + 6
    row = answers.positions(range(5)).tolist().index(root)
    changed = copy.deepcopy(answers)
    first = root + depth + 1  # the token that this depth must predict
    end = int(answers.offsets[3])
    changed.tokens[first:end] = (changed.tokens[first:end] + 1) % VOCAB
    changed.hidden[root + 1 : end] += 1  # the state at the root is hidden[root + 1]
    before, after = (features_of(a, heads, reader_type)[depth] for a in (answers, changed))
    assert not torch.allclose(after[row + depth + 2 :], before[row + depth + 2 :])
    return torch.allclose(after[row], before[row], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", range(DEPTHS))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_ahead_leaks_into_a_depth(kind: str, depth: int, tmp_path: Path) -> None:
    """States and tokens from the target of a depth on can be anything: its features stay."""
    assert is_blind(kind, depth, tmp_path)


@pytest.mark.parametrize("leak", [TokensOneTooFar, StatesOneTooFar])
@pytest.mark.parametrize("kind", KINDS)
def test_a_leak_would_be_seen(kind: str, leak: type[FeatureReader], tmp_path: Path) -> None:
    """Off by one, the target itself or what has read it; only Medusa heads read no tokens."""
    reads_no_tokens = kind == "medusa" and leak is TokensOneTooFar
    assert is_blind(kind, 1, tmp_path, leak) == reads_no_tokens


def gradients(answers: Answers, heads: Heads, embedding: Tensor) -> list[Tensor]:
    """Of all parameters, for half cross-entropy, half divergence."""
    heads.zero_grad()
    reader = FeatureReader(heads, embedding, DEPTHS)
    loss = heads_loss(reader, batch_of(answers, heads), whole_output(heads), 0.8, 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in heads.parameters() if p.grad is not None]


@pytest.mark.parametrize("part", ["prompts", "answers"])
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_tokens_are_no_targets(kind: str, part: str, tmp_path: Path) -> None:
    """Other tokens with the same embeddings change nothing in a prompt, and much in an answer."""
    answers, heads = written(tmp_path), heads_of(kind)
    twins = torch.arange(VOCAB) ^ 1
    embedding = TARGET.embedding()[torch.arange(VOCAB) // 2 * 2]
    is_answer = torch.zeros(len(answers.tokens), dtype=torch.bool)
    for start, end in zip(answers.starts.tolist(), answers.offsets[1:].tolist(), strict=True):
        is_answer[start:end] = True
    is_changed = is_answer == (part == "answers")
    tokens = torch.where(is_changed, twins[answers.tokens], answers.tokens)
    pair = [
        gradients(replace(answers, tokens=t), heads, embedding) for t in (answers.tokens, tokens)
    ]
    is_same = all(torch.equal(*grads) for grads in zip(*pair, strict=True))
    assert is_same == (part == "prompts")


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_position_wise_heads_learn_nothing_from_prompts(kind: str, tmp_path: Path) -> None:
    """Other tokens and other states in all prompts: the same gradients."""
    answers, heads = written(tmp_path), heads_of(kind)
    changed = copy.deepcopy(answers)
    for first, start in zip(answers.offsets.tolist(), answers.starts.tolist(), strict=False):
        changed.tokens[first:start] = (changed.tokens[first:start] + 1) % VOCAB
        changed.hidden[first:start] += 1
    pair = [gradients(a, heads, TARGET.embedding()) for a in (answers, changed)]
    assert all(torch.equal(*grads) for grads in zip(*pair, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns_from_answers_alone(kind: str, tmp_path: Path) -> None:
    """A gradient for all of the module; prompts are read by those that attend, never predicted."""
    answers, heads = written(tmp_path), heads_of(kind)
    reader = FeatureReader(heads, TARGET.embedding(), DEPTHS)
    batch = batch_of(answers, heads)
    assert len(batch.targets) == answers.num_answer_tokens - answers.num_sequences
    for kl in (0.0, 0.5, 1.0):
        heads.zero_grad()
        loss = heads_loss(reader, batch, whole_output(heads), 0.8, kl)
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in heads.named_parameters():
            is_beyond = kind != "mtp" and f".{DEPTHS}." in f".{name}"  # its fifth head
            has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum() > 0)
            assert has_gradient or is_beyond, name


def test_the_divergence_is_zero_for_heads_that_are_the_target(tmp_path: Path) -> None:
    """A Medusa head that passes on the state of its own target's position would be the target."""
    answers, heads = written(tmp_path), heads_of("medusa")
    batch = batch_of(answers, heads)

    class Oracle(FeatureReader):
        def read(self, batch: Batch) -> Iterator[Tensor]:
            assert batch.teacher is not None
            yield batch.teacher[:, 0]

    output = whole_output(heads)
    loss = heads_loss(Oracle(heads, TARGET.embedding(), 1), batch, output, 1.0, 1.0)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    reader = FeatureReader(heads, TARGET.embedding(), 1)
    other = heads_loss(reader, batch, output, 1.0, 1.0)
    assert float(other.detach()) > 0.01
