"""Heads and blocks of drafters inside the core: one call for all rows of a depth."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from entmtp.kernels.core import CoreArrays, CoreModel, NativeKVCache
from entmtp.kernels.growth import GrowthRoom, GrowthTask
from entmtp.kernels.library import (
    CConfig,
    CFront,
    CHead,
    CHeadJob,
    CHeads,
    CJob,
    CMatrix,
    CRanking,
    CSegment,
    CText,
    CVocabulary,
    address,
)
from entmtp.kernels.trees import TreeBatch, TreeRequest, tree_shape

__all__ = [
    "MAX_BEST",
    "BlockOutput",
    "BlockPart",
    "BlockText",
    "HeadLayout",
    "NativeBlock",
    "NativeHeads",
    "PackedMatrix",
    "Vocabulary",
]

MAX_BEST = 64
"""``kMaxBest`` of core.h: columns that the core ranks for a row."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """What a drafter reads of its target, and what it scores.

    Attributes:
        embedding: ``(V, H)`` of the target.
        hot_ids: ``(columns,)`` tokens that are scored.
        embed_scale: factor on the embedding.
    """

    embedding: Floats
    hot_ids: Ints
    embed_scale: float = 1.0

    def for_core(self) -> CVocabulary:
        """The structure; the embedding must outlive what is made of it."""
        return CVocabulary(
            address(self.embedding),
            self.embed_scale,
            len(self.embedding),
            len(self.hot_ids),
            address(self.hot_ids),
        )


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix ``(channels, k)`` from :meth:`Library.pack` and its bias."""

    packed: npt.NDArray[np.uint8]
    channels: int
    k: int
    bias: Floats | None = None


@dataclass(frozen=True)
class HeadLayout:
    """A head by indices into a list of matrices, some of which may serve several heads.

    Attributes:
        first: product of a Hydra head, see ``Head`` of core.h; ``None`` for Medusa.
        blocks: residual blocks in their order.
        output: to scores.
    """

    first: int | None
    blocks: tuple[int, ...]
    output: int


class NativeHeads:
    """Medusa or Hydra heads, on the threads of a target."""

    def __init__(
        self,
        target: CoreModel,
        matrices: Sequence[PackedMatrix],
        heads: Sequence[HeadLayout],
        vocabulary: Vocabulary,
    ) -> None:
        """Hand packed matrices over to the core, which copies them."""
        self._vocabulary = vocabulary
        self._hidden_size = vocabulary.embedding.shape[1]
        given = (CMatrix * len(matrices))()
        for index, m in enumerate(matrices):
            given[index] = CMatrix(address(m.packed), address(m.bias), m.channels, m.k)
        blocks = [np.array(head.blocks, dtype=np.int32) for head in heads]
        layouts = (CHead * len(heads))()
        for index, (head, own) in enumerate(zip(heads, blocks, strict=True)):
            first = -1 if head.first is None else head.first
            layouts[index] = CHead(first, head.output, len(own), address(own))
        shape = CHeads(
            self._hidden_size, len(matrices), len(heads), given, layouts, vocabulary.for_core()
        )
        pointer = target.lib.entmtp_heads_new(target.pointer, ctypes.byref(shape))
        self._model = CoreModel(target.library, target.isa, pointer, owner=target)

    def scores(self, head: int, base: Floats, base_of: Ints, tokens: Ints | None) -> Floats:
        """``(R, columns)`` scores.

        Args:
            head: index from 0.
            base: ``(B, H)`` hidden states.
            base_of: ``(R,)`` the one that each row begins with.
            tokens: ``(R, head + 1)`` above each row, for Hydra.
        """
        num_rows = len(base_of)
        assert base.shape[1] == self._hidden_size  # noqa: S101 - the target's
        assert tokens is None or tokens.shape == (num_rows, head + 1)  # noqa: S101
        scores = np.empty((num_rows, len(self._vocabulary.hot_ids)), dtype=np.float32)
        job = CHeadJob(
            head,
            num_rows,
            len(base),
            address(base),
            address(base_of),
            address(tokens),
            CRanking(address(scores)),
        )
        _check(self._model.lib.entmtp_heads_run(self._model.pointer, ctypes.byref(job)))
        return scores

    def fill(self, base: Floats, requests: Sequence[TreeRequest]) -> list[Ints]:
        """Tokens ``(N,)`` of trees of the best children, ties to the lower column.

        Args:
            base: ``(B, H)`` hidden state of each tree.
            requests: at least one; ranks below :data:`MAX_BEST`.
        """
        assert base.shape == (len(requests), self._hidden_size)  # noqa: S101
        batch = TreeBatch(requests)
        _check(
            self._model.lib.entmtp_heads_fill(
                self._model.pointer, address(base), batch.for_core, len(requests)
            )
        )
        return batch.tokens

    def grow(self, base: Floats, tasks: Sequence[GrowthTask], room: GrowthRoom) -> None:
        """Grow trees into ``room``.

        Args:
            base: ``(B, H)`` hidden state of each tree.
            tasks: at least one; ranks below :data:`MAX_BEST`.
            room: takes the results.
        """
        assert base.shape == (len(tasks), self._hidden_size)  # noqa: S101
        room.prepare(tasks)
        _check(
            self._model.lib.entmtp_heads_grow(
                self._model.pointer, address(base), room.for_core, len(tasks)
            )
        )


@dataclass(frozen=True)
class BlockPart:
    """Rows of one sequence that a block reads.

    Attributes:
        cache: of the sequence.
        positions: int32 ``(n,)``.
        mask: uint8 ``(n, held + n)`` which rows behind the committed ones each sees; ``None`` is
            causal, with none held.
        held: int32 positions of the rows that were read before and not committed.
    """

    cache: NativeKVCache
    positions: Ints
    mask: npt.NDArray[np.uint8] | None = None
    held: Ints | None = None


@dataclass(frozen=True)
class BlockText:
    """Rows of one sequence that a block reads before its tree, the root's last.

    Attributes:
        cache: of the sequence.
        inputs: ``(n, H)``.
        tokens: ``(n,)`` that they are joined with.
    """

    cache: NativeKVCache
    inputs: Floats
    tokens: Ints


@dataclass(frozen=True)
class BlockOutput:
    """What a block gives.

    Attributes:
        hidden: ``(n, H)`` of all rows.
        scores: ``(R, columns)`` of the rows that were scored.
    """

    hidden: Floats
    scores: Floats


class NativeBlock:
    """One decoder block of a drafter with its norm, on the threads of a target.

    Its rows come from outside: as they are, or joined with the embedding of a token.
    """

    def __init__(
        self,
        target: CoreModel,
        config: CConfig,
        arrays: Mapping[str, npt.NDArray[Any]],
        vocabulary: Vocabulary | None,
        *,
        hidden_first: bool = False,
    ) -> None:
        """Hand packed weights over to the core, which copies them.

        Args:
            target: whose threads it uses.
            config: sizes; of one layer.
            arrays: those of a model of one layer, and ``join`` and ``output_bias`` where there are.
            vocabulary: ``None`` where nothing is joined or scored.
            hidden_first: rows are joined as [row, embedding].
        """
        self._vocabulary = vocabulary
        self._hidden_size = int(config.hidden)
        given = CoreArrays(arrays, 1)
        words = CVocabulary() if vocabulary is None else vocabulary.for_core()
        front = CFront(given.at("join"), hidden_first, given.at("output_bias"), words)
        pointer = target.lib.entmtp_block_new(
            target.pointer, ctypes.byref(config), ctypes.byref(given.weights), ctypes.byref(front)
        )
        self._model = CoreModel(target.library, target.isa, pointer, owner=target)

    def new_cache(self, capacity: int) -> NativeKVCache:
        """An empty cache with room for ``capacity`` rows."""
        return NativeKVCache(self._model, capacity)

    def forward(
        self,
        parts: Sequence[BlockPart],
        inputs: Floats,
        tokens: Ints | None = None,
        wanted: Ints | None = None,
    ) -> BlockOutput:
        """Read the rows of all parts; they are pending in their caches then.

        Args:
            parts: at least one.
            inputs: ``(n, H)`` rows of all parts.
            tokens: ``(n,)`` that they are joined with.
            wanted: increasing indices of the rows that are scored.
        """
        segments = (CSegment * len(parts))()
        first = 0
        for index, part in enumerate(parts):
            size, held = len(part.positions), 0 if part.held is None else len(part.held)
            assert part.mask is None or part.mask.shape == (size, held + size)  # noqa: S101
            pointer = part.cache.reserve(held + size)
            places = (address(part.mask), address(part.held))
            segments[index] = CSegment(pointer, first, size, *places, held)
            first += size
        assert inputs.shape == (first, self._hidden_size)  # noqa: S101
        assert tokens is None or tokens.shape == (first,)  # noqa: S101
        positions = np.concatenate([part.positions for part in parts])
        hidden = np.empty((first, self._hidden_size), dtype=np.float32)
        num_wanted = 0 if wanted is None else len(wanted)
        columns = 0 if self._vocabulary is None else len(self._vocabulary.hot_ids)
        scores = np.empty((num_wanted, columns), dtype=np.float32)
        job = CJob(
            tokens=address(tokens),
            positions=address(positions),
            segments=segments,
            num_segments=len(parts),
            num_rows=first,
            hidden=address(hidden),
            logit_rows=address(wanted),
            num_logit_rows=num_wanted,
            inputs=address(inputs),
            ranking=CRanking(address(scores)),
        )
        _check(self._model.lib.entmtp_forward(self._model.pointer, ctypes.byref(job)))
        return BlockOutput(hidden, scores)

    def fill(self, texts: Sequence[BlockText], requests: Sequence[TreeRequest]) -> list[Ints]:
        """Read what waits of each text, commit it, and fill its tree with the best children.

        Args:
            texts: at least one; where the call fails, their caches are as before.
            requests: a tree for each; ranks below :data:`MAX_BEST`.
        """
        batch = TreeBatch(requests)
        given = self._texts(texts, [shape.num_held for shape in batch.shapes])
        _check(
            self._model.lib.entmtp_block_fill(
                self._model.pointer, given, batch.for_core, len(texts)
            )
        )
        return batch.tokens

    def grow(
        self, texts: Sequence[BlockText], tasks: Sequence[GrowthTask], room: GrowthRoom
    ) -> None:
        """Read what waits of each text, commit it, and grow its tree into ``room``.

        Args:
            texts: at least one; where the call fails, their caches are as before.
            tasks: a tree for each; ranks below :data:`MAX_BEST`.
            room: takes the results.
        """
        room.prepare(tasks)
        held = [tree_shape(task.plan.rule.envelope).num_held for task in tasks]
        given = self._texts(texts, held)
        _check(
            self._model.lib.entmtp_block_grow(self._model.pointer, given, room.for_core, len(texts))
        )

    def _texts(self, texts: Sequence[BlockText], num_held: Sequence[int]) -> Any:
        """Texts as the core takes them, with room for so many rows behind each."""
        given = (CText * len(texts))()
        for index, (text, held) in enumerate(zip(texts, num_held, strict=True)):
            size = len(text.tokens)
            assert text.inputs.shape == (size, self._hidden_size)  # noqa: S101
            pointer = text.cache.reserve(size + held)
            given[index] = CText(pointer, size, address(text.inputs), address(text.tokens))
        return given


def _check(code: int) -> None:
    if code < 0:
        raise MemoryError("no memory for the rows of a drafter in the native core")
    assert code == 0, f"the core refused a job ({code})"  # noqa: S101 - a drafter of our own made it
