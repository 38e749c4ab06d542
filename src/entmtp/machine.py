"""The machine that numbers are measured on."""

import platform
from functools import lru_cache
from pathlib import Path

__all__ = ["cpu_name"]

_CPU_INFO = Path("/proc/cpuinfo")


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Name of the processor as the system gives it, else its architecture."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
