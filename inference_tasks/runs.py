"""What a task can ask about its own run: whether it should stop, and how much time it has left."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar

from celery import Task
from celery.exceptions import Ignore

from inference_tasks.errors import StateUnavailableError, TaskCancelledError
from inference_tasks.routes import HEADER
from inference_tasks.state.records import Run, State

__all__ = ["CANCELLED", "TAKEN_OVER", "WatchedTask", "deadline_s"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

#: What ``Ignore`` says when it ends a run whose task has ended itself as cancelled.
CANCELLED = "Cancelled by the task"
#: What ``Ignore`` says when it ends a run that came too late: the claim on its task is over.
TAKEN_OVER = "Taken over"
LOOK_EVERY_S = 0.2
FOLLOW_PAUSE_S = 1.0


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

    def _may_be_followed(self) -> bool:
        """Whether what is linked to a run that has succeeded may be published: not if another claim decides.

        Celery publishes callbacks and the rest of a chain before it writes the result. Waits until Redis answers, as
        the result would.
        """
        request: Any = self.request
        token = getattr(request, "inference_token", None)
        if not (request.callbacks or request.chain) or token is None or request.called_directly or request.is_eager:
            return True
        from inference_tasks.app import inference_of

        while True:
            try:
                (record,) = inference_of(self.app).store.get_many((request.id,))
            except StateUnavailableError as exc:
                logger.warning("what follows %s[%s] waits for Redis: %s", self.name, request.id, exc)
                time.sleep(FOLLOW_PAUSE_S)
                continue
            if record is None:
                return True
            is_taken_over = (record.token or 0) > int(token) or record.generation > request.inference_gen
            has_failed = record.is_finished and record.state != State.SUCCESS
            if is_taken_over or has_failed:
                how = "another worker has it" if is_taken_over else f"it has ended as {record.state}"
                logger.warning("nothing follows from this late run of %s[%s]: %s", self.name, request.id, how)
            return not (is_taken_over or has_failed)

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
