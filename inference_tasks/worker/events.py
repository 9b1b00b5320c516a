"""What this package adds to the events that Celery's workers send to monitors such as Flower."""

from __future__ import annotations

from typing import Any

from inference_tasks.worker import seam

__all__ = ["TierRequest"]


class TierRequest(seam.Request):
    """Celery's request of a task that has come to a worker; its event ``task-started`` brings ``tier`` and ``lane``.

    Of the queue it came from, so the tier that serves it. An event of our own would cost as much as the whole
    difference between a start with events and one without.
    """

    app: Any

    def send_event(self, type: str, **fields: object) -> None:
        """Send an event of this task."""
        if type == "task-started":
            lane = self.app.amqp.door.lane_of(self.delivery_info["routing_key"] or "")
            if lane is not None:
                fields["tier"], fields["lane"] = lane
        super().send_event(type, **fields)
