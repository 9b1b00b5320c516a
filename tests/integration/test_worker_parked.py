"""Work that waits in the broker: it costs a worker nothing, outlives everybody, and is never asked for in a loop."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.broker.messages import Accepted
from inference_tasks.state.records import Claimant, State
from tests.support.brokers import dead_letters, publish_raw, until
from tests.support.history import History
from tests.support.parked import parked
from tests.support.rig import Rig, task
from tests.support.servers import RabbitMQNode

PARKED = 1_000


def raw(rig: Rig, app: InferenceApp, number: int, task_id: str, **headers: Any) -> None:
    """What a plain Celery client would put into the queue of batch."""
    headers = {"id": task_id, "task": "step.batch", "lang": "py", **headers}
    assert publish_raw(app, "batch", json.dumps([[number], {}, {}]).encode(), headers) == Accepted()


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_parked_tasks_hold_no_slot_no_message_and_no_memory_of_a_worker(
    rig: Rig, rabbitmq: RabbitMQNode, vhost: str
) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "1") as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        before = psutil.Process(worker.pid).memory_info().rss
        for number in range(PARKED):
            task(app, "tried.batch").apply_async((number, ["done"]), countdown=3600)
        later = datetime.now(UTC) + timedelta(hours=1)
        for number in range(20):
            raw(rig, app, number, f"{rig.namespace}-{number}", eta=later.isoformat())
        until(lambda: parked(rabbitmq, vhost) == (PARKED + 20, 0), "all lie in the broker, none in the worker")
        began_s = time.monotonic()
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        assert time.monotonic() - began_s < 10
        grown = psutil.Process(worker.pid).memory_info().rss - before
        assert worker.terminate() == 0
    assert grown < 4 * 2**20
    assert inference_of(app).store.accounts().away["batch"] == PARKED
    assert set(rig.starts()) == {0, 1}


def test_a_second_message_of_a_running_task_is_parked_and_does_not_run(
    rig: Rig, rabbitmq: RabbitMQNode, vhost: str
) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker("--concurrency", "2", state={"lease_s": 5.0}) as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        headers = {"id": running.id, "task": "gated.batch", "lang": "py"}
        body = json.dumps([[0, str(gate)], {}, {}]).encode()
        assert publish_raw(app, "batch", body, headers) == Accepted()
        until(lambda: parked(rabbitmq, vhost)[0] == 1, "the copy lies in a delay queue")
        assert task(app, "step.batch").submit(5).result(timeout_s=60) == 5
        # Twice at the most within these: after a second, then after the lease.
        worker.wait_for("met a live claim", count=2)
        gate.open()
        assert running.result(timeout_s=60) == 0
        until(lambda: parked(rabbitmq, vhost) == (0, 0), "the copy has come back and gone", timeout_s=90)
        met = worker.log.count("met a live claim")
    assert met <= 3
    assert rig.starts() == {0: 1, 5: 1}
    rig.wait_waiting(app, 0)


def test_a_message_whose_task_has_failed_without_being_buried_becomes_a_dead_letter(rig: Rig) -> None:
    app = rig.app()
    store = inference_of(app).store
    # As a worker leaves it that dies right after its task has failed.
    failed = task(app, "raises").submit(7)
    (claim,) = store.claim([Claimant(failed.id, "raises", "batch", "fresh")], "gone", 30)
    store.write(failed.id, claim.token, 0, State.FAILED, {"type": "ValueError", "message": "no such picture"})
    with rig.worker():
        (dead,) = dead_letters(app, 1)
        until(lambda: store.dead_count() == 1, "it is in the index")
    assert (dead.headers["id"], dead.headers["inference_dead"]["attempts"]) == (failed.id, 1)
    assert dead.headers["inference_dead"]["error"]["type"] == "ValueError"
    assert failed.status().dead == "replayable"
    assert not rig.starts()
    rig.wait_waiting(app, 0)


@pytest.fixture
def own_rig(
    private_rabbitmq: RabbitMQNode, redis_url: str, namespace: str, history: History, tmp_path: Path
) -> Iterator[Rig]:
    made = Rig(
        {"broker": {"url": private_rabbitmq.url()}, "state": {"url": redis_url}, "namespace": namespace},
        history,
        tmp_path,
        is_exact=False,
    )
    yield made
    made.close()


def test_a_parked_retry_survives_a_restart_of_the_worker_and_of_the_broker(
    own_rig: Rig, private_rabbitmq: RabbitMQNode
) -> None:
    app = own_rig.app()
    with own_rig.worker():
        waiting = [task(app, "tried.by_hand").submit(number, ["countdown 4", "done"]) for number in range(10)]
        own_rig.wait_states(app, [one.id for one in waiting], retrying=10)
        due_at_s = [one.status().due_at_s or 0.0 for one in waiting]
    private_rabbitmq.restart()
    with own_rig.worker(name="second"):
        own_rig.wait_states(app, [one.id for one in waiting], success=10, timeout_s=90)
    again = [entry for entry in own_rig.history.of("start") if entry["retries"] == 1]
    assert sorted(entry["number"] for entry in again) == list(range(10))  # type: ignore[type-var]
    # How long they were parked is the broker's to keep, its own restart included.
    assert all(entry.at_s >= due_at_s[int(str(entry["number"]))] for entry in again)
    assert all(one.status().attempts == 2 for one in waiting)
    own_rig.wait_waiting(app, 0)
