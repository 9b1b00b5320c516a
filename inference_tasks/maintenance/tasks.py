"""The maintenance worker's tasks: ordinary Celery tasks, started by beat, each harmless to run twice or not at all."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from celery import Task

from inference_tasks.errors import InferenceError
from inference_tasks.maintenance.accounting import Dropped, Reconciliation
from inference_tasks.maintenance.pull import Pull
from inference_tasks.maintenance.sweep import Sweep
from inference_tasks.maintenance.waiting import Round
from inference_tasks.schedule import ACCOUNT, LET_GO, PROMOTE, RECONCILE

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["Upkeep", "register"]

log = logging.getLogger(__name__)

#: What lists the dead letters that no worker of ours has written.
DEAD_LETTERS_INDEX = "inference_tasks.dead_letters.index"


class Upkeep:
    """The work of the maintenance tasks, over one connection to the broker that is kept between them.

    Nothing is raised because a server is away: the next interval comes, and what was under way has gone back.
    """

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        # One task at a time uses the connection, also in a pool of threads.
        self._lock = Lock()

    @cached_property
    def pull(self) -> Pull:
        """The connection to the broker."""
        broker = self._inference.settings.broker
        return Pull(cast(str, broker.url), connect_timeout_s=broker.connect_timeout_s)

    @cached_property
    def _sweep(self) -> Sweep:
        return Sweep(self._inference, self.pull)

    @cached_property
    def _dropped(self) -> Dropped:
        return Dropped(self._inference, self.pull)

    @cached_property
    def _reconciliation(self) -> Reconciliation:
        return Reconciliation(self._inference, self.pull)

    @cached_property
    def _round(self) -> Round:
        return Round(self._inference, self.pull)

    def promote(self) -> int:
        """Do one round of aging; return how many tasks moved up."""
        return self._done("aging", lambda: self._sweep.run().promoted)

    def account(self) -> int:
        """Record what was dropped, and list new dead letters; return how many tasks were dropped."""
        dropped = self._done("recording dropped tasks", self._dropped.run)
        self._done("listing dead letters", self._list_dead_letters)
        return dropped

    def reconcile(self) -> int:
        """Look for lost messages; return how many tasks ended because theirs is gone."""
        return self._done("comparing records with queues", self._reconciliation.run)

    def let_go(self) -> int:
        """Look at what waits for other tasks and has come round, and end lifts; return how many tasks were let go."""
        let_go = self._done("letting waiting tasks go", self._round.run)
        self._done("ending lifts", self._inference.lifts.lower)
        return let_go

    def close(self) -> None:
        """Close the connection to the broker."""
        self.pull.close()

    def _list_dead_letters(self) -> int:
        refresh = cast("Callable[[Inference], int]", importlib.import_module(DEAD_LETTERS_INDEX).refresh)
        return refresh(self._inference)

    def _done(self, what: str, work: Callable[[], int]) -> int:
        try:
            with self._lock:
                return work()
        except InferenceError as exc:
            log.warning("%s is put off until the next round: %s", what, exc)
            return 0


def register(inference: Inference) -> Upkeep:
    """Make the tasks known to the app of this process, and return what does their work."""
    app: Any = inference.celery_app
    upkeep = Upkeep(inference)
    works: dict[str, Callable[[], int]] = {
        PROMOTE: upkeep.promote,
        ACCOUNT: upkeep.account,
        RECONCILE: upkeep.reconcile,
        LET_GO: upkeep.let_go,
    }
    for name, work in works.items():
        # Celery's own class: these are no tasks of a tier. Acknowledged early: the next round does what this one could
        # not.
        app.task(_task(work), name=name, base=Task, ignore_result=True, acks_late=False, shared=False, max_retries=0)
    return upkeep


def _task(work: Callable[[], int]) -> Callable[[], int]:
    # A bound method is none that Celery can wrap.
    def run() -> int:
        return work()

    return run
