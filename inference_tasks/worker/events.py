"""What this package adds to the events that Celery's workers send to monitors such as Flower."""

from __future__ import annotations

import os
import sys
import time
from functools import lru_cache
from typing import Any

from inference_tasks.worker import seam
from inference_tasks.worker.gpu import VISIBLE, Gpu, tokens
from inference_tasks.worker.intake import ready_at_s

__all__ = ["TierRequest", "flush_in_loop"]


def flush_in_loop(dispatcher: Any) -> None:
    """Keep a worker's events in their buffer until the thread of its event loop flushes it.

    Celery flushes a full buffer in the thread that fills it. With the threads pool two threads would read the events'
    connection then: publishing looks for frames first, and the loop reads the broker's heartbeats. Each gets a part of
    one, and the loop waits for the rest for ever: a worker that lives, renews its leases, and runs nothing any more.
    """
    if dispatcher is not None:
        dispatcher.buffer_limit = sys.maxsize


class TierRequest(seam.Request):
    """Celery's request of a task that has come to a worker; its event ``task-started`` brings what we know besides.

    ``tier`` and ``lane`` of the queue it came from, so the tier that serves it; ``wait``, the seconds since it could
    have been started; ``gpu`` of the worker, if it has one. An event of our own would cost as much as the whole
    difference between a start with events and one without.
    """

    app: Any

    def send_event(self, type: str, **fields: object) -> None:
        """Send an event of this task."""
        if type == "task-started":
            lane = self.app.amqp.door.lane_of(self.delivery_info["routing_key"] or "")
            if lane is not None:
                fields["tier"], fields["lane"] = lane
            since_s = ready_at_s(self.request_dict)
            if since_s is not None:
                # Clocks of two machines: a task that started before it was ready has not waited.
                fields["wait"] = round(max(0.0, (self.time_start or time.time()) - since_s), 3)
            if gpu := _gpu(os.environ.get(VISIBLE, "")):
                fields["gpu"] = gpu
        super().send_event(type, **fields)


@lru_cache(maxsize=1)
def _gpu(visible: str) -> str:
    return ",".join(Gpu(token).label for token in tokens(visible))
