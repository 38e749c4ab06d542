"""Heads in published layouts on a model from disk: the output is that of the model alone."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

import entmtp
from entmtp.drafters.base import Drafter
from entmtp.drafters.empty import EmptyDrafter
from entmtp.engine import Engine, EngineLimits, GenerationResult
from entmtp.errors import AssetError, CheckpointError
from entmtp.loading.drafters import load_drafter
from entmtp.params import SamplingParams
from entmtp.topology import Topology
from exactness import NONE, RandomScheduler, outcome, random_topology
from fakes import ByteTokenizer
from heads_cases import CASES, LAYOUTS, SIZES, World
from published import Published

Made = Callable[[str], Published]

PROMPTS = ((70, 71, 72), (5,) * 20, (200, 3, 200, 3, 200))
WIDE = Topology.from_paths([(rank,) for rank in range(60)] + [(rank, 0) for rank in range(30)])
TREES = (WIDE, Topology(()), *(random_topology(random.Random(n), 30, 3) for n in range(4)))
SHORT = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A tiny model, in float64, where no near-tie can flip."""
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Heads of a case, made once."""
    return cache(lambda name: CASES[name].build(world, tmp_path_factory.mktemp("heads")))


def decode(
    world: World,
    drafter: Drafter | None,
    sampling: SamplingParams,
    prompts: Sequence[Sequence[int]],
) -> list[GenerationResult]:
    """Texts of a batch; plain decoding without a drafter."""
    tokenizer = ByteTokenizer(SIZES.vocab_size, eos_ids=(258,))
    limits = EngineLimits(max_batch_size=3, prefill_chunk=7, spare_rows=4)
    scheduler = NONE if drafter is None else RandomScheduler(1, TREES)
    engine = Engine(world.target, drafter or EmptyDrafter(), scheduler, tokenizer, limits)
    return engine.generate_batch(prompts, sampling)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_heads_change_no_token(
    world: World, made: Made, name: str, temperature: float
) -> None:
    """With a tree drawn anew at every step, alone and in a batch of three; drafts are accepted."""
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    drafter = world.drafter(made(name).folder)
    expected = decode(world, None, sampling, PROMPTS)
    together = decode(world, drafter, sampling, PROMPTS)
    assert [outcome(r) for r in together] == [outcome(r) for r in expected]
    (alone,) = decode(world, drafter, sampling, PROMPTS[:1])
    assert outcome(alone) == outcome(expected[0])
    assert sum(step.num_accepted for r in together for step in r.stats.steps) > 3


@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-mimo"])
def test_a_target_reads_past_its_own_module(world: World, made: Made, name: str) -> None:
    """A model with a native module decodes as the same model without it, drafting or not."""
    folder = made(name).folder
    plain = entmtp.load(str(world.folder), "none").generate("abc", SHORT)
    for heads in ("none", "mtp"):
        engine = entmtp.load(str(folder), heads)
        assert engine.target.config.num_mtp_modules == 1
        assert engine.generate("abc", SHORT).token_ids == plain.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["vllm-truncated-bias", "hydra++", "mtp-deepseek-copies"])
def test_heads_draft_in_half_precision(world: World, made: Made, name: str, dtype: str) -> None:
    """Caches, rotary tables and matrices are all of the target's dtype."""
    tree = Topology.from_paths([(0,), (1,), (0, 0), (1, 2), (0, 0, 0)])
    engine = entmtp.load(str(world.folder), str(made(name).file), dtype=dtype, topology=tree)
    stats = engine.generate("abcabc", SHORT).stats
    assert (stats.dtype, stats.drafter) == (dtype, CASES[name].kind)
    assert stats.num_drafted > 8


# -- what load picks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-mimo"])
@pytest.mark.parametrize("heads", ["mtp", "auto"])
def test_load_picks_the_native_module(made: Made, name: str, heads: str) -> None:
    """By name, and by itself where a model has one; any tree may be used with it."""
    engine = entmtp.load(str(made(name).folder), heads)
    assert (engine.drafter.name, engine.drafter.max_depth) == ("mtp", None)
    assert engine.generate("abab", SHORT).stats.drafter == "mtp"
    deep = Topology.from_paths([(0,) * depth for depth in range(1, 9)])
    engine = entmtp.load(str(made(name).folder), heads, topology=deep)
    assert engine.generate("abab", SHORT).stats.num_drafted > 8


def test_a_native_module_need_not_be_used(made: Made) -> None:
    """Other drafters are taken where they are asked for."""
    folder = str(made("mtp-mimo").folder)
    for heads, name in (("lookup", "lookup"), ("none", "none"), (str(made("hydra").file), "hydra")):
        assert entmtp.load(folder, heads).drafter.name == name


def test_a_model_without_a_module_refuses_mtp(world: World) -> None:
    """The message says where it would be stated, and what can be done."""
    message = r"no multi-token module of its own \(num_nextn_predict_layers.*'lookup'"
    with pytest.raises(CheckpointError, match=message):
        entmtp.load(str(world.folder), "mtp")


# -- a folder of heads as the model ----------------------------------------------------------------


def heads_with_base(published: Published, folder: Path, base: str) -> Path:
    """A copy of a folder of heads that names its base model."""
    shutil.copytree(published.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    return folder


@pytest.mark.parametrize("name", LAYOUTS[:5])
def test_a_folder_of_heads_loads_its_base_model(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """One name gives both; the output is that of the base model."""
    folder = heads_with_base(made(name), tmp_path / "heads", str(world.folder))
    engine = entmtp.load(str(folder))
    assert engine.drafter.name == CASES[name].kind
    plain = entmtp.load(str(world.folder), "none").generate("abc", SHORT)
    assert engine.generate("abc", SHORT).token_ids == plain.token_ids


def test_heads_that_name_heads_as_their_base_are_refused(made: Made, tmp_path: Path) -> None:
    """Themselves or others; the message once asked to fetch a tokenizer."""
    folder = heads_with_base(made("medusa-v1"), tmp_path / "heads", str(tmp_path / "heads"))
    other = heads_with_base(made("hydra"), tmp_path / "other", str(folder))
    for heads in (folder, other):
        with pytest.raises(CheckpointError, match="which is a folder of heads again: give the mod"):
            entmtp.load(str(heads))


@pytest.mark.parametrize(("heads", "name"), [("none", "none"), ("lookup", "lookup")])
def test_the_base_of_heads_may_draft_otherwise(
    world: World, made: Made, tmp_path: Path, heads: str, name: str
) -> None:
    """The folder then only says which model is meant."""
    folder = heads_with_base(made("hydra"), tmp_path / "heads", str(world.folder))
    assert entmtp.load(str(folder), heads).drafter.name == name


def test_the_base_of_heads_may_have_a_module(made: Made, tmp_path: Path) -> None:
    """``mtp`` means that of the base model."""
    base = str(made("mtp-mimo").folder)
    folder = heads_with_base(made("hydra"), tmp_path / "heads", base)
    assert entmtp.load(str(folder), "mtp").drafter.name == "mtp"
    assert entmtp.load(str(folder)).drafter.name == "hydra"


def test_a_base_that_is_nowhere_is_named(made: Made, tmp_path: Path) -> None:
    """The message names the model that the heads ask for, not the heads."""
    folder = heads_with_base(made("hydra"), tmp_path / "heads", "./no-such-model")
    with pytest.raises(AssetError, match=r"no model '\./no-such-model'"):
        entmtp.load(str(folder))


def test_a_base_that_the_heads_do_not_fit_is_refused(
    world: World, made: Made, tmp_path: Path
) -> None:
    """A config may name the wrong model; nothing is drafted with it."""
    wide = World(tmp_path / "wide", hidden_size=64, head_dim=16)
    folder = heads_with_base(made("medusa-v1"), tmp_path / "heads", str(wide.folder))
    with pytest.raises(CheckpointError, match=r"with hidden size 32, but .* has 64"):
        entmtp.load(str(folder))


def test_heads_on_a_model_by_folder_need_no_name(world: World, made: Made) -> None:
    """A drafter for an engine that is put together by hand."""
    drafter = load_drafter(str(made("hydra++").folder), world.target, "my own engine")
    assert (drafter.name, drafter.max_depth) == ("hydra++", 4)
