"""Replay of trees that are grown: the same nodes as in decoding, from the codes of a trace."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from entmtp.calibrate.replay import deepest_nodes
from entmtp.calibrate.trace import NO_COPY, Trace
from entmtp.errors import TraceError
from entmtp.growth import MAX_COPY, Copy, Grower, GrowthCosts, GrowthPlan, GrowthRule
from entmtp.topology import Topology

__all__ = ["GrownStep", "GrowthReplay", "Prices"]

Prices = Callable[[GrowthRule], GrowthCosts]
"""Milliseconds of steps whose trees a rule grows."""


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

    def __init__(self, trace: Trace, prices: Prices | None = None) -> None:
        """Read what is needed of a trace.

        Args:
            trace: with codes of an envelope.
            prices: of steps; without, the costs of each plan.

        Raises:
            TraceError: it has no codes.
        """
        self.envelope = Topology(trace.facts.envelope)
        if not self.envelope.num_nodes:
            raise TraceError(
                "the trace has no envelope, so trees cannot be grown on it; trace with --envelope"
            )
        self._trace, self._prices = trace, prices
        self._is_hit = (trace.ranks[:, 0] == 0).tolist()
        self._views: dict[int, tuple[GrowthRule, _View]] = {}

    def step(self, plan: GrowthPlan, root: int) -> GrownStep:
        """One step whose root is a position of the trace that has a token behind it.

        Raises:
            TraceError: the plan's envelope is not part of the trace's.
        """
        view = self._view(plan.rule)
        match = int(self._trace.copy_match[root])
        copy = None if match == NO_COPY else Copy(match, (0,) * MAX_COPY)
        grower = Grower(plan, copy)
        codes = view.codes[root].tolist()
        on_copy = view.on_copy(root) if copy is not None else frozenset()
        children = plan.rule.envelope.children
        costs = plan.costs if view.costs is None else view.costs
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
            view.accepted(root, kept),
            tuple(kept),
            attach,
            self._is_hit[root] if was_asked and view.has_best else None,
            cost + float(costs.rows[len(kept)]),
        )

    def _view(self, rule: GrowthRule) -> "_View":
        """What a rule sees of the trace; a policy has one rule or a few."""
        found = self._views.get(id(rule))
        if found is None:
            costs = None if self._prices is None else self._prices(rule)
            found = self._views[id(rule)] = rule, _View(self._trace, rule.envelope, costs)
        return found[1]


class _View:
    """The columns of a trace that belong to the nodes of an envelope."""

    def __init__(self, trace: Trace, envelope: Topology, costs: GrowthCosts | None) -> None:
        places = {path: at for at, path in enumerate(trace.facts.envelope)}
        missing = [path for path in envelope.paths if path not in places]
        if missing:
            raise TraceError(
                f"the envelope of the trace lacks the path {list(missing[0])}, so trees with it "
                "cannot be grown on it; trace with an envelope that holds it"
            )
        self.costs = costs
        self.codes = trace.codes[:, [places[path] for path in envelope.paths]]
        self.has_best = envelope.paths[0] == (0,)
        self._size, self._depths = envelope.num_rows, envelope.depths.tolist()
        self._hits, self._copy_node = trace.copy_hits, trace.copy_node
        self._deepest: npt.NDArray[np.int64] = deepest_nodes(trace, envelope)
        self._paths = [frozenset(envelope.path_nodes(n)) for n in range(envelope.num_rows)]
        own = {path: node for node, path in enumerate(envelope.paths, start=1)} | {(): 0}
        self._own = [0]  # for each node of the trace's envelope the deepest of this one above it
        for path in trace.facts.envelope:
            above = next(path[:n] for n in range(len(path), -1, -1) if path[:n] in own)
            self._own.append(own[above])

    def on_copy(self, root: int) -> frozenset[int]:
        """Nodes on the path of the copy."""
        return self._paths[self._own[int(self._copy_node[root])]]

    def accepted(self, root: int, kept: list[int]) -> int:
        """Depth of the deepest node that is right."""
        size, right, hits = self._size, self._paths[int(self._deepest[root])], self._hits[root]
        best = 0
        for node in kept:
            if node >= size:
                if node - size < hits:
                    best = max(best, node - size + 1)
            elif node in right:
                best = max(best, self._depths[node])
        return best
