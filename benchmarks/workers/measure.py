"""Memory of this process, in MiB. Standard library only: a worker runs in the interpreter of the side it measures."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def _status_mib(key: str) -> float | None:
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    return None


def rss_mib() -> float:
    value = _status_mib("VmRSS")
    return value if value is not None else peak_mib()


def peak_mib() -> float:
    """High-water mark since the start of the process or the last `reset_peak`."""
    value = _status_mib("VmHWM")
    return value if value is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak() -> bool:
    """Start a new high-water mark at what is resident now. False where the kernel does not allow it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # so that memory freed before the measurement does not hide an allocation
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


class Device:
    """Clock and memory of a device; the process's own on a CPU."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        if self.name != "cpu":
            import torch

            torch.accelerator.synchronize()

    def reset_peak(self) -> None:
        reset_peak()
        if self.name != "cpu":
            import torch

            torch.cuda.reset_peak_memory_stats()

    def held_mib(self) -> float:
        if self.name == "cpu":
            return rss_mib()
        import torch

        return torch.cuda.memory_allocated() / 2**20

    def peak_mib(self) -> float:
        if self.name == "cpu":
            return peak_mib()
        import torch

        return torch.cuda.max_memory_allocated() / 2**20
