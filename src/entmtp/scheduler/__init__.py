"""Topology schedulers: a signal in, the next step's tree out."""

from entmtp.scheduler.base import SchedulerDecision, SchedulerState, TopologyScheduler
from entmtp.scheduler.chains import (
    ChainEmaParams,
    ChainEmaScheduler,
    ChainThresholdParams,
    ChainThresholdScheduler,
)
from entmtp.scheduler.dynamic import DynamicParams, DynamicScheduler
from entmtp.scheduler.fixed import FixedScheduler
from entmtp.scheduler.hysteresis import HysteresisParams, HysteresisScheduler
from entmtp.scheduler.ladder import LadderParams, LadderScheduler
from entmtp.scheduler.registry import POLICIES, make_scheduler
from entmtp.scheduler.signals import Signal, SignalTracker
from entmtp.scheduler.throughput import ThroughputParams, ThroughputScheduler
from entmtp.scheduler.values import SIGNALS, signal_value

__all__ = [
    "POLICIES",
    "SIGNALS",
    "ChainEmaParams",
    "ChainEmaScheduler",
    "ChainThresholdParams",
    "ChainThresholdScheduler",
    "DynamicParams",
    "DynamicScheduler",
    "FixedScheduler",
    "HysteresisParams",
    "HysteresisScheduler",
    "LadderParams",
    "LadderScheduler",
    "SchedulerDecision",
    "SchedulerState",
    "Signal",
    "SignalTracker",
    "ThroughputParams",
    "ThroughputScheduler",
    "TopologyScheduler",
    "make_scheduler",
    "signal_value",
]
