"""What a command line leaves behind when a test runs it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Outcome", "Run"]


@dataclass(frozen=True)
class Outcome:
    """Exit code and output."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, object]:
        """The one JSON object on standard output."""
        assert self.code == 0, self.err
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts


Run = Callable[..., Outcome]
"""A command line to its outcome; paths are filled in by ``str.format``."""
