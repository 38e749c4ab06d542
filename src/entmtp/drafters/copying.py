"""Copies: what followed the same words earlier in the text, and how long the match is.

Prompt lookup (Saxena, 2023) as evidence beside a drafter's own. The longer the words that match,
the surer the copy; and it is the surer, the more of the newest tokens were those of copies. How
sure is found by calibration, class by class; the class is a function of the text alone.
"""

from bisect import bisect_right
from collections.abc import Sequence

from entmtp.growth import Copy

__all__ = ["MATCH_LENGTHS", "NUM_MATCHES", "SHARES", "CopyIndex"]

MATCH_LENGTHS = (1, 2, 3, 4, 5, 8, 16)
"""Least tokens that match."""

SHARES = (0.02, 0.06, 0.12, 0.25, 0.5, 0.75)
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
        """Read a text."""
        self._tokens: list[int] = []
        self._followers: dict[int, int] = {}  # n-gram -> position of the token behind it
        self._hits = self._weight = 0.0
        self._keys = (0,) * _MAX_GRAM
        """Of the n-grams at the end of the text, the shortest first; before it there are zeros."""
        self._num_known = self._place = 0
        """How many of these occurred before, and what followed the longest, most recently."""
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        text, followers = self._tokens, self._followers
        keys, num_known, place = self._keys, self._num_known, self._place
        for token in tokens:
            position = len(text)
            for key in keys:
                followers[key] = position
            if num_known:
                is_hit = text[place] == token
                self._hits = _DECAY * self._hits + (1 - _DECAY) * is_hit
                self._weight = _DECAY * self._weight + (1 - _DECAY)
            text.append(token)
            one, two, three, _ = keys
            key = token + 1
            keys = (
                key,
                key << _BITS | one,
                key << 2 * _BITS | two,
                key << 3 * _BITS | three,
            )
            num_known = place = 0
            for key in keys:
                known = followers.get(key)
                if known is None:  # nor is any longer one
                    break
                num_known, place = num_known + 1, known
        self._keys, self._num_known, self._place = keys, num_known, place

    def find(self, length: int) -> Copy | None:
        """The ``length`` tokens that followed the longest match, the most recent one.

        A copy that reaches the end of the text goes on with its own tokens, as a text does that
        repeats itself. ``None`` where no token of the end of the text occurred before.
        """
        if not self._num_known:
            return None
        at = self._place
        tokens = self._tokens[at : at + length]
        period = len(self._tokens) - at
        while len(tokens) < length:
            tokens.append(tokens[-period])
        return Copy(self._match_class(), tuple(tokens))

    def _match_class(self) -> int:
        length_class = bisect_right(MATCH_LENGTHS, self._match_length()) - 1
        share = self._hits / self._weight if self._weight else 0.0
        return length_class * (len(SHARES) + 1) + bisect_right(SHARES, share)

    def _match_length(self) -> int:
        """Tokens before the place that equal the end of the text, at most :data:`_MAX_MATCH`."""
        length, at = self._num_known, self._place
        if length < _MAX_GRAM:  # one more would be a known n-gram
            return length
        tokens, end = self._tokens, len(self._tokens)
        most = min(_MAX_MATCH, at)
        while length < most and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
