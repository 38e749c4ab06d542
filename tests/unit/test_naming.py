"""Counting and comparing tensors by their names."""

import pytest
import torch

from entmtp.drafters.formats.naming import count, has_equal_layers, strip_prefix


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], 0),
        (["other.weight"], 0),
        (["0.weight"], 1),
        (["4.weight", "0.weight"], 5),
        (["10.weight", "9.weight"], 11),
        (["3.weight.scale", "1.weight"], 2),
    ],
    ids=str,
)
def test_a_count_is_one_more_than_the_largest_number(names: list[str], expected: int) -> None:
    """Whatever the order; names that match in part are not counted."""
    assert count(names, r"(\d+)\.weight") == expected


def layers(*values: float) -> dict[str, torch.Tensor]:
    """Layers a, b, c, ... of one head, each filled with a number."""
    tensors = {}
    for stem, value in zip("abcd", values, strict=False):
        tensors |= {f"{stem}.weight": torch.full((2, 2), value), f"{stem}.bias": torch.ones(2)}
    return tensors


def test_layers_are_equal_where_all_of_them_are() -> None:
    """Weights and biases, in every head."""
    assert has_equal_layers(layers(1, 1, 1, 1), [["a", "b"], ["c", "d"]])
    assert has_equal_layers(layers(1, 1, 2, 2), [["a", "b"], ["c", "d"]])
    assert not has_equal_layers(layers(1, 1, 2, 3), [["a", "b"], ["c", "d"]])


def test_a_bias_alone_tells_layers_apart() -> None:
    """A shared matrix is not enough."""
    tensors = layers(1, 1)
    tensors["b.bias"] = torch.zeros(2)
    assert not has_equal_layers(tensors, [["a", "b"]])


@pytest.mark.parametrize("heads", [[["a"]], [[]], [["a", "b"], ["c"]]], ids=str)
def test_fewer_than_two_layers_are_never_called_equal(heads: list[list[str]]) -> None:
    """There is nothing to tie."""
    assert not has_equal_layers(layers(1, 1, 1), heads)


@pytest.mark.parametrize(
    "prefix", ["module.", "medusa_heads.", "model.medusa_head.", "hydra_head."]
)
def test_a_usual_prefix_of_all_names_is_cut(prefix: str) -> None:
    """The tensors stay the same objects."""
    tensors = layers(1, 2)
    cut = strip_prefix({prefix + name: tensor for name, tensor in tensors.items()})
    assert cut.keys() == tensors.keys()
    assert all(cut[name] is tensors[name] for name in tensors)


@pytest.mark.parametrize("names", [["module.a", "b"], ["other.a", "other.b"], []], ids=str)
def test_other_names_stay_as_they_are(names: list[str]) -> None:
    """A prefix of some names only, or an unknown one, is part of the names."""
    tensors = dict.fromkeys(names, torch.ones(1))
    assert strip_prefix(tensors) == tensors
