"""Our place in Celery's start-up and shut-down: what it calls its task consumer, and the step that puts it there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from inference_tasks.worker import seam

if TYPE_CHECKING:
    from inference_tasks.worker.consumer import InferenceConsumer

__all__ = ["TierConsumer", "TierStep"]


class TierConsumer:
    """What Celery calls its task consumer: the same calls as kombu's ``Consumer``, answered by the dispatcher."""

    def __init__(self, owner: InferenceConsumer) -> None:
        self._owner = owner
        self.on_message: Callable[[Any], None] | None = None
        self.channel = owner.connection.default_channel if owner.connection else None
        self.queues = list(owner.app.amqp.queues.consume_from.values())

    def consume(self) -> None:
        self._owner.begin()

    def cancel(self) -> None:
        self._owner.drain()

    def close(self) -> None: ...

    def qos(self, **_: object) -> None: ...

    def consuming_from(self, queue: Any) -> bool:
        name = getattr(queue, "name", queue)
        return any(one.name == name for one in self.queues)

    def add_queue(self, queue: Any) -> None:
        self.queues.append(queue)
        self._owner.obedience.serve(queue.name, on=True)

    def cancel_by_queue(self, queue: str) -> None:
        self.queues = [one for one in self.queues if one.name != queue]
        self._owner.obedience.serve(queue, on=False)


class TierStep(bootsteps.StartStopStep):
    """Put the tier consumer in the place of the one that Celery's ``Tasks`` step has made.

    A step after ``Tasks``, not instead of it: other steps require ``Tasks`` by class and would bring the stock one
    back.
    """

    requires = (seam.Tasks,)
    label = "Tiers"

    def __init__(self, c: InferenceConsumer, **kwargs: object) -> None:
        super().__init__(c, **kwargs)

    def start(self, c: InferenceConsumer) -> None:
        c.attach()

    def stop(self, c: InferenceConsumer) -> None:
        c.drain()

    def shutdown(self, c: InferenceConsumer) -> None:
        c.leave()

    def register_with_event_loop(self, c: InferenceConsumer, hub: Any) -> None:
        c.register(hub)
