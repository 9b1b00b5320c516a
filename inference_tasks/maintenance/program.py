"""The maintenance worker: an ordinary Celery worker on a queue of its own, with beat beside it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from inference_tasks.app import inference_of
from inference_tasks.errors import InferenceError
from inference_tasks.maintenance.beat import Beat
from inference_tasks.maintenance.tasks import register
from inference_tasks.schedule import maintenance_queue
from inference_tasks.worker import seam

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["MaintenanceConsumer", "run"]

ROUTINE_LOGGERS = ("celery.beat", "celery.worker.strategy", "celery.app.trace")


class MaintenanceConsumer(seam.Consumer):
    """Celery's own consumer: its tasks are few and short, and wait for no slot of a GPU."""

    app: Any

    class Blueprint(seam.Consumer.Blueprint):  # type: ignore[misc, valid-type]
        """Celery's steps without the one that declares delays: they are declared with the rest of the topology."""

        default_steps = tuple(
            step for step in seam.Consumer.Blueprint.default_steps if not step.endswith(":DelayedDelivery")
        )

    def connect(self) -> Any:
        """Connect, and declare the topology: the queue may not be there yet, or not any more."""
        connection = super().connect()
        try:
            inference_of(self.app).declare_topology()
        except InferenceError as exc:
            seam.collect(connection)
            raise seam.RecoverableConnectionError(str(exc)) from exc
        return connection


def run(inference: Inference, node: str, *, loglevel: str, has_beat: bool) -> int:
    """Run in this process, which keeps signals and exit code, until it is told to stop; return the exit code.

    Args:
        node: the worker's name, which no other one has.
        loglevel: as Celery has it.
        has_beat: whether the schedule is sent from here too; several that do so do no harm.
    """
    app: Any = inference.celery_app
    if loglevel.upper() == "INFO":
        # Three tasks every few seconds, each with as many lines; what they have done they say themselves.
        for name in ROUTINE_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
    upkeep = register(inference)
    queue = maintenance_queue(inference.topology)
    app.amqp.queues.add(queue)
    app.set_current()
    program = app.Worker(
        hostname=node,
        # A thread, so that heartbeats go on while a task runs; one, because the tasks share a connection.
        pool_cls="threads",
        concurrency=1,
        queues=[queue.name],
        consumer_cls=MaintenanceConsumer,
        loglevel=loglevel.upper(),
    )
    beat = Beat(app) if has_beat else None
    if beat is not None:
        beat.start()
    try:
        program.start()
    finally:
        if beat is not None:
            beat.stop()
        upkeep.close()
    return int(program.exitcode or 0)
