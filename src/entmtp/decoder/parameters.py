"""The parameters of one decoder block as a torch module, for checkpoints and for training."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from entmtp.decoder.block import DecoderBlock
from entmtp.decoder.config import BlockConfig, block_shapes
from entmtp.linear import Project, Projection

__all__ = ["BlockParameters"]


def _plain(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The product as torch makes it."""
    return lambda x: functional.linear(x, weight, bias)


class BlockParameters(nn.Module):
    """Holds the tensors of :func:`block_shapes` under their names; :meth:`build` computes."""

    def __init__(self, config: BlockConfig) -> None:
        """Random matrices, norms of one, biases of zero."""
        super().__init__()
        self.config = config
        for name, shape in block_shapes(config).items():
            if name.endswith(".bias"):
                value = torch.zeros(shape)
            elif len(shape) == 1:
                value = torch.ones(shape)
            else:
                value = torch.empty(shape)
                if not value.is_meta:  # drawing on it would import torch's compiler, for seconds
                    value.normal_(std=1 / math.sqrt(shape[1]))
            self._place(name, nn.Parameter(value))

    def build(self, project: Project = Projection) -> DecoderBlock:
        """The block for inference, with its matrices laid out for products of few rows."""
        pool: dict[str, Tensor] = {name: value.detach() for name, value in self.named_parameters()}
        return DecoderBlock.take(self.config, pool, project=project)

    def trainable(self) -> DecoderBlock:
        """The block for training: gradients reach the parameters. Make it anew for every step."""
        pool: dict[str, Tensor] = dict(self.named_parameters())
        return DecoderBlock.take(self.config, pool, project=_plain)

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        """Register ``a.b.c`` as the parameter c of the submodule a.b."""
        *path, last = name.split(".")
        module: nn.Module = self
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, parameter)
