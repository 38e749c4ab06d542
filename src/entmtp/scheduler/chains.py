"""Policies over chains alone, as serving engines have them: baselines, and for small budgets.

``chain-ema`` drafts as many tokens as were kept lately, and some more; ``chain-threshold`` drafts
on until the drafter's own probability of a token is too low.
"""

from dataclasses import dataclass

import numpy as np

from entmtp.costs import CostTable
from entmtp.errors import InputError
from entmtp.growth import CODES_PER_NAT, NUM_CODES, GrowthPlan, GrowthRule
from entmtp.scheduler.bands import Bands, LevelState, is_probe
from entmtp.scheduler.base import SchedulerDecision, prepared, prepared_plan
from entmtp.scheduler.dynamic import growth_costs
from entmtp.scheduler.signals import Signal
from entmtp.topology import Topology

__all__ = [
    "ChainEmaParams",
    "ChainEmaScheduler",
    "ChainThresholdParams",
    "ChainThresholdScheduler",
]


@dataclass(frozen=True)
class ChainEmaParams:
    """A chain of ``round(slope * mean + offset)`` tokens, the mean being of accepted lengths.

    Attributes:
        slope: above 0.
        offset: length before anything was drafted.
        max_length: of the chain; the least is 0, plain decoding.
    """

    slope: float
    offset: float
    max_length: int

    def __post_init__(self) -> None:
        """Refuse what gives no lengths.

        Raises:
            InputError: says which rule is broken.
        """
        if not self.slope > 0 or not np.isfinite(self.offset) or self.max_length < 1:
            raise InputError("slope must be above 0, offset finite and max_length at least 1")

    @property
    def bounds(self) -> tuple[float, ...]:
        """Means from which on the chain has 1, 2, ... tokens."""
        return tuple((n - 0.5 - self.offset) / self.slope for n in range(1, self.max_length + 1))


class ChainEmaScheduler:
    """A chain as long as the drafts that were kept; deterministic in the signal."""

    policy = "chain-ema"

    def __init__(self, params: ChainEmaParams) -> None:
        """Make the chains."""
        self._bands = Bands(params.bounds, params.bounds)
        self._decisions = [
            SchedulerDecision(f"chain{n}" if n else "none", prepared(Topology.chain(n)), bin=n)
            for n in range(params.max_length + 1)
        ]

    def start(self) -> LevelState:
        """Nothing was drafted."""
        return self._bands.start()

    def choose(self, state: LevelState, signal: Signal) -> SchedulerDecision:
        """The chain for the average; a single token after many plain steps."""
        level = self._bands.move(state, signal.accepted_ema)
        return self._decisions[1 if is_probe(state, level == 0) else level]


@dataclass(frozen=True)
class ChainThresholdParams:
    """A chain goes on behind tokens that the drafter is sure of.

    Attributes:
        max_code: of the log-probability of a token that is drafted, see
            :data:`entmtp.growth.CODES_PER_NAT`.
        max_length: of the chain.
    """

    max_code: int
    max_length: int

    def __post_init__(self) -> None:
        """Refuse what is no threshold.

        Raises:
            InputError: says which rule is broken.
        """
        if not 0 <= self.max_code < NUM_CODES or self.max_length < 1:
            raise InputError(
                f"max_code must be between 0 and {NUM_CODES - 1}, and max_length at least 1"
            )

    @property
    def threshold(self) -> float:
        """Probability above which a token is drafted."""
        is_any = self.max_code == NUM_CODES - 1
        return 0.0 if is_any else float(np.exp(-(self.max_code + 1) / CODES_PER_NAT))


class ChainThresholdScheduler:
    """One plan for every step: the drafter itself decides how long the chain gets."""

    policy = "chain-threshold"

    def __init__(self, params: ChainThresholdParams, costs: CostTable, context: float) -> None:
        """Express the threshold as a rule of growth in which time is worth nothing.

        Args:
            params: of the policy.
            costs: of steps, for replay; no choice depends on them.
            context: committed tokens at which steps are priced.
        """
        length = params.max_length
        table = np.zeros((1, length, NUM_CODES), dtype=np.float32)
        table[:, :, : params.max_code + 1] = 1.0
        rule = GrowthRule(Topology.chain(length), table, np.ones((1, length)))
        prices = growth_costs(costs, length, length, context, 1)
        plan = GrowthPlan(rule, prices, signal_class=0, rate=0.0, depth=length)
        self._decision = SchedulerDecision(self.policy, prepared_plan(plan))

    def start(self) -> None:
        """No state."""

    def choose(self, state: None, signal: Signal) -> SchedulerDecision:
        """The one decision."""
        return self._decision
