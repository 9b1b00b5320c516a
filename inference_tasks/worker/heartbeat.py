"""What a worker tells of itself each second or so, with the renewal of its leases."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import TYPE_CHECKING

from inference_tasks.state.records import RunningTask, WorkerBeat
from inference_tasks.worker.gpu import VISIBLE
from inference_tasks.worker.gpu_reading import GpuReader

if TYPE_CHECKING:
    from inference_tasks.settings.sections import WorkerSettings
    from inference_tasks.worker.slots import Slots
    from inference_tasks.worker.tally import Tally

__all__ = ["Heartbeat", "own_version"]

MOST_RUNNING = 64


def own_version() -> str:
    """Return the version of this package; empty where it is not installed."""
    try:
        return version("inference-tasks")
    except PackageNotFoundError:
        return ""


class Heartbeat:
    """Makes heartbeats; called in the thread that renews the leases."""

    def __init__(
        self,
        *,
        node: str,
        pool: str,
        settings: WorkerSettings,
        slots: Slots,
        tally: Tally,
        state: Callable[[], str],
        gpu: GpuReader | None = None,
    ) -> None:
        """Prepare.

        Args:
            node: the worker's name.
            pool: the kind of its pool.
            settings: of the worker.
            slots: which tasks run.
            tally: what the last minute was like.
            state: ``running``, ``paused`` or ``draining``.
            gpu: reads the worker's GPU; None for the one that CUDA shows it.
        """
        self._node = node
        self._pool = pool
        self._settings = settings
        self._slots = slots
        self._tally = tally
        self._state = state
        visible = os.environ.get(VISIBLE) or None
        self._gpu_name = visible
        self._gpu = gpu or GpuReader(visible)
        self._version = own_version()
        self._started_at_s = round(time.time(), 3)

    def __call__(self) -> WorkerBeat:
        """Return the heartbeat of this moment."""
        tally, tickets = self._tally, sorted(self._slots, key=lambda ticket: ticket.started_s)
        ahead_s = time.time() - monotonic()
        running = (
            RunningTask(
                id=ticket.intake.id,
                task=ticket.intake.name,
                tier=ticket.intake.tier,
                tier_first=ticket.intake.tier_first,
                lane=ticket.intake.lane,
                since_s=round(ticket.started_s + ahead_s, 3),
            )
            for ticket in tickets[:MOST_RUNNING]
        )
        reading = self._gpu.read()
        return WorkerBeat(
            node=self._node,
            pid=os.getpid(),
            gpu=self._gpu_name,
            pool=self._pool,
            slots=self._slots.ready,
            reserve=self._settings.reserve,
            tiers=tuple(self._settings.tiers),
            busy=len(tickets),
            starts_60s=tally.starts(),
            slot_s_60s=tally.slot_s(),
            started_per_s=tally.per_s(),
            version=self._version,
            started_at_s=self._started_at_s,
            running=tuple(running),
            busy_by_tier=dict(Counter(ticket.intake.tier for ticket in tickets)),
            last_start_at_s=tally.last_start_at_s(),
            waits_60s=tally.waits(),
            longest_wait_60s=tally.longest_wait_s(),
            failed_60s=tally.failed(),
            ended_60s=tally.ended(),
            floor_violations_60s=tally.floor_violations(),
            state=self._state(),
            gpu_memory_used_bytes=reading.memory_used_bytes if reading else None,
            gpu_memory_total_bytes=reading.memory_total_bytes if reading else None,
            gpu_utilization=reading.utilization if reading else None,
        )
