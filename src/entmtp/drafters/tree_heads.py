"""Drafting with heads: one evaluation and one batched top-k a depth, for all sequences at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from entmtp.drafters.base import AnyRequest, DraftRequest, DraftTree, GrownTree, GrowRequest
from entmtp.drafters.block_state import BlockRunner, BlockState
from entmtp.drafters.filling import FixedShapes, Shapes, open_depths, root_tokens
from entmtp.drafters.growing import Growth, draft_trees
from entmtp.drafters.heads import HydraHeads, MedusaHeads, PrefixLayer
from entmtp.drafters.picking import LevelRows, Picker
from entmtp.topology import Level

__all__ = ["HeadsDrafter"]


@dataclass
class _State:
    """What the heads read besides tokens, at the last committed token.

    Attributes:
        hidden: ``(1, H)`` hidden state of the target.
        prefix: of the prefix layer, where there is one.
    """

    hidden: Tensor
    prefix: BlockState | None = None


class HeadsDrafter:
    """Fills and grows trees from Medusa, Hydra or Hydra++ heads.

    Implements :class:`entmtp.drafters.base.GrowingDrafter`. Heads deeper than the deepest tree of
    the batch are not run. Any prefix-closed tree is filled rightly: a row is evaluated for each
    node that has children, whatever its rank. The prefix layer of Hydra++ reads the hidden states
    of committed tokens alone, so its cache knows nothing of draft trees.
    """

    def __init__(
        self, heads: MedusaHeads | HydraHeads, embedding: Tensor, digest: str = ""
    ) -> None:
        """Join heads and target.

        Args:
            heads: with output matrices, in the target's dtype and on its device; packed where
                they have a prefix layer.
            embedding: ``(V, H)`` input embedding of the target.
            digest: of the heads, from :func:`entmtp.drafters.checkpoint.heads_digest`.
        """
        self.digest = digest
        self.heads = heads.eval().requires_grad_(False)
        self._embedding = embedding
        self._reads_tokens = isinstance(heads, HydraHeads)
        prefix = heads.prefix if isinstance(heads, HydraHeads) else None
        self._prefix = None if prefix is None else _prefix_runner(prefix, embedding)

    @property
    def name(self) -> str:
        """``medusa``, ``hydra`` or ``hydra++``."""
        return self.heads.config.kind

    @property
    def max_depth(self) -> int:
        """Number of heads."""
        return self.heads.config.num_heads

    @property
    def hot_ids(self) -> Tensor:
        """int64 ``(hot,)``: the tokens that can be drafted."""
        return self.heads.hot_ids

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.heads.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Keep the hidden state of the last prompt token; all of them for a prefix layer."""
        del prompt, root
        state = _State(hidden[-1:].clone())
        if self._prefix is not None:
            state.prefix = self._prefix.start()
            state.prefix.waiting.append((hidden,))
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Keep the hidden state of the last accepted node; all of them for a prefix layer."""
        del tokens
        state.hidden = hidden[-1:].clone()
        if state.prefix is not None:
            state.prefix.waiting.append((hidden.clone(),))

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """Fill or grow one tree a request, depth by depth."""
        return draft_trees(self, requests)

    def fill(self, requests: Sequence[DraftRequest], picker: Picker) -> list[Tensor]:
        """Tokens ``(N,)`` of one tree a request, whose children the picker chooses."""
        trees = root_tokens(requests, self._embedding.device)
        self._walk(requests, trees, FixedShapes([r.plan for r in requests]), picker)
        return trees

    def grow(self, requests: Sequence[GrowRequest]) -> list[GrownTree]:
        """One tree a request; only rows that are worth it are evaluated."""
        growth = Growth(requests, self._embedding.device)
        self._walk(requests, growth.trees, growth, growth)
        return growth.results()

    @torch.inference_mode()
    def _walk(
        self,
        requests: Sequence[AnyRequest],
        trees: Sequence[Tensor],
        shapes: Shapes,
        picker: Picker,
    ) -> None:
        """Evaluate what the shapes open, and let the picker set the children."""
        base: dict[int, Tensor] = {}
        for depth, levels in open_depths(shapes):
            base = base or self._base_features(requests, levels)
            rows = LevelRows.of(depth, levels, requests, trees, share_row=not self._reads_tokens)
            scores = self._scores(rows, [base[index] for index in levels])
            picker.pick(rows.scored(scores, self.heads.hot_ids))

    def _base_features(
        self, requests: Sequence[AnyRequest], levels: Mapping[int, Level]
    ) -> dict[int, Tensor]:
        """``(1, H)`` of each request that is open: h_t, or s_t of the prefix layer."""
        if self._prefix is None:
            return {index: requests[index].state.hidden for index in levels}
        self._prefix.catch_up([requests[index].state.prefix for index in levels])
        return {index: requests[index].state.prefix.feature for index in levels}

    def _scores(self, rows: LevelRows, base: Sequence[Tensor]) -> Tensor:
        """``(R, hot)``: evaluate the head of a depth on the rows of all trees."""
        if self._reads_tokens:
            hidden = torch.cat([h.expand(n, -1) for h, n in zip(base, rows.counts, strict=True)])
            above = torch.cat(
                [
                    tokens[torch.from_numpy(level.paths).to(tokens.device)]
                    for tokens, level in zip(rows.trees, rows.levels, strict=True)
                ]
            )
            embedded = functional.embedding(above, self._embedding)
        else:  # a head sees h_t alone
            hidden = embedded = torch.cat(list(base))
        return self.heads.logits(rows.depth, self.heads.features(rows.depth, hidden, embedded))


def _prefix_runner(prefix: PrefixLayer, embedding: Tensor) -> BlockRunner:
    return BlockRunner(
        prefix.config,
        lambda inputs, rotation, mix: prefix(inputs[0], rotation, mix),
        embedding.dtype,
        embedding.device,
    )
