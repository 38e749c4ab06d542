"""load: names and files to an engine, or a sentence about what does not fit."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import entmtp
from entmtp.bank import Bank
from entmtp.calibrate import adapt
from entmtp.drafters.checkpoint import save_heads
from entmtp.drafters.empty import EmptyDrafter
from entmtp.drafters.heads import HeadsConfig, build_heads
from entmtp.drafters.prompt_lookup import PromptLookupDrafter
from entmtp.errors import (
    AssetError,
    BankError,
    CheckpointError,
    EntmtpError,
    InputError,
    TopologyError,
)
from entmtp.loading import loader
from entmtp.loading.loader import load, set_threads
from entmtp.scheduler import FixedScheduler, HysteresisScheduler
from fakes import HopelessDrafter
from tiny_gguf import make_tensors, write_gguf
from tiny_model import make_model_folder

VOCAB, HIDDEN = 259, 32
TINY = entmtp.SamplingParams(max_new_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model folder."""
    return str(make_model_folder(tmp_path_factory.mktemp("model"), tie_embeddings=False))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file, tokenizer included."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, make_tensors())
    return path


def make_heads_file(
    file: Path, kind: str = "hydra", *, hidden: int = HIDDEN, vocab: int = VOCAB, num_heads: int = 2
) -> str:
    """New heads over the first 40 tokens."""
    config = HeadsConfig(kind, hidden, vocab, num_heads)
    save_heads(build_heads(config, torch.arange(40)), file, "some-model")
    return str(file)


# -- drafters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_what_is_no_temperature_is_refused(model: str, temperature: float) -> None:
    """With a calibrated bank or without."""
    with pytest.raises(InputError, match="temperature is"):
        load(model, "none", temperature=temperature)


def test_a_model_without_heads_drafts_by_lookup_and_says_so(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The note names the model."""
    with caplog.at_level(logging.WARNING, "entmtp"):
        engine = load(model)
    assert isinstance(engine.drafter, PromptLookupDrafter)
    assert f"there are no heads for {model}: drafting by prompt lookup" in caplog.text


def test_lookup_and_none_need_no_note(model: str, caplog: pytest.LogCaptureFixture) -> None:
    """What was asked for is not commented on."""
    assert isinstance(load(model, "lookup").drafter, PromptLookupDrafter)
    assert isinstance(load(model, "none").drafter, EmptyDrafter)
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_shipped_heads_that_do_not_exist_are_refused(model: str, kind: str) -> None:
    """The message names the ways out."""
    with pytest.raises(CheckpointError, match=rf"no {kind} heads .*entmtp train.*'lookup'"):
        load(model, kind)


@pytest.mark.parametrize("kind", ["hydra", "medusa"])
def test_a_file_of_heads_drafts(model: str, tmp_path: Path, kind: str) -> None:
    """With the target's own rows as output; decoding is that of the model alone."""
    file = make_heads_file(tmp_path / "h.safetensors", kind)
    engine = load(model, file)
    plain = load(model, "none")
    assert (engine.drafter.name, engine.drafter.max_depth) == (kind, 2)
    assert engine.generate("abc", TINY).token_ids == plain.generate("abc", TINY).token_ids


def test_heads_with_their_own_output_draft(model: str, tmp_path: Path) -> None:
    """Nothing of the target's output head is attached."""
    config = HeadsConfig("medusa", HIDDEN, VOCAB, 1, has_own_output=True)
    save_heads(build_heads(config, torch.arange(9)), tmp_path / "h.safetensors", "m")
    engine = load(model, str(tmp_path / "h.safetensors"))
    assert engine.generate("abc", TINY).stats.drafter == "medusa"


def test_heads_follow_the_dtype_of_the_target(model: str, tmp_path: Path) -> None:
    """Hidden states come in it."""
    file = make_heads_file(tmp_path / "h.safetensors")
    result = load(model, file, dtype="bfloat16").generate("abc", TINY)
    assert (result.stats.dtype, result.stats.num_tokens) == ("bfloat16", 6)


@pytest.mark.parametrize(("what", "size"), [("hidden", 16), ("vocab", 300)])
def test_heads_of_another_model_are_refused(
    model: str, tmp_path: Path, what: str, size: int
) -> None:
    """Another hidden size or vocabulary; both models are named."""
    file = make_heads_file(tmp_path / "h.safetensors", **{what: size})  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=rf"trained on some-model with a .* of {size}, but"):
        load(model, file)


def test_a_drafter_of_one_s_own_is_taken(model: str) -> None:
    """Any object with the drafter's methods."""
    drafter = HopelessDrafter([])
    assert load(model, drafter).drafter is drafter


# -- trees and policies ----------------------------------------------------------------------------


def test_the_default_policy_is_hysteresis_over_the_shipped_trees(model: str) -> None:
    """Cut to what the drafter can fill."""
    engine = load(model, "lookup")
    assert isinstance(engine.scheduler, HysteresisScheduler)
    assert set(engine.generate("ababab", TINY).stats.topology_steps) <= {"none", "chain4", "tree16"}


def test_shipped_trees_are_cut_to_the_heads(model: str, tmp_path: Path) -> None:
    """Two heads fill the upper two levels; nothing has to be chosen by hand."""
    file = make_heads_file(tmp_path / "h.safetensors")
    stats = load(model, file).generate("abc", TINY).stats
    assert stats.num_drafted > 0


def test_plain_decoding_has_the_empty_tree(model: str) -> None:
    """With or without its name."""
    for topology in (None, "none", entmtp.Topology(())):
        scheduler = load(model, "none", topology=topology).scheduler
        assert isinstance(scheduler, FixedScheduler)


def test_a_topology_is_used_at_every_step(model: str, tmp_path: Path) -> None:
    """By name, from a file, and as an object."""
    (tmp_path / "mine.json").write_text("[[0], [1], [0, 0]]")
    tree = entmtp.Topology.from_paths([[0], [0, 0]])
    given = {"tree8": "tree8", str(tmp_path / "mine.json"): "mine.json", tree: tree.digest}
    for topology, name in given.items():
        engine = load(model, "lookup", topology=topology)  # type: ignore[arg-type]
        assert set(engine.generate("ababab", TINY).stats.topology_steps) == {name}


def test_a_bank_file_replaces_the_shipped_trees(model: str, tmp_path: Path) -> None:
    """Its entries are chosen by the policy, or by name for every step."""
    small = entmtp.Topology.from_paths([[0]])
    bank = Bank.of({"chain4": small, "tree16": small, "pair": small})
    (tmp_path / "bank.json").write_text(bank.to_json())
    for given in (bank, tmp_path / "bank.json", str(tmp_path / "bank.json")):
        stats = load(model, "lookup", given).generate("ababab", TINY).stats
        assert stats.num_drafted <= stats.num_steps
    engine = load(model, "lookup", tmp_path / "bank.json", topology="pair")
    assert set(engine.generate("ababab", TINY).stats.topology_steps) == {"pair"}


def test_the_bank_that_ships_for_all_texts_is_the_default(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was made for model and drafter; nothing reads it where no bank is used."""
    (tmp_path / "mixed.json").write_text(Bank.of({}).to_json())
    monkeypatch.setattr(loader, "shipped_banks", lambda: {"mixed": tmp_path / "mixed.json"})
    with pytest.raises(BankError, match="no entry 'chain4'"):  # so it was read
        load(model, "lookup")
    monkeypatch.setattr(adapt, "is_bank_of", lambda *_: False)
    load(model, "lookup")
    monkeypatch.setattr(loader, "shipped_banks", lambda: pytest.fail("not needed"))
    load(model, "lookup", policy="plain")
    load(model, "lookup", topology="tree8")
    load(model, "lookup", Bank.shipped())


def test_a_bank_without_the_policy_s_levels_is_refused(model: str, tmp_path: Path) -> None:
    """The message names the missing entry."""
    (tmp_path / "bank.json").write_text(Bank.of({}).to_json())
    with pytest.raises(BankError, match="no entry 'chain4'"):
        load(model, "lookup", tmp_path / "bank.json")
    for drafter in ("lookup", "none"):
        with pytest.raises(BankError, match="neither a file nor one of those that ship"):
            load(model, drafter, tmp_path / "nothing.json")


def test_a_scheduler_of_one_s_own_is_taken(model: str) -> None:
    """It brings its trees; a topology or a bank beside it was once ignored without a word."""
    scheduler = FixedScheduler("mine", entmtp.Topology.from_paths([[0]]))
    assert load(model, "lookup", policy=scheduler).scheduler is scheduler
    for extra in ({"topology": "tree8"}, {"bank": Bank.of({})}):
        with pytest.raises(InputError, match="leave out topology and bank"):
            load(model, "lookup", policy=scheduler, **extra)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("drafter", "options", "message"),
    [
        ("lookup", {"policy": "hysteresis", "topology": "tree8"}, "leave out the topology"),
        ("lookup", {"policy": "fixed"}, "needs a topology"),
        ("lookup", {"policy": "best"}, "policy is 'best'; it must be one of auto, plain"),
        ("none", {"topology": "tree8"}, "trees need another drafter"),
        ("none", {"policy": "hysteresis"}, "trees need another drafter"),
    ],
    ids=["both", "neither", "unknown", "tree alone", "policy alone"],
)
def test_policies_and_topologies_that_exclude_each_other_are_refused(
    model: str, drafter: str, options: dict[str, Any], message: str
) -> None:
    """Nothing is dropped silently."""
    with pytest.raises(InputError, match=message):
        load(model, drafter, **options)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 0], [0, 0, 0]], "3 deep, but the hydra drafter has 2 heads"),
        ([[40]], "child rank 40, but the hydra drafter ranks 40 tokens"),
    ],
    ids=["deep", "wide"],
)
def test_a_tree_beyond_the_heads_is_refused(
    model: str, tmp_path: Path, paths: list[list[int]], message: str
) -> None:
    """At once, not at the first step."""
    file = make_heads_file(tmp_path / "h.safetensors")
    with pytest.raises(TopologyError, match=message):
        load(model, file, topology=entmtp.Topology.from_paths(paths))


def test_an_unknown_tree_is_refused(model: str) -> None:
    """The message lists those that ship."""
    with pytest.raises(TopologyError, match=r"no topology 'tree99'.*tree16"):
        load(model, "lookup", topology="tree99")


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype is 'int4'; it must be auto, int8 or one of float32"),
        ({"dtype": "int8", "backend": "torch"}, "of the native backend, which is not used"),
        ({"device": "tpu"}, "device is 'tpu'; it must be auto, cpu or cuda"),
        ({"device": "mps"}, "device is 'mps'; it must be auto, cpu or cuda"),
        ({"device": "cuda:99"}, "there is no device cuda:99"),
        ({"backend": "metal"}, "backend is 'metal'; it must be one of auto, torch, native"),
        ({"backend": "native", "dtype": "float32"}, "computes in int8 on a CPU, not in float32"),
        ({"threads": 0}, "threads is 0; it must be between 1 and 1024"),
        ({"threads": 10**12}, "it must be between 1 and 1024"),
    ],
    ids=str,
)
def test_bad_options_are_refused(model: str, options: dict[str, Any], message: str) -> None:
    """The message names the value and what may be given instead."""
    with pytest.raises(InputError, match=message):
        load(model, "lookup", **options)


def test_options_are_used(model: str) -> None:
    """Device, dtype, backend and limits are what was asked for."""
    limits = entmtp.EngineLimits(max_batch_size=3)
    engine = load(
        model, "lookup", dtype="bfloat16", device="cpu", backend="torch", threads=1, limits=limits
    )
    assert (engine.target.dtype, engine.target.device) == (torch.bfloat16, torch.device("cpu"))
    assert (engine.limits, engine.target.backend) == (limits, "torch-cpu")


def test_threads_are_set() -> None:
    """For the whole process."""
    before = torch.get_num_threads()
    set_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    set_threads(before)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """One with more tokens than the model has rows would give ids that do not exist."""
    folder = make_model_folder(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["one-more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"has 260 tokens, the model only 259"):
        load(str(folder), "lookup")


@pytest.mark.parametrize("name", ["nothing-here", "./nothing", "smollm2-135m"])
def test_a_missing_model_is_refused(name: str) -> None:
    """An unknown name, a missing folder, and a known model that has not been pulled."""
    with pytest.raises(AssetError, match=r"no model|entmtp pull"):
        load(name)


def test_a_gguf_file_decodes_end_to_end(gguf: Path) -> None:
    """Weights, tokenizer and chat template come from the one file; trees change nothing."""
    engine, plain = load(str(gguf), "lookup", topology="tree8"), load(str(gguf), "none")
    prompt = engine.chat_prompt("hello hello")
    assert prompt == plain.chat_prompt("hello hello")
    assert engine.generate(prompt, TINY).token_ids == plain.generate(prompt, TINY).token_ids


@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_truncated_gguf_file_is_refused(gguf: Path, tmp_path: Path, share: float) -> None:
    """Wherever a download broke off, and no tokenizer of it is kept."""
    data = gguf.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        load(str(tmp_path / "short.gguf"))


def test_one_handler_catches_everything_that_load_refuses(model: str, tmp_path: Path) -> None:
    """All of these errors have one base class."""
    (tmp_path / "tree.json").write_text(json.dumps([[0, 0]]))
    for options in ({"topology": str(tmp_path / "tree.json")}, {"dtype": "x"}, {"heads": "x"}):
        with pytest.raises(EntmtpError):
            load(model, **options)  # type: ignore[arg-type]
