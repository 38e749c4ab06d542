"""The rows of one sequence at fixed addresses: the twin of ``RaggedRows`` that can be recorded.

Nothing here reads a number of the step on the host: where the rows go and what they see is computed
on the device, so the same kernels with the same arguments serve every step.
"""

import torch
from torch import Tensor

from entmtp.decoder.attention import attend_grouped
from entmtp.decoder.block import Mixer

__all__ = ["StaticRows"]


class StaticRows:
    """B rows after the committed ones of a cache, attending over its first T rows.

    Rows that a row does not see take part in its products with weight 0, so they have to hold
    finite numbers.
    """

    def __init__(
        self,
        cache: tuple[Tensor, Tensor],
        length: Tensor,
        own: Tensor,
        span: int,
        num_heads: int,
    ) -> None:
        """Say where the rows go and what they see.

        Args:
            cache: keys and values ``(layers, kv heads, capacity, head_dim)``, written to.
            length: int64 ``(1,)``, committed rows; ``length + B <= span``.
            own: boolean ``(B, B)``, what the rows see of one another.
            span: T.
            num_heads: query heads.
        """
        self._keys, self._values = cache
        self._span = span
        size = own.shape[0]
        groups = num_heads // self._keys.shape[1]
        self._rows = length + torch.arange(size, device=own.device)
        column = torch.arange(span, device=own.device) - length
        seen = own.index_select(1, column.clamp(0, size - 1)) & (column < size)
        hidden = ~(seen | (column < 0))
        bias = torch.zeros((size, span), dtype=self._keys.dtype, device=own.device)
        self._bias = bias.masked_fill_(hidden, -torch.inf).repeat(groups, 1)

    def mixer(self, layer: int) -> Mixer:
        """Attention through the cache, in one of its layers."""

        def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            stored = self._keys[layer], self._values[layer]
            stored[0].index_copy_(1, self._rows, keys)
            stored[1].index_copy_(1, self._rows, values)
            seen = [part[:, : self._span] for part in stored]
            return attend_grouped(queries, seen[0], seen[1], self._bias)

        return mix
