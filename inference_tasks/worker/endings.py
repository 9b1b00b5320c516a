"""Ends of tasks that no run reports: dead letters, crash limits, missed deadlines.

Whoever waits for such a task in Celery's canvas must hear of it too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import TaskRevokedError, WorkerLostError

from inference_tasks.worker.dead import Undertaker
from inference_tasks.worker.intake import Unfit

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery import Celery

    from inference_routing.lane import QueueKey
    from inference_tasks.app import Inference
    from inference_tasks.worker.intake import Delivery, Intake
    from inference_tasks.worker.mailbox import Mailbox

__all__ = ["Endings"]

logger = logging.getLogger(__name__)


class Endings:
    """What becomes of messages that shall not run."""

    def __init__(
        self,
        inference: Inference,
        mailbox: Mailbox,
        later: Callable[[float, Callable[[], None]], None],
        *,
        worker: str,
    ) -> None:
        self._app = inference.celery_app
        self._store = inference.store
        self._crash_limit = inference.settings.worker.max_crashes
        self._undertaker = Undertaker(
            post=inference.publisher.post,
            on_main=mailbox.post,
            later=later,
            fail=self._record,
            namespace=inference.settings.namespace,
            dead_queue=inference.topology.dead.name,
            worker=worker,
        )

    def bury(self, message: Delivery, key: QueueKey, unfit: Unfit) -> None:
        """Move a message that can never run to the dead letters, and mark its task as failed."""
        self._undertaker.bury(message, key, unfit)

    def _record(self, unfit: Unfit, key: QueueKey) -> None:
        if unfit.id is not None:
            self._store.fail_unclaimed(
                unfit.id, name=unfit.name or "", tier=key.tier, error_type=unfit.reason, error=unfit.detail
            )

    def crashed(self, message: Delivery, key: QueueKey, intake: Intake) -> None:
        """Move a message whose task has killed its process once too often; its error callbacks and its chord hear."""
        text = f"the process running it died {intake.crash_limit or self._crash_limit} times"
        self.bury(message, key, Unfit("crash limit", text, intake.id, intake.name))
        context = _context(message)
        if context is not None:
            backend = _backend(self._app, message)
            backend.mark_as_failure(context.id, WorkerLostError(text), request=context, store_result=False)

    def expired(self, message: Delivery) -> None:
        """Let the chord of a task that was not started in time count it."""
        context = _context(message)
        if context is not None and context.chord:
            backend = _backend(self._app, message)
            backend.mark_as_revoked(context.id, TaskRevokedError("expired"), request=context, store_result=False)


def _backend(app: Celery, message: Delivery) -> Any:
    task = app.tasks.get(str(message.headers["task"]))
    return app.backend if task is None else task.backend


def _context(message: Delivery) -> Context | None:
    """The request as a run would see it; None where the message has nobody to tell."""
    payload = message.payload
    embed = payload[2] if isinstance(payload, list | tuple) and len(payload) == 3 else None
    if not isinstance(embed, Mapping) or not (embed.get("chord") or embed.get("errbacks")):
        return None
    args, kwargs, _ = payload
    return Context({**message.headers, **embed, "args": args, "kwargs": kwargs, "is_eager": False})
