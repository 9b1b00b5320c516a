"""The processes of a prefork pool: which are ready, and a pool that gives up since none ever is."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable
from typing import Any

from celery import signals

from inference_tasks.worker import seam

__all__ = ["Processes"]

logger = logging.getLogger(__name__)

#: Rounds of new processes of which none becomes ready, after which the worker gives up.
MAX_FAILED_ROUNDS = 3
#: Exit status of a worker that gives up: a deployment must be mended.
EX_DEPLOYMENT = 7


class Processes:
    """Counts processes that are ready, and those that end one after another without ever being so."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._births = 0
        signals.worker_before_create_process.connect(self._born)

    def _born(self, **_: object) -> None:
        self._births += 1

    @property
    def ready(self) -> int:
        """Processes that have finished their start-up."""
        return seam.ready_processes(self._pool)

    def check(self) -> None:
        """Stop a worker none of whose processes gets ready."""
        if not self._births:
            return
        wanted = self._pool.num_processes
        if self.ready >= wanted:
            self._births = 0
        elif self._births > MAX_FAILED_ROUNDS * wanted:
            logger.critical("%d processes in a row have ended before they were ready; giving up", self._births)
            seam.stop_worker(EX_DEPLOYMENT)

    def end_unaccepted(self, jobs: Iterable[object]) -> None:
        """End the processes at a cold stop if one of them may run a job that this process has not heard of yet.

        Celery ends those of which it knows that they run something, and waits for the others, however long they run.
        """
        if any(seam.unaccepted(job) for job in jobs):
            for pid in seam.process_ids(self._pool):
                self._pool.terminate_job(pid, signal.SIGKILL)
