"""The drafter that proposes nothing: plain decoding as a special case of the same loop."""

from collections.abc import Sequence

import torch
from torch import Tensor

from entmtp.drafters.base import AnyRequest, DraftTree
from entmtp.topology import Topology

__all__ = ["EmptyDrafter"]

_EMPTY = Topology(())


class EmptyDrafter:
    """Draws empty trees; implements :class:`entmtp.drafters.base.Drafter`."""

    name = "none"
    digest = ""
    max_depth: int | None = 0
    max_width: int | None = 0

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> None:
        """Nothing to keep."""

    def commit(self, state: None, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Nothing to keep."""

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """The root alone."""
        return [DraftTree(_EMPTY, torch.tensor([request.root])) for request in requests]
