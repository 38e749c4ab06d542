"""Copies: what followed the same words earlier in the text, and how long the match is.

Prompt lookup (Saxena, 2023) as evidence beside a drafter's own: the longer the words that match, the
surer the copy; how sure is found by calibration, class by class.
"""

from collections.abc import Sequence

from entmtp.growth import Copy

__all__ = ["MATCH_LENGTHS", "CopyIndex"]

MATCH_LENGTHS = (1, 2, 3, 4, 5, 8, 16)
"""Least tokens that match, by class of the match."""

_MAX_GRAM = 4  # found by a table; longer matches by looking back from there
_MAX_MATCH = MATCH_LENGTHS[-1]
_BITS = 24  # of a token id inside a key; no vocabulary has as many


class CopyIndex:
    """One text, and where each n-gram of it was last followed by a token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """Start with a text."""
        self._tokens = list(tokens)
        self._followers: dict[int, int] = {}  # n-gram -> position of the token behind it
        self._num_indexed = 0

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._tokens.extend(tokens)

    def find(self, length: int) -> Copy | None:
        """The ``length`` tokens that followed the longest match, the most recent one.

        A copy that reaches the end of the text goes on with its own tokens, as a text does that
        repeats itself. ``None`` where no token of the end of the text occurred before.
        """
        self._catch_up()
        at = self._last_place()
        if at is None:
            return None
        tokens = self._tokens[at : at + length]
        period = len(self._tokens) - at
        while len(tokens) < length:
            tokens.append(tokens[-period])
        matched = self._match_length(at)
        match = sum(matched >= least for least in MATCH_LENGTHS) - 1
        return Copy(match, tuple(tokens))

    def _last_place(self) -> int | None:
        """Position behind the most recent occurrence of the longest known n-gram."""
        key, found = 0, None
        for token in reversed(self._tokens[-_MAX_GRAM:]):
            key = key << _BITS | (token + 1)
            place = self._followers.get(key)
            if place is None:
                break
            found = place
        return found

    def _match_length(self, at: int) -> int:
        """Tokens before ``at`` that equal the end of the text, at most :data:`_MAX_MATCH`."""
        tokens, end = self._tokens, len(self._tokens)
        length = 0
        while length < min(_MAX_MATCH, at) and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _catch_up(self) -> None:
        tokens = self._tokens
        for position in range(max(self._num_indexed, 1), len(tokens)):
            key = 0
            for token in reversed(tokens[max(position - _MAX_GRAM, 0) : position]):
                key = key << _BITS | (token + 1)
                self._followers[key] = position
        self._num_indexed = len(tokens)
