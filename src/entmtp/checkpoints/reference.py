"""The forward pass of heads once more: straight from a file's tensors, in float64, path by path.

The slow twin of the drafters. It shares no code with them or with the readers of layouts but the
rotary frequencies: names and formulas are written out again (Cai et al. 2024, Ankner et al. 2024,
DeepSeek-V3 2024, MiMo 2025), there is no cache, no batch, and every score is computed from the
whole text.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.decoder.config import BlockConfig
from entmtp.decoder.rope import inverse_frequencies

__all__ = ["Reference", "TargetMatrices"]

_Scores = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class TargetMatrices:
    """What the formulas read of the target.

    Attributes:
        embedding: ``(V, H)``.
        project: features ``(H,)`` to logits ``(V,)``, both float64.
        block: sizes of a block of the target.
    """

    embedding: Tensor
    project: Callable[[Tensor], Tensor]
    block: BlockConfig


class Reference:
    """Scores of a file of heads by the formulas."""

    def __init__(
        self, tensors: Mapping[str, Tensor], target: TargetMatrices, embed_scale: float = 1.0
    ) -> None:
        """Take the raw tensors of a file in a published layout, prefixes stripped.

        Args:
            tensors: by name; ``token_map`` int64 ``(hot,)`` where only some tokens are scored.
            target: what the formulas read of it.
            embed_scale: factor on the embeddings where they enter a Hydra head.
        """
        self._tensors, self._target = tensors, target
        self._embed_scale = embed_scale
        self._scores = self._pick()

    def scores(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Scores of the next token behind a path of draft tokens.

        Args:
            hidden: ``(t + 1, H)`` hidden states h_0 .. h_t of the target.
            tokens: x_0 .. x_{t+1}; the last is the root.
            path: draft tokens above, from depth 1.

        Returns:
            float64 ``(V,)``; minus infinity for tokens that are never drafted.
        """
        return self._scores(hidden.double(), tokens, path)

    def _pick(self) -> _Scores:
        names = self._tensors.keys()
        if any(n.startswith("hydra_mlp.") for n in names):
            return self._hydra
        if any(n.startswith("blocks.") and ".layers." in n for n in names):
            return self._vllm_medusa
        if any("mtp_layers." in n for n in names):
            return self._mimo
        if any(n.endswith("eh_proj.weight") for n in names):
            return self._deepseek
        return self._medusa

    def _get(self, name: str) -> Tensor:
        return self._tensors[name].double()

    def _linear(self, stem: str, x: Tensor) -> Tensor:
        out = x @ self._get(f"{stem}.weight").T
        return out + self._get(f"{stem}.bias") if f"{stem}.bias" in self._tensors else out

    def _res_block(self, stem: str, x: Tensor) -> Tensor:
        return x + _silu(self._linear(stem, x))

    def _embed(self, token: int) -> Tensor:
        return self._target.embedding[token].double()

    def _medusa(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        head, x, layer = len(path), hidden[-1], 0
        while f"{head}.{layer}.linear.weight" in self._tensors:
            x = self._res_block(f"{head}.{layer}.linear", x)
            layer += 1
        return self._output((f"{head}.{layer}",), x)

    def _vllm_medusa(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        head, x, layer = len(path), hidden[-1], 0
        while f"blocks.{head}.layers.{layer}.weight" in self._tensors:
            x = self._res_block(f"blocks.{head}.layers.{layer}", x)
            layer += 1
        return self._output((f"lm_heads.{head}", "lm_heads.0", "lm_head"), x)

    def _output(self, stems: Sequence[str], x: Tensor) -> Tensor:
        """``(V,)`` by the first matrix of ``stems`` that is there, else by the target's."""
        own = next((stem for stem in stems if f"{stem}.weight" in self._tensors), None)
        rows = self._target.project(x) if own is None else self._linear(own, x)
        if "token_map" not in self._tensors:
            return rows
        ids = self._tensors["token_map"].long()
        scores = torch.full((len(self._target.embedding),), -math.inf, dtype=torch.float64)
        scores[ids] = rows if len(rows) == len(ids) else rows[ids]
        return scores

    def _hydra(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        head = len(path)
        has_prefix = any(n.startswith("prefix_embeding_layer.") for n in self._tensors)
        base = hidden[-1]
        if has_prefix:
            out = self._block("prefix_embeding_layer.layers.0.", hidden)
            base = self._norm("prefix_embeding_layer.norm.weight", out[-1])
        above = [self._embed(token) * self._embed_scale for token in [tokens[-1], *path]]
        u = torch.cat([base, *above])
        number = 1 if has_prefix else 0
        stem = f"hydra_mlp.{head}.{number}"
        x = self._linear(f"{stem}.res_connection", u) + _silu(self._linear(f"{stem}.linear", u))
        step = 2 if has_prefix else 1
        while f"hydra_mlp.{head}.{(number := number + step)}.linear.weight" in self._tensors:
            x = self._res_block(f"hydra_mlp.{head}.{number}.linear", x)
        return self._output((f"hydra_lm_head.{head}" + (".1" if has_prefix else ""),), x)

    def _deepseek(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        start = self._module(r"(.*layers\.(\d+)\.)eh_proj\.weight")

        def join(h: Tensor, e: Tensor) -> Tensor:
            parts = self._norm(f"{start}enorm.weight", e), self._norm(f"{start}hnorm.weight", h)
            return self._linear(f"{start}eh_proj", torch.cat(parts))

        features = self._recur(start, "shared_head.norm.weight", join, hidden, tokens, path)
        return self._output((f"{start}shared_head.head",), features)

    def _mimo(self, hidden: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        start = self._module(r"(.*mtp_layers\.(\d+)\.)input_proj\.weight")

        def join(h: Tensor, e: Tensor) -> Tensor:
            parts = (
                self._norm(f"{start}hidden_layernorm.weight", h),
                self._norm(f"{start}token_layernorm.weight", e),
            )
            return self._linear(f"{start}input_proj", torch.cat(parts))

        features = self._recur(start, "final_layernorm.weight", join, hidden, tokens, path)
        return self._output((), features)

    def _module(self, pattern: str) -> str:
        """Prefix of the module with the lowest number."""
        matches = [m for n in self._tensors if (m := re.fullmatch(pattern, n))]
        return str(min(matches, key=lambda match: int(match.group(2))).group(1))

    def _recur(
        self,
        start: str,
        norm: str,
        join: Callable[[Tensor, Tensor], Tensor],
        hidden: Tensor,
        tokens: Sequence[int],
        path: Sequence[int],
    ) -> Tensor:
        """The module's feature at the end of the path, every row computed anew at each depth."""
        rows = [join(h, self._embed(x)) for h, x in zip(hidden, tokens[1:], strict=True)]
        for token in path:
            feature = self._norm(start + norm, self._block(start, torch.stack(rows))[-1])
            rows.append(join(feature, self._embed(token)))
        return self._norm(start + norm, self._block(start, torch.stack(rows))[-1])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self._target.block.rms_norm_eps) * self._get(name)

    def _block(self, start: str, x: Tensor) -> Tensor:
        """A Llama block with causal attention over rows ``(T, H)`` at positions 0 .. T-1."""
        size = self._target.block.head_dim
        inner = self._norm(f"{start}input_layernorm.weight", x)

        def heads(name: str) -> Tensor:
            return self._linear(f"{start}self_attn.{name}_proj", inner).view(len(x), -1, size)

        q, k, v = heads("q"), heads("k"), heads("v")
        if f"{start}self_attn.q_norm.weight" in self._tensors:
            q = self._norm(f"{start}self_attn.q_norm.weight", q)
            k = self._norm(f"{start}self_attn.k_norm.weight", k)
        q, k = self._turn(q), self._turn(k)
        group = q.shape[1] // k.shape[1]
        mixed = torch.zeros(len(x), q.shape[1], size, dtype=torch.float64)
        for row in range(len(x)):
            for head in range(q.shape[1]):
                keys, values = k[: row + 1, head // group], v[: row + 1, head // group]
                weights = torch.softmax(keys @ q[row, head] / math.sqrt(size), dim=0)
                mixed[row, head] = weights @ values
        x = x + self._linear(f"{start}self_attn.o_proj", mixed.flatten(1))
        inner = self._norm(f"{start}post_attention_layernorm.weight", x)
        gate = _silu(self._linear(f"{start}mlp.gate_proj", inner))
        up = self._linear(f"{start}mlp.up_proj", inner)
        return x + self._linear(f"{start}mlp.down_proj", gate * up)

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions: the pair (i, i + d/2) of a head as one complex number."""
        scaling = self._target.block.rope_scaling
        angles = torch.outer(
            torch.arange(len(x), dtype=torch.float64),
            inverse_frequencies(self._target.block).double(),
        )
        scale = torch.full_like(angles, 1.0 if scaling is None else scaling.attention_factor)
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(scale, angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
