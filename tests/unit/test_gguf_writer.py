"""Models written as GGUF for llama.cpp come back as they were, up to the type."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from entmtp.decoder.rope import RopeScaling, inverse_frequencies
from entmtp.errors import UnsupportedModelError
from entmtp.loading.gguf_writer import write_gguf
from entmtp.loading.llamacpp import LlamaCpp, missing_llama_cpp
from entmtp.loading.loader import load_target
from entmtp.target.base import Segment
from entmtp.target.weights import iter_tensors, read_config
from tiny_model import make_model_folder

SIZES = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32}
LLAMA3 = RopeScaling("llama3", factor=4.0, original_context=64)
FAMILIES = {
    "llama": {"family": "llama"},
    "untied": {"family": "llama", "tie_embeddings": False},
    "llama3": {"family": "llama", "rope_scaling": LLAMA3},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "hidden_size": 128},  # llama.cpp: 4 heads of 32
    "qwen3": {"family": "qwen3", "qk_norm": True},
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("kind", "error"), [("BF16", 0.004), ("Q8_0", 0.008), ("Q4_0", 0.15)])
def test_weights_come_back(tmp_path: Path, name: str, kind: str, error: float) -> None:
    """Every tensor under its name and in its row order, as precise as the type is."""
    model, file = (
        make_model_folder(tmp_path / "model", **SIZES | FAMILIES[name]),
        tmp_path / "a.gguf",
    )
    write_gguf(model, file, kind)
    before, after = read_config(model), read_config(file)
    assert (after.family, after.head_dim, after.vocab_size, after.qkv_bias, after.qk_norm) == (
        before.family,
        before.head_dim,
        before.vocab_size,
        before.qkv_bias,
        before.qk_norm,
    )
    torch.testing.assert_close(inverse_frequencies(after), inverse_frequencies(before))
    stored = dict(iter_tensors(file, after))
    for tensor_name, tensor in iter_tensors(model, before):
        scale = float(tensor.abs().max())
        assert float((stored.pop(tensor_name) - tensor).abs().max()) <= error * scale, tensor_name
    assert stored == {}


def test_the_output_head_of_four_bits_has_eight(tmp_path: Path) -> None:
    """As files of llama.cpp's own tool have it, where rows are short."""
    model = make_model_folder(tmp_path / "model", **SIZES, tie_embeddings=False)
    write_gguf(model, tmp_path / "a.gguf", "Q4_0")
    types = {
        tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "a.gguf").tensors
    }
    assert types.pop("output.weight") == "Q8_0"
    assert set(types.values()) == {"F32", "Q4_0"}


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hidden_size": 40, "head_dim": 10}, "Q8_0", "rows of 40 weights cannot be stored"),
        ({"rope_scaling": RopeScaling("yarn", 4.0, 64, attention_factor=1.2)}, "BF16", "yarn"),
        ({"family": "mimo", "qkv_bias": True}, "BF16", "no mimo models"),
    ],
)
def test_what_cannot_be_stated_is_refused(
    tmp_path: Path, changes: dict[str, object], kind: str, message: str
) -> None:
    """Before anything is written."""
    model = make_model_folder(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        write_gguf(model, tmp_path / "a.gguf", kind)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.skipif(missing_llama_cpp() is not None, reason="needs llama_cpp")
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_computes_the_same_model(tmp_path: Path, name: str) -> None:
    """Its logits in BF16 are those of float32 but for rounding, over chunks and after a cut."""
    model, file = (
        make_model_folder(tmp_path / "model", **SIZES | FAMILIES[name]),
        tmp_path / "a.gguf",
    )
    write_gguf(model, file, "BF16")
    tokens = [(7 * i) % 250 for i in range(150)]
    target = load_target(model, backend="torch", device="cpu")
    segment = Segment(target.new_cache(150), torch.tensor(tokens), np.arange(150))
    expected = target.forward([segment]).logits[0].numpy()
    model_cpp = LlamaCpp(file, threads=1, context=256, max_rows=64)
    for start, end in ((0, 64), (64, 100), (40, 80), (80, 144)):
        model_cpp.truncate(start)
        found = model_cpp.forward(tokens[start:end])
        difference = np.linalg.norm(found - expected[start:end])
        assert difference < 0.05 * np.linalg.norm(expected[start:end])
