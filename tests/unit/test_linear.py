"""Weights laid out beforehand give the products of the plain ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from entmtp.linear import Projection, can_pack, pack_linears


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 17, 64])
def test_a_projection_equals_the_plain_product(has_bias: bool, num_rows: int) -> None:
    """For any number of rows, with and without a bias, up to float32 rounding."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(40, 24, generator=generator)
    bias = torch.randn(40, generator=generator) if has_bias else None
    x = torch.randn(num_rows, 24, generator=generator)
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(Projection(weight, bias)(x), expected, atol=1e-5, rtol=1e-5)


def test_no_rows_give_no_rows() -> None:
    """An empty batch keeps the width of the result."""
    assert Projection(torch.ones(3, 2))(torch.ones(0, 2)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_take_the_plain_product(dtype: torch.dtype) -> None:
    """Only float32 is laid out; the rest is exactly the plain product."""
    weight, x = torch.randn(8, 4).to(dtype), torch.randn(3, 4).to(dtype)
    assert not can_pack(weight)
    assert torch.equal(Projection(weight)(x), functional.linear(x, weight))


def test_all_linears_of_a_module_are_replaced() -> None:
    """Wherever they are, with the same results."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.SiLU(), nn.Linear(6, 3, bias=False)))
    x = torch.randn(5, 4)
    with torch.inference_mode():
        expected = module(x)
        pack_linears(module)
        torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)
    assert not any(isinstance(child, nn.Linear) for child in module.modules())
