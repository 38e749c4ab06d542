"""Prompt lookup: what followed the same n-gram earlier in the text. No training, any model.

After Saxena's prompt lookup decoding (2023), extended from one chain to trees: the r-th child of a
node is the r-th best distinct continuation of the text that ends at that node, the longest n-gram
first, then the most recent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from entmtp.drafters.base import AnyRequest, DraftRequest, DraftTree
from entmtp.topology import Topology

__all__ = ["PromptLookupDrafter"]

_MAX_OCCURRENCES = 64  # of one n-gram that are looked at, the most recent ones


@dataclass
class _State:
    """The text so far, and where each n-gram of it is followed by a known token."""

    tokens: list[int]
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    num_indexed: int = 0


class PromptLookupDrafter:
    """Drafts from the sequence's own text; implements :class:`entmtp.drafters.base.Drafter`.

    Where nothing matches, the tree returned is smaller than the plan, down to the empty one, so
    that no target row is spent on a guess that does not exist.
    """

    name = "lookup"
    max_depth: int | None = None
    max_width: int | None = None

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        """Set the lengths of n-grams that are looked up, the longest first."""
        self._ngrams = range(max_ngram, min_ngram - 1, -1)
        self.digest = f"ngrams {min_ngram}-{max_ngram}"

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _State:
        """Index the prompt."""
        del hidden
        state = _State([*prompt, root])
        self._index(state)
        return state

    def commit(self, state: _State, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Index the tokens of a step."""
        del hidden
        state.tokens.extend(tokens)
        self._index(state)

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """Fill what can be filled of each plan."""
        return [self._draft_one(request) for request in requests]

    def path_ranks(self, state: _State, path: Sequence[int], limit: int) -> list[int]:
        """Rank of each token of a path among the children proposed there; ``limit`` if it has none.

        Args:
            state: of the sequence; its last token is the root.
            path: tokens behind the root.
            limit: proposals of a node that are looked at.
        """
        tail = state.tokens[-self._ngrams.start :]
        ranks = []
        for depth, token in enumerate(path):
            found = list(self._continuations(state, [*tail, *path[:depth]], limit))
            ranks.append(found.index(token) if token in found else limit)
        return ranks

    def _index(self, state: _State) -> None:
        tokens = state.tokens
        for position in range(max(state.num_indexed, 1), len(tokens)):
            for n in self._ngrams:
                if n <= position:
                    gram = tuple(tokens[position - n : position])
                    state.followers.setdefault(gram, []).append(tokens[position])
        state.num_indexed = len(tokens)

    def _draft_one(self, request: AnyRequest) -> DraftTree:
        assert isinstance(request, DraftRequest)  # noqa: S101 - check_depth refuses the others
        state: _State = request.state
        plan = request.plan
        root = state.tokens[-1]
        tail = state.tokens[-self._ngrams.start :]
        filled: dict[tuple[int, ...], int] = {(): root}
        for level in plan.levels:
            width = level.width
            for parent in level.parents.tolist():
                path = plan.paths[parent - 1] if parent else ()
                if path not in filled:
                    continue
                above = [filled[path[:depth]] for depth in range(1, len(path) + 1)]
                found = list(self._continuations(state, tail + above, width))
                for child in plan.children[parent]:
                    rank = plan.paths[child - 1][-1]
                    if rank < len(found):
                        filled[plan.paths[child - 1]] = found[rank]
        kept = tuple(path for path in plan.paths if path in filled)
        topology = plan if len(kept) == plan.num_nodes else _subtree(kept)
        tokens = torch.tensor([root, *(filled[path] for path in kept)], dtype=torch.int64)
        return DraftTree(topology, tokens)

    def _continuations(self, state: _State, text: list[int], width: int) -> Iterator[int]:
        """Distinct next tokens, best first, at most ``width``."""
        seen: set[int] = set()
        for n in self._ngrams:
            followers = state.followers.get(tuple(text[-n:]), []) if n <= len(text) else []
            for token in reversed(followers[-_MAX_OCCURRENCES:]):
                if token not in seen:
                    seen.add(token)
                    yield token
                    if len(seen) == width:
                        return


@lru_cache(maxsize=4096)
def _subtree(paths: tuple[tuple[int, ...], ...]) -> Topology:
    """A prefix-closed part of a tree; cached, so that its index arrays are made once."""
    return Topology(paths)
