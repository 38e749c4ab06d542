"""Logits of each model family equal those of transformers' own implementation."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from entmtp.target.base import Segment
from entmtp.target.llama import LlamaTarget
from entmtp.target.weights import iter_tensors, read_config
from entmtp.topology import named_topologies
from tiny_gguf import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, make_tensors, write_gguf

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "vicuna": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama": LlamaConfig(**SIZES, rope_theta=500000.0, head_dim=32),
    "smollm": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=24),
    "qwen2-7-to-1": Qwen2Config(**SIZES | {"num_attention_heads": 14}, head_dim=64),
    "qwen3-5-to-1": Qwen3Config(**SIZES | {"num_attention_heads": 10}, head_dim=128),
    "llama-3-to-1": LlamaConfig(
        **SIZES
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 96}
    ),
    "mistral-80": MistralConfig(**SIZES, sliding_window=None, head_dim=80),
    "mistral-slides": MistralConfig(**SIZES, sliding_window=25),  # filled to the last position
    "qwen3-half-slides": Qwen3Config(
        **SIZES, head_dim=24, use_sliding_window=True, sliding_window=25, max_window_layers=1
    ),
}
ORIGINAL = 32
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-deepseek": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
CLASSES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TOLERANCE = 2e-5


def randomised(config: PretrainedConfig) -> torch.nn.Module:
    """A model whose every parameter is random, norms and biases included."""
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def assert_same_logits(reference: torch.nn.Module, path: Path, num_tokens: int = 20) -> None:
    """A prompt in two chunks, then every node of a tree, all from the files at ``path``."""
    config = read_config(path)
    target = LlamaTarget(config, iter_tensors(path, config))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 131, (num_tokens,), generator=generator)
    tree = named_topologies()["tree16"]
    drafted = torch.randint(0, 131, (tree.num_rows,), generator=generator)
    assert num_tokens + tree.depths.max() < config.context_window

    cache = target.new_cache(64)
    rows = []
    for chunk in prompt.split(num_tokens * 2 // 3):
        output = target.forward([Segment(cache, chunk, np.arange(len(chunk)))])
        cache.commit(range(len(chunk)))
        rows.append(output.logits[0])
    with torch.no_grad():
        expected = reference(prompt[None]).logits[0]
    torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=0)

    output = target.forward([Segment(cache, drafted, tree.depths, tree.ancestor_mask)])
    for node in range(tree.num_rows):
        path_tokens = torch.cat((prompt, drafted[tree.path_nodes(node)]))
        with torch.no_grad():
            expected = reference(path_tokens[None]).logits[0, -1]
        torch.testing.assert_close(output.logits[0][node], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Read from a saved folder with several files."""
    reference = randomised(FAMILIES[family])
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert_same_logits(reference, tmp_path)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", CLASSES)
def test_scaled_positions_beyond_the_original_context(
    family: str, scaling: str, tmp_path: Path
) -> None:
    """Rotary scaling is that of transformers; the prompt is three times the first context."""
    rope = {**SCALINGS[scaling], "rope_theta": 10000.0}
    positions = ORIGINAL if scaling == "linear" else ORIGINAL * 4
    sizes = SIZES | {"max_position_embeddings": positions}
    reference = randomised(CLASSES[family](**sizes, rope_parameters=rope))
    reference.save_pretrained(tmp_path)
    assert read_config(tmp_path).rope_scaling is not None
    assert_same_logits(reference, tmp_path, num_tokens=3 * ORIGINAL)


def test_scaling_of_old_files(tmp_path: Path) -> None:
    """A config.json from before transformers 5 says the same under other names."""
    rope = {**SCALINGS["yarn"], "rope_theta": 10000.0}
    reference = randomised(Qwen2Config(**SIZES, rope_parameters=rope))
    reference.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    data = json.loads(file.read_text())
    theta, kind = data["rope_parameters"].pop("rope_theta"), data["rope_parameters"]["rope_type"]
    old = {key: value for key, value in data.pop("rope_parameters").items() if key != "rope_type"}
    file.write_text(
        json.dumps({**data, "rope_theta": theta, "rope_scaling": {**old, "type": kind}})
    )
    assert_same_logits(reference, tmp_path, num_tokens=3 * ORIGINAL)


def test_mimo_decodes_as_a_qwen2(tmp_path: Path) -> None:
    """transformers has no such type; the published model is a Qwen2 decoder with modules beside."""
    reference = randomised(Qwen2Config(**SIZES, head_dim=32))
    reference.save_pretrained(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    data = json.loads(config.read_text())
    data |= {"model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(data))
    extra = {"model.mtp_layers.0.input_proj.weight": torch.ones(64, 128)}
    save_file(load_file(weights) | extra, weights)
    assert_same_logits(reference, tmp_path)


def divisors(rope: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The tensor rope_freqs.weight that stands for llama3 scaling in a GGUF file."""
    values = []
    for pair in range(HEAD_DIM // 2):
        turns = ORIGINAL * 100000.0 ** (-2 * pair / HEAD_DIM) / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        values.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3", "yarn"])
def test_gguf_logits_equal_those_of_transformers(scaling: str, tmp_path: Path) -> None:
    """Scaling from the metadata or from a tensor, in a file as a converter makes it."""
    path, rope = tmp_path / "m.gguf", {**SCALINGS.get(scaling, {"rope_type": "default"})}
    tensors = {
        name: values if values.ndim == 1 else values * np.float32(0.2)
        for name, values in make_tensors().items()
    }
    extra: dict[str, Any] = {}
    if scaling == "llama3":
        tensors["rope_freqs.weight"] = divisors(rope)
    elif scaling != "none":
        extra = {"llama.rope.scaling.type": scaling, "llama.rope.scaling.factor": 4.0}
    if scaling == "yarn":
        extra["llama.rope.scaling.original_context_length"] = ORIGINAL
        extra["llama.rope.scaling.attn_factor"] = 0.75
        rope["attention_factor"] = 0.75 * (1 + 0.1 * math.log(4.0))
    write_gguf(path, tensors, extra=extra)
    config = read_config(path)
    theirs = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={**rope, "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    reference = AutoModelForCausalLM.from_config(theirs).eval()
    weights = dict(iter_tensors(path, config))
    reference.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    assert_same_logits(reference, path, num_tokens=3 * ORIGINAL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """Half precision gives the same logits up to its own rounding."""
    randomised(FAMILIES["llama"]).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    tokens = torch.arange(12)
    both = []
    for kind in (torch.float32, dtype):
        target = LlamaTarget(config, iter_tensors(tmp_path, config), dtype=kind)
        output = target.forward([Segment(target.new_cache(12), tokens, np.arange(12))])
        assert output.logits[0].dtype == kind
        both.append(output.logits[0].float())
    assert float((both[0] - both[1]).abs().max()) < 0.05 * float(both[0].abs().max())
