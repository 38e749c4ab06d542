"""The machine that numbers are measured on."""

import platform
from functools import lru_cache
from pathlib import Path

__all__ = ["cpu_name"]

_CPU_INFO = Path("/proc/cpuinfo")


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """Name of the processor as the system gives it, else its architecture.

    On x86 with family and model: a virtual machine may give one name to processors that differ by
    a factor of two.
    """
    try:
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.strip():
            facts.setdefault(key.strip(), value.strip())
    names = (facts.get(key) for key in ("model name", "Model", "cpu model"))
    name = next((name for name in names if name), "")
    if name and "cpu family" in facts and "model" in facts:
        return f"{name}, family {facts['cpu family']}, model {facts['model']}"
    return name or platform.processor() or platform.machine()
