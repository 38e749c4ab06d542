"""Tensors that are no usable heads are refused at once, by name, with the way out."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.loading.heads_source import find_heads
from heads_cases import (
    CASES,
    LAYOUTS,
    MODEL,
    World,
    needed,
    refusal,
    rewritten,
    tensors_of,
    verdict,
)
from published import Published

Made = Callable[[str], Published]

ABSURD = 10**9 - 1  # a number in a name, which must not become a loop

every_layout = pytest.mark.parametrize("name", LAYOUTS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The model that the heads should be for."""
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def made(world: World, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Sound heads of a case, made once."""
    return cache(lambda name: CASES[name].build(world, tmp_path_factory.mktemp("heads")))


# -- tensors ---------------------------------------------------------------------------------------


@every_layout
def test_a_missing_tensor_is_named(world: World, made: Made, name: str) -> None:
    """Whichever it is; the message says what to do."""
    tensors = needed(made(name))
    for lost in tensors.keys() - {"token_map"}:  # whose lack the config tells
        text = verdict(world, {n: t for n, t in tensors.items() if n != lost})
        assert lost in text, text
        assert "fetch it again" in text or "check that the file is whole" in text


@every_layout
def test_a_renamed_tensor_is_named(world: World, made: Made, name: str) -> None:
    """Under its right name, which is missed."""
    tensors = needed(made(name))
    for lost in tensors:
        text = verdict(world, {(n + "_x" if n == lost else n): t for n, t in tensors.items()})
        assert lost in text, text


@every_layout
def test_an_unknown_tensor_is_named(world: World, made: Made, name: str) -> None:
    """Heads with parts that would be left out are another architecture."""
    tensors = tensors_of(made(name))
    start = next(iter(tensors)).partition(".")[0] if name.startswith("medusa") else ""
    place = {"mtp-mimo": "model.mtp_layers.0.", "mtp-deepseek-copies": "model.layers.2."}
    extra = f"{place.get(name, '')}{start}gate.bias"
    text = verdict(world, {**tensors, extra: torch.ones(2)})
    assert f"holds {extra}, which its layout does not have" in text


@every_layout
def test_a_wrongly_shaped_tensor_is_named_with_both_shapes(
    world: World, made: Made, name: str
) -> None:
    """A row too many; of a tensor that tells the sizes, another one is named that disagrees."""
    tensors = needed(made(name))
    pattern = r"has shape \([\d, ]+\), but \([\d, ]+\) is needed|\d+ rows, but token_map has \d+"
    for changed, tensor in tensors.items():
        larger = torch.cat([tensor, tensor[:1]])
        text = verdict(world, {**tensors, changed: larger})
        assert changed in text or str(len(larger)) in text, text
        assert re.search(pattern, text), text


@every_layout
@pytest.mark.parametrize("change", [lambda t: t.sum(), lambda t: t[..., None]], ids=["()", "..1"])
def test_a_tensor_of_other_dimensions_is_named(
    world: World, made: Made, name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """A single number in the place of a matrix once ended in an IndexError."""
    tensors = needed(made(name))
    for changed, tensor in tensors.items():
        text = verdict(world, {**tensors, changed: change(tensor)})
        assert re.search(rf"tensor {re.escape(changed)} has shape \(", text), text


@every_layout
def test_a_tensor_of_another_kind_of_number_is_named(world: World, made: Made, name: str) -> None:
    """Quantised weights without their scales once ended in an error of torch, many lines long."""
    tensors = needed(made(name))
    for changed, tensor in tensors.items():
        other = tensor.float() if changed == "token_map" else tensor.to(torch.int8)
        text = verdict(world, {**tensors, changed: other})
        assert re.search(rf"tensor {re.escape(changed)} is stored as \w+, but", text), text


def test_packed_numbers_are_refused(world: World, made: Made) -> None:
    """Pairs of 4-bit floats count as floating-point, but once ended in an error of torch."""
    tensors = needed(made("medusa-v2"))
    packed = torch.zeros((32, 32), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    text = verdict(world, {**tensors, "0.0.linear.weight": packed})
    assert "0.0.linear.weight is stored as float4_e2m1fn_x2, but" in text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("medusa-v1", f"{ABSURD}.0.linear.weight"),
        ("medusa-v1", f"0.{ABSURD}.linear.weight"),
        ("medusa-v2", f"{'9' * 5000}.0.linear.weight"),
        ("medusa-v2", "0.0.linear\n.weight"),
        ("vllm-full", f"blocks.{ABSURD}.layers.0.weight"),
        ("vllm-full", f"blocks.0.layers.{ABSURD}.weight"),
        ("vllm-full", f"lm_heads.{ABSURD}.weight"),
        ("hydra", f"hydra_mlp.{ABSURD}.0.linear.weight"),
        ("hydra", f"hydra_mlp.0.{ABSURD}.linear.weight"),
        ("hydra++", f"hydra_lm_head.{ABSURD}.1.weight"),
    ],
    ids=lambda value: value[:30],
)
def test_absurd_names_are_refused_at_once(world: World, made: Made, name: str, tensor: str) -> None:
    """No loop or list grows with a number in a name; a name with a line break stays on its line."""
    verdict(world, {**tensors_of(made(name)), tensor: torch.ones(32, 32)})
    verdict(world, {tensor: torch.ones(32, 32)})


@pytest.mark.parametrize("sign", ["eh_proj.weight", "mtp_layers.0.self_attn.q_proj.weight"])
def test_a_module_whose_own_tensors_are_all_missing_is_refused(world: World, sign: str) -> None:
    """A rest of a multi-token module once ended in an IndexError."""
    text = verdict(world, {f"model.{sign}": torch.ones(2, 2)})
    assert "none of the tensors" in text or "lacks the tensor" in text


@pytest.mark.parametrize("name", ["hydra++", "mtp-deepseek", "mtp-mimo"])
def test_a_block_whose_heads_cannot_be_shared_is_refused(
    world: World, made: Made, name: str
) -> None:
    """Four query heads and three key-value heads once loaded, and failed at the first tree."""
    tensors = needed(made(name))
    for part in ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"):
        for changed in [n for n in tensors if n.endswith(f"self_attn.{part}")]:
            tensors[changed] = tensors[changed][:1].expand(24, *tensors[changed].shape[1:])
    assert re.search(r"4 query heads .* cannot share 3 key-value heads", verdict(world, tensors))


# -- other models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LAYOUTS[:2], "vllm-full", *LAYOUTS[3:]])
def test_heads_of_another_hidden_size_name_both_models(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """And both sizes."""
    doubled = {
        n: t.repeat(*(2 if size % 32 == 0 else 1 for size in t.shape))
        for n, t in needed(made(name)).items()
    }
    base = {"base_model_name_or_path": "someone/large-model"}
    text = refusal(world, rewritten(made(name), tmp_path / "h", doubled, base))
    assert f"heads are for someone/large-model with hidden size 64, but {MODEL} has 32" in text


@pytest.mark.parametrize("name", ["medusa-v1", "vllm-full", "hydra", "hydra++"])
def test_heads_of_another_vocabulary_name_both_models(
    world: World, made: Made, tmp_path: Path, name: str
) -> None:
    """And both sizes."""
    cut = {n: t[:200] if len(t) == 259 else t for n, t in needed(made(name)).items()}
    config = {"base_model_name_or_path": "someone/small-model", "vocab_size": 200}
    text = refusal(world, rewritten(made(name), tmp_path / "h", cut, config))
    assert f"for someone/small-model with a vocabulary of 200, but {MODEL} has 259" in text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("hydra", "input_embed_fn.weight"),
        ("hydra++", "input_embed_fn.weight"),
        ("mtp-deepseek-copies", "model.layers.2.embed_tokens.weight"),
    ],
)
def test_heads_that_carry_another_embedding_are_refused(
    world: World, made: Made, tmp_path: Path, name: str, tensor: str
) -> None:
    """Sizes agree, but the copy of the embedding tells that the model is another one."""
    tensors = tensors_of(made(name))
    tensors[tensor] = tensors[tensor].flip(0)
    base = {"base_model_name_or_path": "someone/other-model"}
    text = refusal(world, rewritten(made(name), tmp_path / "h", tensors, base))
    assert f"embedding of someone/other-model, which is not that of {MODEL}" in text


# -- what cannot be drafted with -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hydra_head_arch": "cross-attn"}, "architecture 'cross-attn' is not supported"),
        ({"hydra_head_arch": "eagle-attn"}, "architecture 'eagle-attn' is not supported"),
        ({"hidden_state_offset": 2}, r"an earlier layer \(hidden_state_offset 2\)"),
    ],
    ids=str,
)
def test_other_hydra_heads_are_refused(
    world: World, made: Made, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    """With what is supported instead."""
    tensors = tensors_of(made("hydra"))
    file = rewritten(made("hydra"), tmp_path / "h", tensors, config)
    text = refusal(world, file, UnsupportedModelError)
    assert re.search(rf"{message}.*supported (are|is) ", text)


def test_heads_that_do_not_read_the_draft_tokens_are_refused(world: World, made: Made) -> None:
    """Ungrounded Hydra heads have no second path around their first block."""
    tensors = {n: t for n, t in tensors_of(made("hydra")).items() if "res_connection" not in n}
    text = verdict(world, tensors, UnsupportedModelError)
    assert "grounded_heads false) are not supported; supported are grounded ones" in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embed_tokens.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"], "an EAGLE"),
        (["midlayer.self_attn.q_proj.weight", "fc.weight", "d2t"], "an EAGLE drafter"),
        (["mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight"], "Qwen3-Next"),
        (["model.mtp_block.0.mlp.gate.weight"], "ERNIE .* mixture of experts"),
        (["cross_attn.q_proj.weight", "lm_head.weight"], "a Hydra head with cross-attention"),
        (["attn.self_attn.q_proj.weight", "fc.weight", "fc.bias"], "an EAGLE"),
        (["hydra_mlps.0.weight"], "the Hydra layout of speculators"),
    ],
    ids=["eagle", "eagle3", "qwen3-next", "ernie", "cross-attn", "eagle-attn", "speculators"],
)
def test_other_drafters_are_refused_by_name(world: World, names: list[str], message: str) -> None:
    """The message says what the file is and which layouts are supported."""
    text = verdict(world, dict.fromkeys(names, torch.ones(2, 2)), UnsupportedModelError)
    assert re.search(rf"is .*{message}.* not supported; supported are Medusa, Hydra", text)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("mlp.experts.0.gate_proj.weight", "a mixture of experts"),
        ("mlp.gate.weight", "a mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa.weight", "multi-head latent attention"),
        ("linear_attn.in_proj.weight", "linear attention, whose state cannot be rolled back"),
    ],
)
@pytest.mark.parametrize("name", ["mtp-deepseek", "mtp-mimo"])
def test_modules_with_other_blocks_are_refused(
    world: World, made: Made, name: str, tensor: str, message: str
) -> None:
    """The reason comes before any talk of missing tensors."""
    tensors = {n: t for n, t in needed(made(name)).items() if ".mlp." not in n}
    start = next(iter(tensors)).split(".")[:3]
    tensors[".".join([*start, tensor])] = torch.ones(4, 32)
    text = verdict(world, tensors, UnsupportedModelError)
    assert f"module has {message}" in text
    assert "supported are dense blocks with full attention" in text


# -- token maps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.index_fill(0, torch.tensor(3), 259), "distinct token ids below 259"),
        (lambda ids: ids.index_fill(0, torch.tensor(3), -1), "distinct token ids below 259"),
        (lambda ids: ids.index_fill(0, torch.tensor(3), int(ids[4])), "distinct token ids"),
        (lambda ids: ids[:-1], "lm_heads have 86 rows, but token_map has 85 entries"),
        (lambda ids: ids[:0], "lm_heads have 86 rows, but token_map has 0 entries"),
        (lambda ids: ids[None], r"token_map has shape \(1, 86\), but \(1,\) is needed"),
    ],
    ids=["too large", "negative", "twice", "short", "empty", "matrix"],
)
def test_a_token_map_that_makes_no_sense_is_refused(
    world: World, made: Made, change: Callable[[Tensor], Tensor], message: str
) -> None:
    """Each row must be the score of a token of its own."""
    tensors = tensors_of(made("vllm-truncated"))
    assert re.search(
        message, verdict(world, {**tensors, "token_map": change(tensors["token_map"])})
    )


def test_an_empty_token_map_is_refused(world: World, made: Made) -> None:
    """With whole output matrices it once loaded as heads that can propose nothing."""
    tensors = tensors_of(made("vllm-mapped"))
    text = verdict(world, {**tensors, "token_map": tensors["token_map"][:0]})
    assert "token_map must hold distinct token ids" in text


def test_a_missing_token_map_is_named(world: World, made: Made, tmp_path: Path) -> None:
    """Where the config tells that only some tokens are scored."""
    tensors = tensors_of(made("vllm-truncated"))
    del tensors["token_map"]
    text = refusal(world, rewritten(made("vllm-truncated"), tmp_path / "h", tensors))
    assert "scores 86 of 259 tokens, but lacks the tensor token_map" in text


def test_other_files_are_no_heads(tmp_path: Path) -> None:
    """A file that is named otherwise is refused by its name, not called damaged."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"no file of heads by its name.*\.safetensors"):
        find_heads(str(file))
