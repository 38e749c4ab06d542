"""Replay of trees that are grown: the same nodes as in decoding, from the codes of a trace."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.replay import deepest_nodes
from entmtp.calibrate.trace import NO_COPY, Trace
from entmtp.errors import TraceError
from entmtp.growth import MAX_COPY, Copy, Grower, GrowthPlan
from entmtp.topology import Topology

__all__ = ["GrownStep", "GrowthReplay"]


@dataclass(frozen=True)
class GrownStep:
    """What growing gives at one root.

    Attributes:
        accepted: draft tokens that are kept.
        kept: nodes that are checked, best first.
        attach: node that those of the copy hang on.
        is_hit: whether the drafter's best first token is right; ``None`` where it was not asked.
        cost_ms: of the step.
    """

    accepted: int
    kept: tuple[int, ...]
    attach: int
    is_hit: bool | None
    cost_ms: float


class GrowthReplay:
    """Grows trees at the roots of a trace."""

    def __init__(self, trace: Trace) -> None:
        """Read what is needed of a trace.

        Raises:
            TraceError: it has no codes of an envelope.
        """
        self.envelope = Topology(trace.facts.envelope)
        if not self.envelope.num_nodes:
            raise TraceError(
                "the trace has no envelope, so trees cannot be grown on it; trace with --envelope"
            )
        self._codes = trace.codes
        self._deepest: npt.NDArray[np.int64] = deepest_nodes(trace, self.envelope)
        self._match, self._hits = trace.copy_match, trace.copy_hits
        self._copy_node = trace.copy_node
        self._is_hit = (trace.ranks[:, 0] == 0).tolist()
        self._has_best = self.envelope.paths[0] == (0,)
        self._paths = [
            frozenset(self.envelope.path_nodes(n)) for n in range(self.envelope.num_rows)
        ]

    def step(self, plan: GrowthPlan, root: int) -> GrownStep:
        """One step whose root is a position of the trace that has a token behind it.

        Raises:
            TraceError: the plan grows trees in another envelope.
        """
        if plan.rule.envelope != self.envelope:
            raise TraceError(
                f"the policy grows trees in an envelope of {plan.rule.envelope.num_nodes} nodes, "
                f"not in that of the trace, which has {self.envelope.num_nodes}; trace with it"
            )
        match = int(self._match[root])
        copy = None if match == NO_COPY else Copy(match, (0,) * MAX_COPY)
        grower = Grower(plan, copy)
        codes = self._codes[root].tolist()
        on_copy = self._paths[int(self._copy_node[root])] if copy is not None else frozenset()
        children, costs = self.envelope.children, plan.costs
        cost, was_asked = 0.0, False
        for depth in range(plan.max_depth):
            rows = grower.open_rows(depth)
            if not rows:
                break
            cost += float(costs.draft[depth]) + (len(rows) - 1) * float(costs.draft_row[depth])
            was_asked = True
            nodes = [child for row in rows for child in children[row]]
            grower.take(nodes, [codes[n - 1] for n in nodes], [n in on_copy for n in nodes])
        kept, attach = grower.keep()
        return GrownStep(
            self._accepted(root, kept),
            tuple(kept),
            attach,
            self._is_hit[root] if was_asked and self._has_best else None,
            cost + float(costs.rows[len(kept)]),
        )

    def _accepted(self, root: int, kept: list[int]) -> int:
        """Depth of the deepest node that is right."""
        size, right = self.envelope.num_rows, self._paths[int(self._deepest[root])]
        hits = int(self._hits[root])
        depths = self.envelope.depths
        best = 0
        for node in kept:
            if node >= size:
                if node - size < hits:
                    best = max(best, node - size + 1)
            elif node in right:
                best = max(best, int(depths[node]))
        return best
