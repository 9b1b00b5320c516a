"""What retries and the ends of tasks rely on inside Celery."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from billiard.exceptions import TimeLimitExceeded
from billiard.pool import ApplyResult
from celery import Celery, Task
from celery.app.amqp import AMQP
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.base import Celery as Base
from celery.exceptions import Ignore, Reject, Retry, TaskPredicate

from inference_tasks.worker import endings, seam


def test_retry_ignore_and_reject_are_told_from_errors_by_one_class() -> None:
    assert issubclass(Retry, TaskPredicate)
    assert issubclass(Ignore, TaskPredicate)
    assert issubclass(Reject, TaskPredicate)
    reject: Any = Reject("why", requeue=True)
    assert (reject.requeue, reject.reason) == (True, "why")


def test_a_replaced_task_says_so_in_these_words() -> None:
    replace: Any = Task.on_replace
    assert f"raise Ignore({endings._REPLACED!r})" in inspect.getsource(replace)


def test_celerys_autoretry_wraps_what_a_task_has_made_of_its_function() -> None:
    class Wrapping(Task):
        name = "wrapping"

        run: Any

        def __init__(self) -> None:
            self.run = lambda: "wrapped"

    task: Any = Wrapping()
    add_autoretry_behaviour(task, autoretry_for=(ValueError,))
    assert task.run() == "wrapped"


def test_a_retry_that_cannot_be_published_is_a_reject_with_the_error() -> None:
    assert "raise Reject(exc, requeue=False)" in inspect.getsource(Task.retry)


def test_celery_asks_the_producer_pool_for_the_kind_of_broker_before_it_works_out_delays() -> None:
    source = inspect.getsource(Base.send_task)
    assert "self.producer_pool.connections.connection.transport.driver_type" in source


def test_the_arguments_of_a_task_message_come_by_position_up_to_the_countdown() -> None:
    names = list(inspect.signature(AMQP.as_task_v2).parameters)
    assert names[1:6] == ["task_id", "name", "args", "kwargs", "countdown"]
    amqp: Any = AMQP(Celery("a", set_as_current=False))
    assert amqp.task_protocols[2].__name__ == "as_task_v2"


def test_a_hard_time_limit_is_told_as_an_error_before_it_is_told_as_a_time_out() -> None:
    told: list[str] = []
    job: Any = ApplyResult(
        {},
        None,
        accept_callback=None,
        timeout_callback=lambda soft, timeout: told.append("time-out"),
        error_callback=lambda info: told.append(type(seam.error_of(info)).__name__),
        timeout=1,
    )
    try:
        raise TimeLimitExceeded(1)
    except TimeLimitExceeded as error:
        job._set(job._job, (False, SimpleNamespace(exception=error)))
    job.handle_timeout(soft=False)
    assert told == ["TimeLimitExceeded", "time-out"]
