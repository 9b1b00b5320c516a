"""SIGTERM: nothing new is taken, what is held goes back at once, what runs ends, and the worker exits with 0."""

from __future__ import annotations

import signal
import time

import pytest

from inference_tasks.app import inference_of
from tests.support.brokers import dead_letters, until
from tests.support.rig import POOLS, Rig, task

DRAINING = "Warm shutdown"


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize(("pool", "slots"), [("prefork", 2), ("threads", 2), ("solo", 1)])
def test_running_tasks_end_and_all_else_is_for_others_at_once(rig: Rig, pool: str, slots: int) -> None:
    app, gate, open_gate = rig.app(), rig.gate(), rig.gate("open")
    open_gate.open()
    with rig.worker(*POOLS[pool], "--concurrency", str(slots), name="leaving") as leaving:
        running = [task(app, "gated.batch").submit(number, str(gate)).id for number in range(slots)]
        rig.wait_started(*range(slots))
        waiting = [task(app, "gated.batch").submit(10 + number, str(open_gate)).id for number in range(4)]
        leaving.send(signal.SIGTERM)
        # The main thread of a solo worker is busy with the task: it says nothing before that ends.
        if pool != "solo":
            leaving.wait_for(DRAINING)
        rig.wait_waiting(app, 4)
        with rig.worker(name="staying"):
            rig.wait_states(app, waiting, success=4)
            rig.wait_states(app, running, processing=slots)
            gate.open()
            assert leaving.wait() == 0
            rig.wait_states(app, running, success=slots)
            until(lambda: rig.waiting(app) == 0, "nothing waits")
            assert [beat.node for beat in inference_of(app).store.workers()] == ["staying@localhost"]
    assert rig.starts() == dict.fromkeys([*range(slots), *range(10, 14)], 1)
    assert [inference_of(app).store.get(one).attempts for one in running + waiting] == [1] * (slots + 4)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize(("pool", "slots"), [("prefork", 2), ("threads", 4), ("solo", 1)])
def test_a_worker_stopped_at_full_speed_has_started_what_it_finished_and_nothing_else(
    rig: Rig, pool: str, slots: int
) -> None:
    app = rig.app()
    ids: list[str] = []
    for tier in ("realtime", "batch", "offline"):
        calls = [(number,) for number in range(600)]
        ids += [handle.id for handle in task(app, f"step.{tier}").submit_many(calls).accepted]
    assert len(ids) == 1800
    with rig.worker(*POOLS[pool], "--concurrency", str(slots), worker={"hold_s": 0.1}) as worker:
        rig.history.wait_for("end", count=30)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    done = len(rig.history.of("end"))
    assert 30 <= done < 1800
    assert len(rig.history.of("start")) == done
    assert rig.states(app, ids) == {"success": done, "pending": 1800 - done}
    rig.wait_waiting(app, 1800 - done)
    # What was held and went back has cost no attempt.
    records = [record for record in inference_of(app).store.get_many(ids) if record]
    assert {(record.state, record.attempts) for record in records} == {("success", 1), ("pending", 0)}


@pytest.mark.parametrize("pool", POOLS)
def test_an_idle_worker_ends_at_once_and_leaves_what_comes_then(rig: Rig, pool: str) -> None:
    app = rig.app()
    with rig.worker(*POOLS[pool]) as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        asked_at_s = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - asked_at_s < 20
        assert inference_of(app).store.workers() == []
    after = [task(app, f"step.{tier}").submit(1).id for tier in ("realtime", "batch")]
    rig.wait_waiting(app, 2)
    assert rig.states(app, after) == {"pending": 2}


def test_messages_that_are_pushed_while_the_worker_ends_are_not_lost(rig: Rig) -> None:
    app = rig.app()
    ids: list[str] = []
    with rig.worker("--pool", "threads", "--concurrency", "2") as worker:
        for number in range(40):
            ids.append(task(app, ("step.realtime", "step.batch")[number % 2]).submit(number).id)
            if number == 20:
                rig.history.wait_for("end", count=10)
                worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    states = rig.states(app, ids)
    assert states["success"] >= 10
    assert states["success"] + states["pending"] == 40
    rig.wait_waiting(app, states["pending"])
    assert len(rig.history.of("start")) == states["success"]


def test_what_waits_for_a_rate_limit_goes_back(rig: Rig) -> None:
    app = rig.app()
    with rig.worker() as worker:
        ids = [task(app, "limited").submit(number).id for number in range(6)]
        rig.wait_started(0)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    states = rig.states(app, ids)
    assert states == {"success": len(rig.history.of("start")), "pending": 6 - len(rig.history.of("start"))}
    rig.wait_waiting(app, states["pending"])


def test_a_message_that_cannot_be_run_is_not_lost_by_a_stop(rig: Rig) -> None:
    app = rig.app()
    with rig.worker() as worker:
        task(app, "step.batch").submit(0).result(timeout_s=60)
        app.send_task("nobody", (), tier="batch")
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    if not rig.waiting(app):
        dead_letters(app, 1)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_cold_stop_returns_what_was_running(rig: Rig, pool: str) -> None:
    """Also if it has begun so lately that the worker's main process has not heard of that."""
    app, gate = rig.app(), rig.gate()
    lease = {"lease_s": 1.0}
    with rig.worker("-P", pool, name="first", state=lease) as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        worker.send(signal.SIGQUIT)
        worker.wait()
        rig.wait_waiting(app, 1)
    gate.open()
    with rig.worker(name="second", state=lease):
        assert running.result(timeout_s=60) == 0
    assert rig.starts() == {0: 2}
