"""A drafter that proposes nothing and keeps what a drafter would have been shown."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from entmtp.drafters.empty import EmptyDrafter

__all__ = ["RecordingDrafter"]


@dataclass
class _Record:
    """One sequence: hidden states of all its tokens but the newest, and the tokens."""

    rows: list[Tensor]
    tokens: list[int]


class RecordingDrafter(EmptyDrafter):
    """Keeps the hidden states of prompts and texts while they are decoded plainly."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        """Keep states in a dtype, on the CPU; by default in the target's."""
        self._dtype = dtype
        self._records: list[_Record] = []

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> _Record:  # type: ignore[override]
        """Start a record with the states of the prompt."""
        record = _Record([self._kept(hidden)], [*prompt, root])
        self._records.append(record)
        return record

    def commit(self, state: _Record, hidden: Tensor, tokens: Sequence[int]) -> None:  # type: ignore[override]
        """Append the states at the root and at accepted tokens."""
        state.rows.append(self._kept(hidden))
        state.tokens.extend(tokens)
        if not any(record is state for record in self._records):
            self._records.append(state)  # a twin with the same tokens was meant to be taken

    def take(self, text: Sequence[int]) -> Tensor:
        """``(n - 1, H)`` states of the n tokens of a prompt and its text; the record is given up.

        Sequences of equal tokens have equal states. Where none is equal, one that goes on behind
        the text is taken, which was cut at a stop, and the rest is left out.
        """
        wanted, size = list(text), len(text)
        matching = [record for record in self._records if record.tokens[:size] == wanted]
        if not matching:
            raise LookupError("no sequence with these tokens was recorded")
        chosen = min(matching, key=lambda record: len(record.tokens))
        self._records = [record for record in self._records if record is not chosen]
        return torch.cat(chosen.rows)[: size - 1]

    def _kept(self, hidden: Tensor) -> Tensor:
        return hidden.to("cpu", self._dtype or hidden.dtype, copy=True)
