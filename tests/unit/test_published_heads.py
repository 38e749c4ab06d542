"""Heads in every published layout draft what their formulas say, wherever they lie."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from entmtp.drafters.base import Drafter
from entmtp.drafters.checkpoint import read_heads_file, save_heads
from entmtp.drafters.formats.layouts import detect
from entmtp.loading.drafters import heads_of_source, make_drafter
from entmtp.loading.heads_source import HeadsSource, find_heads
from entmtp.topology import Topology
from heads_cases import CASES, MODEL, SIZES, World, brute_force, random_text
from published import Published
from strategies import topologies

Made = Callable[[str], tuple[Published, Drafter]]

LATE = Topology.from_paths([(0,), (1,), (2,), (2, 0), (2, 3), (2, 3, 1)])
GAPS = Topology.from_paths([(3,), (7,), (7, 9), (7, 9, 5)])
SINGLE = Topology.from_paths([(4,)])
EMPTY = Topology(())
WIDE = Topology.from_paths([(0,), (0, 0), (0, 0, 0), (1,), (1, 1), (6,), (6, 0)])

every_case = pytest.mark.parametrize("name", CASES)
trees = topologies(max_nodes=14, max_depth=5, max_rank=9)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model that all heads are for."""
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The heads of a case, and a drafter from their folder; made once."""

    @cache
    def make(name: str) -> tuple[Published, Drafter]:
        published = CASES[name].build(world, tmp_path_factory.mktemp("heads"))
        return published, world.drafter(published.folder)

    return make


def source_of(published: Published, way: str) -> HeadsSource:
    """The heads as a user may name them: a file, a folder, or an id of the Hub."""
    if way == "hub":
        return find_heads("someone/heads", download=lambda repo_id: str(published.folder))
    return find_heads(str(published.file if way == "file" else published.folder))


def fits(drafter: Drafter, plan: Topology) -> Topology:
    """As much of a tree as the heads can fill."""
    return plan if drafter.max_depth is None else plan.truncate(drafter.max_depth)


def drafted(drafter: Drafter, seed: int, plan: Topology) -> list[int]:
    """Tokens of a tree behind a random text."""
    text = random_text(drafter, seed)
    return drafter.draft([text.request(fits(drafter, plan))])[0].tokens.tolist()


# -- what is drafted -------------------------------------------------------------------------------


@every_case
@given(plans=st.lists(trees, min_size=1, max_size=3), seed=st.integers(0, 2**20))
@example(plans=[LATE, EMPTY, GAPS], seed=1)
@example(plans=[SINGLE, WIDE], seed=2)
@settings(max_examples=8, derandomize=True)
def test_every_node_of_a_batch_is_what_the_formulas_give(
    world: World, made: Made, name: str, plans: list[Topology], seed: int
) -> None:
    """After a prefill and several commits, beside other sequences, and the same as alone."""
    published, drafter = made(name)
    plans = [fits(drafter, plan) for plan in plans]
    texts = [random_text(drafter, seed + number) for number in range(len(plans))]
    requests = [text.request(plan) for text, plan in zip(texts, plans, strict=True)]
    together = [tree.tokens.tolist() for tree in drafter.draft(requests)]
    assert together == [
        brute_force(world, published, text, plan) for text, plan in zip(texts, plans, strict=True)
    ]
    assert together == [drafter.draft([request])[0].tokens.tolist() for request in requests]


@pytest.mark.parametrize("name", ["hydra++", "mtp-deepseek", "mtp-mimo"])
def test_a_module_with_a_cache_drafts_rightly_behind_a_long_text(
    world: World, made: Made, name: str
) -> None:
    """A text read at once and a text read in single rows give the tree of the formulas."""
    published, drafter = made(name)
    text = random_text(drafter, 11)
    hidden, tokens = text.hidden.repeat(6, 1), (*text.tokens[:-1] * 6, 7)
    assert len(hidden) > 60
    at_once = drafter.prefill(tokens[:-1], hidden, tokens[-1])
    in_rows = drafter.prefill(tokens[:1], hidden[:1], tokens[1])
    for row in range(1, len(hidden)):
        drafter.commit(in_rows, hidden[row : row + 1], tokens[row + 1 : row + 2])
    for state in (at_once, in_rows):
        long = type(text)(state, hidden, tokens)
        (tree,) = drafter.draft([long.request(LATE)])
        assert tree.tokens.tolist() == brute_force(world, published, long, LATE)


# -- what the tensors say --------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("way", ["file", "folder", "hub"])
def test_heads_are_read_wherever_they_lie(world: World, made: Made, name: str, way: str) -> None:
    """A file, a folder and an id give the same drafter."""
    published, expected = made(name)
    heads = heads_of_source(source_of(published, way), world.target, MODEL)
    drafter = make_drafter(heads, world.target)
    assert (drafter.name, drafter.max_depth) == (expected.name, expected.max_depth)
    assert drafted(drafter, 5, WIDE) == drafted(expected, 5, WIDE)


@every_case
def test_numbers_come_from_the_tensors(made: Made, name: str) -> None:
    """Kind, layout, heads, layers and vocabulary, whatever config.json says."""
    (published, drafter), case = made(name), CASES[name]
    source = source_of(published, "folder")
    sizes = detect(source.path, source.tensors(), {}).sizes()
    assert (sizes.layout, sizes.kind) == (case.layout, case.kind)
    assert (sizes.num_heads, sizes.num_layers) == (case.num_heads, case.num_layers)
    assert sizes.hidden_size == SIZES.hidden_size
    assert (drafter.name, drafter.max_width) == (case.kind, case.hot_vocab_size)
    assert drafter.max_depth == (None if case.kind == "mtp" else case.num_heads)


def test_a_config_that_names_too_few_heads_is_noted(made: Made) -> None:
    """The published Medusa config says 2 heads; the file holds 5."""
    source = source_of(made("medusa-v1")[0], "folder")
    sizes = detect(source.path, source.tensors(), source.config).sizes()
    assert sizes.num_heads == 5
    assert sizes.notes == ("config.json says 2 heads; the file holds 5",)


# -- conversion ------------------------------------------------------------------------------------


@every_case
def test_converted_heads_draft_the_same(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """Written in the project's own format and read back, bit for bit."""
    published, expected = made(name)
    heads = heads_of_source(source_of(published, "folder"), world.target, MODEL)
    save_heads(heads, tmp_path / "own.safetensors", MODEL)
    drafter = world.drafter(tmp_path / "own.safetensors")
    assert read_heads_file(tmp_path / "own.safetensors").config == heads.config
    for seed, plan in enumerate([LATE, GAPS, WIDE, SINGLE]):
        assert drafted(drafter, seed, plan) == drafted(expected, seed, plan)


@every_case
def test_heads_converted_to_int8_load(world: World, made: Made, tmp_path: Path, name: str) -> None:
    """They are another approximation, so only what they are is compared."""
    published, expected = made(name)
    heads = heads_of_source(source_of(published, "folder"), world.target, MODEL)
    save_heads(heads, tmp_path / "own.safetensors", MODEL, quantize=True)
    drafter = world.drafter(tmp_path / "own.safetensors")
    assert (drafter.name, drafter.max_depth, drafter.max_width) == (
        expected.name,
        expected.max_depth,
        expected.max_width,
    )
    assert len(drafted(drafter, 1, WIDE)) == fits(drafter, WIDE).num_rows


def test_tied_layers_are_kept_once(world: World, made: Made, tmp_path: Path) -> None:
    """One block stands for all the equal ones, in memory and in the converted file."""
    heads = heads_of_source(source_of(made("hydra++")[0], "file"), world.target, MODEL)
    assert heads.config.is_tied
    save_heads(heads, tmp_path / "own.safetensors", MODEL)
    names = [n for n in heads.state_dict() if n.startswith("blocks.") and n.endswith("weight")]
    assert names == [f"blocks.{head}.0.linear.weight" for head in range(4)]
    assert torch.equal(
        heads.state_dict()["blocks.2.0.linear.weight"],
        source_of(made("hydra++")[0], "file").tensors()["hydra_mlp.2.7.linear.weight"],
    )
