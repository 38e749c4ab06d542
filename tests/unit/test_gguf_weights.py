"""Weights of GGUF files: the same values in the Hugging Face order, or a clear refusal."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import quants

from entmtp.decoder.rope import RopeScaling
from entmtp.errors import CheckpointError, UnsupportedModelError
from entmtp.target.weights import iter_tensors, read_config, tensor_shapes
from tiny_gguf import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    make_tensors,
    vocabulary,
    write_gguf,
)

ROPE = "llama.rope."
YARN: dict[str, float | str] = {
    ROPE + "scaling.type": "yarn",
    ROPE + "scaling.factor": 8.0,
    ROPE + "scaling.original_context_length": 32,
}
HF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
    "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
    "blk.1.attn_q.bias": "model.layers.1.self_attn.q_proj.bias",
    "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
    "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
    "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
    "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
    "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
}


def with_biases(tensors: dict[str, np.ndarray], seed: int = 5) -> dict[str, np.ndarray]:
    """Add random biases to the query, key and value projections."""
    rng = np.random.default_rng(seed)
    sizes = {"attn_q": HEADS, "attn_k": KV_HEADS, "attn_v": KV_HEADS}
    biases = {
        f"blk.{layer}.{name}.bias": rng.standard_normal(heads * HEAD_DIM, dtype=np.float32)
        for layer in range(LAYERS)
        for name, heads in sizes.items()
    }
    return {**tensors, **biases}


def test_llama_comes_back_in_its_own_order(tmp_path: Path) -> None:
    """Query and key rows, permuted by the converter, are put back; Q8_0 is dequantised."""
    tensors, path = with_biases(make_tensors()), tmp_path / "m.gguf"
    write_gguf(path, tensors, quantised=("blk.1.ffn_up.weight",))
    got = dict(iter_tensors(path, read_config(path)))
    stored = quants.quantize(tensors["blk.1.ffn_up.weight"], gguf.GGMLQuantizationType.Q8_0)
    expected = {**tensors, "blk.1.ffn_up.weight": quants.dequantize(stored, 8)}
    assert len(got) == len(tensors)
    for name, hf_name in HF_NAMES.items():
        if name in expected:
            assert np.array_equal(got[hf_name].numpy(), expected[name]), name


def test_config_comes_from_metadata_and_names(tmp_path: Path) -> None:
    """Sizes from the metadata, decimals as they were written, tying from the absent head."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors())
    config = read_config(path)
    assert (config.family, config.vocab_size) == ("llama", len(vocabulary()))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 100000.0)
    assert config.context_window == 128
    assert config.tie_embeddings
    assert not config.qkv_bias


def test_head_of_an_untied_model(tmp_path: Path) -> None:
    """A file with output.weight is untied."""
    tensors, path = make_tensors(), tmp_path / "m.gguf"
    tensors["output.weight"] = tensors["token_embd.weight"] + 1
    write_gguf(path, tensors)
    config = read_config(path)
    assert not config.tie_embeddings
    head = dict(iter_tensors(path, config))["lm_head.weight"]
    assert np.array_equal(head.numpy(), tensors["output.weight"])


def test_qwen2_rows_are_not_permuted(tmp_path: Path) -> None:
    """Only architecture llama interleaves; qwen2 has its biases."""
    tensors, path = with_biases(make_tensors()), tmp_path / "m.gguf"
    write_gguf(path, tensors, arch="qwen2")
    config = read_config(path)
    assert (config.family, config.qkv_bias, config.o_bias) == ("qwen2", True, False)
    got = dict(iter_tensors(path, config))
    for name in ("blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.1.attn_q.bias"):
        assert np.array_equal(got[HF_NAMES[name]].numpy(), tensors[name])


def test_qwen3_has_its_norms(tmp_path: Path) -> None:
    """The norms of queries and keys are found; without them the file is incomplete."""
    tensors, path = make_tensors(), tmp_path / "m.gguf"
    write_gguf(path, tensors, arch="qwen3")
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.k_norm"):
        iter_tensors(path, read_config(path))
    for layer in range(LAYERS):
        tensors[f"blk.{layer}.attn_q_norm.weight"] = np.ones(HEAD_DIM, dtype=np.float32)
        tensors[f"blk.{layer}.attn_k_norm.weight"] = np.ones(HEAD_DIM, dtype=np.float32)
    path.unlink()
    write_gguf(path, tensors, arch="qwen3")
    assert read_config(path).qk_norm
    assert len(dict(iter_tensors(path, read_config(path)))) == len(tensors)


@pytest.mark.parametrize(
    ("arch", "extra", "message"),
    [
        ("gemma2", {}, "architecture 'gemma2' is not supported; supported are llama"),
        ("llama", {"llama.expert_count": 8}, "mixture of 8 experts"),
        ("qwen3next", {}, "model type 'qwen3next' .* a tree cannot be verified; .* qwen3"),
        ("nemotron_h", {}, "cannot be rolled back to before a rejected draft"),
        ("lfm2", {}, "cannot be rolled back to before a rejected draft"),
        ("llama", {ROPE + "scaling.type": "longrope"}, "type 'longrope' .* 'linear', 'yarn' and"),
        ("llama", {ROPE + "scaling.alpha": 1000.0}, r"scaling.alpha = 1000\.0 is not supported"),
        (
            "llama",
            {**YARN, ROPE + "scaling.yarn_log_multiplier": 0.1},
            r"yarn_log_multiplier = 0\.1",
        ),
        (
            "llama",
            {ROPE + "scaling.factor": 2.0, ROPE + "scaling.attn_factor": 1.5},
            r"attn_factor = 1\.5 with rotary scaling of type 'linear'",
        ),
        ("llama", {"split.count": 2}, "merge the parts"),
        ("llama", {"llama.attention.key_length": 16}, "8 of 16 head dimensions"),
        ("llama", {"llama.attention.key_length": [8, 16]}, "differs from layer to layer"),
    ],
)
def test_refuses_what_it_would_decode_wrongly(
    arch: str, extra: dict[str, int | float | str | list[int]], message: str, tmp_path: Path
) -> None:
    """The message names the feature and what is supported."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors(), arch=arch, extra=extra)
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(path)


# -- rotary scaling --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "scaling", "window"),
    [
        ({ROPE + "scaling.type": "none", ROPE + "scaling.factor": 4.0}, None, 128),
        ({ROPE + "scaling.factor": 1.0}, None, 128),
        ({ROPE + "scaling.factor": 2.5}, RopeScaling("linear", 2.5), 320),
        ({ROPE + "scale_linear": 4.0}, RopeScaling("linear", 4.0), 512),
        (
            {
                ROPE + "scaling.type": "linear",
                ROPE + "scaling.factor": 4.0,
                ROPE + "scaling.original_context_length": 20,
            },
            RopeScaling("linear", 4.0),
            128,
        ),
        (
            YARN,
            RopeScaling("yarn", 8.0, 32, attention_factor=0.1 * math.log(8) + 1),
            256,
        ),
        (
            {
                ROPE + "scaling.type": "yarn",
                ROPE + "scaling.factor": 2.0,
                ROPE + "scaling.attn_factor": 0.75,
                ROPE + "scaling.yarn_beta_fast": 16.0,
                ROPE + "scaling.yarn_beta_slow": 2.0,
                ROPE + "scaling.yarn_ext_factor": 1.0,
            },
            RopeScaling(
                "yarn",
                2.0,
                128,
                beta_fast=16,
                beta_slow=2,
                attention_factor=0.75 * (0.1 * math.log(2) + 1),
            ),
            256,
        ),
        ({**YARN, "llama.attention.sliding_window": 100}, "any", 100),
    ],
)
def test_rotary_scaling_comes_from_metadata(
    extra: dict[str, float | str], scaling: object, window: int, tmp_path: Path
) -> None:
    """As llama.cpp means it: a factor alone is linear, and attn_factor is beside yarn's own."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors(), extra={**extra})
    config = read_config(path)
    assert scaling in ("any", config.rope_scaling)
    assert config.context_window == window
    assert config.is_window_capped == (window == 100)


def test_frequency_divisors_come_from_their_tensor(tmp_path: Path) -> None:
    """Llama 3.1 states its scaling as rope_freqs.weight, which is no weight of the target."""
    path, divisors = tmp_path / "m.gguf", np.array([1, 1.5, 4, 8], dtype=np.float32)
    write_gguf(path, {**make_tensors(), "rope_freqs.weight": divisors})
    config = read_config(path)
    assert config.rope_scaling == RopeScaling("divisors", divisors=(1.0, 1.5, 4.0, 8.0))
    assert config.context_window == 128
    names = [name for name, _ in iter_tensors(path, config)]
    assert sorted(names) == sorted(tensor_shapes(config))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({ROPE + "scaling.type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ({ROPE + "scaling.factor": 0.0}, r"llama\.rope\.scaling\.factor is 0\.0"),
        ({ROPE + "scaling.factor": math.nan}, "factor is nan, but must be a number above 0"),
        ({ROPE + "scaling.factor": "two"}, "factor is 'two'"),
        ({ROPE + "freq_base": -1.0}, r"llama\.rope\.freq_base is -1\.0"),
        ({**YARN, ROPE + "scaling.attn_factor": -1.0}, r"attn_factor is -1\.0"),
        ({**YARN, ROPE + "scaling.yarn_beta_fast": 0.5}, r"beta_fast is 0\.5"),
        ({**YARN, ROPE + "freq_base": 1.0}, "but yarn needs one above 1"),
        ({**YARN, ROPE + "scaling.original_context_length": 0}, "original_context_length is 0"),
        ({"llama.attention.sliding_window": 0}, "sliding_window is 0, not a positive integer"),
    ],
)
def test_refuses_senseless_rotary_values(
    extra: dict[str, float | str], message: str, tmp_path: Path
) -> None:
    """Key and value are named; damage is not taken for an unsupported model."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors(), extra={**extra})
    with pytest.raises(CheckpointError, match=message) as error:
        read_config(path)
    assert error.type is CheckpointError


@pytest.mark.parametrize(
    ("divisors", "extra", "message"),
    [
        ([1, 2, 3], {}, r"shape \(3,\), but heads of 8 dimensions ask for \(4,\)"),
        ([1, 2, 0, 4], {}, r"rope_freqs\.weight holds 0\.0"),
        ([1, 2, math.nan, 4], {}, r"rope_freqs\.weight holds nan"),
        ([1, 2, 3, 4], {ROPE + "scaling.factor": 2.0}, "together with .* type 'linear'"),
    ],
)
def test_refuses_divisors_that_do_not_fit(
    divisors: list[float], extra: dict[str, float | str], message: str, tmp_path: Path
) -> None:
    """One number above 0 for each pair, and no other scaling beside them."""
    path = tmp_path / "m.gguf"
    tensors = {**make_tensors(), "rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    write_gguf(path, tensors, extra={**extra})
    with pytest.raises(CheckpointError, match=message):
        read_config(path)


def test_refuses_wrong_shapes(tmp_path: Path) -> None:
    """Both shapes are named."""
    path = tmp_path / "m.gguf"
    write_gguf(path, {**make_tensors(), "output_norm.weight": np.ones(8, dtype=np.float32)})
    with pytest.raises(CheckpointError, match=rf"shape \(8,\).*\({HIDDEN},\)"):
        iter_tensors(path, read_config(path))


@pytest.mark.parametrize("keep", [0, 3, 20, 500, 9000, -8])
def test_refuses_a_truncated_file(keep: int, tmp_path: Path) -> None:
    """Wherever it is cut, the file is named and no other error escapes."""
    path = tmp_path / "m.gguf"
    write_gguf(path, make_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf is not a whole GGUF file"):
        read_config(path)


def test_refuses_senseless_metadata(tmp_path: Path) -> None:
    """A size of zero, and a file without embedding, are damage."""
    path, tensors = tmp_path / "m.gguf", make_tensors()
    write_gguf(path, tensors, extra={"llama.attention.key_length": 0})
    with pytest.raises(CheckpointError, match="key_length is 0, not a positive integer"):
        read_config(path)
    del tensors["token_embd.weight"]
    path.unlink()
    write_gguf(path, tensors)
    with pytest.raises(CheckpointError, match=r"no tensor token_embd\.weight"):
        read_config(path)


def test_refuses_types_that_cannot_be_dequantised(tmp_path: Path) -> None:
    """Integer tensors are no weights."""
    path, tensors = tmp_path / "m.gguf", make_tensors()
    tensors["output_norm.weight"] = np.ones(HIDDEN, dtype=np.int32)
    write_gguf(path, tensors)
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight has type I32"):
        dict(iter_tensors(path, read_config(path)))


def test_refuses_other_files(tmp_path: Path) -> None:
    """An absent file, another format and another version are named."""
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="cannot read"):
        read_config(path)
    for content in (b"PK" + bytes(100), b"GGUF\x01" + bytes(100)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not a whole GGUF file"):
            read_config(path)
