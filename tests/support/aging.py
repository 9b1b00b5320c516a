"""Making tasks old, and looking at what a queue holds, for the tests of maintenance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.maintenance.pull import Pull
from inference_tasks.maintenance.sweep import Sweep, Swept
from inference_tasks.state import keys


def client_of(app: InferenceApp) -> Any:
    """A client of the application's Redis; the caller closes it."""
    return redis.Redis.from_url(cast(str, inference_of(app).settings.state.url), decode_responses=True)


def grow_old(app: InferenceApp, task_ids: Sequence[str], seconds: float) -> None:
    """Let time pass for these tasks alone: every moment that is kept of them moves into the past.

    The server's clock cannot be set.
    """
    inference = inference_of(app)
    prefix = inference.store.prefix
    with client_of(app) as client:
        for record in inference.store.get_many(list(task_ids)):
            assert record is not None
            key = keys.task(prefix, record.id)
            for name in ("submitted_at_s", "ready_at_s"):
                client.hincrbyfloat(key, name, -seconds)
            queue = inference.queue_by_lane[record.tier, record.lane]
            assert client.zscore(keys.ready(prefix, queue), record.id) is not None
            client.zincrby(keys.ready(prefix, queue), -seconds, record.id)


def sweep(app: InferenceApp) -> Swept:
    """One round of aging in this process."""
    pull = new_pull(app)
    try:
        return Sweep(inference_of(app), pull).run()
    finally:
        pull.close()


def new_pull(app: InferenceApp) -> Pull:
    """A connection to take messages over; the caller closes it."""
    return Pull(cast(str, inference_of(app).settings.broker.url), connect_timeout_s=3.0)


@contextmanager
def held(app: InferenceApp, tier: str, lane: str = "fresh") -> Iterator[list[Any]]:
    """All messages of a queue in their order, put back at the end."""
    queue = inference_of(app).topology.queue(tier, lane).name
    with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        found: list[Any] = []
        while (message := channel.basic_get(queue)) is not None:
            found.append(message)
        yield found
        for message in found:
            channel.basic_reject(message.delivery_tag, requeue=True)


def ids_in(app: InferenceApp, tier: str, lane: str = "fresh") -> list[str]:
    """The ids of the tasks whose messages a queue holds, in their order."""
    with held(app, tier, lane) as messages:
        return [message.headers["id"] for message in messages]


def deliveries(message: Any) -> int:
    """How often the broker has delivered a message before, by its own count; classic queues keep none."""
    return int(message.headers.get("x-delivery-count", 0))


def put(app: InferenceApp, queue: str, message: Any, **headers: Any) -> None:
    """Publish a message that was taken once more, with some headers changed."""
    with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        changed = {**message.headers, **headers}
        copy = channel.prepare_message(message.body, None, "application/json", "utf-8", changed, {"delivery_mode": 2})
        channel.confirm_select()
        channel.basic_publish_confirm(copy, exchange=inference_of(app).settings.namespace, routing_key=queue)
