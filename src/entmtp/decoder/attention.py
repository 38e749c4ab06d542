"""Attention of a segment's rows over the prefix and over their own ancestors."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attend", "attend_grouped", "attention_kernels", "visible_keys"]

_CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_kernels(device: torch.device) -> AbstractContextManager[object]:
    """While it is open, attention runs on kernels that take any number of keys without a plan.

    cuDNN, which torch prefers on some GPUs, plans anew for each shape, and in decoding the number
    of keys changes at every step.
    """
    return sdpa_kernel(_CUDA_KERNELS) if device.type == "cuda" else nullcontext()


def visible_keys(
    prefix: int,
    num_rows: int,
    mask: npt.NDArray[np.bool_] | None,
    device: torch.device,
) -> Tensor | None:
    """Which keys each row may see: the whole prefix, and its ancestors among the rows.

    Args:
        prefix: P committed rows.
        num_rows: N rows of the segment.
        mask: ``(N, N)`` ancestor mask; ``None`` is causal.
        device: of the result.

    Returns:
        boolean ``(N, P + N)``, or ``None`` where a single row sees everything.
    """
    if num_rows == 1:
        return None
    if mask is None:
        own = torch.ones((num_rows, num_rows), dtype=torch.bool, device=device).tril_()
    else:
        own = torch.from_numpy(mask).to(device)
    before = torch.ones((num_rows, prefix), dtype=torch.bool, device=device)
    return torch.cat((before, own), dim=1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Scaled dot-product attention with grouped key-value heads.

    The G query heads that share a key-value head become rows of one product, so keys and values
    are read once and never repeated.

    Args:
        queries: ``(N, heads, head_dim)``, rotated.
        keys: ``(kv heads, T, head_dim)``.
        values: ``(kv heads, T, head_dim)``.
        visible: boolean ``(N, T)`` or ``None``.

    Returns:
        ``(N, heads * head_dim)``.
    """
    groups = queries.shape[1] // keys.shape[0]
    mask = None if visible is None else visible.repeat(groups, 1)
    return attend_grouped(queries, keys, values, mask)


def attend_grouped(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """As :func:`attend`, with the mask of the N rows already repeated for each of the G heads.

    Args:
        queries: ``(N, heads, head_dim)``, rotated.
        keys: ``(kv heads, T, head_dim)``.
        values: ``(kv heads, T, head_dim)``.
        mask: ``(G * N, T)``, boolean or added to the scores; ``None`` is all.

    Returns:
        ``(N, heads * head_dim)``.
    """
    num_rows, num_heads, head_dim = queries.shape
    groups = num_heads // keys.shape[0]
    grouped = queries.reshape(num_rows, -1, groups, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(1, -1, groups * num_rows, head_dim)
    out = functional.scaled_dot_product_attention(
        grouped, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask
    )
    out = out.reshape(-1, groups, num_rows, head_dim).permute(2, 0, 1, 3)
    return out.reshape(num_rows, num_heads * head_dim)
