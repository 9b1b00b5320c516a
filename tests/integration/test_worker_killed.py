"""kill -9 of a worker, or of the process that runs a task, at each step: one result each, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.fault_points import die_at
from tests.support.parked import parked
from tests.support.processes import WorkerProcess
from tests.support.rig import Rig, task
from tests.support.servers import RabbitMQNode

LEASE: dict[str, Any] = {"lease_s": 2.0}


def kill_all(worker: WorkerProcess) -> None:
    """The worker and every process of its pool, at once."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def check_accounts(app: InferenceApp, count: int) -> None:
    """All of it has succeeded, and nothing is under way."""
    accounts = inference_of(app).store.accounts()
    counts = {name: number for name, number in accounts.by_tier["batch"].items() if number}
    assert counts == {"admitted": count, "success": count}
    assert not any(accounts.away.values())
    assert inference_of(app).store.dead_count() == 0


@pytest.mark.parametrize(
    ("point", "again"),
    [
        ("worker before claim", 0),
        ("worker after claim", 0),
        ("worker in run", 1),
        ("worker before ack", 0),
        ("child before result", 1),
        ("child after result", 0),
    ],
)
def test_whoever_is_killed_at_whichever_step_each_task_has_one_result(
    rig: Rig, rabbitmq: RabbitMQNode, vhost: str, point: str, again: int
) -> None:
    app, gate = rig.app(), rig.gate()
    is_by_hand = point == "worker in run"
    rig.environment = {} if is_by_hand else die_at(point, rig.directory)
    with rig.worker(name="first", state=LEASE) as first:
        handles = [task(app, "gated.batch").submit(number, str(gate)) for number in range(4)]
        ids = [one.id for one in handles]
        if is_by_hand:
            rig.history.wait_for("start")
            kill_all(first)
        gate.open()
        if point.startswith("worker"):
            first.wait()
            rig.environment = {}
            with rig.worker(name="second", state=LEASE) as second:
                _wait_for_the_end(rig, app, ids, rabbitmq, vhost)
                assert second.terminate() == 0
        else:
            _wait_for_the_end(rig, app, ids, rabbitmq, vhost)
            assert first.terminate() == 0
    assert [one.result(timeout_s=1) for one in handles] == list(range(4))
    starts = rig.starts()
    assert set(starts) == set(range(4))
    assert sum(starts.values()) == 4 + again
    records = [one.status() for one in handles]
    # Of a run that had not started when its worker died only the claim is known: it counts as one.
    assert all(record.attempts == 1 + record.crashes for record in records)
    assert sum(record.crashes for record in records) >= again
    check_accounts(app, 4)


def _wait_for_the_end(rig: Rig, app: InferenceApp, ids: list[str], rabbitmq: RabbitMQNode, vhost: str) -> None:
    rig.wait_states(app, ids, success=len(ids))
    until(lambda: rig.waiting(app) == 0 and parked(rabbitmq, vhost) == (0, 0), "no message is left")


def test_workers_that_are_killed_at_random_moments_lose_nothing_and_repeat_only_what_they_ran(
    rig: Rig, rabbitmq: RabbitMQNode, vhost: str
) -> None:
    app, chance, count = rig.app(), random.Random(7), 150
    workers = [rig.worker("--concurrency", "2", name=name, state=LEASE) for name in ("first", "second")]
    with workers[0], workers[1]:
        ids = [one.id for one in task(app, "step.batch").submit_many([(n, 0.02) for n in range(count)]).accepted]
        for kill in (1, 2, 3):
            rig.history.wait_for("end", count=kill * count // 5 + chance.randrange(20))
            victim = chance.choice(workers)
            kill_all(victim)
            victim.start()
            victim.wait_ready()
        _wait_for_the_end(rig, app, ids, rabbitmq, vhost)
        assert [worker.terminate() for worker in workers] == [0, 0]
    starts = rig.starts()
    assert set(starts) == set(range(count))
    # Two slots, three times.
    assert sum(starts.values()) <= count + 6
    check_accounts(app, count)
