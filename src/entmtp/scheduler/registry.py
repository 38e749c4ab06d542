"""Schedulers by the names of their policies, with the parameters that a bank holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entmtp.bank import NONE, Bank, Calibration
from entmtp.drafters.base import Drafter, check_depth
from entmtp.drafters.empty import EmptyDrafter
from entmtp.errors import BankError, InputError
from entmtp.scheduler.base import TopologyScheduler
from entmtp.scheduler.chains import (
    ChainEmaParams,
    ChainEmaScheduler,
    ChainThresholdParams,
    ChainThresholdScheduler,
)
from entmtp.scheduler.dynamic import DynamicParams, DynamicScheduler
from entmtp.scheduler.fixed import FixedScheduler
from entmtp.scheduler.guard import GuardedScheduler
from entmtp.scheduler.hysteresis import HysteresisParams, HysteresisScheduler
from entmtp.scheduler.ladder import LadderParams, LadderScheduler
from entmtp.scheduler.reading import read_params
from entmtp.scheduler.throughput import ThroughputParams, ThroughputScheduler
from entmtp.topology import Topology, load_topology

__all__ = ["GROWING", "POLICIES", "best_policy", "make_scheduler"]

POLICIES = (
    "auto",
    "plain",
    "fixed",
    "ladder",
    "hysteresis",
    "throughput",
    "dynamic",
    "chain-ema",
    "chain-threshold",
)
GROWING = ("dynamic", "chain-threshold")
"""Those that need a drafter with probabilities."""

_CLEAR_LEAD = 1.03  # beyond what replay of a few texts may be wrong by


def make_scheduler(
    policy: str, drafter: Drafter, bank: Bank | None, topology: str | Topology | None = None
) -> TopologyScheduler:
    """Make a scheduler.

    Args:
        policy: one of :data:`POLICIES`. ``auto`` is the one with the most tokens/s on the texts
            that a calibrated bank was not fitted to, and ``hysteresis`` over trees that ship
            without one.
        drafter: that will fill the trees.
        bank: trees and parameters; ``None`` takes three shipped trees.
        topology: one tree for every step; implies ``fixed``.

    Raises:
        InputError: unknown policy, or one that does not go with the topology, the drafter or the
            bank.
        BankError: the bank lacks the policy's parameters or trees.
        TopologyError: the topology does not fit the drafter.
    """
    if policy not in POLICIES:
        raise InputError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    is_plain = topology in (None, NONE, Topology(()))
    if isinstance(drafter, EmptyDrafter):
        if policy not in ("auto", "fixed", "plain") or not is_plain:
            raise InputError("the drafter 'none' is plain decoding; trees need another drafter")
        return FixedScheduler.plain()
    if topology is not None:
        if policy not in ("auto", "fixed") and not (policy == "plain" and is_plain):
            raise InputError(
                f"{policy} does not take one tree; leave out the topology, or use fixed"
            )
        name, tree = _named_tree(topology, bank)
        check_depth(drafter, tree)
        return FixedScheduler(name, tree)
    if policy == "plain":
        return FixedScheduler.plain()
    if bank is None or bank.calibration is None:
        return _uncalibrated(policy, drafter, bank)
    return _fitted(policy, drafter, bank.fitted(drafter.max_depth), bank.calibration)


def _uncalibrated(policy: str, drafter: Drafter, bank: Bank | None) -> TopologyScheduler:
    if policy == "fixed":
        raise InputError("the policy 'fixed' needs a topology, for example tree16")
    if policy not in ("auto", "hysteresis"):
        raise InputError(
            f"the policy {policy!r} needs a calibrated bank: make one with 'entmtp calibrate', or "
            "use auto, plain, hysteresis, or fixed with a topology"
        )
    return HysteresisScheduler((bank or Bank.shipped()).fitted(drafter.max_depth))


def _fitted(
    policy: str, drafter: Drafter, bank: Bank, calibration: Calibration
) -> TopologyScheduler:
    """A policy with the parameters of the bank."""
    policies = calibration.policies
    is_guarded = policy in ("auto", "throughput")
    if policy == "auto":
        policy = best_policy(policies, can_grow=hasattr(drafter, "grow"))
    if policy in GROWING and not hasattr(drafter, "grow"):
        raise InputError(
            f"the policy {policy!r} needs a drafter with probabilities, which {drafter.name} does "
            "not have; draft with heads, or use another policy"
        )
    if policy == "fixed":
        name = policies["fixed"]["params"]["entry"] if policies else bank.best
        fixed = FixedScheduler(name, bank.get(name))
        return GuardedScheduler(fixed, calibration.costs) if is_guarded else fixed
    if policy not in policies:
        known = ", ".join(["fixed", "plain", *(p for p in POLICIES if p in policies)])
        raise BankError(
            f"the bank has no parameters of the policy {policy!r}: calibrate again with this "
            f"version, or use one of {known}"
        )
    if policy == "plain":
        return FixedScheduler.plain()
    made = _made(policy, policies[policy]["params"], bank, calibration)
    is_guarded = is_guarded and policy not in GROWING
    return GuardedScheduler(made, calibration.costs) if is_guarded else made


def _made(
    policy: str, document: dict[str, Any], bank: Bank, calibration: Calibration
) -> TopologyScheduler:
    costs = calibration.costs
    if policy == "ladder":
        return LadderScheduler(bank, read_params(LadderParams, policy, document))
    if policy == "hysteresis":
        return HysteresisScheduler(bank, read_params(HysteresisParams, policy, document))
    if policy == "throughput":
        return ThroughputScheduler(bank, read_params(ThroughputParams, policy, document), costs)
    if policy == "dynamic":
        return DynamicScheduler(DynamicParams.from_dict(document), costs)
    if policy == "chain-ema":
        return ChainEmaScheduler(read_params(ChainEmaParams, policy, document))
    params = read_params(ChainThresholdParams, policy, document)
    return ChainThresholdScheduler(params, costs, calibration.context)


def best_policy(policies: Mapping[str, Any], *, can_grow: bool = True) -> str:
    """With the most tokens/s on the texts of the check; the first of equals, ``fixed`` of none.

    One that was the best before costs changed a little stays so unless another leads clearly:
    ``dynamic`` is then replayed on a few texts only.

    Args:
        policies: of a bank.
        can_grow: whether the drafter can grow trees.
    """
    rates = {
        name: float(policies[name]["check_tokens_per_s"])
        * (_CLEAR_LEAD if policies[name].get("was_best") else 1.0)
        for name in POLICIES
        if name in policies and (can_grow or name not in GROWING)
    }
    return max(rates, key=lambda name: rates[name]) if rates else "fixed"


def _named_tree(topology: str | Topology, bank: Bank | None) -> tuple[str, Topology]:
    if isinstance(topology, Topology):
        return topology.digest, topology
    if bank is not None and topology in bank.entries:
        return topology, bank.entries[topology]
    return Path(topology).name, load_topology(topology)
