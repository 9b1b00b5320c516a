"""What users of Celery know, on tiers: canvas, revoke, remote control, ignored results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.errors import QueueFullError
from tests.support.brokers import depth, until
from tests.support.processes import WorkerProcess
from tests.support.rig import POOLS, Rig, task
from tests.support.watched_app import FOREIGN

NODE = "worker@localhost"
# Named, so that the answer is known to be complete once it is there.
ASKED: Mapping[str, Any] = {"destination": [NODE], "timeout": 60}


def is_full(app: InferenceApp) -> bool:
    """Fill realtime until it refuses; a quorum queue takes a few more than its bound."""
    for number in range(50):
        try:
            task(app, "add.realtime").submit(number, 0)
        except QueueFullError:
            return True
    return False


# Canvas.


@pytest.mark.parametrize("pool", POOLS)
def test_chain_group_and_chord_run_over_the_tiers(rig: Rig, pool: str) -> None:
    app = rig.app()
    add, total = task(app, "add"), task(app, "total")
    with rig.worker(*POOLS[pool]):
        assert chain(add.s(1, 2), add.s(3).set(tier="realtime"), add.s(4)).apply_async().get(timeout=60) == 10
        assert group(add.s(number, 1) for number in range(5)).apply_async().get(timeout=60) == [1, 2, 3, 4, 5]
        assert (
            chord([add.s(number, 1).set(tier="offline") for number in range(4)], total.s(plus=5))().get(timeout=60)
            == 15
        )
        rig.wait_waiting(app, 0)
    lanes = {(entry["tier"], entry["lane"]) for entry in rig.history.of("taken")}
    assert ("realtime", "returned") in lanes
    assert ("offline", "fresh") in lanes


def test_steps_run_at_the_tier_of_a_later_one_that_lifts_its_canvas(rig: Rig) -> None:
    app = rig.app()
    add, urgent = task(app, "add.offline"), task(app, "add.urgent")
    with rig.worker():
        assert chain(add.s(1, 2), add.s(3), urgent.s(4)).apply_async().get(timeout=60) == 10
        assert (
            chain(add.s(1, 2), group(add.s(3), add.s(4)), task(app, "total.urgent").s(plus=5))
            .apply_async()
            .get(timeout=60)
            == (3 + 3) + (3 + 4) + 5
        )
        assert chain(add.s(1, 2), task(app, "add").s(4)).apply_async().get(timeout=60) == 7
        assert chain(add.s(1, 2).set(tier="batch"), urgent.s(4)).apply_async().get(timeout=60) == 7
        rig.wait_waiting(app, 0)
    tiers = [entry["tier"] for entry in rig.history.of("taken")]
    assert tiers == ["realtime"] * 7 + ["offline", "batch"] + ["batch"] * 2


def test_a_finished_step_is_not_lost_because_the_next_tier_is_full(rig: Rig) -> None:
    app = rig.app(tiers={"realtime": {"bound": 2}})
    assert is_full(app)
    full = depth(app, "realtime")
    result: Any = chain(task(app, "add").s(1000, 1), task(app, "add.realtime").s(5)).apply_async()
    with rig.worker(worker={"tiers": ["batch"]}, tiers={"realtime": {"bound": 2}}):
        until(lambda: depth(app, "realtime", "returned") == 1, "the second step waits")
        until(lambda: app.status(result.parent.id).state == "success", "the first step has succeeded")
        assert result.parent.get(timeout=60) == 1001
        assert depth(app, "realtime") == full
    with rig.worker(tiers={"realtime": {"bound": 2}}):
        assert result.get(timeout=60) == 1006


# Results.


def test_a_task_whose_result_is_ignored_reaches_success(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        silent = task(app, "silent").submit(1)
        until(lambda: silent.status().state == "success", "it has succeeded")
        by_call = task(app, "add").apply_async((1, 1), ignore_result=True)
        until(lambda: app.status(by_call.id).state == "success", "it has succeeded")
    backend: Any = app.backend
    assert backend.client.get(backend.get_key_for_task(silent.id)) is None


def test_an_accepted_task_is_pending_and_an_unknown_one_is_not_found(rig: Rig) -> None:
    app = rig.app()
    with rig.worker(worker={"tiers": ["realtime"]}):
        waiting = task(app, "step.batch").submit(0)
        assert waiting.status().state == "pending"
        assert app.AsyncResult(waiting.id).state == "PENDING"
        assert rig.states(app, ["nobody"]) == {"not found": 1}


# Revoke.


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_revoked_task_is_not_started_and_costs_no_slot(rig: Rig, pool: str) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS[pool]):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        waiting = [task(app, "step.batch").submit(number) for number in (1, 2, 3)]
        assert app.control.revoke(waiting[1].id, reply=True, **ASKED)
        gate.open()
        assert running.result(timeout_s=60) == 0
        until(lambda: waiting[1].status().state == "cancelled", "it is cancelled")
        with pytest.raises(TaskRevokedError):
            app.AsyncResult(waiting[1].id).get(timeout=60)
        rig.wait_states(app, [waiting[0].id, waiting[2].id], success=2)
        done = task(app, "step.batch").submit_many([(number,) for number in range(10, 40)])
        rig.wait_states(app, [one.id for one in done.accepted], success=30)
        rig.wait_waiting(app, 0)
    assert 2 not in rig.starts()


def test_a_running_task_can_be_terminated(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker():
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        app.control.revoke(running.id, terminate=True, signal="SIGKILL", reply=True, **ASKED)
        until(lambda: running.status().state == "cancelled", "it is cancelled")
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        rig.wait_waiting(app, 0)
    assert rig.starts() == {0: 1, 1: 1}


# Remote control.


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_remote_control_sees_queues_and_tasks(rig: Rig, pool: str) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS[pool], "--concurrency", "2"):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        inspect: Any = app.control.inspect(**ASKED)
        topology = inference_of(app).topology
        queues = inspect.active_queues()[NODE]
        assert {queue["name"] for queue in queues} == {queue.name for queue in topology.queues if queue.tier}
        assert [request["id"] for request in inspect.active()[NODE]] == [running.id]
        stats = inspect.stats()[NODE]
        assert stats["pool"]["max-concurrency"] == 2
        assert inspect.registered()[NODE]
        gate.open()
        assert running.result(timeout_s=60) == 0
        assert inspect.stats()[NODE]["total"]["gated.batch"] == 1
        assert inspect.active()[NODE] == []


def test_only_the_loop_uses_the_connections_of_the_loop(rig: Rig) -> None:
    """Two threads that read one connection each get a part of a frame, and the loop waits for the rest for ever."""
    app = rig.app()
    ids = [one.id for one in task(app, "step.batch").submit_many([(number,) for number in range(300)]).accepted]
    options = ("--pool", "threads", "--concurrency", "4", "--task-events")
    with WorkerProcess.celery("tests.support.watched_app", *options, directory=rig.directory, env=rig.env()) as worker:
        rig.wait_states(app, ids, success=300)
        assert worker.terminate() == 0
    assert FOREIGN not in worker.log


def test_a_queue_can_be_left_and_taken_up_again(rig: Rig) -> None:
    app = rig.app()
    topology = inference_of(app).topology
    with rig.worker():
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        fresh = topology.queue("batch").name
        assert app.control.cancel_consumer(fresh, reply=True, **ASKED)
        left = [task(app, "step.batch").submit(number).id for number in (1, 2)]
        assert task(app, "step.realtime").submit(3).result(timeout_s=60) == 3
        assert task(app, "step.offline").submit(4).result(timeout_s=60) == 4
        assert rig.states(app, left) == {"pending": 2}
        inspect: Any = app.control.inspect(**ASKED)
        assert fresh not in {queue["name"] for queue in inspect.active_queues()[NODE]}
        assert app.control.add_consumer(fresh, reply=True, **ASKED)
        rig.wait_states(app, left, success=2)
    assert set(rig.starts().values()) == {1}


# Missing queues.


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_missing_queue_counts_as_empty_and_is_served_again_once_it_is_back(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    inference.declare_topology()
    with rig.worker("--concurrency", "2") as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        with app.connection_for_write() as connection:
            connection.default_channel.queue_delete(inference.topology.queue("batch").name)  # type: ignore[attr-defined]
        worker.wait_for("counts as empty")
        for number in (1, 2, 3):
            assert task(app, "step.realtime").submit(number).result(timeout_s=60) == number
        inference.declare_topology()
        assert task(app, "step.batch").submit(4).result(timeout_s=60) == 4
        assert worker.log.count("Connected to amqp") == 1
        assert worker.terminate() == 0


def test_a_worker_starts_where_a_queue_has_other_arguments(rig: Rig) -> None:
    app = rig.app()
    inference_of(app).declare_topology()
    with rig.worker(tiers={"batch": {"bound": 7}}) as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        assert "x-max-length" in worker.log
