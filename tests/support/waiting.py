"""What tests do with tasks that wait for other tasks."""

from __future__ import annotations

from typing import Any

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.maintenance.waiting import Round
from tests.support.aging import new_pull
from tests.support.brokers import depths, until
from tests.support.rig import task

#: Messages of waiting tasks come round at once, as far as the broker's delays allow.
QUICK = {"waiting_every_s": 0.5, "waiting_first_s": 1, "waiting_longest_s": 1}


def dependent(app: InferenceApp, name: str, *args: Any, needs: Any, **options: Any) -> Any:
    """Submit a task that waits for others."""
    handle = task(app, name).options(depends_on=needs, **options).submit(*args)
    assert handle.status().state in ("waiting", "pending"), handle.status()
    return handle


def look_round(app: InferenceApp) -> int:
    """One round of the maintenance worker in this process; how many tasks were let go."""
    pull = new_pull(app)
    try:
        return Round(inference_of(app), pull).run()
    finally:
        pull.close()


def wait_round(app: InferenceApp, count: int = 1) -> None:
    """Wait until so many messages have come round."""
    pull = new_pull(app)
    try:
        queue = inference_of(app).topology.waiting.name
        until(lambda: pull.ready(queue) >= count, f"{count} messages come round")
    finally:
        pull.close()


def wait_served(app: InferenceApp) -> None:
    """Wait until the queues of the tiers are empty; messages of waiting tasks go on coming round."""
    queues = inference_of(app).queue_by_lane.values()
    until(lambda: not sum(depths(app)[queue] for queue in queues), "no message waits in the tiers")
