"""The weights of a decoder-only model, and what they compute from rows."""

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor
from torch.nn import functional

from entmtp.decoder.block import DecoderBlock, Mixer, rms_norm
from entmtp.decoder.rope import RotationTable
from entmtp.linear import Projection
from entmtp.target.base import TargetConfig

__all__ = ["DecoderStack"]

_FIRST_POSITIONS = 2048  # of the rotation table; it grows


class DecoderStack:
    """Embedding, blocks, final norm and output head; holds nothing of a sequence."""

    def __init__(
        self,
        config: TargetConfig,
        pool: MutableMapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the tensors out of ``pool``.

        Args:
            config: sizes.
            pool: tensors under the Hugging Face names, of this dtype and on this device.
            dtype: of weights, activations, keys and values.
            device: where they live.
        """
        self.config, self.dtype, self.device = config, dtype, device
        self.embedding = pool.pop("model.embed_tokens.weight")
        self._norm = pool.pop("model.norm.weight")
        self.head = self.embedding if config.tie_embeddings else pool.pop("lm_head.weight")
        self.project = Projection(self.head)
        self._blocks = [
            DecoderBlock.take(config, pool, f"model.layers.{index}.")
            for index in range(config.num_layers)
        ]
        length = min(_FIRST_POSITIONS, config.context_window)
        self.rotation = RotationTable(config, length, dtype, device)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key-value heads, head_dim."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    def hidden(
        self, tokens: Tensor, rotation: tuple[Tensor, Tensor], mixer: Callable[[int], Mixer]
    ) -> Tensor:
        """Rows to ``(N, H)`` after the final norm.

        Args:
            tokens: int64 ``(N,)`` on the stack's device.
            rotation: cosines and sines ``(N, 1, head_dim)`` at the rows' positions.
            mixer: what stores keys and values and attends, by layer.
        """
        x = functional.embedding(tokens, self.embedding)
        for number, block in enumerate(self._blocks):
            x = block(x, rotation, mixer(number))
        return rms_norm(x, self._norm, self.config.rms_norm_eps)
