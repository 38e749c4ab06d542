"""What benchmarks/step_cost.py computes, and that what it times is the same model."""

from pathlib import Path

import numpy as np
import pytest
import torch

import step_backends
import step_cost
from entmtp.kernels.library import load_library
from entmtp.target.weights import read_config, tensor_shapes
from fakes import tiny_config
from tiny_model import make_model_folder


def test_the_roofline_is_the_longer_of_two_times() -> None:
    """136 million weights at 34 GB/s take 4 ms; 32 rows at 850 GOP/s take 10.24 ms."""
    weights = 136_000_000
    assert step_cost.roofline_ms(1, weights, 34.0, 850.0) == pytest.approx(4.0)
    assert step_cost.roofline_ms(32, weights, 34.0, 850.0) == pytest.approx(10.24)
    assert step_cost.roofline_ms(32, weights, 34.0, None) == pytest.approx(4.0)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_input_embedding_is_not_multiplied_with(is_tied: bool) -> None:
    """The output head is, whether it is the same matrix or not."""
    tied = step_backends.num_weights(tiny_config(tie_embeddings=True))
    assert step_backends.num_weights(tiny_config(tie_embeddings=is_tied)) == tied
    shapes = tensor_shapes(tiny_config(tie_embeddings=True)).values()
    assert tied == sum(a * b for a, b in (shape for shape in shapes if len(shape) == 2))


def test_bytes_are_those_of_each_matrix() -> None:
    """Four bits and a scale of two bytes for 32 weights; eight in the output head."""
    config = tiny_config()
    head = config.vocab_size * config.hidden_size
    rest = step_backends.num_weights(config) - head
    assert step_backends.weight_bytes("torch", config) == 4 * (rest + head)
    assert step_backends.weight_bytes("llamacpp:Q8_0", config) == 34 / 32 * (rest + head)
    assert step_backends.weight_bytes("llamacpp:Q4_0", config) == 18 / 32 * rest + 34 / 32 * head


@pytest.mark.parametrize("shape", step_cost.SHAPES)
def test_shapes_have_their_published_sizes(shape: str) -> None:
    """0.49 and 1.24 billion parameters."""
    shapes = tensor_shapes(step_cost.SHAPES[shape]).values()
    total = sum(int(np.prod(s)) for s in shapes)
    assert total == {"qwen2.5-0.5b": 494032768, "llama-3.2-1b": 1235814400}[shape]


def test_the_tree_is_binary() -> None:
    """A node sees its ancestors and itself."""
    tree = step_backends.Tree.of(6)
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert [np.flatnonzero(row).tolist() for row in tree.mask] == [
        [0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]
    ]  # fmt: skip


def test_medians_and_rates_are_over_processes() -> None:
    """The report of three processes, in numbers that can be checked in the head."""
    config = tiny_config()
    weights = step_backends.num_weights(config)
    results = [
        {
            "ms": {"native": {"4": ms}},
            "bandwidth": {"memchr": 10.0 + ms, "torch.sum": 9.0},
            "throughput_gop_s": 100 * ms,
            "native_backend": "native-avx2",
        }
        for ms in (1.0, 4.0, 2.0)
    ]
    report = step_cost.combine({"backends": ["native"], "rows": [4]}, config, results)
    assert report["ms"] == {"native": {"4": 2.0}}
    assert report["ms_range"] == {"native": {"4": [1.0, 4.0]}}
    assert report["gb_s"]["native"]["4"] == pytest.approx(weights / 2e6)
    assert report["gop_s"]["native"]["4"] == pytest.approx(8 * weights / 2e6)
    assert report["bandwidth_gb_s"], report["bandwidth_gb_s_range"] == (12.0, [11.0, 14.0])
    assert report["bandwidth_by"] == ["memchr"]
    expected = step_cost.roofline_ms(4, weights, 12.0, 200.0)
    assert report["roofline_ms"] == {"4": pytest.approx(expected)}
    own = step_cost.roofline_ms(4, weights, 12.0, 200.0) / 2.0
    others = [step_cost.roofline_ms(4, weights, 10.0 + ms, 100 * ms) / ms for ms in (1.0, 4.0)]
    assert report["roofline_share"] == {"4": pytest.approx(sorted([own, *others])[1])}


def test_the_limits_are_those_of_a_machine() -> None:
    """Both ways of reading give a speed that a machine can have, and so does the product."""
    limits = step_backends.Limits(2, size=8 << 20)
    for _ in range(3):
        limits.sample()
    found = limits.bandwidth_gb_s()
    assert found.keys() == {"memchr", "torch.sum"}
    assert all(0.05 < value < 2000 for value in found.values())
    rate = limits.throughput_gop_s()
    assert (rate is None) == (load_library() is None)
    assert rate is None or 0.1 < rate < 100_000


class Recorder:
    """A backend that notes its turns."""

    def __init__(self, name: str, turns: list[tuple[str, int]]) -> None:
        self._name, self._turns = name, turns

    def step(self, rows: int) -> torch.Tensor:
        self._turns.append((self._name, rows))
        return torch.empty(0)


def test_backends_take_turns() -> None:
    """Two steps each, the second timed; who begins changes from repeat to repeat."""
    turns: list[tuple[str, int]] = []
    backends = {name: Recorder(name, turns) for name in ("a", "b")}
    limits = step_backends.Limits(1, size=1 << 20)
    ms = step_backends.time_backends(backends, [1, 3], 2, limits)
    first, second = [("a", 1)] * 2 + [("b", 1)] * 2, [("a", 3)] * 2 + [("b", 3)] * 2
    assert turns == first + second + first[2:] + first[:2] + second[2:] + second[:2]
    assert {name: set(found) for name, found in ms.items()} == {"a": {1, 3}, "b": {1, 3}}


def test_all_backends_compute_the_same_tree(tmp_path: Path) -> None:
    """What is timed is one and the same forward, again and again; precision differs."""
    sizes = {"head_dim": 32, "hidden_size": 96, "intermediate_size": 160}
    model = make_model_folder(tmp_path / "model", **sizes)
    config, context = read_config(model), [(7 * i) % 250 for i in range(20)]
    expected = None
    for name in ("torch", "torch:bfloat16", "hf", "native"):
        if step_backends.obstacle(name, model, config) is not None:
            continue
        backend = step_backends.open_backend(name, model, {}, context, 1)
        first = backend.step(6).float()
        assert torch.equal(backend.step(6).float(), first)
        expected = first if expected is None else expected
        assert float((first - expected).norm() / expected.norm()) < 0.1
