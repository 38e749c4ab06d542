"""The parameters of a block: their names and first values, and the block that is built of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from entmtp.decoder.block import RaggedRows
from entmtp.decoder.config import BlockConfig, block_shapes
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.decoder.parameters import BlockParameters
from entmtp.decoder.rope import RotationTable
from published import Sizes, decoder_layer

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
OPTIONS = ({}, {"qkv_bias": True}, {"o_bias": True}, {"mlp_bias": True}, {"qk_norm": True})
ALL_OPTIONS = {name: True for options in OPTIONS for name in options}


@pytest.mark.parametrize("options", [*OPTIONS, ALL_OPTIONS], ids=lambda o: "-".join(o) or "plain")
def test_parameters_carry_the_published_names(options: dict[str, bool]) -> None:
    """Exactly the tensors of a checkpoint, so that its names can be loaded as they are."""
    config = BlockConfig(**SIZES, **options)
    shapes = {n: tuple(t.shape) for n, t in BlockParameters(config).state_dict().items()}
    assert shapes == block_shapes(config)
    assert sorted(n for n, _ in BlockParameters(config).named_parameters()) == sorted(shapes)


def test_first_values_keep_the_scale_of_their_inputs() -> None:
    """Norms of one, biases of zero, and matrices that map unit variance to about unit variance."""
    config = BlockConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 512}, **ALL_OPTIONS)
    for name, value in BlockParameters(config).named_parameters():
        if value.dim() == 1:
            assert bool((value == (0.0 if name.endswith(".bias") else 1.0)).all()), name
        else:
            assert float(value.detach().std() * value.shape[1] ** 0.5) == pytest.approx(
                1.0, rel=0.1
            ), name


def test_two_blocks_share_nothing() -> None:
    """Each has parameters of its own, drawn anew."""
    first, second = (BlockParameters(BlockConfig(**SIZES)) for _ in range(2))
    name = "mlp.down_proj.weight"
    assert not torch.equal(first.state_dict()[name], second.state_dict()[name])


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_the_block_that_is_built_computes_a_decoder_layer(qkv_bias: bool) -> None:
    """Rows at positions 0, 1, ... against the formulas in float64, one head at a time."""
    config = BlockConfig(**SIZES, qkv_bias=qkv_bias)
    parameters = BlockParameters(config).double()
    with torch.no_grad():
        for value in parameters.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    x = torch.randn(9, 32, dtype=torch.float64)
    rows = RaggedRows(x.device)
    rows.add(TorchKVCache((1, 2, 8), 9, x.dtype, x.device), 9)
    rotation = RotationTable(config, 16, x.dtype, x.device).at(torch.arange(9), 9)
    out = parameters.build()(x, rotation, rows.mixer(0))
    weights = {n: t.detach().numpy() for n, t in parameters.named_parameters()}
    expected = decoder_layer(Sizes(rms_norm_eps=config.rms_norm_eps), weights, x.numpy())
    np.testing.assert_allclose(out.detach().numpy(), expected, atol=1e-5)


def test_a_built_block_needs_no_gradient() -> None:
    """It is for inference; training goes through the parameters."""
    block = BlockParameters(BlockConfig(**SIZES)).build()
    assert not block.attention_norm.requires_grad
    assert not block.down(torch.ones(1, 48)).requires_grad


class Recording(TorchFunctionMode):
    """Notes the names of all torch functions that are called."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_parameters_without_values_draw_none() -> None:
    """Drawing on the meta device once imported torch's compiler, which took seconds a load."""
    with Recording() as on_meta, torch.device("meta"):
        BlockParameters(BlockConfig(**SIZES))
    with Recording() as on_cpu:
        BlockParameters(BlockConfig(**SIZES))
    assert "normal_" in on_cpu.names - on_meta.names
