"""Redis away, back, and its claims: no work is lost, none runs twice, and no wait spins."""

from __future__ import annotations

import time

import pytest

from inference_tasks.app import inference_of
from inference_tasks.state.records import Claimant
from tests.support.brokers import until
from tests.support.parked import parked
from tests.support.proxy import FaultProxy
from tests.support.rig import POOLS, Rig, cpu_s, task
from tests.support.servers import RabbitMQNode

AWAY = "taking no new work until the state can be reached again"
BACK = "the state can be reached again: taking work"
MET = "met a live claim"


@pytest.fixture
def line(rig: Rig, redis_url: str, redis_proxy: FaultProxy) -> FaultProxy:
    """The workers' line to Redis; this process has one of its own."""
    rig.worker_options = {"state": {"url": redis_proxy.url(redis_url), "socket_timeout_s": 1.0, "lease_s": 20.0}}
    return redis_proxy


@pytest.mark.parametrize("fault", ["down", "black_hole"])
@pytest.mark.parametrize("pool", POOLS)
def test_without_redis_nothing_starts_and_nothing_is_lost(rig: Rig, line: FaultProxy, pool: str, fault: str) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS[pool], "--concurrency", "1" if pool == "solo" else "2") as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        getattr(line, fault)()
        waiting = [task(app, f"step.{tier}").submit(n).id for n, tier in enumerate(["batch", "realtime"] * 3, 1)]
        if pool == "solo":
            gate.open()  # the result waits for Redis, and so does everything behind it
            rig.history.wait_for("end")
        else:
            worker.wait_for(AWAY)
            rig.wait_waiting(app, 6)
            gate.open()
            rig.history.wait_for("end")
        assert rig.starts() == {0: 1}
        line.resume()
        assert running.result(timeout_s=60) == 0
        rig.wait_states(app, waiting, success=6)
        assert worker.terminate() == 0
    assert rig.starts() == dict.fromkeys(range(7), 1)
    assert {inference_of(app).store.get(one).attempts for one in (running.id, *waiting)} == {1}
    rig.wait_waiting(app, 0)


def test_where_it_is_wished_work_goes_on_without_redis(rig: Rig, line: FaultProxy) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2", state={"on_state_loss": "run"}) as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        line.down()
        later = [task(app, "step.batch").submit(number).id for number in (1, 2)]
        rig.wait_started(1, 2)
        assert AWAY not in worker.log
        line.resume()
        rig.wait_states(app, later, success=2)
        assert task(app, "step.batch").submit(3).result(timeout_s=60) == 3
    assert rig.starts() == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize(
    ("queue_type", "holder"),
    [("quorum", "somebody@else"), ("classic", "somebody@else"), ("quorum", "worker@localhost")],
)
def test_a_message_that_meets_a_live_claim_waits_in_the_broker_and_is_not_asked_for_in_a_loop(
    rig: Rig, rabbitmq: RabbitMQNode, vhost: str, holder: str
) -> None:
    app = rig.app()
    store = inference_of(app).store
    held = task(app, "step.batch").submit(0)
    store.claim([Claimant(held.id, "step.batch", "batch", "fresh")], holder, 60.0)
    with rig.worker() as worker:
        # Others pass it meanwhile.
        for number in (1, 2, 3):
            assert task(app, "step.batch").submit(number).result(timeout_s=60) == number
        # A second after the first time, then when that lease could be over.
        worker.wait_for(MET, count=2)
        before_s, began_s = cpu_s(worker), time.monotonic()
        for number in range(10, 13):
            assert task(app, "step.batch").submit(number, nap_s=1.0).result(timeout_s=60) == number
        assert cpu_s(worker) - before_s < 0.5 * (time.monotonic() - began_s)
        assert worker.log.count(MET) == 2
        assert worker.terminate() == 0
    until(lambda: parked(rabbitmq, vhost) == (1, 0), "the message is parked, and nobody holds it")
    assert rig.waiting(app) == 0
    assert 0 not in rig.starts()


def test_a_message_is_run_once_its_claim_has_ended(rig: Rig) -> None:
    app = rig.app()
    store = inference_of(app).store
    held = task(app, "step.batch").submit(0)
    store.claim([Claimant(held.id, "step.batch", "batch", "fresh")], "somebody@else", 3.0)
    with rig.worker():
        assert held.result(timeout_s=60) == 0
    record = held.status()
    assert (record.attempts, record.crashes) == (2, 1)


def test_a_finished_task_is_not_run_again_when_its_message_comes_again(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        done = task(app, "step.batch").submit(0)
        assert done.result(timeout_s=60) == 0
        store = inference_of(app).store
        assert store.get(done.id).state == "success"
        # A client that never saw the confirm sends the same task again, past the check of the record.
        from tests.support.brokers import publish_raw

        publish_raw(app, "batch", b"[[0], {}, {}]", {"id": done.id, "task": "step.batch", "lang": "py"})
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        until(lambda: rig.waiting(app) == 0, "nothing waits")
    assert rig.starts() == {0: 1, 1: 1}


def test_what_has_expired_is_not_started(rig: Rig) -> None:
    app = rig.app()
    late = task(app, "step.batch").options(timeout_s=0.5).submit(0)
    until(lambda: time.time() > (late.status().expires_at_s or 0) + 0.1, "its time is over")
    with rig.worker():
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        until(lambda: late.status().state == "expired", "it is known to have expired")
    assert rig.starts() == {1: 1}


def test_leases_of_long_tasks_are_renewed_by_every_pool(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS["solo"], state={"lease_s": 3.0}):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        first = running.status().held_until_s or 0.0
        until(lambda: (running.status().held_until_s or 0.0) > first + 4.0, "the lease has been renewed")
        gate.open()
        assert running.result(timeout_s=60) == 0
    assert running.status().attempts == 1
