"""Which errors are tried again, and what stays as in Celery where no worker is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_routing.backoff import Backoff
from inference_tasks import CallerError, InferenceApp, InferenceTask, PermanentError, RetryAfter, TemporaryError


@pytest.fixture
def app() -> InferenceApp:
    return InferenceApp(
        "retries-of-a-test", broker="amqp://nowhere", set_as_current=False, retry={"max_attempts": 3, "base_s": 2}
    )


class RefusedError(TemporaryError, PermanentError):
    """Both at once: what is permanent is permanent."""


def failing(app: InferenceApp, errors: list[Exception], **options: Any) -> tuple[Any, list[int]]:
    """A task that raises these errors in turn, then returns; and the numbers of its tries."""
    tries: list[int] = []

    @app.inference(name="failing", bind=True, **options)
    def task(self: InferenceTask[..., object]) -> str:
        tries.append(self.request.retries)
        if len(tries) <= len(errors):
            raise errors[len(tries) - 1]
        return "done"

    return task, tries


def test_attempts_and_delays_are_those_of_the_settings_unless_the_task_has_its_own(app: InferenceApp) -> None:
    task, _ = failing(app, [])
    assert task.max_retries == 2
    assert 2.0 <= task.next_delay_s() <= 2.5

    @app.inference(max_attempts=7, backoff_s=(1, 5, 30), jitter=False)
    def own() -> None: ...

    assert own.max_retries == 6
    assert own.next_delay_s() == 1
    assert own.backoff == Backoff.listed((1, 5, 30))


def test_a_task_of_plain_celery_keeps_celerys_numbers(app: InferenceApp) -> None:
    @app.task(name="plain", shared=False)
    def plain() -> None: ...

    assert (plain.max_retries, plain.default_retry_delay) == (3, 180)
    assert isinstance(plain, InferenceTask)
    assert not plain.is_retried(ValueError())
    assert plain.is_retried(TemporaryError())


@pytest.mark.parametrize(
    ("error", "options", "is_retried"),
    [
        (TemporaryError(), {}, True),
        (RetryAfter(3), {}, True),
        (ValueError(), {}, False),
        (ValueError(), {"retry_on": (ValueError,)}, True),
        (ValueError(), {"retry_on": (LookupError, ValueError)}, True),
        (TemporaryError(), {"retry_on": (ValueError,)}, True),
        (PermanentError(), {"retry_on": (Exception,)}, False),
        (RefusedError(), {"retry_on": (Exception,)}, False),
    ],
    ids=repr,
)
def test_errors_are_tried_again_by_kind(
    app: InferenceApp, error: Exception, options: dict[str, Any], is_retried: bool
) -> None:
    task, tries = failing(app, [error], **options)
    done = task.apply()
    assert tries == ([0, 1] if is_retried else [0])
    assert done.successful() == is_retried


def test_the_setting_decides_about_errors_that_nothing_names(app: InferenceApp) -> None:
    app = InferenceApp(
        "others", broker="amqp://nowhere", set_as_current=False, retry={"other_errors": "retry", "max_attempts": 3}
    )
    task, tries = failing(app, [ValueError("no"), KeyError("no"), ValueError("still no")])
    done = task.apply()
    assert tries == [0, 1, 2]
    assert str(done.result) == "still no"


def test_celerys_own_autoretry_leaves_a_permanent_error_alone(app: InferenceApp) -> None:
    task, tries = failing(app, [ValueError(), PermanentError()], autoretry_for=(Exception,), max_attempts=5)
    assert isinstance(task.apply().result, PermanentError)
    assert tries == [0, 1]


def test_called_like_a_function_it_raises_like_one(app: InferenceApp) -> None:
    task, tries = failing(app, [TemporaryError("away")])
    with pytest.raises(TemporaryError, match="away"):
        task()
    assert tries == [0]


@pytest.mark.parametrize(
    "options",
    [
        {"backoff_s": ()},
        {"backoff_s": (1, -2)},
        {"backoff_s": "soon"},
        {"backoff_s": 1e12},
        {"retry_on": ("ValueError",)},
        {"retry_on": ValueError()},
        {"max_attempts": 0},
    ],
    ids=repr,
)
def test_a_value_that_cannot_be_meant_is_refused_at_decoration(app: InferenceApp, options: dict[str, Any]) -> None:
    decorate: Callable[..., Any] = app.inference
    with pytest.raises(CallerError):
        decorate(**options)


def test_a_delay_that_cannot_be_kept_ends_the_run_with_a_clear_error(app: InferenceApp) -> None:
    @app.inference(bind=True)
    def late(self: InferenceTask[..., object]) -> None:
        self.retry(countdown=1e12)

    assert isinstance(late.apply().result, CallerError)
