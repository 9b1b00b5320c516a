"""Cut, frozen and restarted brokers: each task starts once and ends once, and the worker consumes again by itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from inference_tasks.errors import InferenceError
from tests.support.brokers import until
from tests.support.history import History
from tests.support.parked import parked
from tests.support.processes import WorkerProcess
from tests.support.proxy import FaultProxy
from tests.support.rig import POOLS, Rig, connections_lost, task
from tests.support.servers import RabbitMQNode, installed

MET = "met a live claim"
SLOTS = {"prefork": 2, "threads": 2, "solo": 1}


@pytest.fixture
def line(rig: Rig, amqp_url: str, rabbitmq_proxy: FaultProxy) -> FaultProxy:
    """The workers' line to the broker; this process has one of its own."""
    rig.worker_options = {"broker": {"url": rabbitmq_proxy.url(amqp_url), "heartbeat_s": 10}}
    return rabbitmq_proxy


def reconnected(worker: WorkerProcess, times: int) -> Callable[[], bool]:
    return lambda: worker.log.count("Connected to amqp") >= 1 + times


# Cut.


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_task_that_runs_while_the_line_is_cut_starts_once_and_ends_once(
    rig: Rig, line: FaultProxy, pool: str
) -> None:
    app, gate, slots = rig.app(), rig.gate(), SLOTS[pool]
    with rig.worker(*POOLS[pool], "--concurrency", str(slots)) as worker:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        waiting = [task(app, "gated.batch").submit(number, str(gate)).id for number in range(1, 4)]
        if pool == "prefork":
            rig.wait_known_as_running(app, slots)
        line.reset_peer()
        if pool != "solo":  # its main thread runs the task
            until(reconnected(worker, 1), "the worker connects again")
        # What came back with the connection takes no slot while its task runs: the other slot is there for the rest.
        rig.history.wait_for("start", count=slots)
        gate.open()
        assert running.result(timeout_s=60) == 0
        rig.wait_states(app, waiting, success=3)
        until(lambda: rig.waiting(app) == 0, "nothing waits")
        assert worker.terminate() == 0
    assert rig.starts() == dict.fromkeys(range(4), 1)
    record = running.status()
    assert (record.state, record.attempts, record.crashes) == ("success", 1, 0)
    rig.wait_waiting(app, 0)


@pytest.mark.parametrize("ending", ["success", "failed"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_gets_the_message_of_its_own_run_back_keeps_it(
    rig: Rig, line: FaultProxy, rabbitmq: RabbitMQNode, vhost: str, pool: str, ending: str
) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS[pool], "--concurrency", "2") as worker:
        if ending == "success":
            running = task(app, "gated.batch").submit(0, str(gate))
        else:
            running = task(app, "tried.batch").submit(0, ["permanent"], str(gate))
        rig.wait_started(0)
        if pool == "prefork":
            rig.wait_known_as_running(app, 1)
        for cut in (1, 2):
            line.reset_peer()
            worker.wait_for("runs on: its message came back", count=cut)
        # Nothing of it is parked: the worker has its message, and the other slot is there for others.
        until(lambda: parked(rabbitmq, vhost) == (0, 1), "the message is the worker's")
        assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
        gate.open()
        rig.wait_states(app, [running.id], **{ending: 1})
        if ending == "failed":
            (dead,) = rig.dead(app, 1)
            assert dead.headers["id"] == running.id
        until(lambda: parked(rabbitmq, vhost) == (0, 0), "the broker knows that it has ended")
        assert MET not in worker.log
        assert worker.terminate() == 0
    assert rig.starts() == {0: 1, 1: 1}
    record = running.status()
    assert (record.attempts, record.crashes) == (1, 0)
    rig.wait_waiting(app, 0)


def test_another_worker_does_not_run_what_a_cut_off_worker_runs(rig: Rig, line: FaultProxy) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(name="cut"):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        rig.wait_known_as_running(app, 1, "cut@localhost")
        rig.worker_options = {}
        with rig.worker(name="other"):
            line.down()
            # It comes back and meets the claim of a worker that still renews it.
            assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
            rig.wait_started(1)
            gate.open()
            assert running.result(timeout_s=60) == 0
            until(lambda: rig.waiting(app) == 0, "nothing waits")
            line.resume()
    assert rig.starts() == {0: 1, 1: 1}
    assert running.status().attempts == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_no_more_tasks_run_after_a_cut_than_there_are_slots(rig: Rig, line: FaultProxy, pool: str) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(*POOLS[pool], "--concurrency", "2") as worker:
        ids = [task(app, "gated.batch").submit(number, str(gate)).id for number in range(6)]
        rig.history.wait_for("start", count=2)
        if pool == "prefork":
            rig.wait_known_as_running(app, 2)
        for cut in (1, 2):
            line.reset_peer()
            until(reconnected(worker, cut), "the worker connects again")
        rig.wait_states(app, ids, processing=2, pending=4)
        assert len(rig.history.of("start")) == 2
        gate.open()
        rig.wait_states(app, ids, success=6)
    assert set(rig.starts().values()) == {1}


def test_short_tasks_survive_cuts_at_full_speed(rig: Rig, line: FaultProxy) -> None:
    app = rig.app()
    ids = [one.id for one in task(app, "step.batch").submit_many([(n, 0.005) for n in range(600)]).accepted]
    with rig.worker("--concurrency", "2") as worker:
        for cut in (1, 2, 3):
            rig.history.wait_for("end", count=cut * 100)
            line.reset_peer()
            until(reconnected(worker, cut), "the worker connects again")
        rig.wait_states(app, ids, success=600)
        until(lambda: rig.waiting(app) == 0, "nothing waits")
        assert worker.terminate() == 0
    # What is on its way into its process at the moment of a cut may start once more; its first result is refused then.
    again = {number for number, starts in rig.starts().items() if starts > 1}
    assert set(rig.starts()) == set(range(600))
    assert len(again) <= 3
    rig.wait_waiting(app, 0)


# Long tasks.


@pytest.mark.serial
def test_solo_misses_no_heartbeat_because_a_task_is_long(rig: Rig, line: FaultProxy) -> None:
    app = rig.app()
    heartbeat_s = 2
    with rig.worker(*POOLS["solo"], broker={"heartbeat_s": heartbeat_s}, state={"lease_s": 2.0}) as worker:
        assert task(app, "step.batch").submit(0).result(timeout_s=60) == 0
        connections = line.accepted
        long = task(app, "step.batch").submit(1, nap_s=3.5 * heartbeat_s)
        assert long.result(timeout_s=60) == 1
        assert task(app, "step.batch").submit(2).result(timeout_s=60) == 2
        assert connections_lost(worker) == 0
        assert line.accepted == connections
    assert rig.starts() == {0: 1, 1: 1, 2: 1}
    assert long.status().attempts == 1


# Half open.


@pytest.mark.parametrize("heartbeat_s", [2, 60])
def test_a_worker_whose_broker_falls_silent_comes_back(rig: Rig, line: FaultProxy, heartbeat_s: int) -> None:
    """By the heartbeat where it is short, else by the deadline of an answer that does not come."""
    app = rig.app()
    ids = [task(app, "step.batch").submit(n, nap_s=0.3).id for n in range(20)]
    with rig.worker(broker={"heartbeat_s": heartbeat_s}) as worker:
        rig.history.wait_for("end", count=2)
        line.black_hole()
        worker.wait_for("Connection to broker lost")
        line.resume()
        rig.wait_states(app, ids, success=20)
        assert worker.terminate() == 0
    assert rig.starts() == dict.fromkeys(range(20), 1)


def test_a_worker_of_the_same_name_starts_while_the_old_connection_is_half_open(rig: Rig, line: FaultProxy) -> None:
    app, gate = rig.app(), rig.gate()
    first = rig.worker(name="gpu0", state={"lease_s": 1.0})
    with first:
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        line.black_hole()
        first.kill()
        gate.open()
        rig.worker_options = {}
        with rig.worker(name="gpu0", state={"lease_s": 1.0}) as second:
            assert task(app, "step.batch").submit(1).result(timeout_s=60) == 1
            assert connections_lost(second) == 0
            # The broker learns of the end, and the task comes back; its lease has ended.
            line.down()
            assert running.result(timeout_s=60) == 0
            assert app.control.inspect(["gpu0@localhost"], timeout=60).ping() == {"gpu0@localhost": {"ok": "pong"}}
    # The killed worker's process may have ended its run by itself: then nobody runs it again.
    assert running.status().attempts == rig.starts()[0]
    assert running.status().crashes == rig.starts()[0] - 1


# Restarts, on a node of their own.

on_its_own_node = pytest.mark.xdist_group("own-node")


@pytest.fixture(scope="module")
def own_node() -> Iterator[RabbitMQNode]:
    """A node that may be restarted, and that waits three seconds for an acknowledgement."""
    with installed(lambda: RabbitMQNode({"consumer_timeout": "3000"})) as node:
        node.evaluate("application:set_env(rabbit, channel_tick_interval, 1000)")
        yield node


@pytest.fixture
def own_rig(
    own_node: RabbitMQNode, redis_url: str, namespace: str, history: History, tmp_path: Path, queue_type: str
) -> Iterator[Rig]:
    options = {
        "broker": {
            "url": own_node.create_vhost(namespace),
            "queue_type": queue_type,
            "management_url": own_node.management_url,
        },
        "state": {"url": redis_url},
        "namespace": namespace,
    }
    made = Rig(options, history, tmp_path, is_exact=False)
    yield made
    made.close()


@on_its_own_node
@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_task_longer_than_the_brokers_patience_runs_once_and_the_worker_goes_on(own_rig: Rig, pool: str) -> None:
    rig, app, gate = own_rig, own_rig.app(), own_rig.gate()
    with rig.worker(*POOLS[pool], "--concurrency", "2") as worker:
        long = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        worker.wait_for("delivery acknowledgement")
        # On the other slot, from this queue and from others.
        for number, tier in ((1, "batch"), (2, "realtime")):
            assert task(app, f"step.{tier}").submit(number).result(timeout_s=60) == number
        gate.open()
        assert long.result(timeout_s=60) == 0
        worker.wait_for("need not run: finished")
        assert connections_lost(worker) == 0
        assert worker.terminate() == 0
    assert rig.starts() == {0: 1, 1: 1, 2: 1}
    record = long.status()
    assert (record.state, record.attempts) == ("success", 1)
    rig.wait_waiting(app, 0)


@on_its_own_node
def test_a_worker_consumes_again_after_each_restart_of_the_broker(own_rig: Rig, own_node: RabbitMQNode) -> None:
    rig, app = own_rig, own_rig.app()
    ids: list[str] = []

    def submit(count: int) -> None:
        for _ in range(count):
            with suppress(InferenceError):
                ids.append(task(app, "step.batch").submit(len(ids), nap_s=0.02).id)

    with rig.worker("--concurrency", "2") as worker:
        submit(60)
        for restart in (1, 2):
            rig.history.wait_for("end", count=20 * restart)
            own_node.ctl("stop_app")
            own_node.ctl("start_app")
            until(reconnected(worker, restart), "the worker connects again")
            submit(20)
            rig.wait_states(app, ids, success=len(ids))
        assert worker.exit_code is None
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    # Two were on their way into their processes, at the most.
    assert sorted(rig.starts()) == list(range(len(ids)))
    assert sum(rig.starts().values()) <= len(ids) + 2
