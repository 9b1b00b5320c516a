"""What a task can ask about its own run: whether it should stop, and how much time it has left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar

from celery import Task
from celery.exceptions import Ignore

from inference_tasks.errors import StateUnavailableError, TaskCancelledError
from inference_tasks.routes import HEADER
from inference_tasks.state.records import Run

__all__ = ["CANCELLED", "WatchedTask", "deadline_s"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

#: What ``Ignore`` says when it ends a run whose task has ended itself as cancelled.
CANCELLED = "Cancelled by the task"
LOOK_EVERY_S = 0.2


class WatchedTask(Task[P, R]):
    """A task whose run can see that it was cancelled, and its deadline."""

    def is_cancelled(self) -> bool:
        """Whether this run should stop: somebody cancelled the task, or another worker has taken it over.

        Cheap enough for every turn of a loop: Redis is asked at most every 0.2 s. A run that stops raises
        ``TaskCancelledError``. False outside of a worker, and while Redis does not answer.
        """
        return self._look()[1].should_stop

    def remaining_s(self) -> float | None:
        """Return the seconds until this task's deadline, 0 once it has passed; None if it has none.

        Callers who have joined the task since its submit may have moved it.
        """
        looked_at_s, run = self._look()
        return None if run.left_s is None else max(0.0, run.left_s - (time.monotonic() - looked_at_s))

    def _look(self) -> tuple[float, Run]:
        request: Any = self.request
        known: tuple[float, Run] | None = getattr(request, "inference_look", None)
        if known is not None and (known[1].should_stop or time.monotonic() - known[0] < LOOK_EVERY_S):
            return known
        found = None
        token = getattr(request, "inference_token", None)
        if token is not None and not request.called_directly and not request.is_eager:
            # Not at the top: the app's module imports this one.
            from inference_tasks.app import inference_of

            try:
                found = inference_of(self.app).store.look(request.id, int(token))
            except StateUnavailableError:
                found = None if known is None else known[1]._replace(left_s=_left_s(request.headers))
        look = time.monotonic(), found or Run(False, _left_s(request.headers))
        request.inference_look = look
        return look

    def _end_cancelled(self, error: TaskCancelledError) -> Ignore:
        """Record that the task has cancelled itself; return what ends the run without another word."""
        request: Any = self.request
        said = str(error)
        self.backend.mark_as_revoked(
            request.id,
            f"cancelled: {said}" if said else "cancelled",
            request=request,
            store_result=not request.ignore_result,
        )
        return Ignore(CANCELLED)


def deadline_s(headers: Mapping[str, Any] | None) -> float | None:
    """Return the deadline that a message was sent with, unix seconds by its sender's clock; None if it has none."""
    ours = (headers or {}).get(HEADER)
    expires_at_s = ours.get("expires_at_s") if isinstance(ours, Mapping) else None
    return expires_at_s if isinstance(expires_at_s, int | float) else None


def _left_s(headers: Mapping[str, Any] | None) -> float | None:
    at_s = deadline_s(headers)
    return None if at_s is None else at_s - time.time()
