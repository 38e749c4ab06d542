"""Where measured numbers come from: versions, machine and command line."""

import platform
import sys
from typing import Any

from entmtp import __version__

__all__ = ["machine_facts"]


def machine_facts() -> dict[str, Any]:
    """The head of a JSON report."""
    import torch

    return {
        "schema": 1,
        "argv": sys.argv[1:],
        "entmtp": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
