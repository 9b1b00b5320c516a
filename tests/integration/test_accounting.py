"""Tasks whose message is gone end as dropped: pushed out of a full queue, or lost without a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from threading import Thread
from typing import Any, cast

import pytest
from kombu import Connection

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.errors import TaskFailedError
from inference_tasks.maintenance.accounting import GONE, Dropped, Reconciliation
from inference_tasks.maintenance.pull import Pull
from inference_tasks.state.records import Move
from tests.support.aging import deliveries, grow_old, held, ids_in, new_pull, put
from tests.support.brokers import depths, until
from tests.support.rig import Rig, task

BOTH = pytest.mark.parametrize("queue_type", ["quorum", "classic"])
DROPS = {"offline": {"bound": 3, "overflow": "drop-head"}}
AGE_S = 700.0


@pytest.fixture
def pulls() -> Iterator[list[Pull]]:
    opened: list[Pull] = []
    yield opened
    for pull in opened:
        pull.close()


def record_dropped(app: InferenceApp) -> int:
    with closing(new_pull(app)) as pull:
        return Dropped(inference_of(app), pull).run()


def submitted(app: InferenceApp, tier: str, count: int) -> list[str]:
    return [task(app, f"step.{tier}").submit(number).id for number in range(count)]


@BOTH
def test_what_drop_head_drops_is_recorded_and_counted(rig: Rig) -> None:
    app = rig.app(tiers=DROPS)
    ids = submitted(app, "offline", 8)
    dropped = inference_of(app).topology.dropped.name
    gone = 8 - depths(app)[inference_of(app).topology.queue("offline").name]
    until(lambda: depths(app)[dropped] == gone, "what was dropped lies in its queue")
    assert gone >= 4
    assert record_dropped(app) == gone
    states = [app.status(one).state for one in ids]
    assert states == ["dropped"] * gone + ["pending"] * (8 - gone)
    assert "drop-head" in str(app.status(ids[0]).error)
    accounts = inference_of(app).store.accounts().by_tier["offline"]
    assert (accounts["admitted"], accounts["dropped"], accounts["pending"]) == (8, gone, 8 - gone)
    assert record_dropped(app) == 0
    assert depths(app)[dropped] == depths(app)[inference_of(app).topology.dead.name] == 0


def test_whoever_waits_for_a_dropped_task_learns_it(rig: Rig) -> None:
    app = rig.app(tiers=DROPS)
    first = task(app, "step.offline").submit(0)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            first.result(timeout_s=30)
        except BaseException as exc:
            errors.append(exc)

    waiting = Thread(target=wait)
    waiting.start()
    submitted(app, "offline", 8)
    until(lambda: record_dropped(app) > 0 and app.status(first.id).state == "dropped", "the first is dropped")
    waiting.join(20)
    assert [type(error) for error in errors] == [TaskFailedError]
    assert "dropped" in str(errors[0])


def test_a_message_that_fell_off_after_its_task_had_moved_on_changes_nothing(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    (task_id,) = submitted(app, "offline", 1)
    message = rig.take(app, "offline")
    grow_old(app, [task_id], 10)
    store = inference.store
    assert store.promoted([Move(task_id, 0, 1, "batch", "aged")]) == [True]
    put(app, inference.topology.dropped.name, message, **{"x-death": [{"reason": "maxlen", "queue": "x", "count": 1}]})
    assert record_dropped(app) == 0
    assert app.status(task_id).state == "pending"


def test_what_lies_among_the_dropped_for_another_reason_goes_to_the_dead_letters(rig: Rig) -> None:
    app = rig.app(tiers=DROPS)
    inference = inference_of(app)
    (task_id,) = submitted(app, "offline", 1)
    with Connection(cast(str, inference.settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        until(lambda: depths(app)[inference.topology.queue("offline").name] == 1, "it waits")
        message = channel.basic_get(inference.topology.queue("offline").name)
        channel.basic_reject(message.delivery_tag, requeue=False)
    until(lambda: depths(app)[inference.topology.dropped.name] == 1, "it was rejected")
    assert record_dropped(app) == 0
    (dead,) = rig.dead(app, 1)
    assert (dead.headers["id"], dead.headers["x-death"][0]["reason"]) == (task_id, "rejected")
    assert json.loads(dead.body)[0] == [0]
    assert app.status(task_id).state == "pending"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def reconciliation(app: InferenceApp, pulls: list[Pull], clock: Clock) -> Reconciliation:
    pulls.append(new_pull(app))
    return Reconciliation(inference_of(app), pulls[-1], now_s=clock)


def purge(app: InferenceApp, tier: str) -> None:
    with Connection(cast(str, inference_of(app).settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        channel.queue_purge(inference_of(app).topology.queue(tier).name)


@BOTH
def test_the_tasks_of_a_purged_queue_end_as_dropped_once_they_were_missed_twice(rig: Rig, pulls: list[Pull]) -> None:
    app = rig.app()
    clock = Clock()
    looks = reconciliation(app, pulls, clock)
    ids = submitted(app, "batch", 3)
    grow_old(app, ids, AGE_S)
    assert looks.run() == 0
    purge(app, "batch")
    assert looks.run() == 0
    clock.now_s += 10
    assert looks.run() == 0
    clock.now_s += 60
    assert looks.run() == 3
    record = app.status(ids[0])
    assert (record.state, cast("dict[str, str]", record.error)["message"]) == ("dropped", GONE)
    assert inference_of(app).store.accounts().by_tier["batch"]["dropped"] == 3
    with pytest.raises(TaskFailedError):
        app.result(ids[1], timeout_s=5)


@BOTH
def test_what_was_submitted_after_the_purge_is_not_touched(rig: Rig, pulls: list[Pull]) -> None:
    app = rig.app()
    clock = Clock()
    looks = reconciliation(app, pulls, clock)
    lost = submitted(app, "batch", 2)
    grow_old(app, lost, AGE_S)
    purge(app, "batch")
    kept = submitted(app, "batch", 2)
    for _ in range(2):
        found = looks.run()
        clock.now_s += 60
    assert found == 2
    assert [app.status(one).state for one in (*lost, *kept)] == ["dropped", "dropped", "pending", "pending"]
    assert ids_in(app, "batch") == kept
    with rig.worker():
        rig.wait_states(app, kept, success=2)


def test_a_task_that_waits_long_but_is_there_is_never_looked_for(rig: Rig, pulls: list[Pull]) -> None:
    app = rig.app()
    clock = Clock()
    looks = reconciliation(app, pulls, clock)
    ids = submitted(app, "batch", 3)
    grow_old(app, ids, 100 * AGE_S)
    for _ in range(3):
        assert looks.run() == 0
        clock.now_s += 60
    with held(app, "batch") as messages:
        assert [deliveries(message) for message in messages] == [0, 0, 0]
        assert not any(message.delivery_info["redelivered"] for message in messages)


def test_a_young_task_is_not_given_up_and_one_that_came_back_is_forgiven(rig: Rig, pulls: list[Pull]) -> None:
    app = rig.app()
    clock = Clock()
    looks = reconciliation(app, pulls, clock)
    (young,) = submitted(app, "batch", 1)
    message = rig.take(app, "batch")
    for _ in range(3):
        assert looks.run() == 0
        clock.now_s += 60
    grow_old(app, [young], AGE_S)
    assert looks.run() == 0
    inference = inference_of(app)
    put(app, inference.topology.queue("batch").name, message)
    clock.now_s += 60
    assert looks.run() == 0
    assert app.status(young).state == "pending"


def test_what_lies_in_another_lane_of_its_tier_is_not_lost(rig: Rig, pulls: list[Pull]) -> None:
    """`topology apply` moves messages to another lane while it makes their queue anew."""
    app = rig.app()
    clock = Clock()
    looks = reconciliation(app, pulls, clock)
    (task_id,) = submitted(app, "batch", 1)
    grow_old(app, [task_id], AGE_S)
    message = rig.take(app, "batch")
    inference = inference_of(app)
    returned = inference.topology.queue("batch", "returned").name
    put(app, returned, message)
    for _ in range(3):
        assert looks.run() == 0
        clock.now_s += 60
    with rig.worker():
        rig.wait_states(app, [task_id], success=1)
