"""A pre-norm block: grouped-query attention with rotary positions, then a SiLU-gated feed-forward.

Touvron et al. 2023 (Llama), with the options of Mistral, Qwen2 (QKV bias) and Qwen3 (QK norm).
Where keys and values go and what each row sees is the caller's: a :data:`Mixer`.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.decoder.attention import attend, visible_keys
from entmtp.decoder.config import BlockConfig
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.decoder.rope import rotate
from entmtp.linear import Project, Projection

__all__ = ["DecoderBlock", "Mixer", "RaggedRows", "rms_norm"]

Mixer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries ``(rows, heads, head_dim)``, keys and values ``(kv heads, rows, head_dim)``, rotated, to
``(rows, heads * head_dim)``."""


@dataclass(frozen=True)
class _Place:
    cache: TorchKVCache
    start: int
    stop: int
    visible: Tensor | None


class RaggedRows:
    """The rows of several sequences in one flat batch, each with its own cache and mask."""

    def __init__(self, device: torch.device) -> None:
        """Start with no rows."""
        self._device = device
        self._places: list[_Place] = []
        self._num_rows = 0

    def add(
        self, cache: TorchKVCache, num_rows: int, mask: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Append the rows of a sequence; they become the pending rows of its cache.

        Args:
            cache: the committed rows in it are seen by every row.
            num_rows: N.
            mask: ``(N, N)`` among the rows; ``None`` is causal.
        """
        self.add_visible(cache, num_rows, visible_keys(cache.length, num_rows, mask, self._device))

    def add_visible(self, cache: TorchKVCache, num_rows: int, visible: Tensor | None) -> None:
        """As :meth:`add`, with what each row sees: boolean ``(N, length + N)``, ``None`` is all."""
        cache.begin(num_rows)
        self._places.append(_Place(cache, self._num_rows, self._num_rows + num_rows, visible))
        self._num_rows += num_rows

    def bounds(self) -> list[tuple[int, int]]:
        """First row and the one after the last of each sequence."""
        return [(place.start, place.stop) for place in self._places]

    def mixer(self, layer: int) -> Mixer:
        """Attention through the caches, in one of their layers."""

        def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            parts = []
            for place in self._places:
                rows = slice(place.start, place.stop)
                stored = place.cache.write(layer, keys[:, rows], values[:, rows])
                parts.append(attend(queries[rows], *stored, place.visible))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return mix


@dataclass(frozen=True)
class DecoderBlock:
    """Weights of one block; the query, key and value projections are one matrix."""

    config: BlockConfig
    attention_norm: Tensor
    qkv: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Callable[[Tensor], Tensor]
    down: Callable[[Tensor], Tensor]

    @classmethod
    def take(
        cls,
        config: BlockConfig,
        pool: MutableMapping[str, Tensor],
        prefix: str = "",
        project: Project = Projection,
    ) -> "DecoderBlock":
        """Take the tensors of one block out of ``pool``, so that fused copies free their parts."""

        def take(name: str) -> Tensor | None:
            return pool.pop(prefix + name, None)

        def need(name: str) -> Tensor:
            return pool.pop(prefix + name)

        def joined(*names: str) -> Callable[[Tensor], Tensor]:
            """One projection out of several that read the same rows."""
            weights = [need(f"{name}.weight") for name in names]
            biases = [b for b in (take(f"{name}.bias") for name in names) if b is not None]
            return project(torch.cat(weights), torch.cat(biases) if biases else None)

        return cls(
            config=config,
            attention_norm=need("input_layernorm.weight"),
            qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            out=joined("self_attn.o_proj"),
            query_norm=take("self_attn.q_norm.weight"),
            key_norm=take("self_attn.k_norm.weight"),
            mlp_norm=need("post_attention_layernorm.weight"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
        )

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        mix: Mixer,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Rows ``(N, H)`` to ``(N, H)``, or to those that are wanted.

        Args:
            x: the residual stream.
            rotation: cosines and sines ``(N, 1, head_dim)`` at the rows' positions.
            mix: stores keys and values, and attends; for wanted rows alone where these are given.
            wanted: int64 ``(W,)`` rows that go on behind the attention.
        """
        mixed = self._attention(x, rotation, mix)
        x = (x if wanted is None else x[wanted]) + mixed
        return x + self._mlp(x)

    def _attention(self, x: Tensor, rotation: tuple[Tensor, Tensor], mix: Mixer) -> Tensor:
        config = self.config
        qkv = self.qkv(rms_norm(x, self.attention_norm, config.rms_norm_eps))
        qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv, sizes, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            q = rms_norm(q, self.query_norm, config.rms_norm_eps)
            k = rms_norm(k, self.key_norm, config.rms_norm_eps)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self.out(mix(q, k.transpose(0, 1), v.transpose(0, 1)))

    def _mlp(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up(rms_norm(x, self.mlp_norm, self.config.rms_norm_eps))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019)."""
    return functional.rms_norm(x, weight.shape, weight, eps)
