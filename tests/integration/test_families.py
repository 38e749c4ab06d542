"""Logits of each model family equal those of transformers' own implementation."""

from pathlib import Path

import numpy as np
import pytest
import torch
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
}
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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A prompt in two chunks, then every node of a tree, read from a saved folder."""
    reference = randomised(FAMILIES[family])
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    config = read_config(tmp_path)
    target = LlamaTarget(config, iter_tensors(tmp_path, config))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, 131, (20,), generator=generator)
    tree = named_topologies()["tree16"]
    drafted = torch.randint(0, 131, (tree.num_rows,), generator=generator)

    cache = target.new_cache(64)
    rows = []
    for chunk in prompt.split(13):
        output = target.forward([Segment(cache, chunk, np.arange(len(chunk)))])
        cache.commit(range(len(chunk)))
        rows.append(output.logits[0])
    with torch.no_grad():
        expected = reference(prompt[None]).logits[0]
    torch.testing.assert_close(torch.cat(rows), expected, atol=TOLERANCE, rtol=0)

    output = target.forward([Segment(cache, drafted, tree.depths, tree.ancestor_mask)])
    for node in range(tree.num_rows):
        path = torch.cat((prompt, drafted[tree.path_nodes(node)]))
        with torch.no_grad():
            expected = reference(path[None]).logits[0, -1]
        torch.testing.assert_close(output.logits[0][node], expected, atol=TOLERANCE, rtol=0)


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
