"""Copies: the longest match, the most recent one, and what followed it."""

from hypothesis import given
from hypothesis import strategies as st

from entmtp.drafters.copying import MATCH_LENGTHS, NUM_MATCHES, SHARES, CopyIndex
from entmtp.growth import Copy


def copy_twin(tokens: list[int], length: int) -> Copy | None:
    """By looking at every earlier place; matches beyond four tokens do not change the place."""
    best: tuple[int, int] | None = None
    for at in range(1, len(tokens)):
        matched = match_twin(tokens, at, len(tokens))
        if matched and (best is None or (min(matched, 4), at) > (min(best[0], 4), best[1])):
            best = matched, at
    if best is None:
        return None
    share = sum(share_twin(tokens) >= bound for bound in SHARES)
    longer = [*tokens]
    for _ in range(length):
        longer.append(longer[best[1] + len(longer) - len(tokens)])
    length_class = max(i for i, least in enumerate(MATCH_LENGTHS) if best[0] >= least)
    return Copy((len(SHARES) + 1) * length_class + share, tuple(longer[len(tokens) :]))


def share_twin(tokens: list[int]) -> float:
    """Average over the tokens that could have been copied, the newest with the largest weight."""
    hits = []
    for end in range(1, len(tokens)):
        places = [at for at in range(1, end) if tokens[at - 1] == tokens[end - 1]]
        if places:
            lengths = {at: match_twin(tokens, at, end) for at in places}
            best = max(places, key=lambda at: (min(lengths[at], 4), at))
            hits.append(tokens[best] == tokens[end])
    weights = [0.9**age for age in range(len(hits))][::-1]
    return sum(w * h for w, h in zip(weights, hits, strict=True)) / sum(weights) if hits else 0.0


def match_twin(tokens: list[int], at: int, end: int) -> int:
    """Tokens before ``at`` that equal those before ``end``."""
    matched = 0
    while matched < at and tokens[at - 1 - matched] == tokens[end - 1 - matched]:
        matched += 1
    return matched


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9), st.integers(0, 40))
def test_copies_equal_those_of_the_twin(tokens: list[int], length: int, cut: int) -> None:
    """Whether a text comes whole or in parts, with questions between."""
    index = CopyIndex(tokens[:cut])
    for token in tokens[cut:]:
        index.find(2)
        index.extend([token])
    assert index.find(length) == copy_twin(tokens, length)
    assert CopyIndex(tokens).find(length) == copy_twin(tokens, length)


def test_a_text_that_repeats_itself_is_copied_on() -> None:
    """Beyond its own end, with the class of a long match."""
    found = CopyIndex([9, 9, *([1, 2, 3] * 8)]).find(7)
    assert found == Copy(NUM_MATCHES - 1, (1, 2, 3, 1, 2, 3, 1))


def test_nothing_is_copied_where_no_token_occurred_before() -> None:
    """An empty text, one token, and a new one."""
    for tokens in ([], [5], [1, 2, 3]):
        assert CopyIndex(tokens).find(4) is None
