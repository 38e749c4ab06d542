"""The target's contract: one forward over a ragged batch of segments.

Plain decoding (one token), a draft tree (N nodes) and a chunk of a prompt are all segments, so
batching and chunked prefill need no second path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, device, dtype

from entmtp.decoder.config import BlockConfig

__all__ = ["KVCache", "LogitStats", "Segment", "Target", "TargetConfig", "TargetOutput"]


@dataclass(frozen=True, kw_only=True)
class TargetConfig(BlockConfig):
    """Sizes of a Llama-family decoder, those of each of its blocks included.

    Attributes:
        family: ``llama``, ``mistral``, ``qwen2``, ``qwen3`` or ``mimo``.
        vocab_size: V.
        num_layers: L.
        context_window: most positions a sequence may have, prompt included.
        sliding_window: positions that the layers which slide look back on; ``None`` where none
            does. It caps ``context_window``: within it, sliding and full attention are the same.
        tie_embeddings: the output head is the input embedding.
        num_mtp_modules: native multi-token modules that the checkpoint holds beside the target.
    """

    family: str
    vocab_size: int
    num_layers: int
    context_window: int
    sliding_window: int | None = None
    tie_embeddings: bool = False
    num_mtp_modules: int = 0

    @property
    def is_window_capped(self) -> bool:
        """Whether the sliding window is what limits ``context_window``."""
        return self.context_window == self.sliding_window


class KVCache(Protocol):
    """Keys and values of one sequence: committed rows, then those of the last forward."""

    @property
    def length(self) -> int:
        """Committed rows."""

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, in this order, and drop its others.

        Args:
            rows: increasing indices into the segment of the last forward.
        """


@dataclass(frozen=True)
class Segment:
    """The rows of one sequence in a forward.

    Attributes:
        cache: where the prefix lies; the rows are appended to it, uncommitted.
        tokens: int64 ``(N,)``, on the CPU or on the target's device.
        depths: ``(N,)``; position of a row = ``cache.length`` + its depth.
        mask: ``(N, N)`` boolean ancestor mask among the rows; ``None`` is causal (a chain).
            Every row sees the whole prefix.
        logits: for which rows the output head is evaluated.
    """

    cache: KVCache
    tokens: Tensor
    depths: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_] | None = None
    logits: Literal["all", "last", "none"] = "all"


@dataclass(frozen=True)
class LogitStats:
    """What decoding asks of rows of raw logits, where a target computes it on the way.

    Attributes:
        tokens: arg-max of each row, ties to the lower id.
        entropy: of softmax, in nats; NaN where a row is not finite.
        top1: largest probability.
    """

    tokens: list[int]
    entropy: list[float]
    top1: list[float]


@dataclass(frozen=True)
class TargetOutput:
    """What a forward gives, one entry a segment.

    Attributes:
        logits: ``(N, V)``, ``(1, V)`` or ``(0, V)`` as the segment asked, in the target's dtype;
            all ``(0, V)`` where they were not needed and there are statistics.
        hidden: ``(N, H)`` after the final norm: what the output head and the drafters read.
        stats: of the rows that were asked for; ``None`` where the target leaves them to the engine.
    """

    logits: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...]
    stats: tuple[LogitStats, ...] | None = None


class Target(Protocol):
    """The model whose output must be preserved."""

    @property
    def config(self) -> TargetConfig:
        """Sizes."""

    @property
    def device(self) -> device:
        """Where logits and hidden states live."""

    @property
    def dtype(self) -> dtype:
        """Of logits and hidden states."""

    @property
    def backend(self) -> str:
        """Name for reports, for example ``torch-cpu``."""

    @property
    def has_own_threads(self) -> bool:
        """Whether it computes on threads of its own, so that torch's would only be in their way."""

    @property
    def precision(self) -> str:
        """What products are computed in, for reports: ``float32``, ``int8`` and so on."""

    @property
    def weights_digest(self) -> str:
        """Of the weights as they are stored, whatever the target makes of them: see
        :class:`entmtp.target.digest.WeightsDigest`.
        """

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache with room for ``capacity`` rows; it grows where that is exceeded."""

    def forward(self, segments: Sequence[Segment], *, needs_logits: bool = True) -> TargetOutput:
        """Evaluate all rows of all segments in one pass.

        Args:
            segments: rows, at least one.
            needs_logits: where false, a target that gives statistics may leave out the logits.
        """

    def embedding(self) -> Tensor:
        """``(V, H)`` input embedding, not to be written to."""

    def output_rows(self, ids: Tensor) -> Tensor:
        """``(len(ids), H)`` rows of the output head, a copy."""

    def project_output(self, features: Tensor) -> Tensor:
        """``(R, V)`` logits of features ``(R, H)`` under the whole output head."""
