"""Ends of tasks that no run reports: whoever waits for them in Celery's canvas must hear of them too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import TaskRevokedError, WorkerLostError

if TYPE_CHECKING:
    from celery import Celery

    from inference_tasks.worker.intake import Delivery

__all__ = ["tell_crashed", "tell_expired"]

logger = logging.getLogger(__name__)


def tell_expired(app: Celery, message: Delivery) -> None:
    """Let the chord of a task that was not started in time count it."""
    context = _context(message)
    if context is not None and context.chord:
        _backend(app, message).mark_as_revoked(
            context.id, TaskRevokedError("expired"), request=context, store_result=False
        )


def tell_crashed(app: Celery, message: Delivery, text: str) -> None:
    """Run the error callbacks of a task whose process died once too often, and let its chord count it."""
    context = _context(message)
    if context is not None and (context.chord or context.errbacks):
        _backend(app, message).mark_as_failure(context.id, WorkerLostError(text), request=context, store_result=False)


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
