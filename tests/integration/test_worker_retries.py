"""Tasks that fail and are tried again: how often, when, through which queue, and how they end."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest

from inference_tasks import InferenceApp, QueueFullError
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.rig import POOLS, Rig, task


def starts(rig: Rig, number: int) -> list[Any]:
    return [entry for entry in rig.history.of("start") if entry["number"] == number]


def gaps_s(rig: Rig, number: int) -> list[float]:
    times = [entry.at_s for entry in starts(rig, number)]
    return [later - earlier for earlier, later in pairwise(times)]


def accepted(app: InferenceApp, number: int, gate: str) -> str | None:
    """Submit one to batch; its id, or None if the tier was full."""
    try:
        return str(task(app, "tried.offline").options(tier="batch").submit(number, ["done"], gate).id)
    except QueueFullError:
        return None


@pytest.mark.parametrize(
    ("pool", "queue_type"), [("prefork", "quorum"), ("prefork", "classic"), ("threads", "quorum"), ("solo", "classic")]
)
def test_one_that_raises_for_ever_runs_exactly_max_attempts_times_and_is_a_dead_letter(rig: Rig, pool: str) -> None:
    app = rig.app()
    with rig.worker(*POOLS[pool]):
        failing = task(app, "tried.batch").submit(0, ["temporary"])
        (dead,) = rig.dead(app, 1)
        until(lambda: inference_of(app).store.dead_count() == 1, "it is in the index")
    assert [entry["retries"] for entry in starts(rig, 0)] == [0, 1, 2]
    assert [entry["lane"] for entry in starts(rig, 0)] == ["fresh", "returned", "returned"]
    assert all(1 <= gap_s < 30 for gap_s in gaps_s(rig, 0))
    record = failing.status()
    assert (record.state, record.attempts, record.failures, record.dead) == ("failed", 3, 3, "replayable")
    said = dead.headers["inference_dead"]
    assert (said["reason"], said["attempts"], said["tier"]) == ("attempts exhausted", 3, "batch")
    assert said["error"] == {"type": "TemporaryError", "message": "it may pass"}
    assert dead.headers["id"] == failing.id
    assert not [name for name in dead.headers if name.startswith(("x-death", "inference_token"))]
    letter = inference_of(app).store.dead_letter(failing.id)
    assert letter is not None
    assert (letter.reason, letter.failures, letter.is_replayable) == ("attempts exhausted", 3, True)
    rig.wait_waiting(app, 0)


def test_each_kind_of_error_ends_as_its_kind(rig: Rig) -> None:
    app = rig.app()
    cases = {
        1: (["listed", "done"], "success", 2),
        2: (["temporary", "permanent"], "permanent error", 2),
        3: (["value"], "error not retried", 1),
        4: (["after 1", "done"], "success", 2),
        5: (["reject"], "rejected by the task", 1),
    }
    with rig.worker("--concurrency", "2"):
        handles = {number: task(app, "tried.batch").submit(number, steps) for number, (steps, _, _) in cases.items()}
        dead = {message.headers["id"]: message.headers["inference_dead"]["reason"] for message in rig.dead(app, 3)}
        rig.wait_states(app, [one.id for one in handles.values()], success=2, failed=3)
    for number, (_, end, runs) in cases.items():
        assert dead.get(handles[number].id, "success") == end
        assert len(starts(rig, number)) == runs


@pytest.mark.parametrize(
    ("name", "steps", "runs", "least_s"),
    [
        ("tried.by_hand", ["countdown 2", "countdown 0.5", "countdown 0", "done"], 4, [2, 0.5, 0]),
        ("tried.by_hand", ["eta 2", "eta -5", "done"], 3, [2, 0]),
        ("tried.by_hand", ["countdown 0"], 4, [0, 0, 0]),
        ("tried.auto", ["value", "value", "done"], 3, [0, 0]),
        ("tried.plain", ["countdown 1", "eta 1", "done"], 3, [1, 1]),
        ("tried.plain", ["temporary", "done"], 2, [1]),
    ],
)
def test_celerys_own_ways_take_the_same_road(
    rig: Rig, name: str, steps: list[str], runs: int, least_s: list[float]
) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2"):
        result = task(app, name).delay(0, steps)
        state = "success" if steps[-1] == "done" else "failed"
        rig.wait_states(app, [result.id], **{state: 1})
    assert len(starts(rig, 0)) == runs
    assert all(gap_s >= least for gap_s, least in zip(gaps_s(rig, 0), least_s, strict=True))
    assert {entry["lane"] for entry in starts(rig, 0)[1:]} == {"returned"}
    assert app.status(result.id).tier == "batch"


def test_a_parked_retry_says_when_it_is_due_and_shows_as_pending_once_it_is(rig: Rig) -> None:
    app = rig.app()
    with rig.worker() as worker:
        parked = task(app, "tried.by_hand").submit(0, ["countdown 3", "done"])
        until(lambda: parked.status().state == "retrying", "it is parked")
        record = parked.status()
        assert (record.attempts, record.failures, record.lane, record.hop) == (1, 1, "returned", 1)
        assert record.error == {"type": "ValueError", "message": "by hand"}
        assert record.due_at_s is not None
        assert 0 < record.due_at_s - time.time() <= 3.1
        worker.terminate()
        until(lambda: parked.status().state == "pending", "it is due, and nobody is there")
        assert time.time() >= record.due_at_s
    with rig.worker(name="second"):
        assert parked.result(timeout_s=60) == 0
    assert gaps_s(rig, 0)[0] >= 3


def test_a_retry_that_could_only_start_after_the_deadline_is_not_parked(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        late = task(app, "tried.late").submit(0, ["temporary"])
        (dead,) = rig.dead(app, 1)
        rig.wait_states(app, [late.id], failed=1)
    assert len(starts(rig, 0)) == 1
    assert late.status().error == {"type": "TemporaryError", "message": "it may pass"}
    assert dead.headers["inference_dead"]["reason"] == "deadline before retry"


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_a_retry_is_not_refused_when_its_tier_is_full_and_keys_do_not_grow(rig: Rig) -> None:
    tiers = {"batch": {"bound": 5}}
    app, gate = rig.app(tiers=tiers), rig.gate()
    with rig.worker(tiers=tiers):
        failing = task(app, "tried.by_hand").submit(0, ["countdown 1", "countdown 2", "countdown 1", "done"], str(gate))
        rig.wait_started(0)
        # One by one: a quorum queue takes notice of its bound a moment late.
        filling = [each for number in range(1, 30) if (each := accepted(app, number, str(gate))) is not None]
        assert len(filling) < 29
        gate.open()
        assert failing.result(timeout_s=60) == 0
        rig.wait_states(app, filling, success=len(filling))
    assert [entry["retries"] for entry in starts(rig, 0)] == [0, 1, 2, 3]
    # 28 levels of the delay queues, once, and the queue.
    keys = [str(entry["key"]) for entry in starts(rig, 0)[1:]]
    assert {len(key) for key in keys} == {2 * 28 + len(f"{rig.namespace}.batch.returned")}


def test_first_submits_are_refused_while_parked_work_fills_the_bound(rig: Rig) -> None:
    tiers = {"batch": {"bound": 3}}
    app = rig.app(tiers=tiers)
    with rig.worker(tiers=tiers):
        parked = [task(app, "tried.by_hand").submit(number, ["countdown 60"]).id for number in range(3)]
        rig.wait_states(app, parked, retrying=3)
        with pytest.raises(QueueFullError) as caught:
            task(app, "tried.by_hand").submit(9, ["done"])
        with pytest.raises(QueueFullError):
            task(app, "step.batch").apply_async((9,), countdown=5)
        assert caught.value.reason == "parked"
        assert task(app, "step.realtime").submit(5).result(timeout_s=60) == 5


def test_a_message_given_back_by_its_task_waits_a_second_each_time(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        given_back = task(app, "tried.batch").submit(0, ["requeue"])
        rig.history.wait_for("start", count=4)
    assert all(gap_s >= 0.99 for gap_s in gaps_s(rig, 0)[:3])
    record = given_back.status()
    assert (record.failures, record.crashes) == (0, 0)
    assert record.attempts >= 3


def test_what_a_task_ignores_or_ends_itself_or_replaces_has_an_end(rig: Rig) -> None:
    app = rig.app()
    with rig.worker("--concurrency", "2"):
        ignored = task(app, "tried.batch").submit(0, ["ignore"])
        own = task(app, "tried.batch").submit(1, ["own"])
        replaced = task(app, "tried.batch").delay(2, ["replace"])
        again = task(app, "tried.batch").delay(3, ["temporary", "replace"])
        assert ignored.result(timeout_s=60) is None
        assert replaced.get(timeout=60) == 3
        assert again.get(timeout=60) == 3
        (dead,) = rig.dead(app, 1)
    assert (own.status().state, dead.headers["id"]) == ("failed", own.id)
    assert app.status(replaced.id).crashes == 0
    rig.wait_waiting(app, 0)


def test_who_waits_for_a_task_hears_of_its_failure_once(rig: Rig) -> None:
    app = rig.app()
    told = task(app, "told").si("end")
    with rig.worker("--concurrency", "2"):
        task(app, "tried.batch").apply_async((0, ["temporary"]), link_error=told)
        task(app, "tried.batch").apply_async((1, ["reject"]), link_error=told)
        task(app, "deaf").apply_async((2,), time_limit=1, link_error=told)
        assert len(rig.dead(app, 3)) == 3
        rig.history.wait_for("told", count=3)
        assert task(app, "step.offline").submit(9).result(timeout_s=60) == 9
    assert len(rig.history.of("told")) == 3
