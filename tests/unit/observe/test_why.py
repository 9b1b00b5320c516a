"""Why a task is where it is: each state in words and in data, from a store in memory."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from inference_routing.lane import DEFAULT_LANE_WEIGHTS, LANE_NAMES
from inference_routing.policy import default_policy
from inference_routing.tier import TIER_NAMES
from inference_tasks.observe.why import Surroundings, Why, expected_wait_s, explain
from inference_tasks.observe.wording import span
from inference_tasks.state.records import Claimant, DeadLetter, NewTask, WorkerBeat
from inference_tasks.state.switches import Action
from inference_tasks.testing.store import FakeTaskStore

QUEUES = {
    (tier, lane): f"inference.{tier}" + ("" if lane == "fresh" else f".{lane}")
    for tier in TIER_NAMES
    for lane in LANE_NAMES
}
AROUND = Surroundings(QUEUES, default_policy())


@pytest.fixture
def store() -> FakeTaskStore:
    return FakeTaskStore()


def submitted(store: FakeTaskStore, tier: str = "batch", lane: str = "fresh", **fields: object) -> NewTask:
    task = NewTask(uuid.uuid4().hex, "vision.classify", tier, tier, lane, 0, "n1")._replace(**fields)  # type: ignore[arg-type]
    store.submit([task])
    store.advance(0.001)
    return task


def works(store: FakeTaskStore, node: str = "w1", **fields: Any) -> None:
    said: dict[str, Any] = {
        "tiers": TIER_NAMES,
        "reserve": 0,
        "started_per_s": {"batch": 2.0},
        "starts_60s": {"batch": {"batch": 120}},
        "slot_s_60s": {"batch": {"batch": 120.0}},
        **fields,
    }
    store.renew([], node, 30.0, WorkerBeat(node=node, pid=1, gpu=None, pool="prefork", slots=2, busy=2, **said))


def started(store: FakeTaskStore, task: NewTask) -> int:
    (claim,) = store.claim([Claimant(task.id, task.name, task.tier, task.lane, hop=task.hop)], "w1", 30.0)
    assert claim.verdict == "run"
    return claim.token


def asked(store: FakeTaskStore, task: NewTask, around: Surroundings = AROUND) -> Why:
    scene = store.scene(task.id, around.queues)
    assert scene is not None
    return explain(scene, around)


def test_a_queued_task_knows_its_place_who_competes_and_when_it_should_start(store: FakeTaskStore) -> None:
    works(store)
    for _ in range(9):
        submitted(store)
    for _ in range(40):
        submitted(store, "realtime")
    task = submitted(store)
    submitted(store)
    found = asked(store, task)
    assert (found.reason, found.position, found.queue_waiting, found.queue) == ("queued", 10, 11, "inference.batch")
    assert found.ahead_by_tier == {"realtime": 40, "batch": 9, "offline": 0}
    assert found.starts_per_s == pytest.approx(2.0)
    assert found.expected_start_at_s == pytest.approx(found.at_s + 4.5, abs=0.01)
    assert found.promotion_to == "realtime"
    assert found.promotion_at_s == pytest.approx(store.now_s + 1800, abs=1)
    assert found.sentence == (
        "It waits in batch (fresh), number 10 of 11. Besides, 40 in realtime wait for the same slots, of which batch "
        "gets 18%. The workers start 2 a second of batch, so it should start in 4 s. If it still waits in 30 min, it "
        "moves up to realtime."
    )


def test_a_deadline_before_the_expected_start_is_told(store: FakeTaskStore) -> None:
    works(store)
    for _ in range(100):
        submitted(store)
    task = submitted(store, expires_at_s=store.now_s + 10)
    assert "It is not started later than in 10 s: that is its deadline." in asked(store, task).sentence


def test_without_a_figure_nothing_is_promised(store: FakeTaskStore) -> None:
    works(store, started_per_s={}, starts_60s={}, slot_s_60s={})
    found = asked(store, submitted(store, "realtime"))
    assert (found.reason, found.expected_start_at_s, found.promotion_at_s) == ("queued", None, None)
    assert "cannot be told" in found.sentence


def test_what_serves_nobody_is_said(store: FakeTaskStore) -> None:
    task = submitted(store)
    assert asked(store, task).reason == "no worker"
    assert "no live worker serves batch" in asked(store, task).sentence
    works(store, tiers=("realtime",))
    assert (asked(store, task).reason, asked(store, task).workers) == ("no worker", 0)
    works(store, reserve=2)
    found = asked(store, task)
    assert (found.reason, found.workers, found.slots) == ("no worker", 1, 0)
    assert "reserved for realtime" in found.sentence


@pytest.mark.parametrize("told_by", ["switch", "heartbeat"])
def test_a_task_whose_workers_are_all_off_says_so(store: FakeTaskStore, told_by: str) -> None:
    task = submitted(store)
    works(store, state="draining" if told_by == "heartbeat" else "running")
    if told_by == "switch":
        store.switch("worker:w1", Action.DRAIN, by="ann")
    found = asked(store, task)
    assert (found.reason, found.slots) == ("workers paused", 2)
    assert found.sentence.endswith("but every worker that serves batch is paused or draining.")


def test_a_paused_tier_is_named_with_the_operators_reason(store: FakeTaskStore) -> None:
    works(store)
    submitted(store)
    task = submitted(store)
    store.switch("lane:batch.fresh", Action.PAUSE, by="ann", because="new model")
    store.advance(120)
    found = asked(store, task)
    assert (found.reason, found.position, found.promotion_at_s) == ("paused", 2, None)
    assert found.switch is not None
    assert found.switch["by"] == "ann"
    assert found.sentence == (
        "It waits in batch (fresh), number 2 of 2, but batch.fresh was paused 2 min ago: new model. "
        "It starts when an operator resumes it."
    )
    store.switch("lane:batch.fresh", Action.DRAIN, by="ann")
    works(store)
    assert asked(store, task).reason == "queued"


def test_a_task_that_runs_or_whose_worker_is_silent(store: FakeTaskStore) -> None:
    task = submitted(store)
    started(store, task)
    store.advance(12)
    found = asked(store, task)
    assert (found.reason, found.worker, found.sentence) == ("running", "w1", "It is running for 12 s.")
    store.cancel([(task.id, "")])
    assert asked(store, task).sentence.endswith("It was asked to stop.")
    store.advance(30)
    assert asked(store, task).reason == "lost"


def test_a_parked_retry_and_a_delayed_submit_tell_when_they_are_due(store: FakeTaskStore) -> None:
    task = submitted(store)
    token = started(store, task)
    error = {"type": "OSError", "message": "no such host"}
    store.finish(task.id, token, 0, "retrying", error, due_at_s=store.now_s + 42)  # type: ignore[arg-type]
    found = asked(store, task)
    assert (found.reason, found.due_at_s) == ("retrying", store.now_s + 42)
    assert found.sentence == "It is to be tried again in 42 s, attempt 2 after OSError: no such host."
    store.advance(43)
    found = asked(store, task)
    assert (found.reason, found.lane, found.position) == ("no worker", "returned", 1)
    delayed = submitted(store, due_at_s=store.now_s + 300)
    assert asked(store, delayed).sentence == "It was submitted with a delay: it comes into batch in 5 min."


def test_a_task_that_waits_for_others_names_them_and_their_states(store: FakeTaskStore) -> None:
    needs = [submitted(store).id for _ in range(5)]
    started(store, NewTask(needs[0], "vision.classify", "batch", "batch", "fresh", 0, "n1"))
    task = submitted(store, depends_on=tuple(needs))
    found = asked(store, task)
    assert (found.reason, found.waits_for) == (
        "dependencies", {one: "processing" if one == needs[0] else "pending" for one in needs}
    )  # fmt: skip
    assert found.sentence.startswith("It waits for 5 tasks to succeed first: ")
    assert found.sentence.endswith(" and 2 more.")


def test_how_a_task_ended_is_told_with_the_error_and_the_dead_letter(store: FakeTaskStore) -> None:
    done = submitted(store)
    store.finish(done.id, started(store, done), 0, "success")
    store.advance(7200)
    assert asked(store, done).sentence == "It succeeded 2.0 h ago, at attempt 1."
    failed = submitted(store)
    store.finish(failed.id, started(store, failed), 0, "failed", {"type": "ValueError", "message": "no"})
    found = asked(store, failed)
    assert (found.reason, found.dead_letter) == ("failed", None)
    assert found.sentence == "It failed less than a second ago, at attempt 1: ValueError: no."
    letter = DeadLetter(
        failed.id, failed.name, "batch", "batch", "fresh", "permanent error", "", None, 1, 1, 0, 0, 1.0, 2.0, True, "m"
    )
    store.bury([letter])
    found = asked(store, failed)
    assert found.reason == "dead"
    assert found.dead_letter == {"reason": "permanent error", "detail": "", "is_replayable": True, "dead_at_s": 2.0}
    assert found.sentence == (
        "It failed less than a second ago with ValueError: no, and lies in the dead letters (permanent error). "
        "It can be replayed."
    )
    cancelled = submitted(store)
    store.cancel([(cancelled.id, "")])
    assert asked(store, cancelled).sentence == "It was cancelled less than a second ago."


def test_what_is_listed_nowhere_is_on_its_way(store: FakeTaskStore) -> None:
    task = submitted(store)
    scene = store.scene(task.id, ())
    assert scene is not None
    assert explain(scene, AROUND).reason == "fetched"


def test_nothing_rises_on_the_embedded_broker_nor_into_what_is_switched_off(store: FakeTaskStore) -> None:
    task = submitted(store)
    assert asked(store, task).promotion_to == "realtime"
    assert asked(store, task, Surroundings(QUEUES, default_policy(), has_promotions=False)).promotion_to is None
    store.switch("tier:realtime", Action.DRAIN, by="ann")
    assert asked(store, task).promotion_to is None


@pytest.mark.parametrize(
    ("lane", "ahead", "waiting", "wait_s"),
    [
        ("fresh", 0, {}, 0.0),
        ("fresh", 10, {}, 5.0),
        # Half of the starts while the other lane has work, all of them after that.
        ("fresh", 10, {"returned": 4}, 4.0 + 3.0),
        ("fresh", 4, {"returned": 100}, 4.0),
        ("aged", 1, {"fresh": 100, "returned": 100}, 4.5),
    ],
)
def test_the_lanes_of_a_tier_share_its_starts_by_weight(
    lane: str, ahead: int, waiting: dict[str, int], wait_s: float
) -> None:
    assert expected_wait_s(lane, ahead, waiting, DEFAULT_LANE_WEIGHTS, per_s=2.0) == pytest.approx(wait_s)


def test_durations_are_said_as_people_say_them() -> None:
    said = [span(seconds) for seconds in (-3, 0.4, 1, 99, 300, 7200, 200_000)]
    assert said == ["less than a second"] * 2 + ["1 s", "99 s", "5 min", "2.0 h", "2.3 days"]
