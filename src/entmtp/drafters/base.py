"""The drafter's contract, and the draft tree that crosses from drafter to target.

A drafter only proposes: whatever it returns, the output of decoding is the target's own. It keeps
one state a sequence and knows nothing of the target's cache or of the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from entmtp.errors import TopologyError
from entmtp.noise import NoiseSource
from entmtp.topology import Topology

__all__ = ["Coupling", "DraftRequest", "DraftTree", "Drafter", "DrafterState", "check_depth"]

DrafterState = Any
"""Private to each drafter: made by ``prefill``, handed back at every call."""


@dataclass(frozen=True)
class DraftTree:
    """A topology filled with tokens for one step.

    Attributes:
        topology: may have fewer nodes than the plan, where the drafter found nothing to propose.
        tokens: int64 ``(N,)``; entry 0 is the root token.
    """

    topology: Topology
    tokens: Tensor


@dataclass(frozen=True)
class Coupling:
    """The noise that the target's tokens will be drawn with; see :mod:`entmtp.noise`.

    Attributes:
        noise: of the sequence.
        temperature: above 0.
        position: absolute index of the token behind the root.
    """

    noise: NoiseSource
    temperature: float
    position: int


@dataclass(frozen=True)
class DraftRequest:
    """One sequence of a batch that wants a tree.

    Attributes:
        state: of that sequence.
        root: the newest emitted token, not yet seen by the target.
        plan: the shape to fill.
        coupling: rank children by their scores plus this noise; by their scores alone without.
    """

    state: DrafterState
    root: int
    plan: Topology
    coupling: Coupling | None = None


class Drafter(Protocol):
    """Proposes draft trees. All calls are made in order: prefill, then draft and commit."""

    @property
    def name(self) -> str:
        """For reports, for example ``hydra``."""

    @property
    def digest(self) -> str:
        """Tells apart drafters of one name: of a sample of the weights, or of the settings."""

    @property
    def max_depth(self) -> int | None:
        """Deepest tree that can be filled; ``None`` where there is no limit."""

    @property
    def max_width(self) -> int | None:
        """Number of child ranks that can be filled; ``None`` where there is no limit."""

    def prefill(self, prompt: Sequence[int], hidden: Tensor, root: int) -> DrafterState:
        """State of a sequence whose prompt the target has read.

        Args:
            prompt: its P tokens.
            hidden: ``(P, H)`` hidden states of the target at those tokens.
            root: the first emitted token.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Fill one tree a request; rows of one depth are evaluated together."""

    def commit(self, state: DrafterState, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Take in the outcome of a step.

        Args:
            state: of that sequence.
            hidden: ``(a + 1, H)`` hidden states at the root and the a accepted nodes.
            tokens: the a accepted tokens and the bonus token, which is the next root.
        """


def check_depth(drafter: Drafter, topology: Topology) -> None:
    """Refuse a tree that a drafter cannot fill.

    Raises:
        TopologyError: deeper than the heads, or a rank beyond their vocabulary.
    """
    if drafter.max_depth is not None and topology.max_depth > drafter.max_depth:
        raise TopologyError(
            f"the tree is {topology.max_depth} deep, but the {drafter.name} drafter has "
            f"{drafter.max_depth} heads; use a tree of depth <= {drafter.max_depth}"
        )
    if drafter.max_width is not None and topology.max_rank >= drafter.max_width:
        raise TopologyError(
            f"the tree uses child rank {topology.max_rank}, but the {drafter.name} drafter ranks "
            f"{drafter.max_width} tokens; use ranks below that"
        )
