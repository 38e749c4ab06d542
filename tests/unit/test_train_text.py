"""Folders of training: answers that many runs read, the text of a run, and what is refused."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from entmtp.errors import TrainingError
from entmtp.train import DataConfig, TrainConfig, train_heads
from entmtp.train import data as answer_files
from entmtp.train.data import load_answers, shard_names
from entmtp.train.text import TrainingText, open_text
from fakes import tiny_target
from training import (
    DATA,
    RECIPE,
    Stop,
    run_training,
    silent,
    stopping_at,
    train_on,
    write,
)

MANY = DataConfig(num_prompts=24, max_new_tokens=6, batch_size=8)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers a file, so that few answers make several."""
    monkeypatch.setattr(answer_files, "SHARD_SIZE", 2)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A folder of 24 answers."""
    write(tmp_path / "answers", data=MANY, turns=[f"number {i} of them" for i in range(24)])
    return tmp_path / "answers"


def text_of(answers: Path, file: Path, held_out: float = 0.1, **config: object) -> TrainingText:
    """The text of a run."""
    settings = TrainConfig("tiny", (), held_out=held_out, **config)  # type: ignore[arg-type]
    return open_text(answers / "answers", file, 0, settings, "digest")


def sequences(text: TrainingText, numbers: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Some sequences of a text as tokens."""
    tokens, offsets = text.answers.tokens.tolist(), text.answers.offsets.tolist()
    return {tuple(tokens[offsets[s] : offsets[s + 1]]) for s in numbers}


def weights_are_same(first: Path, second: Path) -> bool:
    """Whether two files of heads hold the same bits."""
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def everything_in(folder: Path) -> dict[str, bytes]:
    """Files below a folder and what they hold."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# -- part of the text ------------------------------------------------------------------------------


def test_a_part_of_the_text_lies_in_every_larger_one(answers: Path, tmp_path: Path) -> None:
    """Whole answers, never more tokens than asked for, and what is held out is always the same."""
    limits = (20, 50, 90, None)
    texts = [text_of(answers, tmp_path / f"{n}.json", train_tokens=n) for n in limits]
    trained = [sequences(text, text.trained) for text in texts]
    assert trained[0] < trained[1] < trained[2] < trained[3]
    for text, limit in zip(texts, limits, strict=True):
        assert text.num_trained_tokens <= (limit or 1000)
        assert text.num_trained_tokens > (limit or 0) - MANY.max_new_tokens
        assert sequences(text, text.held_out) == sequences(texts[-1], texts[-1].held_out)
        assert not sequences(text, text.held_out) & sequences(text, text.trained)
        assert text.answers.num_sequences == len(text.trained) + len(text.held_out)


def test_answers_to_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    """Held out with its repeats, or trained on with them."""
    write(tmp_path / "a", data=replace(DATA, num_prompts=16, samples=2))
    text = text_of(tmp_path / "a", tmp_path / "text.json", held_out=0.3)
    groups = text.answers.groups
    held, trained = ({int(groups[s]) for s in part} for part in (text.held_out, text.trained))
    assert not held & trained
    assert len(text.held_out) > len(held)


@pytest.mark.parametrize(("limit", "message"), [(10**6, "hold [0-9]+ tokens"), (2, "give more")])
def test_a_part_that_cannot_be_taken_is_refused(answers: Path, limit: int, message: str) -> None:
    """More than there is would be less than the reader thinks."""
    with pytest.raises(TrainingError, match=f"train_tokens is {limit}, .*{message}"):
        text_of(answers, answers / "text.json", train_tokens=limit)
    assert not (answers / "text.json").exists()


def test_only_the_states_of_the_part_are_read(answers: Path, tmp_path: Path) -> None:
    """Each with its own tokens and prompt."""
    whole = load_answers(answers / "answers")
    part = load_answers(answers / "answers", sequences=[3, 17])
    for place, sequence in enumerate((3, 17)):
        rows = slice(int(whole.offsets[sequence]), int(whole.offsets[sequence + 1]))
        mine = slice(int(part.offsets[place]), int(part.offsets[place + 1]))
        assert torch.equal(part.tokens[mine], whole.tokens[rows])
        assert torch.equal(part.hidden[mine], whole.hidden[rows])
        length = whole.starts[sequence] - rows.start
        assert part.starts[place] - mine.start == length


# -- answers of another folder ---------------------------------------------------------------------


def test_many_runs_read_the_same_answers(answers: Path, tmp_path: Path) -> None:
    """Each in its own folder; nothing is written where the answers are."""
    before = everything_in(answers)
    whole = train_on(answers, tmp_path / "whole")
    part = train_on(answers, tmp_path / "part", train_tokens=60)
    other = train_on(answers, tmp_path / "other", recipe=replace(RECIPE, seed=5))
    assert everything_in(answers) == before
    own = train_on(answers, answers)
    assert weights_are_same(own.file, whole.file)
    assert not weights_are_same(own.file, part.file)
    assert not weights_are_same(own.file, other.file)
    report = json.loads((tmp_path / "part" / "report.json").read_text())
    assert report["train_tokens"] == 60
    assert 54 < report["num_train_tokens"] <= 60
    assert part.accuracy.num_positions == whole.accuracy.num_positions


def test_a_run_goes_on_with_the_answers_that_it_began_with(answers: Path, tmp_path: Path) -> None:
    """Whatever has been written since."""
    late = [answers / "answers" / f"answers-0000{i}.safetensors" for i in (2, 5)]
    kept = [file.rename(tmp_path / file.name) for file in late]
    whole = train_on(answers, tmp_path / "whole")
    with pytest.raises(Stop):
        train_on(answers, tmp_path / "part", progress=stopping_at(5), checkpoint_s=0)
    for file, place in zip(kept, late, strict=True):
        file.rename(place)
    assert weights_are_same(train_on(answers, tmp_path / "part").file, whole.file)
    assert not weights_are_same(train_on(answers, tmp_path / "new").file, whole.file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_tokens": 50}, "began with train_tokens None, not 50"),
        ({"held_out": 0.2}, r"began with held_out 0\.05, not 0\.2"),
    ],
    ids=["tokens", "held out"],
)
def test_a_folder_of_other_text_is_refused(
    answers: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    """Heads of another kind too, whose checkpoint would not tell."""
    train_on(answers, tmp_path / "out")
    with pytest.raises(TrainingError, match=message):
        train_on(answers, tmp_path / "out", recipe=replace(RECIPE, kind="medusa"), **change)


def test_answers_that_were_written_again_are_refused(answers: Path, tmp_path: Path) -> None:
    """Under the same names, but by other rules."""
    train_on(answers, tmp_path / "out")
    turns = [f"number {i} of them" for i in range(24)]
    write(tmp_path / "again", data=replace(MANY, seed=7), turns=turns)
    with pytest.raises(TrainingError, match="began with other answers than those in"):
        train_on(tmp_path / "again", tmp_path / "out")


def test_a_folder_with_answers_of_its_own_takes_no_others(answers: Path, tmp_path: Path) -> None:
    """Its settings speak of its own."""
    write(tmp_path / "out")
    with pytest.raises(TrainingError, match="has answers of its own"):
        train_on(answers, tmp_path / "out")


def test_a_folder_with_heads_of_other_answers_gets_none(answers: Path, tmp_path: Path) -> None:
    """It would be a folder of answers without answers."""
    train_on(answers, tmp_path / "out")
    with pytest.raises(TrainingError, match="heads of answers in another folder"):
        write(tmp_path / "out")
    train_on(answers, tmp_path / "out")


def test_a_folder_without_answers_is_named(answers: Path, tmp_path: Path) -> None:
    """The folder in it that holds the files is a likely slip."""
    with pytest.raises(TrainingError, match=r"no folder of answers, as it holds no settings\.json"):
        train_on(answers / "answers", tmp_path / "out")
    (answers / "settings.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"settings\.json: damaged \(no seed\)"):
        train_on(answers, tmp_path / "out")


# -- the model -------------------------------------------------------------------------------------


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    """Its answers would be mixed with those of the first, and heads be trained on both."""
    with pytest.raises(Stop):
        write(tmp_path / "out", progress=stopping_at(3))
    with pytest.raises(TrainingError, match="other weights, another --dtype or another device"):
        write(tmp_path / "out", model_seed=2)
    write(tmp_path / "out")
    train_on(tmp_path / "out", tmp_path / "out")
    with pytest.raises(TrainingError, match=r"another model .*a cosine of"):
        train_on(tmp_path / "out", tmp_path / "out", model_seed=2)


def test_answers_of_another_model_are_refused(answers: Path, tmp_path: Path) -> None:
    """By their states, which hold for any folder and any precision."""
    with pytest.raises(TrainingError, match=r"another model \(its states have a cosine of 0\."):
        train_on(answers, tmp_path / "out", model_seed=2)
    small = tiny_target(1, hidden_size=16, num_heads=2, num_kv_heads=1)
    with pytest.raises(TrainingError, match="states of size 32, the model has 16"):
        train_heads(small, answers, tmp_path / "out", TrainConfig("tiny", (RECIPE,)), silent)
    half = tiny_target(1, torch.bfloat16, tie_embeddings=False)
    trained = train_heads(half, answers, tmp_path / "half", TrainConfig("tiny", (RECIPE,)), silent)
    assert trained[0].file.is_file()


def test_a_folder_that_knows_no_digest_gets_one(tmp_path: Path) -> None:
    """Folders of version 0.1 name their model alone; the states in them tell whose they are."""
    write(tmp_path / "out")
    file = tmp_path / "out" / "settings.json"
    whole = json.loads(file.read_text())
    old = {name: value for name, value in whole.items() if name != "model_digest"}
    file.write_text(json.dumps(old))
    with pytest.raises(TrainingError, match="answers are of another model"):
        write(tmp_path / "out", model_seed=2)
    assert json.loads(file.read_text()) == old
    write(tmp_path / "out")
    assert json.loads(file.read_text()) == whole


# -- the disk --------------------------------------------------------------------------------------


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can grow beyond a size; the system refuses as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("num_bytes", "is_written"),
    [(1500, ()), (8000, ("text.json",))],
    ids=["answers", "checkpoint"],
)
def test_a_full_disk_ends_a_run_that_can_go_on(
    tmp_path: Path, num_bytes: int, is_written: tuple[str, ...]
) -> None:
    """Nothing half written is left, the message tells what to do, and it helps."""
    with full_disk(num_bytes), pytest.raises(TrainingError) as caught:
        run_training(tmp_path / "out")
    assert "File too large" in str(caught.value)
    assert "free some space or use another output folder, and run again" in str(caught.value)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"answers", "run.lock", "settings.json", *is_written}
    assert not list((tmp_path / "out").rglob("*.tmp"))
    whole = run_training(tmp_path / "whole")
    assert weights_are_same(run_training(tmp_path / "out").file, whole.file)


def test_what_a_killed_run_left_half_written_goes(tmp_path: Path) -> None:
    """A file of the user's own stays, whatever its name."""
    write(tmp_path / "out")
    ours = ["hydra.checkpoint.pt.tmp", ".hydra.safetensors.12.tmp", "answers/answers-1.12.tmp"]
    for name in (*ours, "mine.tmp"):
        (tmp_path / "out" / name).write_text("half")
    run_training(tmp_path / "out")
    left = [path.name for path in (tmp_path / "out").rglob("*.tmp")]
    assert left == ["mine.tmp"]


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """The second would remove what the first is about to finish."""
    write(tmp_path / "out")
    with FileLock(tmp_path / "out" / "run.lock"):
        with pytest.raises(TrainingError, match="another run is at work there"):
            write(tmp_path / "out")
        with pytest.raises(TrainingError, match="another run is at work there"):
            train_on(tmp_path / "out", tmp_path / "out")
    assert len(shard_names(tmp_path / "out" / "answers")) == 3


def test_a_run_goes_on_from_heads_of_another(answers: Path, tmp_path: Path) -> None:
    """Hydra++ begins where Hydra ended, with its hot tokens; stopped, it ends with the same."""
    first = train_on(answers, tmp_path / "first", recipe=replace(RECIPE, hot_vocab_size=20))
    recipe = replace(RECIPE, kind="hydra++", hot_vocab_size=25)
    start = {"recipe": recipe, "start_from": first.file}
    whole = train_on(answers, tmp_path / "whole", **start)
    assert torch.equal(load_file(whole.file)["hot_ids"], load_file(first.file)["hot_ids"])
    assert whole.history[0].top[0][0] >= first.history[0].top[0][0]
    with pytest.raises(Stop):
        train_on(answers, tmp_path / "part", progress=stopping_at(3), checkpoint_s=0, **start)
    assert weights_are_same(train_on(answers, tmp_path / "part", **start).file, whole.file)
    with pytest.raises(TrainingError, match="made with other settings"):
        train_on(answers, tmp_path / "part", recipe=recipe)
    other = replace(RECIPE, kind="medusa")
    with pytest.raises(TrainingError, match="hydra are no start for medusa"):
        train_on(answers, tmp_path / "new", recipe=other, start_from=first.file)
    assert not list((tmp_path / "new").glob("*.pt"))
