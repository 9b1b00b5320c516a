"""How full and how busy a worker's GPU is, asked of NVIDIA's driver; nothing where there is none."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, cast

from inference_tasks.worker.gpu import Nvml, tokens

__all__ = ["GpuReader", "GpuReading", "ReadsGpu"]

log = logging.getLogger(__name__)

EVERY_S = 2.0
# A driver that failed (a GPU that fell off the bus, a driver update) is asked again after this.
RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at the GPUs of a worker; several count as one, with their memory summed and their use averaged.

    Attributes:
        memory_used_bytes: by all processes on it, not by this worker alone.
        utilization: the part of the last moments in which something ran on it, 0 to 1; None where the driver does not
            say, as for MIG slices.
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization: float | None


class _Memory(Protocol):
    used: int
    total: int


class _Utilization(Protocol):
    gpu: int


class ReadsGpu(Nvml, Protocol):
    """The functions that are used of the module ``pynvml`` (package nvidia-ml-py)."""

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object: ...  # noqa: N802 -- NVIDIA's name, as are the next

    def nvmlDeviceGetMemoryInfo(self, handle: object, /) -> _Memory: ...  # noqa: N802

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> _Utilization: ...  # noqa: N802


class GpuReader:
    """Reads the GPUs of one worker, at most every two seconds, and never fails: what cannot be read is None.

    Costs two calls of the driver's library for each GPU; it touches no CUDA and takes no memory of the GPU.
    """

    def __init__(
        self,
        gpu: str | None,
        *,
        nvml: ReadsGpu | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Prepare; the driver is first asked by ``read``.

        Args:
            gpu: as ``CUDA_VISIBLE_DEVICES`` names it: an index, a UUID or the beginning of one, or a list of them.
            nvml: the module ``pynvml``; None imports it if it is installed.
            clock: seconds, monotonic.
        """
        self._tokens = tokens(gpu or "")
        self._nvml = nvml
        self._clock = clock
        self._handles: list[object] = []
        self._last: GpuReading | None = None
        self._next_at_s = float("-inf")

    def read(self) -> GpuReading | None:
        """Return the latest reading; None without a GPU, driver or package."""
        now_s = self._clock()
        if not self._tokens or now_s < self._next_at_s:
            return self._last
        try:
            self._last = self._look()
            self._next_at_s = now_s + EVERY_S
        except Exception as exc:
            # Whatever is wrong with a GPU is no reason to stop a heartbeat.
            log.info("GPU %s cannot be read, next try in %g s: %r", ",".join(self._tokens), RETRY_S, exc)
            self._last, self._handles = None, []
            self._next_at_s = now_s + RETRY_S
        return self._last

    def _look(self) -> GpuReading:
        nvml = self._nvml = self._nvml or cast(ReadsGpu, importlib.import_module("pynvml"))
        if not self._handles:
            nvml.nvmlInit()
            self._handles = [_handle(nvml, token) for token in self._tokens]
        memory = [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in self._handles]
        use = [_utilization(nvml, handle) for handle in self._handles]
        known = [one for one in use if one is not None]
        return GpuReading(
            memory_used_bytes=sum(int(one.used) for one in memory),
            memory_total_bytes=sum(int(one.total) for one in memory),
            utilization=sum(known) / len(known) if known else None,
        )


def _handle(nvml: ReadsGpu, token: str) -> object:
    if token.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(token))
    if token.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(token)
    # CUDA takes the beginning of a UUID, the driver's library the whole of it only.
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
        if (uuid.decode() if isinstance(uuid, bytes) else uuid).startswith(token):
            return handle
    raise LookupError(f"no GPU {token!r} is known to the driver")


def _utilization(nvml: ReadsGpu, handle: object) -> float | None:
    try:
        return nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:
        return None
