"""Tasks that wait for other tasks, with real workers, brokers and losses."""

from __future__ import annotations

import time
from typing import Any

import pytest

from inference_tasks import (
    DependencyCycleError,
    DependencyFailedError,
    DependencyUnknownError,
    InferenceApp,
    TaskFailedError,
)
from inference_tasks.app import inference_of
from inference_tasks.state import keys
from tests.integration.test_maintenance import maintenance
from tests.support.aging import client_of
from tests.support.brokers import until
from tests.support.faulty_app import DEATH_VARIABLE
from tests.support.rig import POOLS, Rig, task
from tests.support.waiting import QUICK, dependent, look_round, wait_round, wait_served

FAILED = "DependencyFailedError"


def order(rig: Rig) -> list[Any]:
    return rig.history.values("start", "number")


def why(handle: Any) -> str:
    with pytest.raises(TaskFailedError) as caught:
        handle.result(timeout_s=60)
    return caught.value.error_type


@pytest.mark.parametrize("pool", POOLS)
def test_a_chain_across_tiers_runs_in_its_order_and_at_once(rig: Rig, pool: str) -> None:
    app = rig.app(state={"lift_body_bytes": 0})
    first = task(app, "step.offline").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    third = dependent(app, "step.realtime", 2, needs=[first.id, second])
    status = third.status()
    assert (status.state, set(status.waits_for)) == ("waiting", {first.id, second.id})
    # Nothing but the first may start, and the messages of the others are stored: they are confirmed by now.
    assert rig.waiting(app) == 1
    began_s = time.monotonic()
    with rig.worker(*POOLS[pool]):
        assert third.result(timeout_s=60) == 2
        # Long before their own messages come round.
        assert time.monotonic() - began_s < 45
        wait_served(app)
    assert order(rig) == [0, 1, 2]
    record = third.status()
    assert (record.tier, record.lane, record.hop, record.attempts, record.waits_for) == (
        "realtime",
        "returned",
        1,
        1,
        (),
    )
    assert inference_of(app).store.accounts().away == {}


def test_one_whose_needs_have_succeeded_goes_straight_to_its_tier(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        first = task(app, "step.batch").submit(0)
        assert first.result(timeout_s=60) == 0
    second = dependent(app, "step.batch", 1, needs=[first])
    assert (second.status().state, second.status().lane) == ("pending", "returned")
    assert rig.take(app, "batch", "returned").headers["id"] == second.id


@pytest.mark.parametrize("end", ["fails", "is cancelled", "expires"])
def test_if_one_ends_otherwise_those_that_wait_never_run(rig: Rig, end: str) -> None:
    app = rig.app(maintenance=QUICK)
    first = (
        task(app, "raises").submit(0)
        if end == "fails"
        else task(app, "step.batch").options(timeout_s=0.5 if end == "expires" else None).submit(0)
    )
    second = dependent(app, "step.batch", 1, needs=[first])
    third = dependent(app, "step.realtime", 2, needs=[second])
    if end == "is cancelled":
        assert first.cancel()
    elif end == "expires":
        until(lambda: (first.status().expires_at_s or 0) < time.time(), "the deadline is over")
    with rig.worker(maintenance=QUICK):
        assert [why(second), why(third)] == [FAILED, FAILED]
        with pytest.raises(DependencyFailedError, match=second.id):
            app.AsyncResult(third.id).get(timeout=5)
        wait_served(app)
    assert order(rig) == ([0] if end == "fails" else [])
    # Their messages come round and become dead letters, which can be replayed.
    wait_round(app, 2)
    assert look_round(app) == 0
    letters = {letter.id: letter for letter in inference_of(app).store.dead_letters()}
    assert [letters[one.id].reason for one in (second, third)] == ["dependency failed"] * 2
    assert letters[second.id].is_replayable
    assert second.status().dead == "replayable"
    with pytest.raises(DependencyFailedError):
        task(app, "step.batch").options(depends_on=[first]).submit(3)


def test_a_cancelled_one_is_not_let_go(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.batch").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    third = dependent(app, "step.batch", 2, needs=[second])
    assert second.cancel()
    assert why(third) == FAILED
    with rig.worker():
        assert first.result(timeout_s=60) == 0
    wait_round(app, 2)
    assert look_round(app) == 0
    assert [letter.id for letter in inference_of(app).store.dead_letters()] == [third.id]
    assert (rig.waiting(app), order(rig)) == (1, [0])  # 1: the dead letter


def test_what_cannot_come_is_refused(rig: Rig) -> None:
    app = rig.app()
    first = task(app, "step.batch").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    submitter: Any = task(app, "step.batch").options
    with pytest.raises(DependencyUnknownError, match="nobody") as unknown:
        submitter(depends_on=[first, "nobody"], task_id="mine").submit(2)
    assert unknown.value.dependency == "nobody"
    with pytest.raises(DependencyCycleError):
        submitter(depends_on=["mine"], task_id="mine").submit(2)
    with pytest.raises(DependencyCycleError, match=second.id):
        submitter(depends_on=[second], task_id=first.id).submit(2)
    assert rig.states(app, [first.id, second.id, "mine"]) == {"pending": 1, "waiting": 1, "not found": 1}
    batch = submitter(depends_on=["nobody"]).submit_many([(3,), (4,)])
    assert [type(one.error) for one in batch.refused] == [DependencyUnknownError] * 2


def test_very_many_that_wait_for_one_all_run_once(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.batch").submit(-1)
    batch = task(app, "step.batch").options(depends_on=[first]).submit_many([(number,) for number in range(1200)])
    assert batch.is_complete
    with rig.worker("--pool", "threads", "--concurrency", "4"), maintenance_of(rig):
        rig.wait_states(app, [one.id for one in batch.accepted], success=1200)
    assert set(rig.starts().values()) == {1}


def maintenance_of(rig: Rig) -> Any:
    rig.options = {**rig.options, "maintenance": QUICK}
    return maintenance(rig)


def test_a_process_that_dies_between_end_and_release_costs_a_round(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.batch").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    rig.environment = {DEATH_VARIABLE: "1"}
    with rig.worker(name="dies"):
        rig.wait_states(app, [first.id], success=1)
        wait_served(app)
    assert (second.status().state, second.status().waits_for) == ("waiting", ())
    rig.environment = {}
    with rig.worker(), maintenance_of(rig):
        assert second.result(timeout_s=60) == 1
    assert rig.starts() == {0: 1, 1: 1}
    assert second.status().hop == 1


def test_a_message_too_large_for_redis_starts_its_task_when_it_comes_round(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "total").submit([1, 2])
    second = dependent(app, "total", list(range(40_000)), needs=[first])
    with client_of(app) as client:
        assert not client.exists(keys.message(inference_of(app).store.prefix, second.id))
    with rig.worker():
        assert first.result(timeout_s=60) == 3
        wait_round(app)
        assert look_round(app) == 1
        assert second.result(timeout_s=60) == sum(range(40_000))


def lose_all(app: InferenceApp) -> None:
    with client_of(app) as client:
        found = list(client.scan_iter(f"{inference_of(app).store.prefix}*"))
        client.delete(*found)


def test_a_loss_of_redis_in_between_loses_no_work(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.offline").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    third = dependent(app, "step.realtime", 2, needs=[second])
    lose_all(app)
    # As long as the queue of the first may hold its message, nobody gives the others up.
    for _ in range(4):
        wait_round(app, 2)
        assert look_round(app) == 0
    assert [one.status().state for one in (second, third)] == ["waiting", "waiting"]
    with rig.worker(), maintenance_of(rig):
        assert third.result(timeout_s=60) == 2
    assert order(rig) == [0, 1, 2]


def test_after_a_loss_what_waits_for_nothing_known_becomes_a_dead_letter(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.batch").submit(0)
    second = dependent(app, "step.batch", 1, needs=[first])
    third = dependent(app, "step.batch", 2, needs=[second])
    with rig.worker():
        # Its success has freed the second one; only this test knows no more of that.
        rig.take(app, "batch")
    lose_all(app)
    store = inference_of(app).store

    def is_given_up() -> bool:
        look_round(app)
        return store.dead_count() == 2

    until(is_given_up, "both are given up")
    reasons = {letter.id: letter.reason for letter in store.dead_letters()}
    assert reasons == {second.id: "dependency unknown", third.id: "dependency failed"}
    assert first.id in (store.get(second.id).error or {"message": ""})["message"]
    assert store.accounts().by_tier["batch"]["failed"] == 2


def test_the_same_id_again_waits_once(rig: Rig) -> None:
    app = rig.app(maintenance=QUICK)
    first = task(app, "step.batch").submit(0)
    for _ in range(2):
        dependent(app, "step.batch", 1, needs=[first], task_id="twice")
    with rig.worker():
        assert app.handle("twice").result(timeout_s=60) == 1
        wait_round(app, 2)
        assert look_round(app) == 0
        wait_served(app)
    assert rig.starts() == {0: 1, 1: 1}
