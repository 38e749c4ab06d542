"""The engine: sequences, admission, the step; streams tokens out."""

from entmtp.engine.core import Engine, EngineLimits
from entmtp.engine.results import GenerationResult, Request, StepTimes, StreamChunk

__all__ = ["Engine", "EngineLimits", "GenerationResult", "Request", "StepTimes", "StreamChunk"]
