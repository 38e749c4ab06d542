"""How fast the machine is just now, beside what a table of costs says.

A shared machine changes its pace by some percent within a minute, which is as much as a prediction
may be off. Where decoding is held against a table that was timed before, the same steps are timed
once more beside it, and the prediction is for that pace.
"""

import random
from collections.abc import Sequence

import numpy as np

from entmtp.calibrate.places import TimedPlace, filler_tokens
from entmtp.calibrate.points import StepSamples
from entmtp.costs import CostTable
from entmtp.engine import Engine
from entmtp.topology import Topology

__all__ = ["Pace"]

_VISITS = 4


class Pace:
    """Steps of a few trees, timed again and again; close it in the end."""

    def __init__(
        self, engine: Engine, trees: Sequence[Topology], costs: CostTable, temperature: float
    ) -> None:
        """Remember what is timed.

        Args:
            engine: whose target and drafter are timed; it must be idle.
            trees: at least one.
            costs: that predictions are made from; its smallest context is timed.
            temperature: of sampling.
        """
        self._context = costs.contexts[0]
        place = self._context, 1
        self._place = TimedPlace(engine, place, filler_tokens(engine), temperature)
        self._trees, self._costs = tuple(trees), costs
        self._rng = random.Random(0)

    def now(self) -> float:
        """Time of a step now over its time in the table: median over the trees."""
        samples = {tree: StepSamples() for tree in self._trees}
        for number in range(_VISITS + 1):
            for tree in self._rng.sample(self._trees, len(self._trees)):
                self._place.step(tree, samples[tree] if number else None)
        ratios = [
            1000 * float(np.median(one.whole())) / self._costs.step_ms(tree, self._context)
            for tree, one in samples.items()
        ]
        return float(np.median(ratios))

    def close(self) -> None:
        """Drop the sequence."""
        self._place.close()
