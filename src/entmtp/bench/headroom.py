"""How much of what could be gained a policy gains: by replay of the same texts.

The bound is a clairvoyant that picks the best tree of the bank at every step, knowing the text; the
share is the way from the best single tree to it. A policy that grows trees, or a chain that is cut,
is not bound by the bank's trees, so its share may be above 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entmtp.bank import Bank
from entmtp.bench.contestants import Contestants
from entmtp.bench.methods import Method
from entmtp.bench.running import BenchParams
from entmtp.bench.tasks import Task
from entmtp.calibrate.collect import TraceSettings
from entmtp.calibrate.fit import mean_context
from entmtp.calibrate.policies import replay_policy
from entmtp.calibrate.replay import headroom_share
from entmtp.calibrate.session import trace_prompts, usual_envelope
from entmtp.calibrate.simulate import Texts, bound_ms
from entmtp.calibrate.trace import Trace
from entmtp.growth import GrowthCosts, GrowthRule
from entmtp.scheduler import FixedScheduler, TopologyScheduler
from entmtp.scheduler.dynamic import growth_costs
from entmtp.topology import Topology

__all__ = ["measure_headroom"]

_LEAST_HEADROOM = 0.01
"""What a clairvoyant must gain over the best single tree, for a share to mean anything."""

Progress = Callable[[int, int], None]


def measure_headroom(
    contestants: Contestants,
    task: Task,
    methods: Sequence[Method],
    params: BenchParams,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    """Headroom of the methods that draft with the engine's own heads.

    Args:
        contestants: whose engine is traced.
        task: its texts are traced, or found again.
        methods: that ran.
        params: of the run.
        folder: of traces.
        progress: told prompts traced and their number.

    Returns:
        by method its share, and tokens/s by replay; empty where the task has no bank.

    Raises:
        EntmtpError: the heads cannot be traced.
    """
    bank = contestants.heads.bank_of(task)
    own = [method for method in methods if method.heads == "own"]
    if bank is None or bank.calibration is None or not own:
        return {}
    engine = contestants.engine
    trace = trace_prompts(
        engine,
        contestants.heads.model,
        task.records,
        TraceSettings(params.sampling, envelope=usual_envelope(engine.drafter)),
        progress,
        folder=folder,
    )
    ground = _Ground.of(trace, bank.fitted(engine.drafter.max_depth))
    found = {method.name: ground.ms(contestants.scheduler(method, task)) for method in own}
    return {name: ground.describe(ms) for name, ms in found.items()}


@dataclass(frozen=True)
class _Ground:
    """A trace, and what steps on it cost."""

    trace: Trace
    texts: Texts
    static_ms: Mapping[str, float]
    bound: float

    @classmethod
    def of(cls, trace: Trace, bank: Bank) -> "_Ground":
        """Replay every tree of the bank, and the bound."""
        assert bank.calibration is not None  # noqa: S101 - the caller looked
        costs, context = bank.calibration.costs, mean_context(trace)
        texts = Texts(trace, list(bank.entries.values()), costs, context)
        ground = cls(trace, texts, {}, bound_ms(texts))
        static = {
            name: ground.ms(FixedScheduler(name, tree)) for name, tree in bank.entries.items()
        }
        return cls(trace, texts, static, ground.bound)

    def ms(self, scheduler: TopologyScheduler) -> float:
        """Milliseconds of all texts under a policy."""
        return replay_policy(self.trace, scheduler, self._cost, self._prices).cost_ms

    def describe(self, ms: float) -> dict[str, Any]:
        """The share and what it is made of; no share where there is hardly anything to share."""
        best = min(self.static_ms, key=lambda name: self.static_ms[name])
        has_room = self.static_ms[best] / self.bound >= 1 + _LEAST_HEADROOM if self.bound else False
        share = headroom_share(ms, self.static_ms, self.bound) if has_room else None
        return {
            "share": share,
            "replayed_tokens_per_s": self._rate(ms),
            "best_static": best,
            "best_static_tokens_per_s": self._rate(self.static_ms[best]),
            "bound_tokens_per_s": self._rate(self.bound),
        }

    def _rate(self, ms: float) -> float:
        return 1000 * self.texts.num_tokens / max(ms, 1e-9)

    def _cost(self, tree: Topology) -> float:
        return self.texts.costs.step_ms(tree, self.texts.context)

    def _prices(self, rule: GrowthRule) -> GrowthCosts:
        depth, most = rule.envelope.max_depth, rule.max_nodes
        return growth_costs(self.texts.costs, depth, most, self.texts.context, batch=1)
