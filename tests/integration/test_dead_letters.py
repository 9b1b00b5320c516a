"""Dead letters from their death to their replay: real workers, and the commands as an operator gives them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis
from click.testing import CliRunner
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.cli import main
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.index import depth, listed, refresh
from inference_tasks.dead_letters.revival import drop, replay
from tests.support.brokers import Broker, depths, publish_raw, until
from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.rig import Rig, task

both = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


# What an operator does.


def settings(rig: Rig, **more: str) -> dict[str, str]:
    options = cast("dict[str, Any]", rig.options)
    return {
        "INFERENCE_NAMESPACE": options["namespace"],
        "INFERENCE_BROKER__URL": options["broker"]["url"],
        "INFERENCE_BROKER__QUEUE_TYPE": options["broker"]["queue_type"],
        "INFERENCE_STATE__URL": options["state"]["url"],
        "INFERENCE_STATE__PREFIX": options["state"]["prefix"],
        **more,
    }


def command(rig: Rig, *arguments: str, code: int = 0, **env: str) -> Any:
    """Run a command by the settings alone and return its answer, or what it said instead of one."""
    done = CliRunner().invoke(main, [*arguments, "--json"], env=settings(rig, **env), catch_exceptions=False)
    assert done.exit_code == code, done.stderr
    return json.loads(done.stdout) if done.stdout else done.stderr


def process(rig: Rig, *arguments: str) -> LoggedProcess:
    """A command in a process of its own, to be sent signals."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, **settings(rig)}
    argv = (sys.executable, "-m", "inference_tasks.cli", *arguments)
    return LoggedProcess(argv, log=rig.directory / "command.log", env=env)


def ids_in_queue(app: InferenceApp) -> list[str]:
    """Ids of the dead letters in the order of the queue, looked at without this package."""
    inference = inference_of(app)
    wanted = depth(inference)
    with Connection(cast(str, inference.settings.broker.url)) as connection:
        channel: Any = connection.channel()
        found: list[Any] = []
        channel.basic_consume(inference.topology.dead.name, callback=found.append)
        while len(found) < wanted:
            connection.drain_events(timeout=5)
        channel.close()
    return [message.headers.get("id", "") for message in map(channel.message_to_python, found)]


def worker_without_the_tasks(rig: Rig) -> WorkerProcess:
    """A worker of an older release: it knows only the steps, so everything else is an unknown task to it."""
    return Broker.worker(rig, name="old")


def perish(rig: Rig, app: InferenceApp, numbers: Sequence[int], name: str = "add") -> list[str]:
    """Submit tasks to a worker that does not know them, and wait until all are dead letters."""
    before = depth(inference_of(app))
    report = task(app, name).submit_many([(number, 1) for number in numbers])
    assert not report.refused
    with worker_without_the_tasks(rig):
        until(lambda: depth(inference_of(app)) == before + len(numbers), "all are dead", 60)
    return [handle.id for handle in report.accepted]


def run(steps: Any) -> Any:
    """Work off a replay or a drop and return its last tally."""
    return list(steps)[-1]


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
        assert app.result(first, timeout_s=10) == 2
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


# Replaying.


@both
def test_a_replay_takes_what_is_meant_and_leaves_the_rest_in_its_order(rig: Rig) -> None:
    app = rig.app()
    ids = perish(rig, app, range(200))
    order = ids_in_queue(app)
    meant = ids[3::9]
    tally = run(replay(inference_of(app), Filter.of(ids=meant), rate_per_s=1000))
    assert (tally.done, tally.is_complete) == (len(meant), True)
    assert ids_in_queue(app) == [one for one in order if one not in meant]
    with rig.worker():
        rig.wait_states(app, meant, success=len(meant))
    assert rig.starts() == dict.fromkeys(range(3, 200, 9), 1)


@both
def test_a_replay_goes_through_a_full_tier(rig: Rig) -> None:
    full: dict[str, Any] = {"tiers": {"batch": {"bound": 20}}}
    app = rig.app(**full)
    inference = inference_of(app)
    with Broker.worker(rig, name="old", **full):
        handles = [task(app, "add").submit(number, 1) for number in range(10)]
        until(lambda: depth(inference) == 10, "all are dead", 30)
    # Not as a burst: that may exceed the bound of a quorum queue.
    until(lambda: bool(task(app, "add").submit_many([(99, 1)]).refused), "the tier is full", 30)
    waiting = depths(app)[inference.topology.queue("batch").name]
    assert waiting >= 20
    assert run(replay(inference, Filter(), rate_per_s=1000)).done == 10
    assert depths(app)[inference.topology.queue("batch", "returned").name] == 10
    with rig.worker(**full):
        rig.wait_states(app, [handle.id for handle in handles], success=10)


def test_a_deadline_of_the_past_does_not_end_a_replayed_task(rig: Rig) -> None:
    app = rig.app()
    handle = task(app, "add").options(timeout_s=3.0).submit(1, 1)
    with worker_without_the_tasks(rig):
        until(lambda: depth(inference_of(app)) == 1, "it is dead", 30)
    deadline = inference_of(app).store.get(handle.id).expires_at_s
    assert deadline is not None
    run(replay(inference_of(app), Filter()))
    server = redis.Redis.from_url(cast(str, inference_of(app).settings.state.url))
    until(lambda: cast(Any, server.time())[0] > deadline, "its deadline is over", 10)
    server.close()
    with rig.worker():
        assert handle.result(timeout_s=10) == 2


def test_a_task_that_fails_again_during_the_replay_is_not_replayed_again_by_it(rig: Rig) -> None:
    app = rig.app()
    ids = perish(rig, app, range(40))
    with worker_without_the_tasks(rig):
        # Each comes back at once, behind the others.
        tally = run(replay(inference_of(app), Filter(), rate_per_s=40))
        assert tally.done == 40
        until(lambda: depth(inference_of(app)) == 40, "all are dead again", 30)
    refresh(inference_of(app))
    assert {letter.generation for letter in listed(inference_of(app))} == {1}
    assert sorted(ids_in_queue(app)) == sorted(ids)


def test_the_rate_is_kept(rig: Rig) -> None:
    app = rig.app()
    perish(rig, app, range(60))
    started = time.monotonic()
    assert run(replay(inference_of(app), Filter(), rate_per_s=30)).done == 60
    assert 1.6 < time.monotonic() - started < 4


@both
def test_a_replay_of_500_that_is_killed_in_the_middle_and_run_again_runs_each_once_more(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    ids = perish(rig, app, range(500))
    killed = process(rig, "dead", "replay", "--yes", "--rate", "150")
    returned = inference.topology.queue("batch", "returned").name
    for reached in (100, 230):
        with killed:
            until(lambda reached=reached: depths(app)[returned] >= reached, "it is under way", 30)  # type: ignore[misc]
            killed.send(signal.SIGKILL)
            killed.wait()
    assert 0 < depths(app)[returned] < 500
    answer = command(rig, "dead", "replay", "--yes", "--rate", "2000")
    assert answer["is_complete"]
    assert depth(inference) == 0
    assert inference.store.dead_count() == 0
    assert {record.generation for record in inference.store.get_many(ids) if record} == {1}
    with rig.worker("--pool", "threads", "--concurrency", "4"):
        rig.wait_states(app, ids, timeout_s=60, success=500)
        until(lambda: rig.waiting(app) == 0, "the copies of the killed runs are gone", 30)
    assert rig.starts() == dict.fromkeys(range(500), 1)
    found = command(rig, "tiers", "--audit")
    assert (found["is_exact"], found["moving"]) == (True, 0)
    assert found["tiers"]["batch"]["success"] == found["tiers"]["batch"]["admitted"] == 500


def test_ctrl_c_ends_a_replay_with_everything_in_its_place(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(100))
    ids = ids_in_queue(app)
    stopped = process(rig, "dead", "replay", "--yes", "--rate", "20")
    returned = inference.topology.queue("batch", "returned").name
    with stopped:
        until(lambda: depths(app)[returned] >= 10, "it is under way", 30)
        stopped.send(signal.SIGINT)
        assert stopped.wait(15) == 130
    assert "Stopped" in stopped.log
    assert "Traceback" not in stopped.log
    gone = depths(app)[returned]
    assert ids_in_queue(app) == ids[gone:]
    assert inference.store.dead_count() == 100 - gone
    assert [record.state for record in inference.store.get_many(ids[:gone]) if record] == ["pending"] * gone


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
            until(lambda: _reject(channel, inference.topology.queue("batch").name), "it is rejected", 10)
    until(lambda: depth(inference) == 1, "the broker has buried it", 15)
    assert app.status(handle.id).state == "pending"
    (letter,) = command(rig, "dead", "list", "--reason", reason)["letters"]
    assert (letter["id"], letter["tier"], letter["task"]) == (handle.id, "batch", "add")
    record = app.status(handle.id)
    assert (record.state, record.error and record.error["type"]) == ("failed", reason)
    assert command(rig, "dead", "replay", "--reason", reason)["done"] == 1
    with rig.worker():
        assert handle.result(timeout_s=10) == 2


def _reject(channel: Any, queue: str) -> bool:
    message = channel.basic_get(queue)
    if message is not None:
        channel.basic_reject(message.delivery_tag, False)
    return message is not None


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
        until(lambda: depth(inference_of(app)) == 1, "it is dead", 30)
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


# Dropping, and the accounts.


@both
def test_the_accounts_are_exact_after_failures_drops_and_replays(rig: Rig) -> None:
    app = rig.app()
    assert command(rig, "tiers", "--audit")["since_s"] is None
    perish(rig, app, range(30))
    ids = ids_in_queue(app)
    command(rig, "dead", "list")
    found = command(rig, "tiers", "--audit")
    assert (found["is_exact"], found["moving"], found["broker"]["dead"]) == (True, 0, 30)
    assert found["tiers"]["batch"]["dead:replayable"] == found["tiers"]["batch"]["failed"] == 30

    dropped = command(rig, "dead", "drop", "--limit", "12", "--yes")
    assert (dropped["done"], dropped["is_complete"]) == (12, True)
    assert ids_in_queue(app) == ids[12:]
    assert command(rig, "dead", "replay", "--limit", "8")["done"] == 8
    more = [task(app, "add.realtime").submit(number, 0) for number in range(5)]
    with rig.worker():
        rig.wait_states(app, [*ids[12:20], *(handle.id for handle in more)], success=13)
        task(app, "raises").submit(7)
        until(lambda: inference_of(app).store.accounts().by_tier["batch"]["failed"] == 23, "it has failed", 15)
    until(lambda: _audit(rig)["moving"] == 0, "nothing moves", 30)
    found = _audit(rig)
    assert found["is_exact"]
    batch, realtime, total = (found["tiers"][name] for name in ("batch", "realtime", "total"))
    assert (batch["admitted"], batch["success"], batch["failed"]) == (31, 8, 23)
    assert (batch["dead:dropped"], batch["dead:replayable"], batch["dead:unburied"]) == (12, 11, 0)
    assert (realtime["admitted"], realtime["success"]) == (5, 5)
    assert total["admitted"] == 36
    assert found["broker"]["dead"] == found["indexed"] == 11
    assert Counter(record.dead for record in inference_of(app).store.get_many(ids) if record) == {
        "dropped": 12,
        "replayable": 10,
        None: 8,
    }


def _audit(rig: Rig) -> Any:
    command(rig, "dead", "list")
    return command(rig, "tiers", "--audit")


def test_the_audit_tells_what_moves(rig: Rig) -> None:
    app = rig.app()
    gate = rig.gate()
    handles = [task(app, "gated.batch").submit(number, str(gate)) for number in range(3)]
    with rig.worker():
        rig.wait_started(0)
        found = command(rig, "tiers", "--audit")
        assert (found["is_exact"], found["moving"]) == (True, 1)
        assert (found["tiers"]["batch"]["processing"], found["tiers"]["batch"]["pending"]) == (1, 2)
        assert found["broker"]["ready"] == 2
        gate.open()
        rig.wait_states(app, [handle.id for handle in handles], success=3)
    assert command(rig, "tiers", "--audit")["moving"] == 0


def test_an_account_that_does_not_add_up_is_told_by_the_exit_code(rig: Rig) -> None:
    app = rig.app()
    task(app, "add").submit(1, 1)
    options = cast("dict[str, Any]", rig.options)
    server = redis.Redis.from_url(options["state"]["url"])
    server.hincrby(f"{options['state']['prefix']}accounts", "batch:admitted", 1)
    server.close()
    assert not command(rig, "tiers", "--audit", code=1)["is_exact"]
    wrong = CliRunner().invoke(main, ["tiers", "--audit"], env=settings(rig))
    assert wrong.exit_code == 1
    assert "do not add up" in wrong.stdout


def test_servers_that_are_away_are_told_by_the_exit_code(rig: Rig) -> None:
    for variable, nowhere in (
        ("INFERENCE_BROKER__URL", "amqp://127.0.0.1:1/"),
        ("INFERENCE_STATE__URL", "redis://127.0.0.1:1/0"),
    ):
        for words in (("dead", "list"), ("dead", "replay", "--yes"), ("dead", "drop", "--yes"), ("tiers", "--audit")):
            assert "doctor" in command(rig, *words, code=5, **{variable: nowhere})


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
