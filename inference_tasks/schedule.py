"""What runs on the maintenance worker, and when: names, Celery's beat schedule, and the way to its queue.

A process that only sends these tasks, as ``celery beat`` does, needs no more than this.
"""

from __future__ import annotations

from collections.abc import Mapping

from kombu import Exchange, Queue

from inference_routing.topology import Topology
from inference_tasks.settings import Settings

__all__ = [
    "ACCOUNT",
    "LET_GO",
    "LONGEST_SLEEP_S",
    "PROMOTE",
    "RECONCILE",
    "SCHEDULER",
    "MaintenanceRoute",
    "beat_schedule",
    "maintenance_queue",
]

PROMOTE = "inference_tasks.promote"
ACCOUNT = "inference_tasks.account"
RECONCILE = "inference_tasks.reconcile"
LET_GO = "inference_tasks.let_go"

SCHEDULER = "inference_tasks.maintenance.beat:Scheduler"

#: The longest that beat sleeps; its lock in Redis lives five times as long.
LONGEST_SLEEP_S = 5


def beat_schedule(settings: Settings) -> dict[str, dict[str, object]]:
    """Return the entries for ``app.conf.beat_schedule``, each under the name of its task.

    Each expires when the next one is due, so that none pile up while no maintenance worker runs. Empty with the
    embedded broker, which has none.
    """
    if not (settings.broker.url or "").startswith(("amqp", "pyamqp")):
        return {}
    every_s = {
        PROMOTE: settings.aging.every_s,
        ACCOUNT: settings.maintenance.account_every_s,
        RECONCILE: settings.maintenance.reconcile_every_s,
        LET_GO: settings.maintenance.waiting_every_s,
    }
    return {
        name: {"task": name, "schedule": seconds, "options": {"expires": seconds, "ignore_result": True}}
        for name, seconds in every_s.items()
    }


def maintenance_queue(topology: Topology) -> Queue:
    """Return the queue of the maintenance worker as Celery wants it."""
    queue = topology.maintenance
    return Queue(
        queue.name,
        Exchange(topology.exchange.name, type=topology.exchange.type, durable=True),
        routing_key=queue.name,
        durable=True,
        queue_arguments=dict(queue.arguments),
        # The topology is declared in one place.
        no_declare=True,
    )


class MaintenanceRoute:
    """The first of Celery's ``task_routes``: a route of the user's for all tasks must not lead these elsewhere."""

    def __init__(self, topology: Topology) -> None:
        self._queue = maintenance_queue(topology)

    def __call__(
        self,
        name: str,
        args: object = None,
        kwargs: object = None,
        options: Mapping[str, object] | None = None,
        task: object = None,
        **_: object,
    ) -> dict[str, object] | None:
        """Return the maintenance queue for its tasks, None for all others."""
        return {"queue": self._queue} if name in (PROMOTE, ACCOUNT, RECONCILE, LET_GO) else None
