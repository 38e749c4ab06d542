"""Memory of this process and of the GPU."""

from pathlib import Path

import torch

__all__ = ["PeakMemory", "resident_bytes"]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> int | None:
    """Memory of the process that is in use now; ``None`` where the system does not tell."""
    return _read("VmRSS")


class PeakMemory:
    """The most memory since it was started: of the GPU where one decodes, else of the process."""

    def __init__(self, device: torch.device) -> None:
        """Watch a device."""
        self._device = device

    def start(self) -> None:
        """Forget the peak so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        except OSError:
            return  # the peak is then that of the whole run

    def peak_bytes(self) -> int | None:
        """The peak; ``None`` where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _read("VmHWM")


def _read(field: str) -> int | None:
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = next((line for line in lines if line.startswith(f"{field}:")), None)
    return None if found is None else 1024 * int(found.split()[1])
