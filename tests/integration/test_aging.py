"""Aged tasks move up one tier at a time, in order, without a trace on those that stay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from threading import Barrier, Thread
from typing import Any, cast

import pytest
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.maintenance.sweep import Sweep, Swept
from inference_tasks.state import keys
from tests.support.aging import client_of, deliveries, grow_old, held, ids_in, new_pull, put, sweep
from tests.support.brokers import depth, depths, publish_raw, until
from tests.support.rig import Rig, task

LIMIT_S = 1800.0

BOTH = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


def submitted(app: InferenceApp, tier: str, numbers: Sequence[int]) -> list[str]:
    batch = task(app, f"step.{tier}").submit_many([(number,) for number in numbers])
    return [handle.id for handle in batch.accepted]


def header_of(message: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", message.headers["inference"])


@BOTH
def test_aged_tasks_move_up_one_tier_in_their_order_and_the_others_are_not_touched(rig: Rig) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(8))
    grow_old(app, ids[:5], LIMIT_S + 1)
    swept = sweep(app)
    assert (swept.promoted, swept.returned, swept.discarded) == (5, 0, 0)
    with held(app, "batch", "aged") as moved:
        assert [message.headers["id"] for message in moved] == ids[:5]
        assert [json.loads(message.body)[0] for message in moved] == [[number] for number in range(5)]
    with held(app, "offline") as stayed:
        assert [message.headers["id"] for message in stayed] == ids[5:]
        assert [deliveries(message) for message in stayed] == [0, 0, 0]
        assert not any(message.delivery_info["redelivered"] for message in stayed)


def test_the_tier_that_was_asked_for_is_kept_in_record_and_headers(rig: Rig) -> None:
    app = rig.app()
    (task_id,) = [task(app, "step.batch").options(tier="offline").submit(1).id]
    before = app.status(task_id)
    grow_old(app, [task_id], LIMIT_S + 1)
    sweep(app)
    record = app.status(task_id)
    assert (record.state, record.tier, record.lane, record.tier_first, record.hop) == (
        "pending", "batch", "aged", "offline", 1
    )  # fmt: skip
    assert cast(float, record.ready_at_s) >= cast(float, before.submitted_at_s)
    with held(app, "batch", "aged") as (message,):
        header = header_of(message)
        assert {key: header[key] for key in ("tier", "tier_first", "asked", "lane", "gen", "hop")} == {
            "tier": "batch", "tier_first": "offline", "asked": "offline", "lane": "aged", "gen": 0, "hop": 1
        }  # fmt: skip
        assert message.headers["task"] == "step.batch"
        assert "x-death" not in message.headers


def test_age_counts_anew_in_each_tier(rig: Rig) -> None:
    app = rig.app()
    (task_id,) = submitted(app, "offline", [1])
    grow_old(app, [task_id], 2 * LIMIT_S)
    assert sweep(app).promoted == 1
    assert sweep(app).promoted == 0
    grow_old(app, [task_id], LIMIT_S - 60)
    assert sweep(app).promoted == 0
    grow_old(app, [task_id], 60)
    assert sweep(app).promoted == 1
    record = app.status(task_id)
    assert (record.tier, record.lane, record.tier_first, record.hop) == ("realtime", "aged", "offline", 2)
    grow_old(app, [task_id], 10 * LIMIT_S)
    assert sweep(app).promoted == 0


def test_a_promoted_task_runs_once_and_counts_under_the_tier_it_was_submitted_to(rig: Rig) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(3))
    grow_old(app, ids, LIMIT_S + 1)
    sweep(app)
    with rig.worker():
        rig.wait_states(app, ids, success=3)
    assert rig.starts() == {0: 1, 1: 1, 2: 1}
    accounts = inference_of(app).store.accounts().by_tier
    assert accounts["offline"]["success"] == 3


def test_a_full_tier_takes_promoted_tasks_all_the_same(rig: Rig) -> None:
    app = rig.app(tiers={"batch": {"bound": 2}})
    submitted(app, "batch", range(2))
    ids = submitted(app, "offline", range(10, 16))
    grow_old(app, ids, LIMIT_S + 1)
    assert sweep(app).promoted == 6
    assert depth(app, "batch", "aged") == 6


@BOTH
def test_what_was_settled_before_the_connection_closed_does_not_come_back(rig: Rig) -> None:
    app = rig.app()
    queue = inference_of(app).queue_by_lane["offline", "fresh"]
    for count in (1, 10, 30) * 4:
        submitted(app, "offline", range(count))
        with closing(new_pull(app)) as pull:
            pull.settle(done=pull.take(queue, count))
    (last,) = submitted(app, "offline", [0])
    assert ids_in(app, "offline") == [last]


def test_the_aged_lane_is_topped_up_with_those_who_have_waited_longest(rig: Rig) -> None:
    app = rig.app(aging={"ready_max": 3})
    ids = submitted(app, "offline", range(6))
    for position, task_id in enumerate(ids):
        grow_old(app, [task_id], LIMIT_S + 100 - position)
    assert sweep(app).promoted == 3
    assert ids_in(app, "batch", "aged") == ids[:3]
    assert sweep(app).promoted == 0
    rig.take(app, "batch", "aged")
    assert sweep(app).promoted == 1
    assert ids_in(app, "offline") == ids[4:]


def test_old_copies_at_the_head_do_not_keep_back_those_behind_them(rig: Rig) -> None:
    app = rig.app(aging={"ready_max": 3})
    ids = submitted(app, "offline", range(5))
    grow_old(app, ids, LIMIT_S + 1)
    queue = inference_of(app).queue_by_lane["offline", "fresh"]
    messages = rig.take_many(app, "offline", 5)
    for message in messages[:3] * 3 + messages[3:]:
        put(app, queue, message)
    assert sweep(app).promoted == 3
    rig.take(app, "batch", "aged")
    swept = sweep(app)
    assert (swept.promoted, swept.discarded, swept.returned) == (1, 6, 0)
    assert ids_in(app, "offline") == ids[4:]


def test_time_in_the_delay_queues_does_not_count_as_waiting(rig: Rig) -> None:
    app = rig.app()
    result = task(app, "step.offline").apply_async((1,), countdown=3600)
    with client_of(app) as client:
        key = keys.task(inference_of(app).store.prefix, result.id)
        client.hincrbyfloat(key, "submitted_at_s", -10 * LIMIT_S)
    assert sweep(app).promoted == 0


@BOTH
def test_a_parked_task_ages_from_when_it_came_back_and_leaves_the_brokers_headers_behind(rig: Rig) -> None:
    """With the headers of its first death RabbitMQ would take the next one for a cycle, and drop the message."""
    app = rig.app()
    task_id = task(app, "step.offline").apply_async((1,), countdown=1).id
    with held_when_it_comes(rig, app, "offline", "returned") as (message,):
        assert message.headers["x-death"]
    grow_old(app, [task_id], LIMIT_S - 60)
    assert sweep(app).promoted == 0
    grow_old(app, [task_id], 61)
    assert sweep(app).promoted == 1
    with held(app, "batch", "aged") as (message,):
        assert not [name for name in message.headers if name.startswith("x-") and "death" in name]
        assert header_of(message)["tier_first"] == "offline"
    with rig.worker():
        rig.wait_states(app, [task_id], success=1)
    assert rig.starts() == {1: 1}


@contextmanager
def held_when_it_comes(rig: Rig, app: InferenceApp, tier: str, lane: str) -> Iterator[list[Any]]:
    until(lambda: depth(app, tier, lane) == 1, "the parked message is due")
    with held(app, tier, lane) as messages:
        yield messages


def test_a_head_that_is_not_to_be_moved_is_looked_at_once(rig: Rig) -> None:
    """Its task has failed, and a worker has yet to see to it: what waits behind keeps its place meanwhile."""
    app = rig.app()
    ids = submitted(app, "offline", range(3))
    grow_old(app, ids, LIMIT_S + 1)
    inference_of(app).store.fail_unclaimed(ids[0], name="step.offline", tier="offline", error_type="x", error="y")
    with closing(new_pull(app)) as pull:
        rounds = Sweep(inference_of(app), pull)
        assert rounds.run().returned == 2
        assert [rounds.run().returned for _ in range(3)] == [0, 0, 0]
    assert ids_in(app, "offline") == ids


CRASHING = """
import json, os, signal, sys
from inference_tasks.app import inference_of
from inference_tasks.maintenance.pull import Pull
from inference_tasks.state.store import TaskStore
from tests.support.aging import sweep
from tests.support.faulty_app import make_app

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

options, where = json.loads(sys.argv[1]), sys.argv[2]
if where == "published":
    TaskStore.promoted = die
else:
    Pull.settle = die
sweep(make_app(options))
"""


@BOTH
@pytest.mark.parametrize("where", ["published", "marked"])
def test_a_sweep_that_is_killed_before_it_acknowledges_leaves_a_copy_that_never_runs_twice(
    rig: Rig, where: str
) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(3))
    grow_old(app, ids, LIMIT_S + 1)
    killed = subprocess.run(
        [sys.executable, "-c", CRASHING, json.dumps(rig.options), where],
        env={"PYTHONPATH": ":".join(sys.path)},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == -9, killed.stderr
    with client_of(app) as client:
        # Its lease would keep the next sweep away for a minute.
        client.delete(keys.lease(inference_of(app).store.prefix, "aging:offline"))
    assert depths(app)[inference_of(app).topology.queue("batch", "aged").name] == 3
    if where == "marked":
        # The originals are known to be superseded.
        assert rig.states(app, ids) == {"pending": 3}
        assert {app.status(one).hop for one in ids} == {1}
    else:
        again = sweep(app)
        assert (again.promoted, again.discarded) == (3, 0)
        assert depth(app, "batch", "aged") == 6
    with rig.worker():
        rig.wait_states(app, ids, success=3)
        rig.wait_waiting(app, 0)
    assert rig.starts() == {0: 1, 1: 1, 2: 1}
    accounts = inference_of(app).store.accounts().by_tier["offline"]
    assert (accounts["admitted"], accounts["success"]) == (3, 3)


def test_two_sweeps_at_once_promote_each_task_once(rig: Rig) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(300))
    grow_old(app, ids, LIMIT_S + 1)
    start = Barrier(2)
    found: list[Swept] = []

    def one() -> None:
        with closing(new_pull(app)) as pull:
            swept = Sweep(inference_of(app), pull)
            start.wait(10)
            found.append(swept.run())

    threads = [Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(swept.promoted for swept in found) == 300
    assert sorted(ids_in(app, "batch", "aged")) == sorted(ids)


def test_even_without_a_lease_each_message_is_in_one_hand(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    app = rig.app()
    monkeypatch.setattr(type(inference_of(app).store), "lease", lambda *_: True)
    test_two_sweeps_at_once_promote_each_task_once(rig)


def test_lists_that_redis_has_lost_are_found_again_with_one_look(rig: Rig) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(6))
    inference = inference_of(app)
    young = [task(app, "step.offline").submit(6).id]
    with held(app, "offline") as messages:
        bodies = [(message.headers, message.body) for message in messages]
    # As if the first six had been submitted long ago, and then Redis had lost everything.
    rig.take(app, "offline")
    for _ in range(6):
        rig.take(app, "offline")
    with client_of(app) as client:
        for key in client.scan_iter(f"{inference.store.prefix}*"):
            client.delete(key)
    for headers, body in bodies:
        ours = dict(headers["inference"])
        if headers["id"] != young[0]:
            ours["submitted_at_s"] -= LIMIT_S + 1
        publish_raw(app, "offline", str(body).encode(), {**headers, "inference": ours})
    swept = sweep(app)
    assert (swept.promoted, swept.returned) == (6, 1)
    assert ids_in(app, "batch", "aged") == ids
    store = inference.store
    assert {one.id for one in store.oldest(inference.topology.queue("batch", "aged").name)} == set(ids)
    assert [one.id for one in store.oldest(inference.topology.queue("offline").name)] == young
    # The one that stays is listed now, so it is not looked at again.
    assert sweep(app).returned == 0
    with rig.worker():
        rig.wait_states(app, [*ids, *young], success=7)
    assert set(rig.starts().values()) == {1}


def test_messages_of_plain_clients_age_from_when_they_are_first_seen(rig: Rig) -> None:
    app = rig.app()
    headers = {"id": "plain-1", "task": "step.offline", "lang": "py"}
    publish_raw(app, "offline", b"[[7], {}, null]", headers)
    assert sweep(app).promoted == 0
    inference = inference_of(app)
    queue = inference.topology.queue("offline").name
    assert [one.id for one in inference.store.oldest(queue)] == ["plain-1"]
    with client_of(app) as client:
        client.zincrby(keys.ready(inference.store.prefix, queue), -LIMIT_S - 1, "plain-1")
    assert sweep(app).promoted == 1
    with held(app, "batch", "aged") as (message,):
        assert header_of(message)["tier_first"] == "offline"
    with rig.worker():
        rig.wait_states(app, ["plain-1"], success=1)


def test_what_has_waited_as_long_as_records_live_goes_to_the_dead_letters(rig: Rig) -> None:
    app = rig.app(state={"unfinished_ttl_s": 1000})
    (task_id,) = submitted(app, "realtime", [1])
    grow_old(app, [task_id], 999)
    with held(app, "realtime") as (message,):
        headers, body = message.headers, message.body
    rig.take(app, "realtime")
    ours = {**headers["inference"], "submitted_at_s": headers["inference"]["submitted_at_s"] - 999}
    publish_raw(app, "realtime", str(body).encode(), {**headers, "inference": ours})
    assert sweep(app).given_up == 1
    record = app.status(task_id)
    assert (record.state, record.dead) == ("failed", "replayable")
    letter = inference_of(app).store.dead_letter(task_id)
    assert letter is not None
    assert (letter.reason, letter.tier, letter.is_replayable) == ("waited too long", "realtime", True)
    (dead,) = rig.dead(app, 1)
    assert dead.headers["inference_dead"]["reason"] == "waited too long"


@BOTH
def test_tasks_whose_messages_are_gone_cost_one_look_and_no_order(rig: Rig) -> None:
    app = rig.app()
    ids = submitted(app, "offline", range(150))
    grow_old(app, ids[:50], LIMIT_S + 1)
    rig.take_many(app, "offline", 50)
    with closing(new_pull(app)) as pull:
        rounds = Sweep(inference_of(app), pull)
        assert rounds.run().returned == 50
        assert [rounds.run().returned for _ in range(3)] == [0, 0, 0]
    assert [message.headers["id"] for message in rig.take_many(app, "offline", 100)] == ids[50:]


@BOTH
def test_however_many_are_given_back_they_keep_their_order(rig: Rig) -> None:
    """Of more than 32 that it has not taken back yet, a quorum queue loses the order."""
    app = rig.app()
    ids = submitted(app, "offline", range(120))
    queue = inference_of(app).topology.queue("offline").name
    for _ in range(10):
        with closing(new_pull(app)) as pull:
            taken = pull.take(queue, 100)
            assert [message.headers["id"] for message in taken] == ids[:100]
            pull.settle(back=taken)
            until(lambda pull=pull: pull.ready(queue) == 120, "all are back")  # type: ignore[misc]


def test_a_queue_that_is_missing_is_an_empty_one(rig: Rig) -> None:
    app = rig.app()
    (task_id,) = submitted(app, "offline", [1])
    grow_old(app, [task_id], LIMIT_S + 1)
    with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        channel.queue_delete(inference_of(app).topology.queue("offline").name)
    assert sweep(app).promoted == 0
