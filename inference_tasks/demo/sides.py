"""The two sides of the comparison. Imported once the servers are known: the apps read the settings."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, cast

from inference_routing.tier import TIER_NAMES
from inference_tasks.app import inference_of
from inference_tasks.demo import fifo, tasks
from inference_tasks.demo.side import Call
from inference_tasks.errors import QueueFullError

__all__ = ["Fifo", "Tiers"]


class Tiers:
    """This package."""

    name = "ours"
    title = "inference-tasks"

    def __init__(self) -> None:
        self.inference = inference_of(tasks.app)
        self._depths = self.inference.depths()
        self._queues = {name: tier for (tier, _), name in self.inference.queue_by_lane.items()}

    def worker(self, slots: int) -> list[str]:
        options = ("--gpu", "none", "--pool", "prefork", "--slots", f"{slots}", "--reserve", "0", "--tiers", "all")
        mine = ("--name", "demo", "--supervised-by", f"{os.getpid()}")
        command = (sys.executable, "-m", "inference_tasks.cli", "worker", "-A", "inference_tasks.demo.tasks:app")
        return [*command, *options, *mine]

    def send(self, tier: str, calls: Sequence[Call]) -> list[int]:
        report = tasks.classify.submit_many(calls, tier=tier)
        for one in (*report.refused, *report.unknown):
            if not isinstance(one.error, QueueFullError):
                raise one.error
        return [calls[one.index][2] for one in report.refused]

    def depths(self) -> dict[str, int] | None:
        ready = self._depths.of(self.inference.topology)
        counted = dict.fromkeys(TIER_NAMES, 0)
        for name, tier in self._queues.items():
            counted[tier] += ready.get(name, 0)
        return counted

    def close(self) -> None:
        self._depths.close()
        self.inference.publisher.close()
        self.inference.store.close()


class Fifo:
    """Stock Celery with one queue."""

    name = "fifo"
    title = "one FIFO queue"

    def worker(self, slots: int) -> list[str]:
        quiet = ("--without-gossip", "--without-mingle", "--loglevel", "INFO")
        node = ("-n", f"fifo-{os.getpid()}@{socket.gethostname()}", "--pool", "prefork", "--concurrency", f"{slots}")
        return [sys.executable, "-m", "celery", "-A", "inference_tasks.demo.fifo:app", "worker", *node, *quiet]

    def send(self, tier: str, calls: Sequence[Call]) -> list[int]:
        for call in calls:
            fifo.classify.apply_async(call)
        return []

    def depths(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        cast(Any, fifo.app).close()
