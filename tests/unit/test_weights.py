"""Weights of Hugging Face folders: what is read, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.hf_config import config_from_dict, config_to_dict
from entmtp.target.weights import (
    is_extra_module,
    iter_tensors,
    read_config,
    tensor_shapes,
    write_model,
)
from fakes import tiny_config

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


def make_model(kind: str) -> Any:
    """A tiny random model of transformers."""
    name, options = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole folder of the untied llama."""
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ``None`` stays as null."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of model.safetensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shard_size", ["1GB", "8KB"])
@pytest.mark.parametrize("kind", MODELS)
def test_reads_what_transformers_wrote(kind: str, shard_size: str, tmp_path: Path) -> None:
    """Names, shapes and values are those of the model, from one file or from shards."""
    model = make_model(kind)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").exists() == (shard_size == "1GB")
    expected = dict(model.state_dict())
    config = read_config(tmp_path)
    if config.tie_embeddings:
        del expected["lm_head.weight"]
    tensors = dict(iter_tensors(tmp_path, config))
    assert tensors.keys() == expected.keys() == tensor_shapes(config).keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", MODELS)
def test_config_states_the_model(kind: str, tmp_path: Path) -> None:
    """Sizes and features agree with those of the transformers configuration."""
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.family == model.config.model_type
    assert config.context_window == 64
    assert config.rope_theta == 5000.0
    assert config.num_kv_heads == 2
    assert config.head_dim == {"llama-bias": 6, "qwen3": 16, "qwen3-bias": 16}.get(kind, 8)
    assert config.qkv_bias == (kind in ("llama-bias", "qwen2", "qwen3-bias"))
    assert config.o_bias == (kind in ("llama-bias", "qwen3-bias"))
    assert config.mlp_bias == (kind == "llama-bias")
    assert config.qk_norm == kind.startswith("qwen3")


@pytest.mark.parametrize("kind", MODELS)
def test_written_model_loads_in_transformers(kind: str, tmp_path: Path) -> None:
    """write_model makes a folder from which transformers builds the same model."""
    model = make_model(kind)
    source, copy = tmp_path / "source", tmp_path / "copy"
    model.save_pretrained(source)
    copy.mkdir()
    config = read_config(source)
    write_model(copy, config, iter_tensors(source, config), extra={"eos_token_id": 3})
    assert read_config(copy) == config
    again = transformers.AutoModelForCausalLM.from_pretrained(copy)
    ids = torch.arange(12)[None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert again.config.eos_token_id == 3


def test_stored_dtype_is_kept(folder: Path) -> None:
    """Half precision is not widened on reading."""
    edit_tensors(folder, lambda t: t.update({name: t[name].bfloat16() for name in t}))
    tensors = iter_tensors(folder, read_config(folder))
    assert {tensor.dtype for _, tensor in tensors} == {torch.bfloat16}


def test_absent_keys_take_the_defaults_of_the_family(tmp_path: Path) -> None:
    """A sparse config means what it means to transformers."""
    sizes = {**{key: SIZES[key] for key in list(SIZES)[:4]}, "num_attention_heads": 32}
    sizes["hidden_size"] = 64
    for family, name in {"llama": "Llama", "mistral": "Mistral", "qwen3": "Qwen3"}.items():
        theirs = getattr(transformers, f"{name}Config")(**sizes)
        sparse = {**sizes, "model_type": family}
        (tmp_path / "config.json").write_text(json.dumps(sparse))
        ours = read_config(tmp_path)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == theirs.head_dim
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
        window = getattr(theirs, "sliding_window", None)
        assert ours.sliding_window == window
        assert ours.context_window == (window or theirs.max_position_embeddings)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "mistral", "sliding_window": 512}, 64),
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, 64),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, 64),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            16,
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            16,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "full_attention"],
            },
            64,
        ),
        (
            {
                "model_type": "llama",
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            16,
        ),
    ],
)
def test_sliding_window_caps_the_context(
    changes: dict[str, Any], window: int, folder: Path
) -> None:
    """Only where some layer really slides; within the window full attention is the same."""
    edit_config(folder, **changes)
    config = read_config(folder)
    assert config.context_window == window
    assert config.is_window_capped == (window == 16)


def test_written_config_keeps_the_sliding_window(folder: Path) -> None:
    """All families that can say so do; llama cannot, and is not written."""
    for family in ("mistral", "qwen2", "qwen3", "mimo"):
        edit_config(
            folder,
            model_type=family,
            sliding_window=16,
            use_sliding_window=True,
            layer_types=["full_attention", "sliding_attention"],
        )
        config = read_config(folder)
        assert config_from_dict(config_to_dict(config), folder) == config
    edit_config(folder, model_type="llama")
    with pytest.raises(
        CheckpointError, match=r"llama config\.json cannot state sliding_window = 16"
    ):
        config_to_dict(read_config(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen2", "qkv_bias": True, "o_bias": True}, "qwen2 .* state o_bias = True"),
        ({"family": "mistral", "qkv_bias": True}, "mistral .* state qkv_bias = True"),
        ({"family": "llama", "qkv_bias": True}, "llama .* state o_bias = False"),
        ({"family": "mimo", "mlp_bias": True}, "mimo .* state mlp_bias = True"),
        ({"family": "llama", "qk_norm": True}, "llama .* state qk_norm = True"),
    ],
)
def test_refuses_to_write_what_the_family_cannot_state(
    changes: dict[str, Any], message: str
) -> None:
    """What is written means, when read again, the same model."""
    with pytest.raises(CheckpointError, match=message):
        config_to_dict(tiny_config(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, ["'gemma2'", "llama, mistral, qwen2, qwen3"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["'chunked_attention' layers"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["'full_attention'"]),
        ({"partial_rotary_factor": 0.5}, ["0.5", "supported is 1"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq", "GGUF"]),
        ({"num_local_experts": 8}, ["num_local_experts = 8", "dense"]),
        ({"hidden_act": "gelu"}, ["'gelu'", "'silu'"]),
    ],
)
def test_refuses_what_it_would_decode_wrongly(
    changes: dict[str, Any], words: list[str], folder: Path
) -> None:
    """The message names the feature and what is supported."""
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError) as error:
        read_config(folder)
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "'linear_attention' layers"),
        ({"model_type": "qwen3", "layer_types": ["conv"]}, "a model with 'conv' layers"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "a model with 'conv' layers"),
        *(
            ({"model_type": name}, f"model type '{name}'")
            for name in (
                *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
                *("nemotron_h", "mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba"),
                *("zamba2", "lfm2", "lfm2_moe", "recurrent_gemma", "rwkv", "minimax"),
                *("granitemoehybrid", "kimi_linear", "olmo_hybrid", "xlstm"),
            )
        ),
    ],
)
def test_refuses_recurrent_layers_with_the_reason(
    changes: dict[str, Any], what: str, folder: Path
) -> None:
    """A tree is verified by dropping rows, and a recurrent state has none."""
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError) as error:
        read_config(folder)
    words = (what, "cannot be rolled back", "so a tree cannot be verified", "llama, mistral, qwen2")
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


def test_takes_no_other_model_for_a_recurrent_one(folder: Path) -> None:
    """Names that only begin alike get the general message."""
    for name in ("minimax_m2", "qwen3_moe", "mimo_v2_flash", "nemotron", "falcon", "granite"):
        edit_config(folder, model_type=name)
        with pytest.raises(UnsupportedModelError, match=f"model type '{name}' is not supported; "):
            read_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"vocab_size": 1 << 53}, "vocab_size is 9007199254740992, not a positive integer below"),
        ({"max_position_embeddings": None}, "max_position_embeddings is None, not a positive"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, "head size 7 is odd"),
        ({"model_type": None}, "names no model_type"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list"),
        ({"layer_types": [1]}, r"layer_types is \[1\], not a list"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1, not a number"),
        ({"num_nextn_predict_layers": True}, "num_nextn_predict_layers is True"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', but must be a number above 0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers is None, not an integer",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"], "sliding_window": None},
            "sliding_window is None, not a positive integer",
        ),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
    ],
)
def test_refuses_senseless_sizes(changes: dict[str, Any], message: str, folder: Path) -> None:
    """A damaged config is told apart from an unsupported one."""
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "is not a JSON object")]
)
def test_refuses_a_config_that_is_no_object(text: str, message: str, folder: Path) -> None:
    """A truncated config.json is named as such."""
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(folder)


def test_refuses_a_folder_without_config(tmp_path: Path) -> None:
    """An empty folder is no model."""
    with pytest.raises(CheckpointError, match=r"no config\.json: give a Hugging Face"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "holds extra, which a llama model"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"model\.norm\.weight has shape \(31,\), but its config asks for \(32,\)",
        ),
    ],
)
def test_refuses_tensors_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, folder: Path
) -> None:
    """Missing, unexpected and wrongly shaped tensors are found before any is read."""
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        iter_tensors(folder, read_config(folder))


def test_refuses_integer_weights(folder: Path) -> None:
    """Quantised tensors without a quantization_config are named by their type."""
    edit_tensors(folder, lambda t: t.update({"model.norm.weight": torch.zeros(32).to(torch.int8)}))
    with pytest.raises(UnsupportedModelError, match="stored as I8"):
        iter_tensors(folder, read_config(folder))


def test_ignores_known_buffers(folder: Path) -> None:
    """Old checkpoints carry the rotary frequencies."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(4)}))
    assert name not in dict(iter_tensors(folder, read_config(folder)))


# -- native multi-token modules --------------------------------------------------------------------

EXTRA = ("model.mtp_layers.0.input_proj.weight", "model.layers.2.eh_proj.weight")


@pytest.mark.parametrize("name", EXTRA)
def test_multi_token_modules_are_no_tensors_of_the_target(name: str, folder: Path) -> None:
    """Neither unexpected nor yielded, whatever they are stored as; nothing else changes."""
    expected = dict(iter_tensors(folder, read_config(folder)))
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(3, dtype=torch.int8)}))
    edit_config(folder, num_nextn_predict_layers=1)
    config = read_config(folder)
    assert config.num_mtp_modules == 1
    assert dict(iter_tensors(folder, config)).keys() == expected.keys()


@pytest.mark.parametrize("name", EXTRA)
@pytest.mark.parametrize("stated", [0, None])
def test_modules_that_the_config_does_not_state_are_unexpected(
    name: str, stated: int | None, folder: Path
) -> None:
    """A model cut from a deeper one is refused, as its config says nothing of such modules."""
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(3)}))
    edit_config(folder, num_nextn_predict_layers=stated)
    with pytest.raises(CheckpointError, match=f"holds {name}, which a llama model of its config"):
        iter_tensors(folder, read_config(folder))


@pytest.mark.parametrize(
    ("name", "is_extra"),
    [
        ("model.layers.1.mlp.up_proj.weight", False),
        ("model.layers.2.mlp.up_proj.weight", True),
        ("model.layers.3.shared_head.norm.weight", True),
        ("model.layers.4.mlp.up_proj.weight", False),
        ("model.mtp_layers.0.final_layernorm.weight", True),
        ("model.mtp_layers.1.final_layernorm.weight", True),
        ("model.mtp_layers.2.final_layernorm.weight", False),
        ("model.layers.2", False),
        ("model.layers.x.mlp.up_proj.weight", False),
        ("layers.2.mlp.up_proj.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_as_many_modules_as_the_config_states(name: str, is_extra: bool) -> None:
    """Those after the last layer, and those of a list of their own, up to the stated number."""
    assert is_extra_module(name, tiny_config(num_layers=2, num_mtp_modules=2)) == is_extra
    assert not is_extra_module(name, tiny_config(num_layers=2))


@pytest.mark.parametrize("bias", [None, True, False])
def test_mimo_is_a_qwen2_with_its_own_name(bias: bool | None, tmp_path: Path) -> None:
    """The same weights and sizes; biases unless the config says otherwise."""
    make_model("qwen2").save_pretrained(tmp_path)
    theirs = read_config(tmp_path)
    edit_config(tmp_path, model_type="mimo", num_nextn_predict_layers=1)
    if bias is not None:
        edit_config(tmp_path, attention_bias=bias)
    if bias is False:
        edit_tensors(tmp_path, lambda t: [t.pop(n) for n in list(t) if n.endswith(".bias")])
    config = read_config(tmp_path)
    changes = {"family": "mimo", "num_mtp_modules": 1, "qkv_bias": bias is not False}
    assert config == replace(theirs, **changes)
    assert dict(iter_tensors(tmp_path, config)).keys() == tensor_shapes(config).keys()
    data = config_to_dict(config)
    assert (data["architectures"], data["model_type"]) == (["MiMoForCausalLM"], "mimo")
    assert config_from_dict(data, tmp_path) == config


def test_tied_model_may_carry_an_equal_head(folder: Path) -> None:
    """The same matrix twice is no contradiction; two different ones are."""
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match='set "tie_word_embeddings": false'):
        iter_tensors(folder, read_config(folder))
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    assert "lm_head.weight" not in dict(iter_tensors(folder, read_config(folder)))


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_refuses_a_truncated_file(keep: int, folder: Path) -> None:
    """Whether the header or the data are cut, the file is named."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        iter_tensors(folder, read_config(folder))


def test_refuses_a_missing_shard(tmp_path: Path) -> None:
    """A shard that the index names must be there."""
    make_model("llama").save_pretrained(tmp_path, max_shard_size="8KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        iter_tensors(tmp_path, read_config(tmp_path))


def test_refuses_pickles(folder: Path) -> None:
    """A pickle can run code, so it is not opened."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="convert the model to safetensors"):
        iter_tensors(folder, read_config(folder))


def test_refuses_a_folder_without_weights(folder: Path) -> None:
    """A config alone is no model."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="give a folder with safetensors weights"):
        iter_tensors(folder, read_config(folder))


def test_failed_write_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """A model of which a tensor is missing or misshaped is not written at all."""
    config = read_config(folder)
    tensors = list(iter_tensors(folder, config))
    target = tmp_path / "copy"
    target.mkdir()
    with pytest.raises(CheckpointError, match="were not given"):
        write_model(target, config, tensors[1:])
    with pytest.raises(CheckpointError, match="cannot write tensor"):
        write_model(target, config, [*tensors, tensors[0]])
    assert list(target.iterdir()) == []
