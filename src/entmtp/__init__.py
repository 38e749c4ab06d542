"""entmtp: faster LLM decoding with the same output.

Light heads on the target model draft a tree of next tokens, the target checks the tree in one
forward pass, and before every step a scheduler picks the tree from a small bank by the entropy of
the target's own distribution. The names below are the public surface; they are imported on first
use, so that ``import entmtp`` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOMES = {
    "Bank": "entmtp.bank",
    "DecodeStats": "entmtp.metrics",
    "DraftRequest": "entmtp.drafters.base",
    "DraftTree": "entmtp.drafters.base",
    "Drafter": "entmtp.drafters.base",
    "Engine": "entmtp.engine",
    "EngineLimits": "entmtp.engine",
    "EntmtpError": "entmtp.errors",
    "FixedScheduler": "entmtp.scheduler",
    "GenerationResult": "entmtp.engine",
    "HysteresisParams": "entmtp.scheduler",
    "HysteresisScheduler": "entmtp.scheduler",
    "LadderParams": "entmtp.scheduler",
    "LadderScheduler": "entmtp.scheduler",
    "Request": "entmtp.engine",
    "SamplingParams": "entmtp.params",
    "SchedulerDecision": "entmtp.scheduler",
    "Signal": "entmtp.scheduler",
    "StepRecord": "entmtp.metrics",
    "StreamChunk": "entmtp.engine",
    "Topology": "entmtp.topology",
    "TopologyScheduler": "entmtp.scheduler",
    "TypicalParams": "entmtp.params",
    "load": "entmtp.loading",
    "load_topology": "entmtp.topology",
    "named_topologies": "entmtp.topology",
    "pull": "entmtp.loading",
}

__all__ = [
    "Bank",
    "DecodeStats",
    "DraftRequest",
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineLimits",
    "EntmtpError",
    "FixedScheduler",
    "GenerationResult",
    "HysteresisParams",
    "HysteresisScheduler",
    "LadderParams",
    "LadderScheduler",
    "Request",
    "SamplingParams",
    "SchedulerDecision",
    "Signal",
    "StepRecord",
    "StreamChunk",
    "Topology",
    "TopologyScheduler",
    "TypicalParams",
    "__version__",
    "load",
    "load_topology",
    "named_topologies",
    "pull",
]

if TYPE_CHECKING:
    from entmtp.bank import Bank
    from entmtp.drafters.base import Drafter, DraftRequest, DraftTree
    from entmtp.engine import Engine, EngineLimits, GenerationResult, Request, StreamChunk
    from entmtp.errors import EntmtpError
    from entmtp.loading import load, pull
    from entmtp.metrics import DecodeStats, StepRecord
    from entmtp.params import SamplingParams, TypicalParams
    from entmtp.scheduler import (
        FixedScheduler,
        HysteresisParams,
        HysteresisScheduler,
        LadderParams,
        LadderScheduler,
        SchedulerDecision,
        Signal,
        TopologyScheduler,
    )
    from entmtp.topology import Topology, load_topology, named_topologies


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'entmtp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
