"""The reference target: a Llama-family decoder in torch, on CPU or CUDA.

A stack of :class:`entmtp.decoder.block.DecoderBlock`, an embedding and an output head. The
arithmetic follows the published implementations; tests hold it against theirs.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.decoder.block import DecoderBlock, RaggedRows, rms_norm
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.decoder.rope import RotationTable
from entmtp.linear import Projection
from entmtp.target.base import KVCache, Segment, TargetConfig, TargetOutput

__all__ = ["LlamaTarget"]


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
        self._blocks = [
            DecoderBlock.take(config, pool, f"model.layers.{index}.")
            for index in range(config.num_layers)
        ]
        length = min(2048, config.context_window)
        self._rotation = RotationTable(config, length, dtype, self.device)

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

    def project_output(self, features: Tensor) -> Tensor:
        """``(R, V)`` logits of features ``(R, H)`` under the whole output head."""
        return self._project_head(features)

    def new_cache(self, capacity: int) -> TorchKVCache:
        """An empty cache with room for ``capacity`` rows."""
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        return TorchKVCache(shape, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> TargetOutput:
        """Evaluate all rows of all segments in one pass; see :class:`Segment`."""
        rows = RaggedRows(self.device)
        for segment in segments:
            rows.add(_own_cache(segment.cache), segment.tokens.numel(), segment.mask)
        tokens = torch.cat([segment.tokens.to(self.device) for segment in segments])
        positions = np.concatenate([s.depths + s.cache.length for s in segments])
        index = torch.from_numpy(positions).to(self.device)
        rotation = self._rotation.at(index, int(positions.max()) + 1)
        x = functional.embedding(tokens, self._embedding)
        for number, block in enumerate(self._blocks):
            x = block(x, rotation, rows.mixer(number))
        hidden = rms_norm(x, self._norm, self.config.rms_norm_eps)
        bounds = rows.bounds()
        return TargetOutput(
            logits=self._logits(hidden, segments, bounds),
            hidden=tuple(hidden[start:stop] for start, stop in bounds),
        )

    def _logits(
        self, hidden: Tensor, segments: Sequence[Segment], bounds: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, ...]:
        wanted = []
        for segment, (start, stop) in zip(segments, bounds, strict=True):
            first = {"all": start, "last": stop - 1, "none": stop}[segment.logits]
            wanted.append(hidden[first:stop])
        logits = self._project_head(torch.cat(wanted))
        return tuple(torch.split(logits, [len(part) for part in wanted]))


def _own_cache(cache: KVCache) -> TorchKVCache:
    if not isinstance(cache, TorchKVCache):
        raise TypeError(f"the torch target reads TorchKVCache, not {type(cache).__name__}")
    return cache
