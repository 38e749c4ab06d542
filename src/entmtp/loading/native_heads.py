"""Heads in the native core: packed to int8 from trained modules, for one call a depth."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from entmtp.decoder.config import BlockConfig
from entmtp.decoder.parameters import BlockParameters
from entmtp.drafters.base import Drafter
from entmtp.drafters.heads import (
    Heads,
    HydraHeads,
    MedusaHeads,
    PrefixLayer,
    RecurrentModule,
    block_linears,
    conditioned_linears,
)
from entmtp.drafters.native_heads import NativeHeadsDrafter
from entmtp.drafters.native_recurrent import NativeRecurrentDrafter
from entmtp.drafters.native_rows import Floats, PrefixRunner
from entmtp.errors import CheckpointError
from entmtp.kernels.drafts import (
    HeadLayout,
    NativeBlock,
    NativeHeads,
    PackedMatrix,
    Vocabulary,
)
from entmtp.target.native import NativeTarget
from entmtp.target.native_weights import (
    Array,
    core_config,
    interleave,
    layer_rows,
    make_rotation,
    native_obstacle,
    rotary_tables,
)
from entmtp.topology import MAX_NODES

__all__ = ["fits_core", "make_native_drafter"]


def fits_core(heads: Heads) -> bool:
    """Whether the core computes heads of these sizes on a target that it computes."""
    block = heads.config.block
    return block is None or native_obstacle(block) is None


def make_native_drafter(heads: Heads, target: NativeTarget, digest: str) -> Drafter:
    """Pack heads into the core; the module is not needed any more then.

    Args:
        heads: float32, see :func:`fits_core`.
        target: that they draft for.
        digest: of the heads.

    Raises:
        CheckpointError: the heads hold NaN or infinity.
    """
    with torch.inference_mode():
        for name, value in heads.state_dict().items():
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise CheckpointError(f"the heads hold NaN or infinity in {name}: fetch them again")
        if isinstance(heads, RecurrentModule):
            return _recurrent_drafter(heads, target, digest)
        assert isinstance(heads, MedusaHeads | HydraHeads)  # noqa: S101 - there is no other kind
        return _heads_drafter(heads, target, digest)


class _Matrices:
    """Packed matrices, each once."""

    def __init__(self, target: NativeTarget) -> None:
        self._core = target.core
        self.packed: list[PackedMatrix] = []
        self._index: dict[int, int] = {}

    def add(self, rows: Floats, bias: Floats | None) -> int:
        """Index of a matrix ``(channels, k)``."""
        packed = self._core.library.pack(rows, self._core.isa)
        channels, k = rows.shape
        self.packed.append(PackedMatrix(packed, channels, k, bias))
        return len(self.packed) - 1

    def add_linear(self, linear: nn.Module) -> int:
        """Index of a module's matrix; the same module gives the same index."""
        assert isinstance(linear, nn.Linear)  # noqa: S101 - heads are packed once
        if id(linear) not in self._index:
            bias = None if linear.bias is None else _floats(linear.bias)
            self._index[id(linear)] = self.add(_floats(linear.weight), bias)
        return self._index[id(linear)]


def _heads_drafter(
    heads: MedusaHeads | HydraHeads, target: NativeTarget, digest: str
) -> NativeHeadsDrafter:
    config, matrices = heads.config, _Matrices(target)
    layouts = []
    shared = None if config.has_own_output else matrices.add(_output_rows(heads, target), None)
    for index in range(config.num_heads):
        first = None
        if isinstance(heads, HydraHeads):
            residual, gated = conditioned_linears(heads, index)
            bias = interleave(_floats(residual.bias)[:, None], _floats(gated.bias)[:, None])
            weight = interleave(_floats(residual.weight), _floats(gated.weight))
            first = matrices.add(weight, bias[:, 0].copy())
        blocks = tuple(matrices.add_linear(linear) for linear in block_linears(heads, index))
        output = shared
        if output is None:
            output = matrices.add_linear(heads.outputs[0 if config.is_output_shared else index])
        layouts.append(HeadLayout(first, blocks, output))
    vocabulary = _vocabulary(heads, target)
    core = NativeHeads(target.core, matrices.packed, layouts, vocabulary)
    prefix = heads.prefix if isinstance(heads, HydraHeads) else None
    runner = None if prefix is None else _prefix_runner(prefix, target)
    return NativeHeadsDrafter(config, core, heads.hot_ids.clone(), digest, runner)


def _prefix_runner(prefix: PrefixLayer, target: NativeTarget) -> PrefixRunner:
    arrays = _block_arrays(prefix.config, prefix.layer, target)
    arrays["final_norm"] = _floats(prefix.norm)
    shape = core_config(
        prefix.config,
        num_layers=1,
        vocab_size=0,
        num_positions=_num_positions(target),
    )
    block = NativeBlock(target.core, shape, arrays, None)
    return PrefixRunner(block, prefix.config.hidden_size)


def _recurrent_drafter(
    module: RecurrentModule, target: NativeTarget, digest: str
) -> NativeRecurrentDrafter:
    config, core = module.block_config, target.core
    turn = make_rotation(config.hidden_size).full
    final = _floats(module.final_norm)
    if module.config.has_own_output:
        output = module.outputs[0]
        assert isinstance(output, nn.Linear)  # noqa: S101 - heads are packed once
        rows, bias = _floats(output.weight), output.bias
    else:
        rows, bias = _output_rows(module, target), None
    norms = [_floats(module.embed_norm), _floats(module.hidden_norm)]
    if module.config.hidden_first:
        norms.reverse()
    scaled: Floats = _floats(module.join.weight) * np.concatenate(norms)
    join: Floats = turn.T @ scaled
    scored: Floats = rows * final
    normed: Floats = scored @ turn
    arrays = _block_arrays(config, module.layer, target)
    arrays |= {
        "final_norm": final,
        "head": core.library.pack(normed, core.isa),
        "join": core.library.pack(join, core.isa),
    }
    if bias is not None:
        arrays["output_bias"] = _floats(bias)
    shape = core_config(
        config,
        num_layers=1,
        vocab_size=len(module.hot_ids),
        num_positions=_num_positions(target),
    )
    block = NativeBlock(
        core,
        shape,
        arrays,
        _vocabulary(module, target),
        hidden_first=module.config.hidden_first,
    )
    return NativeRecurrentDrafter(block, module.hot_ids.clone(), digest)


def _block_arrays(
    config: BlockConfig, layer: BlockParameters | None, target: NativeTarget
) -> dict[str, Array]:
    """Arrays of a model of one layer, its norm, head and front apart."""
    assert layer is not None  # noqa: S101 - given up only where heads are packed for torch
    core, rotation = target.core, make_rotation(config.hidden_size)
    tensors: Mapping[str, Tensor] = layer.state_dict()
    arrays: dict[str, Array] = {}
    for name, rows in layer_rows(config, tensors, rotation).items():
        arrays[f"0.{name}"] = core.library.pack(rows, core.isa) if rows.ndim == 2 else rows
    cos, sin = rotary_tables(config, _num_positions(target))
    return arrays | {"dense": rotation.dense.astype(np.float32), "cos": cos, "sin": sin}


def _num_positions(target: NativeTarget) -> int:
    """A drafted path may reach beyond the last position of a text."""
    return target.config.context_window + MAX_NODES


def _output_rows(heads: Heads, target: NativeTarget) -> Floats:
    """``(hot, H)`` rows of the target's output head."""
    return _floats(target.output_rows(heads.hot_ids))


def _vocabulary(heads: Heads, target: NativeTarget) -> Vocabulary:
    hot_ids = heads.hot_ids.numpy().astype(np.int32)
    return Vocabulary(_floats(target.embedding()), hot_ids, heads.config.embed_scale)


def _floats(tensor: Tensor) -> Floats:
    rows: Floats = np.ascontiguousarray(tensor.detach().float().numpy(), dtype=np.float32)
    return rows
