"""What a worker does with the tasks that it is asked to stop."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inference_tasks.worker import seam

if TYPE_CHECKING:
    from inference_tasks.worker.slots import Ticket

__all__ = ["Stopper"]

logger = logging.getLogger(__name__)


class Stopper:
    """Ends the processes of tasks that are to be terminated. Whoever is only asked to stop sees to that itself."""

    def __init__(self, running: Iterable[Ticket], pool: Any, *, can_kill: bool) -> None:
        self._running = running
        self._pool = pool
        self._can_kill = can_kill
        self._refused: set[str] = set()

    def asked(self, stopping: Mapping[str, bool]) -> None:
        """Deal with the tasks that are asked to stop, given as {id: whether it is to be terminated}."""
        running = {ticket.intake.id for ticket in self._running}
        self._refused.intersection_update(stopping)
        for task_id, is_killed in stopping.items():
            if task_id not in running:
                # Celery keeps it for later (a rate limit, a time to start at): it shall not come to the pool.
                seam.revoke_here(task_id)
            elif is_killed and self._can_kill:
                if seam.terminate(task_id, self._pool):
                    logger.info("task %s is terminated, as it was asked to be", task_id)
            elif is_killed and task_id not in self._refused:
                self._refused.add(task_id)
                logger.warning(
                    "task %s cannot be terminated: only the prefork pool can end a run; it ends when it looks", task_id
                )
