"""Copies: what followed the same words earlier in the text, and how long the match is.

Prompt lookup (Saxena, 2023) as evidence beside a drafter's own. The longer the words that match,
the surer the copy; and it is the surer, the more of the newest tokens were those of copies. How
sure is found by calibration, class by class; the class is a function of the text alone.
"""

from collections.abc import Sequence

from entmtp.growth import Copy

__all__ = ["MATCH_LENGTHS", "NUM_MATCHES", "SHARES", "CopyIndex"]

MATCH_LENGTHS = (1, 2, 3, 4, 5, 8, 16)
"""Least tokens that match."""

SHARES = (0.25, 0.5, 0.75)
"""Bounds between classes of the share of recent tokens that were the next one of a copy."""

NUM_MATCHES = len(MATCH_LENGTHS) * (len(SHARES) + 1)
"""Classes of a match: ``length_class * (len(SHARES) + 1) + share_class``."""

_DECAY = 0.9  # of the average over recent tokens

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
        self._hits = self._weight = 0.0

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
        return Copy(self._match_class(at), tuple(tokens))

    def _match_class(self, at: int) -> int:
        matched = self._match_length(at)
        length_class = sum(matched >= least for least in MATCH_LENGTHS) - 1
        share = self._hits / self._weight if self._weight else 0.0
        share_class = sum(share >= bound for bound in SHARES)
        return length_class * (len(SHARES) + 1) + share_class

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
            key, copied = 0, None
            for token in reversed(tokens[max(position - _MAX_GRAM, 0) : position]):
                key = key << _BITS | (token + 1)
                copied = self._followers.get(key, copied)
                self._followers[key] = position
            if copied is not None:
                is_hit = tokens[copied] == tokens[position]
                self._hits = _DECAY * self._hits + (1 - _DECAY) * is_hit
                self._weight = _DECAY * self._weight + (1 - _DECAY)
        self._num_indexed = len(tokens)
