"""The drafter's contract, and the draft tree that crosses from drafter to target.

A drafter only proposes: whatever it returns, the output of decoding is the target's own. It keeps
one state a sequence and knows nothing of the target's cache or of the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from entmtp.errors import TopologyError
from entmtp.growth import UNSCORED, Copy, Grower, GrowthPlan
from entmtp.noise import NoiseSource
from entmtp.topology import Topology

__all__ = [
    "AnyRequest",
    "Coupling",
    "DraftPlan",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "DrafterState",
    "GrowRequest",
    "GrowingDrafter",
    "GrownTree",
    "bare_tree",
    "check_depth",
    "first_tokens",
]

DrafterState = Any
"""Private to each drafter: made by ``prefill``, handed back at every call."""

DraftPlan = Topology | GrowthPlan
"""A shape to fill, or how to grow one."""


@dataclass(frozen=True)
class DraftTree:
    """A topology filled with tokens for one step.

    Attributes:
        topology: may have fewer nodes than the plan, where the drafter found nothing to propose.
        tokens: int64 ``(N,)``; entry 0 is the root token.
        first: the drafter's best token behind the root where the tree may lack it; ``None`` where
            it was not asked, or does not say.
        num_copied: nodes that were copied from earlier in the text.
    """

    topology: Topology
    tokens: Tensor
    first: int | None = None
    num_copied: int = 0


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
    """One sequence of a batch that wants a tree of a given shape.

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


@dataclass(frozen=True)
class GrowRequest:
    """One sequence of a batch that wants a tree grown; attributes as :class:`DraftRequest`.

    Attributes:
        copy: what followed the same words earlier in the text.
    """

    state: DrafterState
    root: int
    plan: GrowthPlan
    coupling: Coupling | None = None
    copy: Copy | None = None


AnyRequest = DraftRequest | GrowRequest
"""Of either kind."""


@dataclass(frozen=True)
class GrownTree:
    """What came of growing.

    Attributes:
        plan: that was asked for.
        tokens: int64 ``(E + 1 + m,)`` of the envelope, the root's own where nothing was scored;
            behind them the copy's.
        codes: uint8 ``(E + 1,)`` of the nodes' log-probabilities given their parents, before any
            noise; :data:`entmtp.growth.UNSCORED` where nothing was scored, and for the root.
        kept: nodes that are worth checking, best first.
        attach: node that those of the copy hang on.
    """

    plan: GrowthPlan
    tokens: npt.NDArray[np.int64]
    codes: npt.NDArray[np.uint8]
    kept: Sequence[int]
    attach: int = 0

    @property
    def tree(self) -> DraftTree:
        """The nodes that are worth checking."""
        found = self.plan.rule.subtree(self.kept, self.attach)
        has_best = self.plan.rule.envelope.paths[0] == (0,) and self.codes[1] != UNSCORED
        first = int(self.tokens[1]) if has_best else None
        tokens = torch.from_numpy(self.tokens[found.nodes])
        return DraftTree(found.topology, tokens, first, found.num_copied)


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

    def draft(self, requests: Sequence[AnyRequest]) -> list[DraftTree]:
        """Fill or grow one tree a request; rows of one depth are evaluated together.

        Only a :class:`GrowingDrafter` is asked to grow any; :func:`check_depth` sees to it.
        """

    def commit(self, state: DrafterState, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Take in the outcome of a step.

        Args:
            state: of that sequence.
            hidden: ``(a + 1, H)`` hidden states at the root and the a accepted nodes; maybe a view
                of the target's output, so not to be written to.
            tokens: the a accepted tokens and the bonus token, which is the next root.
        """


def first_tokens(request: GrowRequest) -> list[int]:
    """Tokens of an envelope before anything is scored, and those of the copy behind them."""
    copied = request.copy.tokens if request.copy is not None else ()
    return [request.root] * request.plan.rule.envelope.num_rows + list(copied)


def bare_tree(request: GrowRequest) -> GrownTree:
    """What comes of a request of whose tree nothing was scored: a copy at most."""
    kept, attach = Grower(request.plan, request.copy).keep()
    tokens = np.array(first_tokens(request), dtype=np.int64)
    codes = np.full(request.plan.rule.envelope.num_rows, UNSCORED, dtype=np.uint8)
    return GrownTree(request.plan, tokens, codes, kept, attach)


class GrowingDrafter(Drafter, Protocol):
    """A drafter whose scores are probabilities, so that it can grow trees."""

    def grow(self, requests: Sequence[GrowRequest]) -> list[GrownTree]:
        """Grow one tree a request; rows of one depth are evaluated together."""


def check_depth(drafter: Drafter, plan: DraftPlan) -> None:
    """Refuse a tree that a drafter cannot fill or grow.

    Raises:
        TopologyError: deeper than the heads, a rank beyond their vocabulary, or grown by a drafter
            without probabilities.
    """
    if isinstance(plan, GrowthPlan) and not hasattr(drafter, "grow"):
        raise TopologyError(
            f"the {drafter.name} drafter has no probabilities to grow trees by; use a fixed tree, "
            "or draft with heads"
        )
    if drafter.max_depth is not None and plan.max_depth > drafter.max_depth:
        raise TopologyError(
            f"the tree is {plan.max_depth} deep, but the {drafter.name} drafter has "
            f"{drafter.max_depth} heads; use a tree of depth <= {drafter.max_depth}"
        )
    if drafter.max_width is not None and plan.max_rank >= drafter.max_width:
        raise TopologyError(
            f"the tree uses child rank {plan.max_rank}, but the {drafter.name} drafter ranks "
            f"{drafter.max_width} tokens; use ranks below that"
        )
