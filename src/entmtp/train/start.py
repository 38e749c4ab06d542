"""Where the training of modules with a block of their own begins."""

import torch
from torch import Tensor

from entmtp.decoder.parameters import BlockParameters
from entmtp.drafters.heads import Heads, HydraHeads, RecurrentModule

__all__ = ["start_as_identity"]


@torch.no_grad()
def start_as_identity(heads: Heads, states: Tensor) -> None:
    """Let a new module pass the target's state on, as the residual blocks of other heads do.

    The block adds nothing at first, and the norm behind it gives its output the usual size of the
    states, so the scores begin as the target's own for the token before. Heads without a block
    begin that way as they are.

    Args:
        heads: untrained; changed in place.
        states: ``(N, H)`` some of the target's.
    """
    size = float(states.to(torch.float32).square().mean().sqrt())
    if isinstance(heads, RecurrentModule):
        width = heads.config.hidden_size
        begin = 0 if heads.config.hidden_first else width
        heads.join.weight.zero_()
        heads.join.weight[:, begin : begin + width].fill_diagonal_(1.0)
        _add_nothing(heads.layer)
        heads.final_norm.fill_(size)
    elif isinstance(heads, HydraHeads) and heads.prefix is not None:
        _add_nothing(heads.prefix.layer)
        heads.prefix.norm.fill_(size)


def _add_nothing(layer: BlockParameters | None) -> None:
    assert layer is not None  # noqa: S101 - heads are packed after training
    for name, value in layer.named_parameters():
        if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            value.zero_()
