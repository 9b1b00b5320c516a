"""Runs that end otherwise than by returning: crashes, time limits, and the models of the process that follows."""

from __future__ import annotations

import os
import signal

import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.faulty_app import LOAD_VARIABLE
from tests.support.rig import POOLS, Rig, task


def error_type(app: InferenceApp, task_id: str) -> str | None:
    error = app.status(task_id).error
    return error["type"] if error else None


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_task_that_kills_its_process_ends_in_the_dead_letters_and_others_go_on(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2", worker={"max_crashes": 3}) as worker:
        poison = task(app, "crash").submit(0)
        others = [task(app, "step.batch").submit(number, nap_s=0.05).id for number in range(1, 21)]
        (dead,) = rig.dead(app, 1)
        rig.wait_states(app, others, success=20)
        assert task(app, "step.realtime").submit(99).result(timeout_s=60) == 99
        assert worker.terminate() == 0
    assert dead.headers["id"] == poison.id
    assert dead.headers["inference_dead"]["reason"] == "crash limit"
    record = poison.status()
    assert (record.state, record.crashes, record.attempts) == ("failed", 3, 3)
    assert rig.starts()[0] == 3
    rig.wait_waiting(app, 0)


def test_a_process_killed_from_outside_costs_its_task_one_run(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker("--concurrency", "2"):
        running = task(app, "gated.batch").submit(0, str(gate))
        (start,) = rig.history.wait_for("start")
        os.kill(start.pid, signal.SIGKILL)
        rig.history.wait_for("start", count=2)
        gate.open()
        assert running.result(timeout_s=60) == 0
    record = running.status()
    assert (record.attempts, record.crashes) == (2, 1)


def test_a_replaced_process_has_loaded_its_models_before_its_first_task(rig: Rig) -> None:
    app = rig.app()
    rig.environment = {LOAD_VARIABLE: "1.0"}
    early = task(app, "predict").submit(0)
    with rig.worker():
        assert early.result(timeout_s=60) is True
        task(app, "crash").options(task_id=f"{rig.namespace}-crash").submit(1)
        later = [task(app, "predict").submit(number) for number in (2, 3)]
        assert [one.result(timeout_s=60) for one in later] == [True, True]
    loaded_at_s = {entry.pid: entry.mono_s for entry in rig.history.of("loaded")}
    starts = rig.history.of("start")
    assert all(entry.mono_s > loaded_at_s[entry.pid] for entry in starts)
    assert len({entry.pid for entry in starts if entry["number"] != 1}) >= 2
    # Loading counts against no task: neither its slot time nor its start.
    costs = [entry["cost_s"] for entry in rig.history.of("freed") if entry["id"] == early.id]
    assert len(costs) == 1
    assert costs[0] < 0.9  # type: ignore[operator]
    assert (early.status().started_at_s or 0) > min(entry.at_s for entry in rig.history.of("loaded")) - 0.1


def test_a_hard_time_limit_frees_the_slot_and_fails_the_task(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "1") as worker:
        stuck = task(app, "deaf").apply_async((0,), time_limit=1)
        behind = [task(app, "step.batch").submit(number).id for number in range(1, 31)]
        rig.wait_states(app, behind, success=30)
        assert (app.status(stuck.id).state, error_type(app, stuck.id)) == ("failed", "TimeLimitExceeded")
        assert worker.terminate() == 0
    assert rig.starts()[0] == 1
    assert len({entry.pid for entry in rig.history.of("loaded")}) == 2
    (dead,) = rig.dead(app, 1)
    assert (dead.headers["id"], dead.headers["inference_dead"]["reason"]) == (stuck.id, "time limit")
    rig.wait_waiting(app, 0)


def test_a_soft_time_limit_raises_in_the_task_which_may_go_on(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2"):
        raising = task(app, "deaf").apply_async((0,), soft_time_limit=1)
        going_on = task(app, "deaf").apply_async((1,), {"soft": "go on"}, soft_time_limit=1, time_limit=3)
        until(lambda: app.status(raising.id).state == "failed", "the first has failed")
        assert error_type(app, raising.id) == "SoftTimeLimitExceeded"
        until(lambda: app.status(going_on.id).state == "failed", "the second has failed")
        assert error_type(app, going_on.id) == "TimeLimitExceeded"
        done = task(app, "step.batch").submit_many([(number,) for number in range(10, 40)])
        rig.wait_states(app, [one.id for one in done.accepted], success=30)
    assert sorted(rig.history.values("soft", "number")) == [0, 1]  # type: ignore[type-var]


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_that_raises_has_failed_with_its_error_and_is_not_run_again(rig: Rig, pool: str) -> None:
    app = rig.app()
    with rig.worker(*POOLS[pool]):
        failing = task(app, "raises").submit(0)
        until(lambda: failing.status().state == "failed", "it has failed")
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
    assert failing.status().error == {"type": "ValueError", "message": "no such picture"}
    assert rig.starts() == {0: 1, 1: 1}


def test_processes_are_replaced_after_so_many_tasks_and_no_slot_is_lost(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2", "--max-tasks-per-child", "5"):
        done = task(app, "predict").submit_many([(number,) for number in range(30)])
        rig.wait_states(app, [one.id for one in done.accepted], success=30)
        assert inference_of(app).store.workers()[0].slots <= 2
    pids = {entry.pid for entry in rig.history.of("start")}
    assert len(pids) >= 5
    assert set(rig.starts().values()) == {1}


def test_spawned_processes_run_tasks_with_the_models_of_the_app(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2", worker_pool_start_method="spawn"):
        handles = [task(app, "predict").submit(number) for number in range(6)]
        assert [one.result(timeout_s=60) for one in handles] == [True] * 6
    assert {entry.pid for entry in rig.history.of("start")} <= {entry.pid for entry in rig.history.of("loaded")}
