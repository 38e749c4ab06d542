"""Drafting with one recurrent module: its block is used again at every depth of the tree.

A row joins the feature of the row above with the embedding of the node's own token, and attends
to the committed text and to its own path. Its feature scores the node's children.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from entmtp.drafters.base import AnyRequest, DraftRequest, DraftTree, GrownTree, GrowRequest
from entmtp.drafters.block_state import BlockRows, BlockRunner, BlockState
from entmtp.drafters.filling import FixedShapes, Shapes, open_depths, root_tokens
from entmtp.drafters.growing import Growth, draft_trees
from entmtp.drafters.heads import RecurrentModule
from entmtp.drafters.picking import LevelRows, Picker
from entmtp.topology import Level

__all__ = ["RecurrentDrafter"]


@dataclass
class _Branch:
    """One tree while it is being filled.

    Attributes:
        state: of the sequence.
        tokens: ``(N,)``.
        length: rows in the cache before the tree.
        row_of: node -> its row behind ``length``, for the nodes that were evaluated.
        features: ``(R, H)`` of the parents of the depth that was filled last.
        parents: those nodes, in the same order.
    """

    state: BlockState
    tokens: Tensor
    length: int
    row_of: dict[int, int]
    features: Tensor
    parents: npt.NDArray[np.int64]


class RecurrentDrafter:
    """Fills and grows trees of any depth from a multi-token module.

    Implements :class:`entmtp.drafters.base.GrowingDrafter`. The cache of a sequence holds one row
    for every committed token but the first, made from the target's own hidden states; rows of a
    tree are cut away again when it is filled.
    """

    name = "mtp"
    max_depth: int | None = None

    def __init__(self, module: RecurrentModule, embedding: Tensor, digest: str = "") -> None:
        """Join module and target.

        Args:
            module: packed, in the target's dtype and on its device.
            embedding: ``(V, H)`` input embedding of the target.
            digest: of the module, from :func:`entmtp.drafters.checkpoint.heads_digest`.
        """
        self.digest = digest
        self.module = module.eval().requires_grad_(False)
        self._embedding = embedding
        self._runner = BlockRunner(
            module.block_config,
            lambda inputs, rotation, mix: module.features(
                inputs[0], functional.embedding(inputs[1], embedding), rotation, mix
            ),
            embedding.dtype,
            embedding.device,
        )

    @property
    def hot_ids(self) -> Tensor:
        """int64 ``(hot,)``: the tokens that can be drafted."""
        return self.module.hot_ids

    @property
    def max_width(self) -> int:
        """Size of the hot vocabulary."""
        return len(self.module.hot_ids)

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> BlockState:
        """Let the rows (h_t, x_{t+1}) of the prompt wait, the root's included."""
        state = self._runner.start()
        state.waiting.append((hidden, self._ids([*prompt[1:], root])))
        return state

    def commit(self, state: BlockState, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Let the rows of the root and the accepted nodes wait."""
        state.waiting.append((hidden.clone(), self._ids(tokens)))

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
        branches: dict[int, _Branch] = {}
        try:
            for depth, levels in open_depths(shapes):
                if depth:
                    self._evaluate(depth, levels, branches)
                else:
                    self._runner.catch_up([requests[index].state for index in levels])
                    branches = {i: _start(requests[i].state, trees[i]) for i in levels}
                rows = LevelRows.of(depth, levels, requests, trees)
                features = torch.cat([branches[index].features for index in levels])
                picker.pick(rows.scored(self.module.logits(0, features), self.module.hot_ids))
        finally:
            for branch in branches.values():
                branch.state.cache.truncate(branch.length)

    def _evaluate(
        self, depth: int, levels: Mapping[int, Level], branches: Mapping[int, _Branch]
    ) -> None:
        """Read the nodes of ``depth`` whose children are wanted."""
        rows = []
        for number, level in levels.items():
            branch = branches[number]
            above = np.searchsorted(branch.parents, level.paths[:, -2])
            index = torch.from_numpy(level.parents).to(branch.tokens.device)
            rows.append(
                BlockRows(
                    branch.state,
                    (
                        branch.features[torch.from_numpy(above).to(branch.features.device)],
                        branch.tokens[index],
                    ),
                    np.full(len(level.parents), branch.length - 1 + depth, dtype=np.int64),
                    _place(branch, level),
                )
            )
        read = self._runner.run(rows)
        for (number, level), features in zip(levels.items(), read, strict=True):
            branches[number].features = features
            branches[number].parents = level.parents

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.int64, device=self._embedding.device)


def _start(state: BlockState, tokens: Tensor) -> _Branch:
    root = np.zeros(1, dtype=np.int64)
    return _Branch(state, tokens, state.cache.length, {}, state.feature, root)


def _place(branch: _Branch, level: Level) -> npt.NDArray[np.bool_]:
    """Give rows to the parents of a level; what each sees: the text, its path and itself."""
    first = len(branch.row_of)
    for node in level.parents.tolist():
        branch.row_of[node] = len(branch.row_of)
    mask = np.zeros((len(level.parents), branch.length + len(branch.row_of)), dtype=np.bool_)
    mask[:, : branch.length] = True
    for row, path in enumerate(level.paths.tolist()):
        for node in path[1:]:
            mask[row, branch.length + branch.row_of[node]] = True
        assert mask[row, branch.length + first + row]  # noqa: S101 - a row sees itself
    return mask
