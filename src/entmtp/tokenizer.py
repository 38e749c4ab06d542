"""The seam between text and token ids; the implementation is made in ``entmtp.loading``."""

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = ["Message", "TextStream", "Tokenizer"]

Message = Mapping[str, str]
"""A chat message: ``{"role": "user", "content": "..."}``."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; any object with these members will do."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text; special tokens written out in it are recognised."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant begins to speak.

        Raises:
            InputError: the model has no chat template, or it refuses these messages.
        """


class TextStream:
    """Turns a growing list of token ids into text that never has to be taken back.

    A token may hold a part of a character; such a part is held until the character is whole.
    Tokens whose text was given out are dropped from the decoding window, so the cost of a token
    does not grow with the length of the text.
    """

    _MAX_HELD = 3  # a character has at most four bytes, so its parts are at most three tokens
    _MAX_WINDOW = 64

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id of the decoding window
        self._whole = 0  # number of ids at whose end the text last ended in a whole character
        self._given = 0  # characters of the window's text that have been given out
        self.text = ""

    def push(self, token: int) -> str:
        """Take one token; return the text that became certain through it (may be empty)."""
        self._ids.append(token)
        window = self._decode_window()
        if not window.endswith("\ufffd"):
            piece = self._give(window, len(window))
            self._move_window(self._whole, 0)
            self._whole = len(self._ids)
            return piece
        if len(self._ids) - self._whole <= self._MAX_HELD:
            return ""
        # more than a part of one character: only the last of it can still become whole
        piece = self._give(window, len(window) - 1)
        if len(self._ids) - self._start > self._MAX_WINDOW:
            self._move_window(len(self._ids) - self._MAX_WINDOW // 2, 1)
        return piece

    def flush(self) -> str:
        """Return what is still held, as it is, at the end of the text."""
        window = self._decode_window()
        return self._give(window, len(window))

    def _decode_window(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :])

    def _give(self, window: str, end: int) -> str:
        piece = window[self._given : end]
        self._given = max(self._given, end)
        self.text += piece
        return piece

    def _move_window(self, start: int, num_held: int) -> None:
        """Begin at another id; all characters but the last ``num_held`` have been given out."""
        self._start = start
        self._given = len(self._decode_window()) - num_held
