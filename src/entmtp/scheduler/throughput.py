"""``throughput``: the tree whose expected tokens exceed the worth of its time by most.

What each tree gives is known by class of the free signals, from traced texts; what it costs, from
the table of this machine. A millisecond is worth lambda tokens. That is the best rate of a single
tree, raised by what the policy gained over it on the traced texts, so it follows context and batch:
the more sequences a step has, the dearer are nodes, and the smaller are the trees. The rule is
myopic, not optimal. Where nothing pays the step is plain, and then a small tree is drafted now
and then, so that the policy recovers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entmtp.bank import Bank
from entmtp.costs import CostTable
from entmtp.errors import InputError
from entmtp.scheduler.bands import (
    CONTEXTS,
    Bands,
    LevelState,
    Places,
    check_rising,
    is_probe,
)
from entmtp.scheduler.base import SchedulerDecision, prepared
from entmtp.scheduler.signals import Signal
from entmtp.scheduler.values import Score, check_signal

__all__ = ["ThroughputParams", "ThroughputScheduler", "best_trees"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ThroughputParams:
    """Fitted parameters; C classes, E entries.

    Attributes:
        entries: bank entries among which it chooses, plain decoding too.
        weights: of the signals in the sum that is divided into classes.
        bounds: ``(C - 1,)`` rising, between classes.
        tokens: ``(C, E)`` expected tokens of a step.
        mean_tokens: ``(E,)`` over all classes.
        gain: lambda over the best rate of a single tree.
        probe: entry that is drafted after many plain steps.
        min_dwell: steps in a class before the next change.
    """

    entries: tuple[str, ...]
    weights: Mapping[str, float]
    bounds: tuple[float, ...]
    tokens: tuple[tuple[float, ...], ...]
    mean_tokens: tuple[float, ...]
    gain: float
    probe: str
    min_dwell: int = 1

    def __post_init__(self) -> None:
        """Check that the tables fit together.

        Raises:
            InputError: says which rule is broken.
        """
        for name in self.weights:
            check_signal(name)
        check_rising("bounds", self.bounds)
        shape = len(self.bounds) + 1, len(self.entries)
        if np.shape(self.tokens) != shape or len(self.mean_tokens) != shape[1]:
            raise InputError(
                f"tokens are {np.shape(self.tokens)} and mean_tokens {len(self.mean_tokens)}; they "
                f"must be {shape} and {shape[1]}"
            )
        if self.min_dwell < 1 or not self.gain > 0:
            raise InputError("min_dwell must be at least 1, and gain must be above 0")


class ThroughputScheduler:
    """Takes the entry that is worth most in the class; deterministic in the signal."""

    policy = "throughput"

    def __init__(self, bank: Bank, params: ThroughputParams, costs: CostTable) -> None:
        """Take the trees from the bank.

        Raises:
            BankError: the bank lacks one of the entries.
        """
        self._params, self._costs = params, costs
        self._trees = [prepared(bank.get(name)) for name in params.entries]
        self._plain = {
            n for n, t in zip(params.entries, self._trees, strict=True) if not t.num_nodes
        }
        self._score = Score(params.weights)
        self._bands = Bands(params.bounds, params.bounds, params.min_dwell)
        self._probe = SchedulerDecision(params.probe, prepared(bank.get(params.probe)))
        self._decisions = Places(self._decide)

    def start(self) -> LevelState:
        """Nothing is known of the request."""
        return self._bands.start()

    def choose(self, state: LevelState, signal: Signal) -> SchedulerDecision:
        """The best entry for the class, the context and the batch."""
        level = self._bands.move(state, self._score(signal))
        decision = self._decisions.at(signal.context, signal.batch)[level]
        return self._probe if is_probe(state, decision.name in self._plain) else decision

    def _decide(self, context: int, batch: int) -> list[SchedulerDecision]:
        milliseconds = np.array(
            [self._costs.step_ms(tree, CONTEXTS[context], batch) / batch for tree in self._trees]
        )
        chosen = best_trees(self._params, milliseconds)
        return [
            SchedulerDecision(self._params.entries[at], self._trees[at], bin=level)
            for level, at in enumerate(chosen)
        ]


def best_trees(params: ThroughputParams, milliseconds: FloatArray) -> list[int]:
    """``(C,)`` index of the best entry of each class; the first of equals.

    Args:
        params: of the policy.
        milliseconds: ``(E,)`` of a step with each entry, for one sequence.
    """
    rate = params.gain * float((np.array(params.mean_tokens) / milliseconds).max())
    worth = np.array(params.tokens) - rate * milliseconds
    best: list[int] = worth.argmax(axis=1).tolist()
    return best
