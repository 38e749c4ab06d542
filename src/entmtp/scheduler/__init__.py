"""Topology schedulers: a signal in, the next step's tree out."""

from entmtp.scheduler.base import SchedulerDecision, SchedulerState, TopologyScheduler
from entmtp.scheduler.fixed import FixedScheduler
from entmtp.scheduler.hysteresis import HysteresisParams, HysteresisScheduler
from entmtp.scheduler.signals import Signal, SignalTracker

__all__ = [
    "FixedScheduler",
    "HysteresisParams",
    "HysteresisScheduler",
    "SchedulerDecision",
    "SchedulerState",
    "Signal",
    "SignalTracker",
    "TopologyScheduler",
]
