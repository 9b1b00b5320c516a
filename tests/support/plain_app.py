"""A Celery application without any of this package, for tests of the fixtures and of what plain Celery does."""

from __future__ import annotations

import os

from celery import Celery

from tests.support import history

# The worker's environment holds CELERY_BROKER_URL and CELERY_RESULT_BACKEND, which Celery reads by itself.
app = Celery("plain")
app.conf.update(
    broker_connection_retry_on_startup=True,
    # The stock default, a transient queue for remote control, is refused by RabbitMQ 4.3.
    control_queue_exclusive=False,
    control_queue_durable=True,
)


# Celery gives a shared task to every application of the process, the next test's included.
@app.task(name="plain.add", shared=False)
def add(x: int, y: int) -> int:
    """Return the sum, and tell the history if the test keeps one."""
    if history.PATH_VARIABLE in os.environ:
        history.log("add", x=x, y=y)
    return x + y
