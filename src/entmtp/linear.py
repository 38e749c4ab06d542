"""Matrix products of few rows on a CPU, with the weights laid out once.

``torch.nn.functional.linear`` brings a float32 matrix into the library's own layout again at each
call, which for a few rows costs more than the product. oneDNN takes a layout made beforehand; torch
exposes that through the operators that its compiler emits. Where they are missing, or for other
dtypes and devices, the plain product is used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["PackedLinear", "Project", "Projection", "can_pack", "pack_linears"]

Project = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]
"""Weight ``(out, in)`` and bias to a product of rows; :class:`Projection` is one."""


def can_pack(weight: Tensor) -> bool:
    """Whether a weight can be laid out beforehand here."""
    has_operators = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(
        torch.ops.mkldnn, "_reorder_linear_weight"
    )
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_fitting = weight.device.type == "cpu" and weight.dtype == torch.float32
    return has_operators and has_library and is_fitting


class Projection:
    """x W^T + b for a weight that does not change."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Lay out a weight ``(out, in)``; the given tensor is not kept where that is possible."""
        self._bias = bias
        self._is_packed = can_pack(weight)
        if self._is_packed:
            self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        else:
            self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Rows ``(N, in)`` to ``(N, out)``."""
        if not self._is_packed:
            return functional.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out


class PackedLinear(nn.Module):
    """A trained ``nn.Linear`` for inference."""

    def __init__(self, linear: nn.Linear, project: Project = Projection) -> None:
        """Take over its weight and bias."""
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self._projection = project(linear.weight.detach(), bias)

    def forward(self, x: Tensor) -> Tensor:
        """Rows ``(N, in)`` to ``(N, out)``."""
        return self._projection(x)


def pack_linears(module: nn.Module, project: Project = Projection) -> None:
    """Replace every ``nn.Linear`` below ``module`` by a :class:`PackedLinear`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child, project))
