"""What a trace keeps of copies: the class of the match, how far it is right, where heads agree."""

from collections.abc import Sequence

from entmtp.drafters.base import GrownTree
from entmtp.drafters.copying import CopyIndex
from entmtp.growth import MAX_COPY, Copy
from entmtp.topology import Topology

__all__ = ["TextCopies", "common_length", "node_on_copy"]


class TextCopies:
    """The copies behind each token of one text."""

    def __init__(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Start before the first token behind the prompt."""
        self._index, self._tokens = CopyIndex(prompt), tokens
        self._num_read = 0

    def at(self, position: int) -> Copy | None:
        """The copy behind a token; positions must not fall."""
        self._index.extend(self._tokens[self._num_read : position + 1])
        self._num_read = position + 1
        return self._index.find(MAX_COPY)

    def hits(self, position: int, copy: Copy) -> int:
        """How many of its tokens are right."""
        return common_length(copy.tokens, self._tokens[position + 1 : position + 1 + MAX_COPY])


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Leading elements that are equal."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def node_on_copy(envelope: Topology, tree: GrownTree, copy: Copy) -> int:
    """Deepest node of a wholly evaluated envelope whose path carries the first tokens of a copy."""
    tokens, node = tree.tokens.tolist(), 0
    for wanted in copy.tokens:
        below = [child for child in envelope.children[node] if tokens[child] == wanted]
        if not below:
            break
        node = below[0]
    return node
