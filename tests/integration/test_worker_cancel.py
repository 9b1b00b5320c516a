"""Tasks that are cancelled: waiting, parked and running ones, on real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError

from inference_tasks import TaskFailedError
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.rig import POOLS, Rig, task


def test_what_was_cancelled_while_no_worker_was_there_never_runs(rig: Rig) -> None:
    app = rig.app()
    tasks = [task(app, "step.batch").submit(number) for number in range(6)]
    assert [one.cancel() for one in tasks[::2]] == [True] * 3
    assert inference_of(app).cancel(tasks[1].id)
    with pytest.raises(TaskFailedError) as caught:
        tasks[0].result(timeout_s=5)
    assert caught.value.state == "cancelled"
    with pytest.raises(TaskRevokedError):
        app.AsyncResult(tasks[0].id).get(timeout=5)
    with rig.worker():
        assert [tasks[number].result(timeout_s=60) for number in (3, 5)] == [3, 5]
        rig.wait_waiting(app, 0)
        assert not tasks[3].cancel()
    assert rig.starts() == {3: 1, 5: 1}
    rig.wait_states(app, [one.id for one in tasks], cancelled=4, success=2)


def test_a_parked_task_is_not_tried_again(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        failing = task(app, "tried.batch").submit(0, ["after 2"])
        until(lambda: failing.status().state == "retrying", "it is parked")
        assert failing.cancel()
        due_at_s = time.time() + 3
        until(lambda: time.time() > due_at_s and rig.waiting(app) == 0, "the parked copy has come and gone")
        assert failing.status().state == "cancelled"
        assert inference_of(app).store.accounts().away == {}
    assert rig.starts() == {0: 1}


@pytest.mark.parametrize("pool", POOLS)
def test_a_running_task_stops_when_it_looks(rig: Rig, pool: str) -> None:
    app = rig.app()
    with rig.worker(*POOLS[pool]) as worker:
        running = task(app, "watching").submit(0)
        rig.wait_started(0)
        assert running.cancel(terminate=pool != "prefork")
        until(lambda: running.status().state == "cancelled", "it has ended itself")
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        rig.wait_waiting(app, 0)
        assert "Traceback" not in worker.log
    record = running.status()
    assert (record.attempts, record.failures, record.crashes, record.dead) == (1, 0, 0, None)
    assert rig.dead(app, 1, timeout_s=0.5) == []
    assert rig.starts() == {0: 1, 1: 1}


def test_one_that_asks_for_another_try_is_cancelled_and_one_that_ends_has_its_result(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2"):
        again, unmoved = (task(app, "watching").submit(n, then) for n, then in enumerate(("retry", "ended")))
        rig.wait_started(0, 1)
        assert again.cancel()
        assert unmoved.cancel()
        until(lambda: again.status().state == "cancelled", "it is not tried again")
        assert unmoved.result(timeout_s=60) == 1
        rig.wait_waiting(app, 0)
    assert rig.starts() == {0: 1, 1: 1}


def test_a_terminated_task_loses_its_process_and_nothing_else(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker() as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        rig.wait_known_as_running(app, 1)
        began_s = time.monotonic()
        assert running.cancel(terminate=True)
        until(lambda: running.status().state == "cancelled", "it is cancelled")
        assert time.monotonic() - began_s < 10
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        rig.wait_waiting(app, 0)
        assert worker.terminate() == 0
    record = running.status()
    assert (record.attempts, record.failures, record.crashes, record.dead) == (1, 0, 0, None)
    assert rig.dead(app, 1, timeout_s=0.5) == []
    assert inference_of(app).store.accounts().by_tier["batch"]["cancelled"] == 1
    assert rig.starts() == {0: 1, 1: 1}
    pids = {entry["number"]: entry.pid for entry in rig.history.of("start")}
    assert pids[0] != pids[1]


def test_a_task_is_cancelled_though_its_worker_died_with_it(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(state={"lease_s": 3.0}) as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        worker.kill()
    assert running.cancel()
    gate.open()
    with rig.worker(name="second"):
        rig.wait_waiting(app, 0)
        until(lambda: running.status().state == "cancelled", "it does not start again")
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
    assert rig.starts() == {0: 1, 1: 1}


def test_a_chord_hears_of_a_cancelled_member(rig: Rig) -> None:
    app = rig.app()
    signature: Any = chord([task(app, "add").s(1, 1), task(app, "add").s(2, 2)], task(app, "total").s())
    result = signature.apply_async()
    member = result.parent.results[1]
    assert inference_of(app).cancel(member.id)
    store = inference_of(app).store
    with rig.worker():
        until(lambda: store.get_many([result.id])[0] is not None, "the end of the chord is recorded")
        record = store.get(result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=30)
    assert (record.state, record.error and record.error["type"]) == ("failed", "ChordError")


def test_a_run_sees_its_remaining_time(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        assert task(app, "left").submit(0).result(timeout_s=60) is None
        left_s = task(app, "left").options(timeout_s=90).submit(1).result(timeout_s=60)
    assert 0 < left_s < 90


def test_the_command_cancels_and_says_what_came_of_it(rig: Rig) -> None:
    app = rig.app()
    waiting = task(app, "step.batch").submit(0)

    def run(*argv: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "inference_tasks.cli", "cancel", "-A", "tests.support.faulty_app", *argv]
        env = {**os.environ, **rig.env()}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    code, said = run(waiting.id, "--json")
    assert (code, json.loads(said)) == (0, {"id": waiting.id, "cancelled": True, "state": "cancelled"})
    code, said = run(waiting.id, "--terminate")
    assert (code, said.strip()) == (1, f"{waiting.id} had ended before, as cancelled")
    assert run("nobody")[0] == 3
