"""The reference target: a Llama-family decoder in torch, on CPU or CUDA.

A stack of :class:`entmtp.decoder.block.DecoderBlock`, an embedding and an output head. The
arithmetic follows the published implementations; tests hold it against theirs.
"""

import copy
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from entmtp.decoder.attention import attention_kernels
from entmtp.decoder.block import RaggedRows
from entmtp.decoder.kv_cache import TorchKVCache
from entmtp.target.base import KVCache, Segment, TargetConfig, TargetOutput
from entmtp.target.cuda_graphs import CudaRecorder, GraphRunner, Recorder
from entmtp.target.digest import WeightsDigest
from entmtp.target.stack import DecoderStack

__all__ = ["LlamaTarget"]


class LlamaTarget:
    """A target in torch; implements :class:`entmtp.target.base.Target`."""

    has_own_threads = False

    def __init__(
        self,
        config: TargetConfig,
        tensors: Iterable[tuple[str, Tensor]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        graphs: bool | Recorder = True,
    ) -> None:
        """Take over weights.

        Args:
            config: sizes; the tensors must agree with them (``target.weights`` checks).
            tensors: (name, value) under the Hugging Face names, in any float dtype.
            dtype: of weights, activations, keys and values.
            device: where they live.
            graphs: whether decoding steps of one sequence are CUDA graphs where the device is
                CUDA, or what records them, on any device.
        """
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        digest = WeightsDigest(config)
        pool = {name: value.to(self.device, dtype) for name, value in digest.watch(tensors)}
        self.weights_digest = digest.hexdigest()
        self._stack = DecoderStack(config, pool, dtype, self.device)
        self._runner = _make_runner(self._stack, graphs)

    @property
    def backend(self) -> str:
        """``torch-cpu`` or ``torch-cuda``."""
        return f"torch-{self.device.type}"

    @property
    def precision(self) -> str:
        """Name of the dtype."""
        return str(self.dtype).removeprefix("torch.")

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding."""
        return self._stack.embedding

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, a copy."""
        return self._stack.head.index_select(0, ids.to(self.device))

    def project_output(self, features: Tensor) -> Tensor:
        """``(R, V)`` logits of features ``(R, H)`` under the whole output head."""
        return self._stack.project(features)

    def new_cache(self, capacity: int) -> TorchKVCache:
        """An empty cache with room for ``capacity`` rows."""
        return TorchKVCache(self._stack.cache_shape, capacity, self.dtype, self.device)

    @property
    def graphs_captured(self) -> int:
        """Steps recorded so far, one for each number of rows and span of the cache."""
        return 0 if self._runner is None else self._runner.graphs_captured

    @property
    def graph_replays(self) -> int:
        """Forwards that were replays."""
        return 0 if self._runner is None else self._runner.graph_replays

    def with_graphs(self, graphs: bool | Recorder) -> "LlamaTarget":
        """A target on the same weights, with graphs of its own; ``False`` is without any."""
        twin = copy.copy(self)
        twin._runner = _make_runner(self._stack, graphs)
        return twin

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        """Evaluate all rows of all segments in one pass; the logits are always there."""
        del needs_logits
        with attention_kernels(self.device):
            output = None
            if self._runner is not None and len(segments) == 1:
                output = self._runner.step(segments[0])
            return self._eager(segments) if output is None else output

    def _eager(self, segments: Sequence[Segment]) -> TargetOutput:
        rows = RaggedRows(self.device)
        for segment in segments:
            rows.add(_own_cache(segment.cache), segment.tokens.numel(), segment.mask)
        tokens = torch.cat([segment.tokens.to(self.device) for segment in segments])
        positions = np.concatenate([s.depths + s.cache.length for s in segments])
        index = torch.from_numpy(positions).to(self.device)
        rotation = self._stack.rotation.at(index, int(positions.max()) + 1)
        hidden = self._stack.hidden(tokens, rotation, rows.mixer)
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
        logits = self._stack.project(torch.cat(wanted))
        return tuple(torch.split(logits, [len(part) for part in wanted]))


def _make_runner(stack: DecoderStack, graphs: bool | Recorder) -> GraphRunner | None:
    if not isinstance(graphs, bool):
        return GraphRunner(stack, graphs)
    if not graphs or stack.device.type != "cuda":
        return None
    return GraphRunner(stack, CudaRecorder(stack.device))


def _own_cache(cache: KVCache) -> TorchKVCache:
    if not isinstance(cache, TorchKVCache):
        raise TypeError(f"the torch target reads TorchKVCache, not {type(cache).__name__}")
    return cache
