"""Heads as people pass them on: other containers, names and dtypes, other choices in training."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from entmtp.drafters.base import Drafter
from entmtp.drafters.checkpoint import save_heads
from entmtp.loading.drafters import heads_of_source, load_drafter
from entmtp.loading.heads_source import find_heads, native_module
from entmtp.topology import Topology
from heads_cases import (
    CASES,
    MODEL,
    World,
    brute_force,
    random_text,
    rewritten,
    tensors_of,
)
from published import Published

Made = Callable[[str], Published]
Tensors = dict[str, Tensor]

TREE = Topology.from_paths([(0,), (1,), (2,), (2, 0), (2, 3), (0, 5)])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model that all heads are for."""
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Heads of a case as published, made once."""
    return cache(lambda name: CASES[name].build(world, tmp_path_factory.mktemp("heads")))


def assert_drafts_like(world: World, published: Published, drafter: Drafter) -> None:
    """Trees behind a few texts are those of the published formulas."""
    for seed in range(3):
        text = random_text(drafter, seed)
        (tree,) = drafter.draft([text.request(TREE)])
        assert tree.tokens.tolist() == brute_force(world, published, text, TREE)


# -- containers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
@pytest.mark.parametrize("name", ["medusa-v1", "hydra++"])
def test_any_container_holds_any_layout(
    world: World, made: Made, tmp_path: Path, name: str, suffix: str
) -> None:
    """The name of a file tells how it is read, its tensors what it is."""
    file, tensors = tmp_path / f"heads{suffix}", tensors_of(made(name))
    if suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)
    assert_drafts_like(world, made(name), world.drafter(file))


@pytest.mark.parametrize("protocol", [2, 3])
def test_old_pickles_are_read(world: World, made: Made, tmp_path: Path, protocol: int) -> None:
    """Without the zip container of later releases."""
    file = tmp_path / "medusa_lm_head.pt"
    torch.save(
        tensors_of(made("medusa-v1")),
        file,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=False,
    )
    assert_drafts_like(world, made("medusa-v1"), world.drafter(file))


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_a_training_checkpoint_is_unwrapped(
    world: World, made: Made, tmp_path: Path, key: str
) -> None:
    """The state dict may lie under a usual key, beside numbers of the training run."""
    file = tmp_path / "heads.pt"
    torch.save({"epoch": 3, key: tensors_of(made("hydra"))}, file)
    assert_drafts_like(world, made("hydra"), world.drafter(file))


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("medusa-v1", "module."),
        ("medusa-v2", "medusa_head."),
        ("medusa-v1", "model.medusa_head."),
        ("hydra", "hydra_head."),
        ("hydra++", "module."),
    ],
)
def test_usual_prefixes_are_cut(
    world: World, made: Made, tmp_path: Path, name: str, prefix: str
) -> None:
    """Those of data-parallel training and of the module around the heads."""
    renamed = {prefix + n: tensor for n, tensor in tensors_of(made(name)).items()}
    file = rewritten(made(name), tmp_path / "h", renamed)
    assert_drafts_like(world, made(name), world.drafter(file))


@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-mimo"])
def test_a_module_may_lie_in_a_file_of_its_own(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """With the model's prefix before its names or without."""
    tensors = tensors_of(made(name))
    for number, prefix in enumerate(("", "model.")):
        names = {n: n.removeprefix("model.") for n in tensors}
        file = tmp_path / f"{number}.safetensors"
        save_file({prefix + names[n]: tensor for n, tensor in tensors.items()}, file)
        assert_drafts_like(world, made(name), world.drafter(file))


def test_the_first_of_several_modules_is_used(world: World, made: Made, tmp_path: Path) -> None:
    """The others, for deeper tokens, are left alone."""
    tensors = tensors_of(made("mtp-mimo"))
    more = {n.replace("mtp_layers.0.", "mtp_layers.1."): t.flip(0) for n, t in tensors.items()}
    save_file({**more, **tensors}, tmp_path / "heads.safetensors")
    assert_drafts_like(world, made("mtp-mimo"), world.drafter(tmp_path / "heads.safetensors"))


@pytest.mark.parametrize("name", ["medusa-v1", "vllm-truncated", "hydra++", "mtp-mimo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_heads_of_other_dtypes_follow_the_target(
    world: World, made: Made, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Published heads are mostly in half precision; all is computed in the target's dtype."""
    published = made(name)
    rounded = {
        n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors_of(published).items()
    }
    back = {n: t.float() if t.is_floating_point() else t for n, t in rounded.items()}
    first = world.drafter(rewritten(published, tmp_path / "first", rounded))
    second = world.drafter(rewritten(published, tmp_path / "second", back))
    for seed in range(3):
        trees = [d.draft([random_text(d, seed).request(TREE)])[0] for d in (first, second)]
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()


# -- other choices in training ---------------------------------------------------------------------


def test_layers_that_are_not_tied_are_kept_apart(world: World, made: Made, tmp_path: Path) -> None:
    """One that differs by a single number is enough; then it takes part."""
    tensors = tensors_of(made("hydra-tied"))
    tensors["hydra_mlp.1.2.linear.weight"][0, 0] += 1.0
    heads = rewritten(made("hydra-tied"), tmp_path / "h", tensors)
    loaded = heads_of_source(find_heads(str(heads)), world.target, MODEL)
    assert not loaded.config.is_tied
    for layer, number in enumerate((1, 2)):
        ours = loaded.state_dict()[f"blocks.1.{layer}.linear.weight"]
        assert torch.equal(ours, tensors[f"hydra_mlp.1.{number}.linear.weight"])


def test_a_token_map_of_all_tokens_orders_the_rows(
    world: World, made: Made, tmp_path: Path
) -> None:
    """Row i scores token_map[i] even where no token is left out; the map was once ignored."""
    tensors = tensors_of(made("vllm-full"))
    order = torch.randperm(259, generator=torch.Generator().manual_seed(0))
    tensors = {n.removeprefix("medusa_heads."): t for n, t in tensors.items()}
    rows = {n: t[order] if n.startswith("lm_heads") else t for n, t in tensors.items()}
    file = rewritten(made("vllm-full"), tmp_path / "h", {**rows, "token_map": order})
    assert_drafts_like(world, made("vllm-full"), world.drafter(file))


def test_an_output_head_that_differs_from_the_target_s_is_used(
    world: World, made: Made, tmp_path: Path
) -> None:
    """A multi-token module may have been trained further with a head of its own."""
    name = "model.layers.2.shared_head.head.weight"
    tensors = tensors_of(made("mtp-deepseek-copies"))
    same = world.drafter(made("mtp-deepseek-copies").folder)
    assert not same.module.config.has_own_output
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "heads.safetensors")
    drafter = world.drafter(tmp_path / "heads.safetensors")
    assert drafter.module.config.has_own_output
    chain = Topology.from_paths([(0,), (1,), (7,)])
    for seed in range(3):
        (ours,) = drafter.draft([random_text(drafter, seed).request(chain)])
        (theirs,) = same.draft([random_text(same, seed).request(chain)])
        mirrored = [258 - token for token in theirs.tokens.tolist()[1:]]
        assert ours.tokens.tolist()[1:] == mirrored


def test_an_output_head_that_is_the_target_s_up_to_rounding_is_not_kept(
    world: World, made: Made, tmp_path: Path
) -> None:
    """A copy in half precision would cost memory and time for nothing."""
    tensors = {n: t.to(torch.bfloat16) for n, t in tensors_of(made("mtp-deepseek-copies")).items()}
    save_file(tensors, tmp_path / "heads.safetensors")
    assert not world.drafter(tmp_path / "heads.safetensors").module.config.has_own_output


def test_matrices_that_are_one_in_the_file_can_be_converted(
    world: World, made: Made, tmp_path: Path
) -> None:
    """Heads that share their output matrix once loaded and then could not be saved."""
    tensors = tensors_of(made("medusa-v1"))
    tensors |= {f"{head}.1.weight": tensors["0.1.weight"] for head in range(5)}
    file = rewritten(made("medusa-v1"), tmp_path / "h", tensors)
    heads = heads_of_source(find_heads(str(file)), world.target, MODEL)
    save_heads(heads, tmp_path / "own.safetensors", MODEL)
    drafters = [world.drafter(file), world.drafter(tmp_path / "own.safetensors")]
    trees = [d.draft([random_text(d, 4).request(TREE)])[0].tokens.tolist() for d in drafters]
    assert trees[0] == trees[1]


# -- modules inside a model ------------------------------------------------------------------------


def test_a_model_that_lost_its_module_has_none(world: World, tmp_path: Path, made: Made) -> None:
    """Some copies still state it in config.json; automatic choice once failed on them."""
    folder = tmp_path / "m"
    rewritten(
        Published(world.folder, world.folder / "model.safetensors", None, made("hydra").scores),
        folder,
        dict(load_all(world.folder / "model.safetensors")),
        {"num_nextn_predict_layers": 1},
    )
    assert native_module(folder) is None
    assert load_drafter("auto", world.target, str(folder)).name == "lookup"


@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-mimo"])
def test_a_model_with_a_module_drafts_with_it(world: World, made: Made, name: str) -> None:
    """Asked for by name, by the model's folder, and where nothing is asked for."""
    folder = str(made(name).folder)
    for heads in ("mtp", "auto", folder):
        assert_drafts_like(world, made(name), load_drafter(heads, world.target, folder))


def load_all(file: Path) -> Tensors:
    """Every tensor of a safetensors file."""
    return find_heads(str(file)).tensors()


# -- other models ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "is_noted"),
    [
        ("someone/llama-3", True),
        ("someone/vicuna-7b-v1.3", False),
        ("someone/Vicuna-7B-v1.3", False),
        ("my own engine", False),
    ],
)
def test_heads_that_name_another_base_are_noted(
    world: World, made: Made, caplog: pytest.LogCaptureFixture, model: str, is_noted: bool
) -> None:
    """A name proves nothing, so heads whose sizes fit are used all the same."""
    with caplog.at_level(logging.WARNING, "entmtp"):
        load_drafter(str(made("medusa-v1").folder), world.target, model)
    note = f"the heads were made for lmsys/vicuna-7b-v1.3, the model is {model}"
    assert (note in caplog.text) == is_noted
