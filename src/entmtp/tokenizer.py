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
    Text up to the last word boundary that was decoded is dropped from the window, so the cost
    of a token does not grow with the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # first id of the decoding window
        self._seen = 0  # ids of the window whose text has been given out
        self.text = ""

    def push(self, token: int) -> str:
        """Take one token; return the text that became certain through it (may be empty)."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._seen])
        now = self._tokenizer.decode(self._ids[self._start :])
        if now.endswith("\ufffd") and len(self._ids) - self._seen < 4:
            return ""
        return self._advance(now[len(before) :])

    def flush(self) -> str:
        """Return what is still held, as it is, at the end of the text."""
        before = self._tokenizer.decode(self._ids[self._start : self._seen])
        now = self._tokenizer.decode(self._ids[self._start :])
        return self._advance(now[len(before) :])

    def _advance(self, piece: str) -> str:
        self._start = self._seen
        self._seen = len(self._ids)
        self.text += piece
        return piece
