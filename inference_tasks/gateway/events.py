"""The life of a task as server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from inference_tasks.errors import StateUnavailableError, TaskNotFoundError
from inference_tasks.gateway.documents import as_json, task_body
from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.service import Gateway
from inference_tasks.gateway.waiting import version_of
from inference_tasks.state.records import TaskRecord

__all__ = ["EVENTS_HEADERS", "EVENTS_TYPE", "follow"]

EVENTS_TYPE = "text/event-stream"
# Neither caches nor a buffering proxy may keep events back.
EVENTS_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

PING_EVERY_S = 15.0
RECONNECT_AFTER_MS = 2000


async def follow(
    gateway: Gateway,
    key: ApiKey,
    record: TaskRecord,
    links: dict[str, str],
    seen: str | None,
    *,
    ping_every_s: float = PING_EVERY_S,
) -> AsyncIterator[bytes]:
    """Tell the state of a task whenever it changes, and end after its end state.

    Each event holds the whole task, and its id names the state: a client that comes back with the last id it saw gets
    what is different now, and nothing twice. States that came and went within a second may be left out.

    Args:
        record: found just now, when it was also seen that the key may see it.
        seen: the id of the last event that the client knows.
    """
    yield f"retry: {RECONNECT_AFTER_MS}\n\n".encode()
    async with gateway.waiters.watch(record.id, is_looking=True) as watch:
        # What changed between the first look and the subscription is found by this second one.
        watch.wake()
        told_at_s = time.monotonic()
        while not gateway.is_ending:
            if not await watch.woken(max(0.0, told_at_s + ping_every_s - time.monotonic())):
                told_at_s = time.monotonic()
                yield b": ping\n\n"
                continue
            try:
                record = await gateway.look_up(key, record.id)
                version = version_of(record)
                if version != seen:
                    document = await gateway.document(record)
                    body = as_json(task_body(record, links, document))
                    seen = version
                    told_at_s = time.monotonic()
                    yield b"id: " + version.encode() + b"\nevent: state\ndata: " + body + b"\n\n"
            except StateUnavailableError:
                # Its return wakes this again.
                continue
            except TaskNotFoundError:
                # Redis has lost the record: there is nothing to tell until a worker sees the message.
                continue
            if record.is_finished:
                return
