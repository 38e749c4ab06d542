"""When a text ends, and which part of it is certain; a function of its tokens alone."""

from collections.abc import Sequence

from entmtp.params import SamplingParams
from entmtp.tokenizer import TextStream, Tokenizer

__all__ = ["OutputText"]


class OutputText:
    """Tokens and text of one sequence as they grow; decides where it ends.

    As the decision is made token by token, it does not depend on how tokens come in steps.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, max_tokens: int) -> None:
        """Start an empty text.

        Args:
            tokenizer: turns tokens into text.
            sampling: stop strings and the handling of end-of-text tokens.
            max_tokens: limit, from the request and the context window.
        """
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._max_tokens = max_tokens
        self._stop = sampling.stop
        self._eos = frozenset() if sampling.ignore_eos else tokenizer.eos_ids
        self._stream = TextStream(tokenizer)
        self._held = ""  # certain text that may be the beginning of a stop string

    @property
    def num_left(self) -> int:
        """Tokens that may still be emitted."""
        return self._max_tokens - len(self.token_ids)

    def push(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Take the tokens of a step up to the one that ends the text, if any does.

        Returns:
            the text that became certain, and the tokens that were taken.
        """
        before, taken = len(self.text), len(self.token_ids)
        for token in tokens:
            self._push_one(token)
            if self.finish_reason is not None:
                break
        return self.text[before:], tuple(self.token_ids[taken:])

    def _push_one(self, token: int) -> None:
        self.token_ids.append(token)
        self._held += self._stream.push(token)
        if token in self._eos:
            self.finish_reason = "stop"
        elif self.num_left <= 0:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            self._held += self._stream.flush()
        if not self._cut_at_stop():
            keep = 0 if self.finish_reason else self._num_open()
            certain = len(self._held) - keep
            self.text += self._held[:certain]
            self._held = self._held[certain:]

    def _cut_at_stop(self) -> bool:
        """End before the first stop string, where one has appeared."""
        starts = [self._held.find(stop) for stop in self._stop]
        found = [start for start in starts if start >= 0]
        if found:
            self.text += self._held[: min(found)]
            self._held = ""
            self.finish_reason = "stop"
        return bool(found)

    def _num_open(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )
