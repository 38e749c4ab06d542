"""Training: what heads may see, what they must predict, and runs that go on where they ended."""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.drafters.checkpoint import load_heads
from entmtp.drafters.heads import HeadsConfig, HydraHeads, MedusaHeads, build_heads
from entmtp.drafters.recording import RecordingDrafter
from entmtp.drafters.tree_heads import HeadsDrafter
from entmtp.engine import Engine, EngineLimits
from entmtp.errors import InputError, TrainingError
from entmtp.params import SamplingParams
from entmtp.sampling import derive_seed
from entmtp.scheduler import FixedScheduler
from entmtp.target.base import Segment
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import tensor_shapes
from entmtp.tokenizer import Message
from entmtp.topology import named_topologies
from entmtp.train import (
    DataConfig,
    HeadsRecipe,
    TrainConfig,
    TrainEvent,
    output_sample,
    train_heads,
    write_answers,
)
from entmtp.train import data as answer_files
from entmtp.train.accuracy import measured_sequences
from entmtp.train.batches import (
    IGNORED,
    Batch,
    ExampleMaker,
    hot_vocabulary,
    iter_batches,
    iter_text_batches,
    sequences_of,
)
from entmtp.train.data import Answers, collect_answers, load_answers
from entmtp.train.jobs import AnswerJob, first_jobs, second_jobs
from entmtp.train.losses import FeatureReader, heads_loss
from entmtp.train.plots import plot_history
from entmtp.train.prompts import Draw, draw_prompts, follow_up
from entmtp.train.text import TrainingText
from entmtp.train.trainer import TargetTensors, TrainedKind, train_kind
from entmtp.workload import PromptRecord, read_task
from fakes import ByteTokenizer, tiny_config, tiny_target
from training import (
    DATA,
    NUM_HEADS,
    RECIPE,
    LastWordsTokenizer,
    Stop,
    run_training,
    silent,
    stopping_at,
    whole_output,
    write_prompts,
)

HIDDEN, VOCAB = 8, 30
KINDS = ("medusa", "hydra")


def make_answers(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> Answers:
    """Random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return Answers(
        torch.randint(0, vocab, (total,), generator=generator),
        torch.randn(total, HIDDEN, generator=generator).to(torch.float16),
        torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64),
        torch.tensor([0, *np.cumsum(lengths)[:-1]], dtype=torch.int64),
        torch.arange(len(lengths)),
    )


def make_heads(kind: str, hot_ids: Tensor, *, is_trained: bool = False) -> MedusaHeads | HydraHeads:
    """Heads with an output matrix; new ones pass h_t on, trained ones have random weights."""
    heads = build_heads(HeadsConfig(kind, HIDDEN, VOCAB, NUM_HEADS, num_layers=2), hot_ids)
    generator = torch.Generator().manual_seed(5)
    if is_trained:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(generator=generator)
    heads.attach_output(torch.randn(len(hot_ids), HIDDEN, generator=generator))
    return heads


def hot_index(hot_ids: Tensor) -> Tensor:
    """Index of each token in the hot vocabulary."""
    index = torch.full((VOCAB,), IGNORED, dtype=torch.int64)
    index[hot_ids] = torch.arange(len(hot_ids))
    return index


def batch_of(answers: Answers, positions: Sequence[int], hot_ids: Tensor | None = None) -> Batch:
    """Examples at some positions; all tokens are hot unless told otherwise."""
    hot_ids = torch.arange(VOCAB) if hot_ids is None else hot_ids
    return ExampleMaker(answers, hot_index(hot_ids), NUM_HEADS).at(torch.tensor(positions))


def loss_of(
    heads: MedusaHeads | HydraHeads, batch: Batch, embedding: Tensor, decay: float, kl: float = 0.0
) -> Tensor:
    """The loss of a batch."""
    reader = FeatureReader(heads, embedding, NUM_HEADS)
    return heads_loss(reader, batch, whole_output(heads), decay, kl)


def all_features(heads: MedusaHeads | HydraHeads, batch: Batch, embedding: Tensor) -> list[Tensor]:
    """What each head makes of a batch, before it scores tokens."""
    return list(FeatureReader(heads, embedding, NUM_HEADS).read(batch))


def recording_engine(target: LlamaTarget, batch_size: int = 4) -> Engine:
    """Plain decoding that keeps hidden states."""
    return Engine(
        target,
        RecordingDrafter(),
        FixedScheduler.plain(),
        ByteTokenizer(),
        EngineLimits(max_batch_size=batch_size),
    )


def make_prompts(count: int) -> list[tuple[int, ...]]:
    """Distinct prompts of different lengths, of ids from 200 on."""
    return [tuple(200 + (7 * i + j) % 50 for j in range(3 + i % 4)) for i in range(count)]


def make_jobs(count: int, temperature: float = 0.0) -> list[AnswerJob]:
    """Twelve tokens to each prompt, a seed each."""
    return [
        AnswerJob(
            prompt,
            SamplingParams(max_new_tokens=12, temperature=temperature, seed=derive_seed(3, row)),
            row,
            Draw(PromptRecord(f"p{row}", "t", ("turn",))),
        )
        for row, prompt in enumerate(make_prompts(count))
    ]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers a file, so that few answers make several."""
    monkeypatch.setattr(answer_files, "SHARD_SIZE", 2)


def answer_prompts(target: LlamaTarget, folder: Path, count: int = 5) -> Answers:
    """Let a target write twelve tokens to each prompt."""
    collect_answers(recording_engine(target), make_jobs(count), folder, "answers", silent)
    return load_answers(folder)


# -- what heads see --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", range(NUM_HEADS))
def test_a_head_never_sees_the_token_it_must_predict(kind: str, head: int) -> None:
    """Another x_{t+2+i}, and other tokens after it, leave the input of head i as it is."""
    answers, embedding = make_answers(12), torch.randn(VOCAB, HIDDEN)
    changed = replace(answers, tokens=answers.tokens.clone())
    position = 4
    changed.tokens[position + head + 1 :] = (changed.tokens[position + head + 1 :] + 1) % VOCAB
    heads = make_heads(kind, torch.arange(VOCAB), is_trained=True)
    before, after = (batch_of(a, [position]) for a in (answers, changed))
    assert before.targets[0, head] != after.targets[0, head]
    pair = [all_features(heads, batch, embedding)[head] for batch in (before, after)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("head", range(NUM_HEADS))
def test_a_hydra_head_sees_every_token_above_its_target(head: int) -> None:
    """The root and the draft tokens above enter; so the leak test looks where it should."""
    answers, embedding = make_answers(12), torch.randn(VOCAB, HIDDEN)
    heads = make_heads("hydra", torch.arange(VOCAB), is_trained=True)
    before = all_features(heads, batch_of(answers, [4]), embedding)[head]
    for above in range(head + 1):
        changed = replace(answers, tokens=answers.tokens.clone())
        changed.tokens[4 + above] = (changed.tokens[4 + above] + 1) % VOCAB
        after = all_features(heads, batch_of(changed, [4]), embedding)[head]
        assert not torch.equal(before, after)


def test_a_medusa_head_sees_no_token_at_all() -> None:
    """It reads h_t alone."""
    answers, embedding = make_answers(12), torch.randn(VOCAB, HIDDEN)
    changed = replace(answers, tokens=(answers.tokens + 1) % VOCAB)
    heads = make_heads("medusa", torch.arange(VOCAB), is_trained=True)
    pair = (all_features(heads, batch_of(a, [4]), embedding) for a in (answers, changed))
    assert all(torch.equal(*features) for features in zip(*pair, strict=True))


# -- what heads must predict -----------------------------------------------------------------------


def test_targets_are_the_tokens_after_those_that_were_read() -> None:
    """At position j head i reads tokens j .. j + i and must predict token j + i + 1."""
    answers = make_answers(9)
    batch = batch_of(answers, [0, 3])
    for row, position in enumerate((0, 3)):
        following = answers.tokens[position : position + NUM_HEADS + 1]
        assert torch.equal(batch.above[row], following[:-1])
        assert torch.equal(batch.targets[row], following[1:])
    assert torch.equal(batch.hidden, answers.hidden[[0, 3]].float())


def test_nothing_is_predicted_beyond_an_answer() -> None:
    """The next answer in the file is another text."""
    answers = make_answers(4, 5)
    targets = batch_of(answers, [0, 1, 2, 6, 7]).targets
    is_ignored = (targets == IGNORED).tolist()
    assert is_ignored == [
        [False, False, False],
        [False, False, True],
        [False, True, True],
        [False, False, True],
        [False, True, True],
    ]


def test_cold_tokens_are_not_predicted() -> None:
    """A token outside the hot vocabulary has no score that could be raised."""
    answers = replace(make_answers(6), tokens=torch.tensor([5, 6, 7, 5, 6, 7]))
    batch = batch_of(answers, [0, 1], torch.tensor([7, 5]))
    assert batch.targets.tolist() == [[IGNORED, 0, 1], [0, 1, IGNORED]]


def test_the_hot_vocabulary_holds_the_most_frequent_tokens() -> None:
    """By falling frequency, ties to the lower id."""
    answers = replace(make_answers(6), tokens=torch.tensor([9, 4, 9, 7, 4, 9]))
    assert hot_vocabulary(answers, [0], 4, VOCAB).tolist() == [9, 4, 7, 0]
    assert len(hot_vocabulary(answers, [0], 1000, VOCAB)) == VOCAB


def test_the_last_token_of_an_answer_starts_no_example() -> None:
    """Every position has at least one token to predict; an answer of one token has none."""
    answers = make_answers(3, 1, 2)
    assert answers.positions([0, 1, 2]).tolist() == [0, 1, 4]
    assert answers.positions([1]).tolist() == answers.positions([]).tolist() == []
    assert answers.sequence_ends().tolist() == [3, 3, 3, 4, 6, 6]


def test_an_epoch_visits_every_position_once_in_an_order_of_its_own() -> None:
    """The order depends on seed and epoch alone, for seeds up to the largest that is allowed."""
    positions = torch.arange(3, 40)
    orders = [
        torch.cat(list(iter_batches(positions, 8, seed, epoch)))
        for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 0))
    ]
    assert all(torch.equal(torch.sort(order).values, positions) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)
    assert torch.equal(orders[1], torch.cat(list(iter_batches(positions, 8, 0, 1))))


def test_an_epoch_of_texts_visits_every_position_once_with_few_texts_a_batch() -> None:
    """Batches have about the size that was asked for, and other texts in other epochs."""
    answers = make_answers(*(5 + 3 * (i % 7) for i in range(40)))
    positions = answers.positions(range(1, 40))
    recipe = replace(RECIPE, sequences_a_step=6, batch_size=16)
    epochs = [list(iter_text_batches(answers, positions, recipe, e)) for e in (0, 1, 0)]
    assert all(torch.equal(*pair) for pair in zip(epochs[0], epochs[2], strict=True))
    groups = []
    for batches in epochs[:2]:
        assert torch.equal(torch.cat(batches).sort().values, positions)
        texts = [sequences_of(answers, batch).unique().tolist() for batch in batches]
        assert all(len(found) <= 6 for found in texts)
        assert sum(len(found) > 3 for found in texts) > len(texts) / 2
        sizes = [len(batch) for batch in batches]
        assert min(sizes) >= 8
        assert max(sizes) <= 24
        groups.append({tuple(found) for found in texts})
    assert groups[0] != groups[1]


# -- loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_heads_lose_what_the_target_itself_would(kind: str) -> None:
    """New heads pass h_t on, so the loss is that of the target's own output at h_t."""
    answers, hot_ids = make_answers(7, 6), torch.arange(24)
    batch = batch_of(answers, [0, 2, 4, 8, 11], hot_ids)
    heads = make_heads(kind, hot_ids)
    scores = batch.hidden.double().numpy() @ heads.shared_output.double().numpy().T
    losses = np.log(np.exp(scores).sum(axis=1, keepdims=True)) - scores
    expected = 0.0
    for head in range(NUM_HEADS):
        targets = batch.targets[:, head].tolist()
        parts = [losses[row, t] for row, t in enumerate(targets) if t != IGNORED]
        expected += 0.7**head * float(np.mean(parts))
    loss = loss_of(heads, batch, torch.randn(VOCAB, HIDDEN), 0.7)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_only_the_tokens_of_a_batch_get_a_gradient() -> None:
    """Embeddings of tokens that no head reads are not touched, nor those after the last target."""
    answers = replace(make_answers(6), tokens=torch.tensor([1, 2, 3, 4, 5, 6]))
    embedding = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    heads = make_heads("hydra", torch.arange(VOCAB), is_trained=True)
    loss_of(heads, batch_of(answers, [1]), embedding, 1.0).backward()
    assert embedding.grad is not None
    assert embedding.grad.abs().sum(dim=1).nonzero().flatten().tolist() == [2, 3, 4]


def test_a_batch_with_nothing_to_predict_is_refused() -> None:
    """A loss of zero would look like heads that know everything."""
    batch = batch_of(make_answers(4), [3])
    with pytest.raises(TrainingError, match="no token to predict"):
        loss_of(make_heads("medusa", torch.arange(VOCAB)), batch, torch.ones(VOCAB, HIDDEN), 1.0)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    """Weights are spoilt by then; the message says what to lower."""
    heads, batch = make_heads("medusa", torch.arange(VOCAB)), batch_of(make_answers(9), [0])
    heads.attach_output(torch.full((VOCAB, HIDDEN), float("nan")))
    with pytest.raises(TrainingError, match="lower the learning rate"):
        loss_of(heads, batch, torch.ones(VOCAB, HIDDEN), 1.0)


# -- training of one kind --------------------------------------------------------------------------


def train_all(
    answers: Answers,
    folder: Path,
    recipe: HeadsRecipe = RECIPE,
    progress: Callable[[TrainEvent], None] = silent,
    *,
    checkpoint_s: float = 60.0,
) -> TrainedKind:
    """Train on all answers but the first."""
    generator = torch.Generator().manual_seed(9)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    block = BlockConfig(
        hidden_size=HIDDEN, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4
    )
    target = TargetTensors(embedding, lambda ids: embedding[ids], block)
    text = TrainingText(answers, tuple(range(1, answers.num_sequences)), (0,))
    made = train_kind(text, recipe, target, folder, progress, checkpoint_s=checkpoint_s)
    assert all(0 <= share <= 1 for top in made.accuracy.top for share in top)
    return made


def train(
    answers: Answers,
    folder: Path,
    recipe: HeadsRecipe = RECIPE,
    progress: Callable[[TrainEvent], None] = silent,
    *,
    checkpoint_s: float = 60.0,
) -> dict[str, Tensor]:
    """The weights of heads trained on all answers but the first."""
    made = train_all(answers, folder, recipe, progress, checkpoint_s=checkpoint_s)
    return made.heads.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 5, 6, 9])
def test_a_run_that_was_killed_gives_the_same_weights(
    tmp_path: Path, kind: str, num_steps: int
) -> None:
    """Bitwise, whether it ended at once, at the last step of an epoch, or within the next one."""
    answers, recipe = make_answers(4, 20, 21), replace(RECIPE, kind=kind)
    (tmp_path / "whole").mkdir()
    whole = train(answers, tmp_path / "whole", recipe)
    with pytest.raises(Stop):
        train(answers, tmp_path, recipe, stopping_at(num_steps), checkpoint_s=0)
    done = []
    resumed = train(answers, tmp_path, recipe, lambda event: done.append(event.done))
    assert done == list(range(num_steps, 11))
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize("kind", ["hydra++", "mtp"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_modules_that_read_whole_texts_go_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_steps: int
) -> None:
    """Their batches are sequences; the weights are those of a run that was left alone.

    What a step draws, tokens that are scored and noise, is the step's own.
    """
    monkeypatch.setattr(output_sample, "NUM_EXACT", 10)
    answers = make_answers(6, 20, 21, 9, 14)
    answers = replace(answers, starts=answers.starts + 2)
    own = {"num_layers": 1, "kl": 0.5, "sequences_a_step": 2, "sampled_tokens": 5, "noise": 0.1}
    recipe = replace(RECIPE, kind=kind, **own)
    (tmp_path / "whole").mkdir()
    steps: list[int] = []
    whole = train(answers, tmp_path / "whole", recipe, lambda event: steps.append(event.done))
    with pytest.raises(Stop):
        train(answers, tmp_path, recipe, stopping_at(num_steps), checkpoint_s=0)
    done: list[int] = []
    resumed = train(answers, tmp_path, recipe, lambda event: done.append(event.done))
    assert done == steps[num_steps:]
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_finished_run_is_not_trained_further(tmp_path: Path) -> None:
    """Running the same command again only reads the checkpoint."""
    answers = make_answers(4, 20)
    first = train(answers, tmp_path)
    again = train(answers, tmp_path)
    assert all(torch.equal(again[name], value) for name, value in first.items())


def test_training_moves_the_weights_and_lowers_the_loss(tmp_path: Path) -> None:
    """On a text that repeats itself every four tokens."""
    states = torch.eye(HIDDEN)[:4].repeat(6, 1).to(torch.float16)
    offsets = torch.tensor([0, 8, 16, 24])
    answers = Answers(torch.arange(24) % 4, states, offsets, offsets[:-1], torch.arange(3))
    events: list[TrainEvent] = []
    train(answers, tmp_path, replace(RECIPE, epochs=20), events.append)
    losses = [event.loss for event in events if event.loss is not None]
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Weights of two recipes are not mixed."""
    train(make_answers(4, 20), tmp_path)
    with pytest.raises(TrainingError, match="made with other settings"):
        train(make_answers(4, 20), tmp_path, replace(RECIPE, learning_rate=0.02))


def test_a_checkpoint_of_other_answers_is_refused(tmp_path: Path) -> None:
    """Its hot tokens are others, so its heads would go on with targets that mean something else."""
    recipe = replace(RECIPE, hot_vocab_size=5)
    first, second = (
        replace(make_answers(4, 20), tokens=torch.arange(24) % 5 + start) for start in (0, 5)
    )
    train(first, tmp_path, recipe)
    with pytest.raises(TrainingError, match="other settings or answers"):
        train(second, tmp_path, recipe)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, share: float) -> None:
    """The message names the file and says to delete it."""
    train(make_answers(4, 20), tmp_path)
    file = tmp_path / "hydra.checkpoint.pt"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(TrainingError, match=r"hydra\.checkpoint\.pt: damaged .* delete it"):
        train(make_answers(4, 20), tmp_path)


@pytest.mark.parametrize("content", [{"done": 3}, [1, 2]], ids=["no identity", "a list"])
def test_a_checkpoint_of_another_program_is_refused(tmp_path: Path, content: object) -> None:
    """A sound file of torch's that holds something else once ended in a KeyError."""
    torch.save(content, tmp_path / "hydra.checkpoint.pt")
    with pytest.raises(TrainingError, match="damaged"):
        train(make_answers(4, 20), tmp_path)


def test_positions_with_only_cold_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    """Such a position alone in a batch once ended a run, and ended it again after each resume."""
    tokens = torch.tensor([5] * 10 + [6, 7, 8, 9, 10, 11] + [5] * 4)
    answers = replace(make_answers(4, 16), tokens=tokens)
    train(answers, tmp_path, replace(RECIPE, hot_vocab_size=1, batch_size=1))


@pytest.mark.parametrize("kind", ["hydra", "mtp"])
def test_text_without_anything_to_learn_is_refused(tmp_path: Path, kind: str) -> None:
    """Answers of one token, or of cold tokens alone; the message tells how many, and what helps."""
    message = "2 answers of {} tokens hold nothing to train on.* raise max_new_tokens or hot_vocab"
    recipe = replace(RECIPE, kind=kind)
    with pytest.raises(TrainingError, match=message.format(2)):
        train(make_answers(4, 1, 1), tmp_path, recipe)
    answers = replace(make_answers(5, 2, 2), tokens=torch.tensor([5, 5, 5, 5, 5, 5, 6, 5, 7]))
    with pytest.raises(TrainingError, match=message.format(4)):
        train(answers, tmp_path, replace(recipe, hot_vocab_size=1))


def test_a_small_hot_vocabulary_can_be_measured(tmp_path: Path) -> None:
    """Top-8 accuracy over four tokens once failed, after the training was done."""
    train(make_answers(4, 20), tmp_path, replace(RECIPE, hot_vocab_size=4))


# -- accuracy over time ----------------------------------------------------------------------------


def test_heads_are_measured_at_regular_steps(tmp_path: Path) -> None:
    """Before the first step, evenly on the way, and at the end, whose numbers are the last."""
    answers, recipe = make_answers(9, 20, 21), replace(RECIPE, epochs=4, measurements=5)
    events: list[TrainEvent] = []
    made = train_all(answers, tmp_path, recipe, events.append)
    assert [m.step for m in made.history] == [0, 4, 8, 12, 16, 20]
    assert [m.positions_seen for m in made.history] == [0, 32, 63, 94, 125, 156]
    assert made.history[0].loss is None
    assert all(m.loss is not None and m.loss > 0 for m in made.history[1:])
    assert made.history[-1].top == made.accuracy.top  # all that is held out is measured
    assert events[7].top1 == tuple(top[0] for top in made.history[1].top)
    assert events[8].top1 == tuple(top[0] for top in made.history[2].top)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "mtp"])
def test_measuring_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Weights and the state of random numbers are those of a run that hardly measures."""
    answers = make_answers(9, 20, 21)
    answers = replace(answers, starts=answers.starts + 2)
    made, random_states = [], []
    for measurements in (1, 1000):
        (tmp_path / str(measurements)).mkdir()
        recipe = replace(RECIPE, kind=kind, num_layers=1, measurements=measurements)
        made.append(train_all(answers, tmp_path / str(measurements), recipe))
        random_states.append(torch.get_rng_state())
    assert len(made[0].history) == 2 < len(made[1].history)
    assert made[0].history[-1].top == made[1].history[-1].top
    first, second = (m.heads.state_dict() for m in made)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert torch.equal(*random_states)


@pytest.mark.parametrize("num_steps", [0, 1, 5, 6, 9])
def test_a_run_that_was_killed_has_the_same_history(tmp_path: Path, num_steps: int) -> None:
    """What was measured lies in the checkpoint, and nothing is measured twice."""
    answers, recipe = make_answers(4, 20, 21), replace(RECIPE, measurements=4)
    (tmp_path / "whole").mkdir()
    whole = train_all(answers, tmp_path / "whole", recipe)
    with pytest.raises(Stop):
        train(answers, tmp_path, recipe, stopping_at(num_steps), checkpoint_s=0)
    assert train_all(answers, tmp_path, recipe).history == whole.history


def test_few_answers_are_measured_on_the_way() -> None:
    """At most 40 of at most 2,000 positions, the same ones each time."""
    many, long, endless = (make_answers(*[n] * 60) for n in (11, 401, 3000))
    for answers, number in ((many, 40), (long, 5), (endless, 1)):
        chosen = measured_sequences(answers, range(5, 60))
        assert len(set(chosen)) == len(chosen) == number
        assert min(chosen) >= 5
        assert chosen == measured_sequences(answers, range(5, 60))
    assert measured_sequences(make_answers(1, 1), [0, 1]) == []


def test_the_plot_shows_all_kinds(tmp_path: Path) -> None:
    """A picture of a sensible size, for one kind and for several."""
    kinds = {}
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        recipe = replace(RECIPE, kind=kind)
        kinds[kind] = train_all(make_answers(9, 20, 21), tmp_path / kind, recipe).history
    widths = []
    for shown in (dict(list(kinds.items())[:1]), kinds):
        data = plot_history(shown, tmp_path).read_bytes()
        assert data.startswith(b"\x89PNG")
        widths.append(int.from_bytes(data[16:20], "big"))
    assert 700 < widths[0] < widths[1] < 1500
    with pytest.raises(InputError, match=r"training\.png: cannot be written"):
        plot_history(kinds, tmp_path / "missing")


# -- answers ---------------------------------------------------------------------------------------


def test_answers_are_the_target_s_own_and_hold_no_prompt(tmp_path: Path) -> None:
    """What is trained on is what plain decoding emits, token by token."""
    target = tiny_target(1, tie_embeddings=False)
    answers = answer_prompts(target, tmp_path)
    engine, jobs = recording_engine(target), make_jobs(5)
    alone = [engine.generate(job.prompt, job.sampling).token_ids for job in jobs]
    assert answers.answer_tokens().tolist() == [token for ids in alone for token in ids]
    assert answers.num_answer_tokens == sum(map(len, alone))
    whole = [t for job, ids in zip(jobs, alone, strict=True) for t in (*job.prompt, *ids)]
    assert answers.tokens.tolist() == whole
    assert len(answers.hidden) == len(answers.tokens)
    positions = set(answers.positions(range(5)).tolist())
    for start, begin, end in zip(
        answers.offsets[:-1], answers.starts, answers.offsets[1:], strict=True
    ):
        assert not positions & set(range(int(start), int(begin)))
        assert set(range(int(begin), int(end) - 1)) <= positions


def test_a_hidden_state_is_the_one_that_its_token_was_chosen_from(tmp_path: Path) -> None:
    """hidden[j] is the target's state before tokens[j]: its best score is that token's."""
    target = tiny_target(1, tie_embeddings=False)
    answers = answer_prompts(target, tmp_path, count=3)
    scores = answers.hidden.float() @ target.output_rows(torch.arange(257)).T
    positions = answers.positions(range(3))
    assert torch.equal(scores.argmax(dim=1)[positions], answers.tokens[positions])
    assert not answers.hidden[answers.offsets[:-1]].any()
    start, position = int(answers.offsets[1]), int(answers.starts[1]) + 5
    text = answers.tokens[start:position].tolist()
    segment = Segment(target.new_cache(len(text)), torch.tensor(text), np.arange(len(text)))
    state = target.forward([segment]).hidden[0][-1]
    torch.testing.assert_close(answers.hidden[position].float(), state, atol=2e-3, rtol=2e-3)


def test_answers_that_were_interrupted_go_on_with_the_same_shards(tmp_path: Path) -> None:
    """What was written is left alone, and the rest is what it would have been."""
    target = tiny_target(1, tie_embeddings=False)
    (tmp_path / "whole").mkdir()
    engines = [recording_engine(target, batch_size=1) for _ in range(3)]
    jobs = make_jobs(7, temperature=0.9)
    assert collect_answers(engines[0], jobs, tmp_path / "whole", "answers", silent)
    (tmp_path / "part").mkdir()
    arguments = (jobs, tmp_path / "part", "answers")
    with pytest.raises(Stop):
        collect_answers(engines[1], *arguments, stopping_at(5))
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "part").iterdir()}
    counts: list[int] = []
    collect_answers(engines[2], *arguments, lambda event: counts.append(event.done))
    assert len(kept) == 2
    assert counts[0] == 4
    for file in (tmp_path / "whole").iterdir():
        whole, part = load_file(file), load_file(tmp_path / "part" / file.name)
        assert all(torch.equal(part[name], value) for name, value in whole.items())
    assert all((tmp_path / "part" / n).stat().st_mtime_ns == t for n, t in kept.items())


def test_missing_answers_are_named(tmp_path: Path) -> None:
    """A folder without shards holds nothing to train on."""
    with pytest.raises(TrainingError, match="no answers to train on"):
        load_answers(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_damaged_shard_is_named(tmp_path: Path, share: float) -> None:
    """The message says which file to delete."""
    answer_prompts(tiny_target(1, tie_embeddings=False), tmp_path, count=3)
    file = tmp_path / "answers-00001.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(TrainingError, match=r"answers-00001\.safetensors: damaged .* delete it"):
        load_answers(tmp_path)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_are_drawn_evenly_and_once(tmp_path: Path) -> None:
    """A short file gives all it has, a repeated turn counts once, and the draw follows the seed."""
    short = write_prompts(tmp_path / "a.jsonl", ["a0", "a1", "a1"])
    long = write_prompts(tmp_path / "b.jsonl", ["a0", *(f"b{i}" for i in range(20))])
    drawn = [draw.record.turns[0] for draw in draw_prompts([short, long], 8, seed=0)]
    assert sorted(turn for turn in drawn if turn[0] == "a") == ["a0", "a1"]
    assert len(drawn) == len(set(drawn)) == 8
    assert drawn == [draw.record.turns[0] for draw in draw_prompts([short, long], 8, seed=0)]
    assert drawn != [draw.record.turns[0] for draw in draw_prompts([short, long], 8, seed=1)]


def test_prompts_of_a_small_task_are_answered_again(tmp_path: Path) -> None:
    """Every prompt once before any twice; words decide what is the same; some are left out."""
    lines = [{"id": f"s{i}", "task": "creative", "turns": [f"story {i}"]} for i in range(3)] + [
        {"id": f"c{i}", "task": "code", "turns": [f"code {i}"]} for i in range(30)
    ]
    lines += [{"id": "again", "task": "code", "turns": ["Code,  3!"]}]
    file, tested = tmp_path / "all.jsonl", tmp_path / "tested.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tested.write_text(json.dumps({"id": "t", "task": "x", "turns": ["other", "CODE 5"]}) + "\n")
    drawn = draw_prompts([file], 14, seed=0, samples=2, exclude=[tested])
    stories = sorted((d.record.id, d.copy) for d in drawn if d.record.task == "creative")
    assert stories == [(f"s{i}", copy) for i in range(3) for copy in range(2)]
    codes = [d.record.turns[0] for d in drawn if d.record.task == "code"]
    assert len(codes) == len(set(codes)) == 8
    everything = draw_prompts([file], 1000, seed=0, exclude=[tested])
    assert len(everything) == 32
    assert "code 5" not in [d.record.turns[0] for d in everything]


def test_tasks_are_drawn_and_excluded_as_files_are(tmp_path: Path) -> None:
    """A workload is a task or a file; a task can be excluded as a file can."""
    file = write_prompts(tmp_path / "p.jsonl", ["one", "two", read_task("math", 1)[0].turns[0]])
    drawn = draw_prompts(["mixed", file], 1000, seed=0, exclude=["math"])
    tasks = Counter(draw.record.id.split("/")[0] for draw in drawn)
    assert [tasks[task] for task in ("code", "chat", "creative", "math")] == [56, 56, 56, 0]
    assert len(drawn) == 3 * 56 + 2


def test_jobs_follow_from_the_draw(tmp_path: Path) -> None:
    """Repeats are sampled, long answers are as long as asked, a group shares its prompt."""
    file = write_prompts(tmp_path / "p.jsonl", [f"turn {i}" for i in range(10)])
    settings = DataConfig(
        num_prompts=20, samples=2, max_new_tokens=5, long_answers=0.5, long_new_tokens=40
    )
    jobs = first_jobs([file], [], LastWordsTokenizer(), 100, settings)
    assert len(jobs) == 20
    assert len({job.sampling.seed for job in jobs}) == 20
    assert {job.sampling.max_new_tokens for job in jobs} == {5, 40}
    for job in jobs:
        assert job.sampling.temperature == (0.8 if job.draw.copy else 0.0)
        twins = [other for other in jobs if other.prompt == job.prompt]
        assert {other.group for other in twins} == {job.group}
        assert len(twins) == 2


def test_second_turns_stand_behind_answers_that_ended(tmp_path: Path) -> None:
    """The conversation holds the answer; one that was cut off is not gone on with."""
    file = write_prompts(tmp_path / "p.jsonl", [f"turn {i}" for i in range(40)])
    settings = DataConfig(num_prompts=40, max_new_tokens=5, follow_ups=0.5)

    class Whole(ByteTokenizer):
        def encode_chat(self, messages: Sequence[Message]) -> list[int]:
            return self.encode("|".join(message["content"] for message in messages))

    tokenizer = Whole()
    end = next(iter(tokenizer.eos_ids))
    jobs = first_jobs([file], [], tokenizer, 400, settings)
    answers = {n: [*tokenizer.encode("yes"), end if n % 2 else 65] for n in range(40)}
    further = second_jobs(jobs, answers, tokenizer, 400, settings)
    assert 4 < len(further) < 16
    known = {job.prompt: number for number, job in enumerate(jobs)}
    for job in further:
        first, answer, turn = tokenizer.decode(list(job.prompt)).split("|")
        number = known[tuple(tokenizer.encode(first))]
        assert number % 2
        assert answer == "yes"
        assert turn
        assert job.group == jobs[number].group
    again = second_jobs(jobs, answers, tokenizer, 400, settings)
    assert again == further
    assert second_jobs(jobs, answers, tokenizer, 20, settings) == []


def test_follow_ups_know_their_task() -> None:
    """Every task draws from the common ones too; an unknown one from these alone."""
    turns = {
        task: {follow_up(task, random.Random(seed)) for seed in range(400)}
        for task in ("code", "chat")
    }
    assert "Write a test for it." in turns["code"] - turns["chat"]
    assert len(turns["chat"]) == 12


@pytest.mark.parametrize(
    ("turns", "message"),
    [(["only one"], "1 prompts were found"), (["x" * 255, "y" * 300], "0 prompts fit")],
    ids=["one", "too long"],
)
def test_too_few_prompts_are_refused(tmp_path: Path, turns: list[str], message: str) -> None:
    """Nothing can be held out of one answer; nothing is written."""
    with pytest.raises(TrainingError, match=message):
        run_training(tmp_path / "out", turns=turns)
    assert not (tmp_path / "out").exists()


# -- the whole run ---------------------------------------------------------------------------------


def test_a_run_leaves_heads_and_a_report(tmp_path: Path) -> None:
    """The heads can be loaded for their target; the report says how good they are."""
    trained = run_training(tmp_path / "out")
    heads = load_heads(trained.file, hidden_size=32, vocab_size=257, target="tiny")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert isinstance(heads, HydraHeads)
    assert heads.config.num_heads == NUM_HEADS
    assert (report["model"], report["num_answers"]) == ("tiny", 6)
    assert report["heads"][0]["held_out"]["top"] == [list(t) for t in trained.accuracy.top]
    history = report["heads"][0]["history"]
    assert [entry["step"] for entry in history] == [m.step for m in trained.history]
    assert history[0].keys() == {"step", "positions_seen", "loss", "top1", "top2", "top4", "top8"}
    assert history[-1]["top2"] == [shares[1] for shares in trained.history[-1].top]
    assert trained.accuracy.num_positions[0] > 0


def test_answers_that_leave_none_to_train_on_are_refused(tmp_path: Path) -> None:
    """Where all would be held out, or the time for answers was over before the first group."""
    with pytest.raises(TrainingError, match="leave none to train on"):
        run_training(tmp_path / "held", held_out=0.95)
    with pytest.raises(TrainingError, match="no answers to train on"):
        run_training(tmp_path / "hasty", data=replace(DATA, answer_minutes=1e-9))


def test_a_time_limit_leaves_out_what_is_not_whole(tmp_path: Path) -> None:
    """With no time at all there is no group of answers to train on."""
    data = replace(DATA, answer_minutes=1e-9)
    with pytest.raises(TrainingError, match="no answers to train on"):
        run_training(tmp_path / "out", data=data)


def test_answers_stay_once_training_has_begun(tmp_path: Path) -> None:
    """A run that goes on never adds answers to those that a checkpoint was made from."""
    folder = tmp_path / "out"
    run_training(folder)
    for file in (folder / "answers").iterdir():
        file.unlink()
    with pytest.raises(TrainingError, match=r"answers-00000\.safetensors: missing"):
        run_training(folder)


@pytest.mark.parametrize("stage", ["answers", "hydra"])
def test_a_whole_run_that_was_killed_goes_on(tmp_path: Path, stage: str) -> None:
    """In either stage; the heads are those of a run that was left alone."""
    with pytest.raises(Stop):
        run_training(tmp_path / "part", progress=stopping_at(3, stage=stage))
    resumed = load_file(run_training(tmp_path / "part").file)
    whole = load_file(run_training(tmp_path / "whole").file)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    "change",
    [
        {"data": replace(DATA, seed=1)},
        {"data": replace(DATA, max_new_tokens=5)},
        {"name": "another"},
        {"turns": ("other words", "and more of them")},
    ],
    ids=["seed", "length", "model", "prompts"],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """Answers to other prompts or by other rules are not mixed."""
    with pytest.raises(Stop):
        run_training(tmp_path / "out", progress=stopping_at(0))
    with pytest.raises(TrainingError, match="other prompts or settings"):
        run_training(tmp_path / "out", **change)  # type: ignore[arg-type]


def test_the_batch_size_of_answers_may_change_between_runs(tmp_path: Path) -> None:
    """It changes nothing in the answers."""
    with pytest.raises(Stop):
        run_training(tmp_path / "out", progress=stopping_at(0))
    run_training(tmp_path / "out", data=replace(DATA, batch_size=2))


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    """A broken settings file once ended in an error of the JSON reader's."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("{")
    with pytest.raises(TrainingError, match=r"settings\.json: damaged"):
        run_training(tmp_path / "out")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """What the system says about it comes with the folder's name."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answers").write_text("a file where a folder is needed")
    with pytest.raises(TrainingError, match="out: cannot store the run there"):
        run_training(tmp_path / "out")


def test_heads_that_cannot_be_stored_are_reported(tmp_path: Path) -> None:
    """At the end of a run too; what was trained waits in the checkpoint."""
    (tmp_path / "out" / "hydra.safetensors").mkdir(parents=True)
    with pytest.raises(TrainingError, match="out: cannot store the run there"):
        run_training(tmp_path / "out")
    assert (tmp_path / "out" / "hydra.checkpoint.pt").is_file()


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (DataConfig, {"num_prompts": 1}),
        (DataConfig, {"max_new_tokens": 1}),
        (DataConfig, {"temperature": float("nan")}),
        (DataConfig, {"temperature": float("inf")}),
        (DataConfig, {"batch_size": 0}),
        (DataConfig, {"seed": -1}),
        (HeadsRecipe, {"kind": "eagle"}),
        (HeadsRecipe, {"num_heads": 0}),
        (HeadsRecipe, {"hot_vocab_size": 0}),
        (HeadsRecipe, {"epochs": 0}),
        (HeadsRecipe, {"learning_rate": float("nan")}),
        (HeadsRecipe, {"learning_rate": float("inf")}),
        (HeadsRecipe, {"seed": 2**63}),
        (HeadsRecipe, {"measurements": 0}),
        (TrainConfig, {"held_out": 1.0}),
        (TrainConfig, {"train_tokens": 1}),
        (TrainConfig, {"checkpoint_s": -1.0}),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(
    config: type[DataConfig | HeadsRecipe | TrainConfig], values: dict[str, Any]
) -> None:
    """Before anything is written: the message names the setting and its value."""
    name, value = next(iter(values.items()))
    with pytest.raises(InputError, match=f"{name} is {value}; it must be"):
        TrainConfig("tiny", (), **values) if config is TrainConfig else config(**values)


# -- heads that learnt something -------------------------------------------------------------------


def cyclic_target(period: int = 9) -> LlamaTarget:
    """A target whose text repeats itself: token x is followed by x + 1, within its block.

    The one block adds nothing to the residual stream, and each row of the output head is the
    embedding of the token before.
    """
    config = tiny_config(num_layers=1, tie_embeddings=False)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape)
        for name, shape in tensor_shapes(config).items()
    }
    ids = torch.arange(config.vocab_size)
    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    tensors["model.embed_tokens.weight"] = embedding
    before = torch.where(ids % period == 0, ids + period - 1, ids - 1).clamp(max=ids[-1])
    tensors["lm_head.weight"] = embedding[before]
    return LlamaTarget(config, tensors.items())


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_a_toy_text_and_speed_up_real_decoding(tmp_path: Path, kind: str) -> None:
    """On text with a period, three trained heads are right nearly always: four tokens a step."""
    target, tokenizer = cyclic_target(), LastWordsTokenizer()
    prompts = write_prompts(tmp_path / "p.jsonl", [chr(i) * 2 for i in range(65, 85)])
    recipe = HeadsRecipe(kind, NUM_HEADS, 1, 64, epochs=30, batch_size=64, learning_rate=0.03)
    data = DataConfig(num_prompts=20, max_new_tokens=16, batch_size=20)
    config, folder = TrainConfig("cycle", (recipe,), held_out=0.1), tmp_path / "out"
    write_answers(target, tokenizer, [prompts], folder, data, silent, model_name="cycle")
    trained = train_heads(target, folder, folder, config, silent)[0]
    heads = load_heads(trained.file, hidden_size=32, vocab_size=257, target="cycle")
    heads.attach_output(target.output_rows(heads.hot_ids))
    tree = named_topologies()["chain4"].truncate(NUM_HEADS)
    drafter, scheduler = HeadsDrafter(heads, target.embedding()), FixedScheduler("chain", tree)
    engine = Engine(target, drafter, scheduler, tokenizer)
    result = engine.generate("TT", SamplingParams(max_new_tokens=41))
    assert result.token_ids == tuple(81 + (84 - 81 + 1 + i) % 9 for i in range(41))
    assert result.stats.mean_acceptance_length > 3.5
    assert trained.accuracy.top[0][0] > 0.9
