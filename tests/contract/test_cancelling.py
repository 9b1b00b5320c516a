"""What every task store does when tasks are cancelled: on the fake and on Redis."""

from __future__ import annotations

import json

import pytest

from inference_tasks.state.records import Cancellation, Finish, Renewal, Run, Verdict
from tests.support.task_stores import (
    LEASE_S,
    OOPS,
    StoreHarness,
    away,
    claimed,
    counted,
    failed,
    ids_in,
    message,
    started,
    submitted,
)

RETURNED = "inference.batch.returned"


def cancelled(harness: StoreHarness, task_id: str, *, terminate: bool = False) -> Cancellation:
    (answer,) = harness.store.cancel([(task_id, "")], terminate=terminate)
    return answer


def test_a_waiting_task_ends_at_once_and_its_message_never_runs(harness: StoreHarness) -> None:
    task = submitted(harness, lane="returned")
    assert cancelled(harness, task.id) == Cancellation.CANCELLED
    record = harness.store.get(task.id)
    assert (record.state, record.attempts, record.is_finished) == ("cancelled", 0, True)
    document = json.loads(harness.result(task.id) or "")
    assert (document["status"], document["result"]["exc_type"]) == ("REVOKED", "TaskRevokedError")
    assert (counted(harness), away(harness)) == ({"admitted": 1, "cancelled": 1}, {})
    assert ids_in(harness, RETURNED) == []
    assert claimed(harness, task) == Verdict.CANCELLED
    assert cancelled(harness, task.id) == Cancellation.ENDED


def test_a_parked_task_ends_at_once_and_its_copy_never_runs(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "retrying", OOPS, due_at_s=harness.now_s() + 60)
    assert cancelled(harness, task.id) == Cancellation.CANCELLED
    record = harness.store.get(task.id)
    assert (record.state, record.error, record.due_at_s, record.failures) == ("cancelled", None, None, 1)
    assert (away(harness), ids_in(harness, RETURNED)) == ({}, [])
    assert claimed(harness, task, hop=1) == Verdict.CANCELLED


def test_who_cancels_hears_what_he_cannot_cancel(harness: StoreHarness) -> None:
    done, token = started(harness)
    harness.store.finish(done.id, token, 0, "success")
    waiting = submitted(harness)
    answers = harness.store.cancel([(done.id, ""), ("nobody", ""), (waiting.id, "")])
    assert answers == [Cancellation.ENDED, Cancellation.MISSING, Cancellation.CANCELLED]
    assert harness.store.get(done.id).state == "success"
    assert harness.store.cancel([]) == []


@pytest.mark.parametrize("terminate", [False, True])
def test_a_running_task_is_asked_to_stop_through_its_workers_renewal(harness: StoreHarness, terminate: bool) -> None:
    task, token = started(harness)
    other, token_of_other = started(harness)
    running = [(other.id, token_of_other, message(other)), (task.id, token, message(task))]
    assert harness.store.renew(running, "w1", LEASE_S) == Renewal([], {})
    assert harness.store.look(task.id, token) == Run(False, None)
    assert cancelled(harness, task.id, terminate=terminate) == Cancellation.ASKED
    assert harness.store.renew(running, "w1", LEASE_S) == Renewal([], {task.id: terminate})
    assert harness.store.look(task.id, token) == Run(True, None)
    assert harness.store.get(task.id).cancel_asked == ("terminate" if terminate else "stop")
    assert harness.store.get(task.id).state == "processing"


def test_the_stronger_word_stays(harness: StoreHarness) -> None:
    task, _ = started(harness)
    for terminate in (True, False):
        assert cancelled(harness, task.id, terminate=terminate) == Cancellation.ASKED
    assert harness.store.get(task.id).cancel_asked == "terminate"


@pytest.mark.parametrize("end", ["success", "failed", "cancelled"])
def test_a_run_that_was_asked_to_stop_may_end_as_it_likes(harness: StoreHarness, end: str) -> None:
    task, token = started(harness)
    cancelled(harness, task.id)
    assert harness.store.finish(task.id, token, 0, end, OOPS if end == "failed" else None, b"{}")
    assert harness.store.get(task.id).state == end


def test_it_is_not_tried_again(harness: StoreHarness) -> None:
    task, token = started(harness)
    cancelled(harness, task.id)
    written = harness.store.write(task.id, token, 0, "retrying", OOPS, b"{}", due_at_s=harness.now_s() + 60)
    assert written == Finish.WRITTEN
    record = harness.store.get(task.id)
    assert (record.state, record.failures, record.error) == ("cancelled", 1, None)
    assert json.loads(harness.result(task.id) or "")["status"] == "REVOKED"
    assert claimed(harness, task, hop=1) == Verdict.CANCELLED
    assert counted(harness) == {"admitted": 1, "cancelled": 1}


@pytest.mark.parametrize("how", ["released", "crashed", "lease over"])
def test_it_does_not_start_anew_elsewhere(harness: StoreHarness, how: str) -> None:
    task, token = started(harness)
    cancelled(harness, task.id)
    if how == "released":
        harness.store.release([(task.id, token)])
    elif how == "crashed":
        assert harness.store.crashed(task.id, token, "w1").over
    else:
        harness.advance(LEASE_S + 1)
    assert claimed(harness, task) == Verdict.CANCELLED
    assert harness.store.get(task.id).state == "cancelled"
    assert harness.result(task.id) is not None
    assert counted(harness) == {"admitted": 1, "cancelled": 1}


def test_a_run_whose_worker_is_gone_is_ended_and_what_it_writes_later_is_refused(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.advance(LEASE_S + 1)
    assert cancelled(harness, task.id) == Cancellation.CANCELLED
    assert harness.store.renew([(task.id, token, message(task))], "w1", LEASE_S) == Renewal([task.id], {})
    assert harness.store.write(task.id, token, 0, "success", None, b"{}") == Finish.ENDED
    assert claimed(harness, task) == Verdict.CANCELLED


def test_a_replayed_task_is_not_asked_to_stop_any_more(harness: StoreHarness) -> None:
    task, token = started(harness)
    cancelled(harness, task.id)
    harness.store.finish(task.id, token, 0, "failed", OOPS, b"{}")
    assert harness.store.replayed(task.id, 1)
    assert harness.store.get(task.id).cancel_asked is None
    marked, unmarked = failed(harness), failed(harness)
    for one in (marked, unmarked):
        assert claimed(harness, one, generation=1) == Verdict.RUN


def test_a_run_sees_its_deadline_and_that_another_has_its_task(harness: StoreHarness) -> None:
    task, token = started(harness, submitted_at_s=0.0, expires_at_s=100.0)
    run = harness.store.look(task.id, token)
    assert run is not None
    assert run.left_s == pytest.approx(100, abs=5)
    harness.advance(LEASE_S + 1)
    assert claimed(harness, task) == Verdict.RUN
    after = harness.store.look(task.id, token)
    assert after is not None
    assert after.should_stop
    assert after.left_s == pytest.approx(69, abs=5)
    assert harness.store.look("nobody", 1) is None
