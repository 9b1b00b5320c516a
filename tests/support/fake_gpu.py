"""As much of NVIDIA's library as is read of a GPU; also, as a file of the name ``pynvml.py``, for whole processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UUID = "GPU-1b2c3d4e-0000-0000-0000-000000000000"
MIG = "MIG-9a8b7c6d-0000-0000-0000-000000000000"
GIB = 2**30

# Two GPUs, always half full and a quarter busy.
MODULE = f"""
from types import SimpleNamespace

class NVMLError(Exception):
    pass

def nvmlInit():
    pass

def nvmlShutdown():
    pass

def nvmlDeviceGetCount():
    return 2

def nvmlDeviceGetHandleByIndex(index):
    return index

def nvmlDeviceGetHandleByUUID(uuid):
    return 0

def nvmlDeviceGetUUID(handle):
    return "GPU-%08x-0000-0000-0000-000000000000" % handle

def nvmlDeviceGetName(handle):
    return "Made-up GPU"

def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used={8 * GIB}, total={16 * GIB}, free={8 * GIB})

def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=25, memory=10)
"""


def install(directory: Path) -> None:
    """Give the processes whose import path begins with this directory two GPUs."""
    (directory / "pynvml.py").write_text(MODULE)


class DriverError(Exception):
    """What NVML raises."""


@dataclass
class Amounts:
    used: int = 0
    total: int = 0
    gpu: int = 0


class Driver:
    """A driver that exists in memory only; {handle: what it says}."""

    NVMLError = DriverError

    def __init__(self, *amounts: Amounts, is_mig: bool = False) -> None:
        self.amounts = list(amounts)
        self.is_mig = is_mig
        self.is_there = True
        self.inits = self.looks = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.is_there:
            raise DriverError("NVML Shared Library Not Found")
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        """Nothing is kept."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.amounts)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:  # noqa: N802
        if index >= len(self.amounts):
            raise DriverError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object:  # noqa: N802
        if not (self.is_mig and uuid == MIG):
            raise DriverError("Not Found")
        return 0

    def nvmlDeviceGetUUID(self, handle: object, /) -> str | bytes:  # noqa: N802
        return UUID if handle == 0 else b"GPU-5f6a7b8c-0000-0000-0000-000000000000"

    def nvmlDeviceGetName(self, handle: object, /) -> str | bytes:  # noqa: N802
        return "Made-up GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> Amounts:  # noqa: N802
        assert isinstance(handle, int)
        if not self.is_there:
            raise DriverError("GPU is lost")
        self.looks += 1
        return self.amounts[handle]

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> Amounts:  # noqa: N802
        assert isinstance(handle, int)
        if self.is_mig:
            raise DriverError("Not Supported")
        return self.amounts[handle]
