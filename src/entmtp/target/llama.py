"""The reference target: a Llama-family decoder in torch, on CPU or CUDA.

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated feed-forward
(Touvron et al. 2023), with the options of Mistral, Qwen2 (QKV bias) and Qwen3 (QK norm). The
arithmetic follows the published implementations; tests hold it against theirs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.linear import Projection
from entmtp.target.base import KVCache, Segment, TargetConfig, TargetOutput
from entmtp.target.kv_cache import TorchKVCache
from entmtp.target.tree_attention import attend, visible_keys

__all__ = ["LlamaTarget"]


@dataclass(frozen=True)
class _Layer:
    """Weights of one block; the query, key and value projections are one matrix."""

    attention_norm: Tensor
    qkv: Projection
    out: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class _Rows:
    """One segment's place in the flat batch, and what its attention needs in every layer."""

    cache: TorchKVCache
    start: int
    stop: int
    visible: Tensor | None


class LlamaTarget:
    """A target in torch; implements :class:`entmtp.target.base.Target`."""

    def __init__(
        self,
        config: TargetConfig,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take over weights.

        Args:
            config: sizes; the tensors must agree with them (``target.weights`` checks).
            tensors: (name, value) under the Hugging Face names, in any float dtype.
            dtype: of weights, activations, keys and values.
            device: where they live.
        """
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        pool = {name: value.to(self.device, dtype) for name, value in tensors}
        self._embedding = pool.pop("model.embed_tokens.weight")
        self._norm = pool.pop("model.norm.weight")
        self._head = self._embedding if config.tie_embeddings else pool.pop("lm_head.weight")
        self._project_head = Projection(self._head)
        self._layers = [_take_layer(pool, index) for index in range(config.num_layers)]
        self._cos, self._sin = self._rotation_table(min(2048, config.context_window))

    @property
    def backend(self) -> str:
        """``torch-cpu`` or ``torch-cuda``."""
        return f"torch-{self.device.type}"

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding."""
        return self._embedding

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, a copy."""
        return self._head.index_select(0, ids.to(self.device))

    def new_cache(self, capacity: int) -> TorchKVCache:
        """An empty cache with room for ``capacity`` rows."""
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        return TorchKVCache(shape, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> TargetOutput:
        """Evaluate all rows of all segments in one pass; see :class:`Segment`."""
        rows = self._place(segments)
        tokens = torch.cat([segment.tokens.to(self.device) for segment in segments])
        cos, sin = self._rotation(segments)
        x = functional.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            x = x + self._attention(layer, index, x, rows, (cos, sin))
            x = x + self._mlp(layer, x)
        hidden = self._rms_norm(x, self._norm)
        return TargetOutput(
            logits=self._logits(hidden, segments, rows),
            hidden=tuple(hidden[r.start : r.stop] for r in rows),
        )

    def _place(self, segments: Sequence[Segment]) -> list[_Rows]:
        rows, start = [], 0
        for segment in segments:
            cache = _own_cache(segment.cache)
            num_rows = segment.tokens.numel()
            cache.begin(num_rows)
            visible = visible_keys(cache.length, num_rows, segment.mask, self.device)
            rows.append(_Rows(cache, start, start + num_rows, visible))
            start += num_rows
        return rows

    def _attention(
        self,
        layer: _Layer,
        index: int,
        x: Tensor,
        rows: Sequence[_Rows],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        config = self.config
        qkv = layer.qkv(self._rms_norm(x, layer.attention_norm))
        qkv = qkv.view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv, sizes, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._rms_norm(q, layer.query_norm), self._rms_norm(k, layer.key_norm)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        parts = []
        for r in rows:
            keys, values = r.cache.write(index, k[:, r.start : r.stop], v[:, r.start : r.stop])
            parts.append(attend(q[r.start : r.stop], keys, values, r.visible))
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        return layer.out(mixed)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._rms_norm(x, layer.mlp_norm))
        gate, up = gate_up.chunk(2, dim=-1)
        return layer.down(functional.silu(gate) * up)

    def _logits(
        self, hidden: Tensor, segments: Sequence[Segment], rows: Sequence[_Rows]
    ) -> tuple[Tensor, ...]:
        wanted = []
        for segment, r in zip(segments, rows, strict=True):
            first = {"all": r.start, "last": r.stop - 1, "none": r.stop}[segment.logits]
            wanted.append(hidden[first : r.stop])
        logits = self._project_head(torch.cat(wanted))
        return tuple(torch.split(logits, [len(part) for part in wanted]))

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(rows, 1, head_dim)`` at the positions of all rows."""
        positions = np.concatenate([s.depths + s.cache.length for s in segments])
        needed = int(positions.max()) + 1
        if needed > len(self._cos):
            self._cos, self._sin = self._rotation_table(max(needed, 2 * len(self._cos)))
        index = torch.from_numpy(positions).to(self.device)
        return self._cos[index].unsqueeze(1), self._sin[index].unsqueeze(1)

    def _rotation_table(self, length: int) -> tuple[Tensor, Tensor]:
        """RoPE (Su et al. 2021): angle of pair i at position p is p * theta ** (-2i / head_dim)."""
        dim = self.config.head_dim
        exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=self.device).float() / dim
        frequency = 1.0 / (self.config.rope_theta**exponent)
        angle = torch.outer(torch.arange(length, device=self.device).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + d/2]) of ``(rows, heads, d)`` by its angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _own_cache(cache: KVCache) -> TorchKVCache:
    if not isinstance(cache, TorchKVCache):
        raise TypeError(f"the torch target reads TorchKVCache, not {type(cache).__name__}")
    return cache


def _take_layer(pool: dict[str, Tensor], index: int) -> _Layer:
    """Take the tensors of one block out of the pool, so that fused copies free their parts."""
    prefix = f"model.layers.{index}."

    def take(name: str) -> Tensor | None:
        return pool.pop(prefix + name, None)

    def need(name: str) -> Tensor:
        return pool.pop(prefix + name)

    def project(*names: str) -> Projection:
        """One projection out of several that read the same rows."""
        weights = [need(f"{name}.weight") for name in names]
        biases = [b for b in (take(f"{name}.bias") for name in names) if b is not None]
        return Projection(torch.cat(weights), torch.cat(biases) if biases else None)

    return _Layer(
        attention_norm=need("input_layernorm.weight"),
        qkv=project("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=project("self_attn.o_proj"),
        query_norm=take("self_attn.q_norm.weight"),
        key_norm=take("self_attn.k_norm.weight"),
        mlp_norm=need("post_attention_layernorm.weight"),
        gate_up=project("mlp.gate_proj", "mlp.up_proj"),
        down=project("mlp.down_proj"),
    )
