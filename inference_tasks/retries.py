"""Trying a failed task again: which errors, how often, how much later. All of it through Celery's ``Task.retry``.

What is tried later is parked in the broker by the publish that ``Task.retry`` makes: see ``broker.addressing``.
"""

from __future__ import annotations

import logging
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from celery.exceptions import Ignore, Reject, TaskPredicate
from celery.utils.time import maybe_make_aware

from inference_routing.backoff import Backoff
from inference_tasks.errors import (
    BrokerUnavailableError,
    CallerError,
    OutcomeUnknownError,
    PermanentError,
    RetryAfter,
    StateUnavailableError,
    TaskCancelledError,
    TemporaryError,
    kept_delay_s,
)
from inference_tasks.runs import TAKEN_OVER, WatchedTask, deadline_s

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["DEADLINE", "ENDING", "EXHAUSTED", "RetryingTask", "backoff_of", "errors_of"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

logger = logging.getLogger(__name__)

#: Attribute of an error that says why its task is not tried again; it crosses from the pool's process with the error.
ENDING = "inference_ending"
EXHAUSTED = "attempts exhausted"
DEADLINE = "deadline before retry"

PAUSE_FIRST_S = 0.5
PAUSE_LONGEST_S = 5.0


class RetryingTask(WatchedTask[P, R]):
    """A task that is tried again after a ``TemporaryError``, and after what its ``retry_on`` names.

    Attributes:
        retry_on: further errors that are tried again. ``PermanentError`` never is.
        backoff: delays between the tries; None for those of the settings.
        jitter: whether chance lengthens the delays; None leaves it to ``backoff``.
        max_attempts: how many runs may raise; None for the settings' number. Celery's tasks have ``max_retries``.
        follows_settings: whether section ``retry`` of the settings fills in what is None. Set by ``@app.inference``;
            Celery's own tasks keep Celery's numbers.
        retries_others: whether errors that nothing names are tried again.
    """

    retry_on: tuple[type[Exception], ...] = ()
    backoff: Backoff | None = None
    jitter: bool | None = None
    max_attempts: int | None = None
    follows_settings: bool = False
    retries_others: bool = False

    # Of Celery's autoretry_for, which may name an error that this one is derived from.
    dont_autoretry_for: tuple[type[Exception], ...] = (PermanentError, TaskCancelledError)

    def __init__(self) -> None:
        super().__init__()
        # mirrors celery.app.autoretry, which puts its own wrapper around this one.
        self.run = _tried_again(self, self.run)  # type: ignore[method-assign]

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Fill in what the settings say. Called by Celery when the task becomes part of an app."""
        super().on_bound(app)
        if cls.follows_settings:
            # Not at the top: the app's module imports this one.
            from inference_tasks.app import inference_of

            settings = inference_of(app).settings
            cls.retries_others = settings.retry.other_errors == "retry"
            if cls.max_attempts is None:
                cls.max_retries = settings.retry.max_attempts - 1

    def is_retried(self, error: BaseException) -> bool:
        """Whether the task is tried again after this error, as far as its number of attempts allows."""
        if isinstance(error, PermanentError | TaskCancelledError):
            return False
        return self.retries_others or isinstance(error, (TemporaryError, *self.retry_on))

    def next_delay_s(self) -> float:
        """Return seconds to wait after the run that is going on, by the task's back-off."""
        backoff = self.backoff
        if backoff is None:
            from inference_tasks.app import inference_of

            backoff = inference_of(self.app).settings.backoff()
        if self.jitter is not None:
            backoff = backoff.with_jitter(self.jitter)
        return backoff.delay_s(self.request.retries + 1, random.random())

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: Exception | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
        **options: Any,
    ) -> Any:
        """Try again later; Celery's own call, with two differences.

        Without ``countdown`` and ``eta`` a task of ``@app.inference`` waits as its back-off says. And a retry that
        could only start after the task's deadline is not parked: the task fails with its last error.

        Raises:
            Retry: always, unless ``throw`` is false: it ends this run.
            CallerError: the delay is no number, or longer than the broker can keep a message.
        """
        request = self.request
        if eta is None:
            if countdown is None and self.follows_settings:
                countdown = self.next_delay_s()
            countdown = None if countdown is None else kept_delay_s("countdown", countdown)
        if not request.called_directly and not request.is_eager:
            limit = self.max_retries if max_retries is None else max_retries
            error = exc or sys.exc_info()[1]
            if limit is not None and request.retries >= limit:
                _mark(error, EXHAUSTED)
            elif self._is_too_late(self._due_at_s(eta, countdown)):
                _mark(error, DEADLINE)
                raise error or self.MaxRetriesExceededError(
                    f"{self.name}[{request.id}] was to be tried again, but its deadline comes first"
                )
        given = {"exc": exc, "throw": throw, "eta": eta, "countdown": countdown, "max_retries": max_retries, **options}
        return self._parked(lambda: super(RetryingTask, self).retry(args, kwargs, **given))

    def _due_at_s(self, eta: datetime | None, countdown: float | None) -> float:
        now_s = time.time()
        if eta is not None:
            delay_s = kept_delay_s("eta", maybe_make_aware(eta, self.app.timezone).timestamp() - now_s)
        else:
            delay_s = self.default_retry_delay if countdown is None else countdown
        return now_s + math.ceil(delay_s)

    def _is_too_late(self, due_at_s: float) -> bool:
        said_s = deadline_s(self.request.headers)
        if said_s is None or due_at_s < said_s:
            return False
        # Callers who have joined the task since may have given it more time.
        left_s = self.remaining_s()
        return left_s is not None and due_at_s >= time.time() + left_s

    def _parked(self, retry: Callable[[], Any]) -> Any:
        """Publish the copy again until the broker has it, as a result is written again until Redis has it.

        Celery would end the task here, with the broker's error in place of its own.
        """
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return retry()
            except Reject as reject:
                why = getattr(reject, "reason", None)
                if not isinstance(why, BrokerUnavailableError | OutcomeUnknownError | StateUnavailableError):
                    raise
                logger.warning("the retry of %s[%s] is not parked yet: %s", self.name, self.request.id, why)
            time.sleep(pause_s)
            pause_s = min(PAUSE_LONGEST_S, 2 * pause_s)


def _tried_again(task: RetryingTask[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a task's function: what may be tried again ends in ``Task.retry``."""

    @wraps(run)
    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            value = run(*args, **kwargs)
        except TaskPredicate:
            raise
        except TaskCancelledError as exc:
            if task.request.called_directly or task.request.is_eager:
                raise
            raise task._end_cancelled(exc) from exc
        except Exception as exc:
            # Called like a function, it raises like one.
            if task.request.called_directly or not task.is_retried(exc):
                raise
            delay_s = exc.delay_s if isinstance(exc, RetryAfter) else task.next_delay_s()
            # Raised here, and not where it is made: each line of a traceback costs a tenth of a millisecond to print.
            raise task.retry(exc=exc, countdown=delay_s, throw=False) from exc
        if not task._may_be_followed():
            raise Ignore(TAKEN_OVER)
        return value

    return tried


def errors_of(option: object) -> tuple[type[Exception], ...]:
    """Return the option ``retry_on`` as a tuple of classes.

    Raises:
        CallerError: it holds something else.
    """
    classes = tuple(option) if isinstance(option, Iterable) else (option,)
    for one in classes:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise CallerError(f"@app.inference: retry_on: expected classes of exceptions, found {one!r:.80}.")
    return classes


def backoff_of(option: object) -> Backoff:
    """Return the option ``backoff_s``: a ``Backoff``, delays in seconds, or one delay.

    Raises:
        CallerError: it is none of these.
    """
    if isinstance(option, Backoff):
        return option
    steps: Any = option if isinstance(option, Iterable) and not isinstance(option, str) else (option,)
    try:
        backoff = Backoff.listed(steps)
    except ValueError as error:
        raise CallerError(f"@app.inference: backoff_s: {error}.") from error
    for step_s in backoff.steps_s:
        kept_delay_s("@app.inference: backoff_s", step_s)
    return backoff


def _mark(error: BaseException | None, why: str) -> None:
    if error is not None:
        with suppress(AttributeError, TypeError):  # a class may allow no attributes
            setattr(error, ENDING, why)
