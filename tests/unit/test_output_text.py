"""Text from tokens: characters that are never torn, stop strings, and where a text ends."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from entmtp.engine.text import OutputText
from entmtp.params import SamplingParams
from entmtp.tokenizer import Message, TextStream
from fakes import ByteTokenizer
from strategies import utf8_texts

EOS = 256


class PieceTokenizer:
    """Token i is the i-th of some byte strings, which may hold parts of characters."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.eos_ids = frozenset[int]()
        self.longest_call = 0

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        self.longest_call = max(self.longest_call, len(ids))
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """Bytes cut anywhere into pieces of one to four."""
    pieces = []
    while data:
        size = draw(st.integers(1, 4))
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def stream(tokenizer: ByteTokenizer | PieceTokenizer, tokens: Sequence[int]) -> list[str]:
    """What each token, and then the end, makes certain."""
    texts = TextStream(tokenizer)
    return [*(texts.push(token) for token in tokens), texts.flush()]


def output(
    *stop: str, max_tokens: int = 1000, ignore_eos: bool = False, pieces: Sequence[bytes] = ()
) -> OutputText:
    """An empty text, one token a byte unless pieces are given."""
    params = SamplingParams(stop=stop, ignore_eos=ignore_eos)
    return OutputText(PieceTokenizer(pieces) if pieces else ByteTokenizer(), params, max_tokens)


def finished(text: OutputText, tokens: Sequence[int]) -> tuple[str, int, str | None]:
    """Text, number of tokens and reason after these tokens."""
    text.push(tokens)
    return text.text, len(text.token_ids), text.finish_reason


# -- the stream of characters ----------------------------------------------------------------------


@given(utf8_texts())
@example("\ufffdé")  # was lost: a fourth token was taken for the end of the character
def test_stream_equals_decoding_the_whole(text: str) -> None:
    """One byte at a time gives the text, replacement characters written out in it included."""
    assert "".join(stream(ByteTokenizer(), text.encode())) == text


@given(st.data(), utf8_texts())
def test_stream_of_pieces_equals_decoding_the_whole(data: st.DataObject, text: str) -> None:
    """Tokens that end in the middle of characters, one after the other, lose nothing."""
    pieces = data.draw(cut(text.encode()))
    assert "".join(stream(PieceTokenizer(pieces), range(len(pieces)))) == text


@given(st.binary(max_size=24))
def test_stream_of_invalid_bytes_equals_decoding_the_whole(garbage: bytes) -> None:
    """Bytes that are no text become the replacement characters of a decoding in one piece."""
    assert "".join(stream(ByteTokenizer(), garbage)) == garbage.decode(errors="replace")


def test_a_character_comes_with_its_last_byte() -> None:
    """No part of it is shown before."""
    assert stream(ByteTokenizer(), "a😀é".encode()) == ["a", "", "", "", "😀", "", "é", ""]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    """A text that ends within a character ends with the replacement character."""
    assert stream(ByteTokenizer(), "é".encode()[:1]) == ["", "\ufffd"]


def test_flushing_twice_adds_nothing() -> None:
    """What was given out is not given out again."""
    texts = TextStream(ByteTokenizer())
    texts.push(0xC3)
    assert (texts.flush(), texts.flush(), texts.text) == ("\ufffd", "", "\ufffd")


@pytest.mark.parametrize("piece", [b"word ", b"\x80", "\ufffd".encode()])
def test_the_cost_of_a_token_does_not_grow(piece: bytes) -> None:
    """Only a short window is decoded again, in text and in an endless run of garbage."""
    tokenizer = PieceTokenizer([piece])
    assert "".join(stream(tokenizer, [0] * 500)) == (piece * 500).decode(errors="replace")
    assert tokenizer.longest_call <= 65


# -- ends ------------------------------------------------------------------------------------------


def test_end_of_text_token() -> None:
    """It ends the text, is counted, and is not shown."""
    assert finished(output(), [*b"ab", EOS, *b"cd"]) == ("ab", 3, "stop")


def test_end_of_text_token_ignored() -> None:
    """The text goes on, still without showing it."""
    assert finished(output(ignore_eos=True), [*b"ab", EOS, *b"cd"]) == ("abcd", 5, None)


def test_length() -> None:
    """The text ends with the last token of the budget."""
    text = output(max_tokens=3)
    assert text.num_left == 3
    assert finished(text, b"abcd") == ("abc", 3, "length")
    assert text.num_left == 0


def test_end_of_text_token_at_the_limit() -> None:
    """The model ended the text by itself, so the reason is not the length."""
    assert finished(output(max_tokens=2), [*b"a", EOS]) == ("a", 2, "stop")


def test_length_within_a_character() -> None:
    """The rest of a torn character is shown as it is."""
    assert finished(output(max_tokens=2), "aé".encode()) == ("a\ufffd", 2, "length")


def test_push_takes_tokens_up_to_the_end() -> None:
    """It returns the text and the tokens that count; later tokens of a step are dropped."""
    text = output()
    assert text.push(b"ab") == ("ab", (97, 98))
    assert text.push([*b"c", EOS, *b"d"]) == ("c", (99, EOS))


# -- stop strings ----------------------------------------------------------------------------------


def test_stop_string_across_tokens() -> None:
    """The text ends before it; the tokens that complete it are counted."""
    assert finished(output("END"), b"abENDcd") == ("ab", 5, "stop")


def test_stop_string_within_a_token() -> None:
    """What follows the stop string in its token is cut as well."""
    assert finished(output("lo", pieces=[b"hel", b"lo w", b"x"]), [0, 1, 2]) == ("hel", 2, "stop")


def test_stop_string_at_the_very_beginning() -> None:
    """The text is empty."""
    assert finished(output("ab"), b"abc") == ("", 2, "stop")


def test_stop_string_of_multi_byte_characters() -> None:
    """It is found among characters, so bytes that only look alike do not count."""
    assert finished(output("é"), "aèàéb".encode()) == ("aèà", 7, "stop")


def test_stop_string_completed_by_a_torn_character() -> None:
    """A stop string is found when the last byte of its last character arrives."""
    text = output("x😀")
    assert text.push("ax😀".encode()[:5]) == ("a", tuple("ax😀".encode()[:5]))
    assert finished(text, "😀".encode()[3:]) == ("a", 6, "stop")


def test_the_earliest_stop_string_wins() -> None:
    """Of two in one token the text is cut at the first, whatever their order in the request."""
    assert finished(output("wor", "lo", pieces=[b"hello world"]), [0]) == ("hel", 1, "stop")


def test_overlapping_stop_strings() -> None:
    """The one that is complete first ends the text, though the other began before."""
    assert finished(output("abcd", "bc"), b"xabcd") == ("xa", 4, "stop")


def test_stop_string_that_begins_again_within_itself() -> None:
    """A false start may hold the real one."""
    assert finished(output("aab"), b"aaab") == ("a", 4, "stop")


def test_a_false_start_is_released() -> None:
    """Text that may begin a stop string is held, then shown when it does not."""
    text = output("END")
    assert [text.push([byte])[0] for byte in b"aENd"] == ["a", "", "", "ENd"]


@pytest.mark.parametrize(("tokens", "reason"), [([*b"aEN", EOS], "stop"), (b"aENx", "length")])
def test_held_text_is_shown_at_the_end(tokens: Sequence[int], reason: str) -> None:
    """A stop string that never came takes nothing away."""
    text = output("ENDx", max_tokens=4)
    assert finished(text, tokens) == (bytes(t for t in tokens if t < 256).decode(), 4, reason)


def test_stop_string_at_the_limit() -> None:
    """A stop string that the last token completes is the reason, not the length."""
    assert finished(output("bc", max_tokens=3), b"abc") == ("a", 3, "stop")


# -- any text --------------------------------------------------------------------------------------

LETTERS = st.sampled_from("aabé中😀")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3).map(tuple)
TOKENS = st.text(LETTERS, max_size=12).map(lambda text: list(text.encode()))


def reference(tokens: Sequence[int], stop: Sequence[str], limit: int) -> tuple[str, int, str]:
    """Decode everything again after every token, and search all of it."""
    for size in range(1, len(tokens) + 1):
        is_eos, is_full = tokens[size - 1] == EOS, size == limit
        whole = ByteTokenizer().decode(tokens[:size])
        sure = whole if is_eos or is_full else whole.rstrip("\ufffd")
        starts = [sure.find(s) for s in stop if s in sure]
        if starts or is_eos or is_full:
            reason = "stop" if starts or is_eos else "length"
            return sure[: min(starts, default=len(sure))], size, reason
    raise AssertionError("the last token is the end of the text")


@given(TOKENS, STOPS, st.integers(1, 30))
def test_text_and_end_equal_a_search_of_the_whole(
    tokens: list[int], stop: tuple[str, ...], limit: int
) -> None:
    """Holding back and a short window change neither the text nor where it ends."""
    tokens = [*tokens, EOS]
    assert finished(output(*stop, max_tokens=limit), tokens) == reference(tokens, stop, limit)


@given(st.data(), TOKENS, STOPS, st.integers(1, 30))
def test_text_does_not_depend_on_the_grouping(
    data: st.DataObject, tokens: list[int], stop: tuple[str, ...], limit: int
) -> None:
    """However tokens come in steps, text, tokens and reason are the same."""
    tokens = [*tokens, EOS]
    once, grouped = output(*stop, max_tokens=limit), output(*stop, max_tokens=limit)
    once.push(tokens)
    start = 0
    while grouped.finish_reason is None:
        size = data.draw(st.integers(1, 5))
        grouped.push(tokens[start : start + size])
        start += size
    assert (grouped.text, grouped.token_ids) == (once.text, once.token_ids)
    assert grouped.finish_reason == once.finish_reason


@given(TOKENS, STOPS)
def test_shown_text_is_never_taken_back(tokens: list[int], stop: tuple[str, ...]) -> None:
    """The pieces of a stream add up to the text, and no stop string is ever in them."""
    text, shown = output(*stop), ""
    for token in [*tokens, EOS]:
        if text.finish_reason is None:
            shown += text.push([token])[0]
            assert not any(s in shown for s in stop)
    assert shown == text.text
