"""Whole sequences in training, for modules that attend to the text: Hydra++ and multi-token ones.

All rows of a batch lie in one flat tensor. Row r of a sequence is the target's state after its
token r; the rows of a text are what the module reads when it decodes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ExampleMixer", "SequenceRows"]


@dataclass(frozen=True)
class SequenceRows:
    """Rows of whole sequences, and where the examples of a batch stand among them.

    Attributes:
        hidden: float32 ``(R, H)`` states of the target, sequence by sequence.
        following: int64 ``(R,)`` the token behind each row's own.
        lengths: rows of each sequence.
        index: int64 ``(B,)`` row of each example: the last one that its step has read.
    """

    hidden: Tensor
    following: Tensor
    lengths: tuple[int, ...]
    index: Tensor

    @property
    def positions(self) -> Tensor:
        """int64 ``(R,)`` position of each row in its sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths])


class ExampleMixer:
    """Attention of the rows of examples to the text, and to the chains that are drafted on it.

    First called for all rows of the text, of which only those that examples stand on attend, each
    to itself and the rows before it. A module that is applied again calls it once for every depth,
    with the rows of the examples: the row of depth d of an example sees the text up to its root
    and the rows of depths 1 .. d of the same example, itself included, as in a draft tree.
    """

    def __init__(self, rows: SequenceRows) -> None:
        """Start before the text has been read."""
        self._rows = rows
        self._text: tuple[Tensor, Tensor] | None = None
        self._chain: list[tuple[Tensor, Tensor]] = []
        ends = torch.tensor(rows.lengths).cumsum(0)
        sequence = torch.searchsorted(ends, rows.index, right=True)
        self._starts = (ends - torch.tensor(rows.lengths)).tolist()
        self._members = [torch.nonzero(sequence == s).flatten() for s in range(len(rows.lengths))]
        self._order = torch.argsort(torch.cat(self._members))

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See :data:`entmtp.decoder.block.Mixer`."""
        if self._text is None:
            self._text = keys, values
            queries = queries[self._rows.index]
        else:
            self._chain.append((keys, values))
        parts = [
            self._mix_one(queries, s) for s, members in enumerate(self._members) if len(members)
        ]
        return torch.cat(parts)[self._order]

    def _mix_one(self, queries: Tensor, sequence: int) -> Tensor:
        """Rows of the examples of one sequence."""
        assert self._text is not None  # noqa: S101 - the text comes first
        members, start = self._members[sequence], self._starts[sequence]
        length = self._rows.lengths[sequence]
        text_keys, text_values = (part[:, start : start + length] for part in self._text)
        groups = queries.shape[1] // text_keys.shape[0]
        q = queries[members] * queries.shape[2] ** -0.5
        q = q.view(len(members), text_keys.shape[0], groups, -1)
        scores = torch.einsum("bkgd,ktd->bkgt", q, text_keys)
        is_ahead = torch.arange(length) > (self._rows.index[members] - start)[:, None]
        scores = scores.masked_fill(is_ahead[:, None, None], float("-inf"))
        own = [
            torch.einsum("bkgd,kbd->bkg", q, keys[:, members])[..., None] for keys, _ in self._chain
        ]
        weights = torch.softmax(torch.cat((scores, *own), dim=-1), dim=-1)
        out = torch.einsum("bkgt,ktd->bkgd", weights[..., :length], text_values)
        for depth, (_, values) in enumerate(self._chain):
            own_values = values[:, members].transpose(0, 1)[:, :, None]
            out = out + weights[..., length + depth, None] * own_values
        return out.flatten(1)
