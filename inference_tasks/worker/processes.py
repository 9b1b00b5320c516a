"""The processes of a prefork pool: each loads its models before it has a slot, and a pool that cannot gives up."""

from __future__ import annotations

import logging
import os
from typing import Any

from celery import current_app, signals

from inference_tasks.app import inference_of
from inference_tasks.worker import seam

__all__ = ["Processes"]

logger = logging.getLogger(__name__)

#: Exit status of a pool process that cannot load its models.
EX_NO_MODELS = 70
#: Rounds of new processes of which none becomes ready, after which the worker gives up.
MAX_FAILED_ROUNDS = 3
#: Exit status of a worker that gives up: a deployment must be mended.
EX_DEPLOYMENT = 7


@signals.worker_process_init.connect(weak=False)
def _load_models(**_: object) -> None:
    """Load the models in each pool process; one without its models must not get a slot.

    Celery logs what its signals raise and goes on, so the process is ended here.
    """
    try:
        inference_of(current_app).load_models()
    except Exception:
        logger.critical("this process ends, since it cannot load its models", exc_info=True)
        logging.shutdown()
        os._exit(EX_NO_MODELS)


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
