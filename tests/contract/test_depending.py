"""What every task store does with tasks that wait for other tasks: on the fake and on Redis."""

from __future__ import annotations

import json

import pytest

from inference_tasks.state.records import (
    DEPENDENCY_CYCLE,
    DEPENDENCY_FAILED,
    DEPENDENCY_UNKNOWN,
    PARKED,
    Finish,
    Freed,
    Move,
    NewTask,
    SubmitAnswer,
    Verdict,
    Visit,
    Visitor,
)
from tests.support.task_stores import (
    LEASE_S,
    OOPS,
    RedisHarness,
    StoreHarness,
    away,
    claimed,
    counted,
    ids_in,
    message,
    new,
    submitted,
)

RETURNED = "inference.batch.returned"


def dependent(harness: StoreHarness, *needs: NewTask, **fields: object) -> NewTask:
    task = new(lane="returned", depends_on=tuple(need.id for need in needs), message="its message", **fields)
    assert harness.store.submit([task]) == [SubmitAnswer(True, "waiting")]
    return task


def ran(harness: StoreHarness, task: NewTask, state: str = "success", **fields: object) -> list[Freed]:
    """Run a task to its end; what that has freed."""
    found: list[Freed] = []
    harness.store.on_freed = found.extend
    (claim,) = harness.store.claim([message(task, **fields)], "w1", LEASE_S)
    assert claim.verdict == Verdict.RUN
    assert harness.store.finish(
        task.id, claim.token, task.generation, state, OOPS if state == "failed" else None, b"{}"
    )
    return found


def visit(harness: StoreHarness, task: NewTask) -> Visit:
    (answer,) = harness.store.visited([Visitor(message(task), task.depends_on, task.message)])
    return answer


def refusal(harness: StoreHarness, *needs: str, **fields: object) -> SubmitAnswer:
    task = new(lane="returned", depends_on=needs, **fields)
    (answer,) = harness.store.submit([task])
    if "id" not in fields:
        assert harness.store.get_many([task.id]) == [None]
    return answer


def test_a_task_waits_until_the_last_of_what_it_needs_has_succeeded(harness: StoreHarness) -> None:
    first, second = submitted(harness), submitted(harness)
    task = dependent(harness, first, second)
    record = harness.store.get(task.id)
    assert (record.state, record.lane, set(record.waits_for)) == ("waiting", "returned", {first.id, second.id})
    assert (counted(harness), away(harness)) == ({"admitted": 3, "pending": 2, "waiting": 1}, {"batch": 1})
    assert ids_in(harness, RETURNED) == []
    assert ran(harness, first) == []
    assert harness.store.get(task.id).waits_for == (second.id,)
    assert ran(harness, second) == [Freed(task.id, 0, 0, "batch", "its message")]
    assert harness.store.get(task.id).waits_for == ()
    assert harness.store.promoted([Move(task.id, 0, 1, "batch", "returned")]) == [True]
    record = harness.store.get(task.id)
    assert (record.state, record.hop, record.lane) == ("pending", 1, "returned")
    assert (ids_in(harness, RETURNED), away(harness)) == ([task.id], {"batch": 1})
    assert claimed(harness, task) == Verdict.SUPERSEDED
    assert claimed(harness, task, hop=1) == Verdict.RUN
    assert away(harness) == {}
    assert counted(harness) == {"admitted": 3, "processing": 1, "success": 2}


def test_a_released_copy_is_believed_where_its_mark_is_missing(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = dependent(harness, need)
    assert claimed(harness, task) == Verdict.WAITING
    assert claimed(harness, task, hop=1) == Verdict.RUN
    assert (counted(harness), away(harness)) == ({"admitted": 2, "pending": 1, "processing": 1}, {})
    assert harness.store.get(task.id).waits_for == ()


def test_one_whose_retry_was_written_from_outside_waits_for_nobody(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = dependent(harness, need)
    assert harness.store.write(task.id, None, None, "retrying", OOPS) == Finish.WRITTEN
    record = harness.store.get(task.id)
    assert (record.state, record.lane, record.waits_for) == ("retrying", "returned", ())
    assert refusal(harness, task.id, id=need.id) == SubmitAnswer(False, "pending")  # no circle
    assert ran(harness, need) == []
    assert claimed(harness, task) == Verdict.RUN


def test_one_that_needs_nothing_any_more_may_run_from_its_own_message(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = dependent(harness, need)
    ran(harness, need)
    assert claimed(harness, task) == Verdict.RUN
    assert harness.store.promoted([Move(task.id, 0, 1, "batch", "returned")]) == [False]


def test_a_task_whose_needs_have_all_succeeded_is_pending_at_once(harness: StoreHarness) -> None:
    need = submitted(harness)
    ran(harness, need)
    task = new(lane="returned", depends_on=(need.id,), message="its message")
    assert harness.store.submit([task]) == [SubmitAnswer(True, "pending")]
    assert ids_in(harness, RETURNED) == [task.id]
    assert harness.store.submit([task]) == [SubmitAnswer(False, "pending")]


@pytest.mark.parametrize("end", ["failed", "cancelled", "expired", "dropped", "crashed"])
def test_any_other_end_fails_those_that_wait_and_those_that_wait_for_them(harness: StoreHarness, end: str) -> None:
    need = submitted(harness, expires_at_s=50.0 if end == "expired" else None, submitted_at_s=0.0)
    task = dependent(harness, need)
    last = dependent(harness, task, tier="realtime")
    store = harness.store
    if end == "failed":
        assert ran(harness, need, "failed") == []
    elif end == "cancelled":
        store.cancel([(need.id, "")])
    elif end == "expired":
        harness.advance(60)
        assert claimed(harness, need) == Verdict.EXPIRED
    elif end == "dropped":
        assert store.dropped([(need.id, 0, 0)], "full") == 1
    else:
        (claim,) = store.claim([message(need, crash_limit=1)], "w1", LEASE_S)
        assert store.crashed(need.id, claim.token, "w1").over
    record = store.get(task.id)
    state = "failed" if end == "crashed" else end
    why = {"type": "DependencyFailedError", "message": f"It needed task {need.id}, which ended as {state}."}
    assert (record.state, record.error, record.dead, record.waits_for) == ("failed", why, None, ())
    record = store.get(last.id)
    assert record.state == "failed"
    assert record.error is not None
    assert record.error["message"] == f"It needed task {task.id}, which ended as failed."
    assert away(harness) == {}
    assert counted(harness) == (
        {"admitted": 3, "failed": 3} if state == "failed" else {"admitted": 3, state: 1, "failed": 2}
    )
    document = json.loads(harness.result(task.id) or "")
    assert document["status"] == "FAILURE"
    assert document["result"]["exc_type"] == "DependencyFailedError"
    # Its message comes round, and goes to the dead letters as that of any failed task.
    assert visit(harness, task) == Visit("unburied")
    assert claimed(harness, task) == Verdict.UNBURIED


def test_what_cannot_come_is_refused_and_leaves_nothing(harness: StoreHarness) -> None:
    need = submitted(harness)
    store = harness.store
    assert refusal(harness, need.id, "nobody") == SubmitAnswer(False, DEPENDENCY_UNKNOWN, dependency="nobody")
    store.cancel([(need.id, "")])
    expected = SubmitAnswer(False, DEPENDENCY_FAILED, dependency=need.id, dependency_state="cancelled")
    assert refusal(harness, need.id) == expected
    assert refusal(harness, "me", id="me") == SubmitAnswer(False, DEPENDENCY_CYCLE, dependency="me")
    assert store.get_many(["me"]) == [None]
    assert counted(harness) == {"admitted": 1, "cancelled": 1}


def test_a_circle_is_refused(harness: StoreHarness) -> None:
    first = submitted(harness)
    second = dependent(harness, first)
    third = dependent(harness, second)
    answer = refusal(harness, third.id, id=first.id)
    assert answer == SubmitAnswer(False, DEPENDENCY_CYCLE, dependency=third.id)
    assert harness.store.get(first.id).state == "pending"
    # Also where its record was taken back in between.
    assert harness.store.retract([first.id], "n1") == 1
    answer = refusal(harness, third.id, id=first.id)
    assert answer == SubmitAnswer(False, DEPENDENCY_CYCLE, dependency=third.id)


def test_a_submit_that_was_not_stored_takes_its_record_back_unless_it_was_freed(harness: StoreHarness) -> None:
    need = submitted(harness)
    gone, freed = dependent(harness, need, nonce="n2"), dependent(harness, need, nonce="n2")
    assert harness.store.retract([gone.id], "n2") == 1
    assert (counted(harness), away(harness)) == ({"admitted": 2, "pending": 1, "waiting": 1}, {"batch": 1})
    assert [one.id for one in ran(harness, need)] == [freed.id]
    assert harness.store.promoted([Move(freed.id, 0, 1, "batch", "returned")]) == [True]
    assert harness.store.retract([freed.id], "n2") == 0


def test_what_waits_counts_as_parked_for_the_bound(harness: StoreHarness) -> None:
    need = submitted(harness)
    tasks = [dependent(harness, need) for _ in range(2)]
    assert (
        harness.store.submit([new(), new(lane="returned", depends_on=(need.id,))]) == [SubmitAnswer(False, PARKED)] * 2
    )
    harness.store.cancel([(tasks[0].id, "")])
    assert harness.store.get(tasks[0].id).state == "cancelled"
    assert visit(harness, tasks[0]) == Visit("over")
    assert harness.store.submit([new()])[0].created
    assert ran(harness, need)[0].id == tasks[1].id


def test_a_message_that_comes_round_is_told_what_is_to_become_of_it(harness: StoreHarness) -> None:
    first, second = submitted(harness), submitted(harness)
    task = dependent(harness, first, second, expires_at_s=500.0, submitted_at_s=0.0)
    assert visit(harness, task) == Visit("wait", tuple(sorted((first.id, second.id))))
    ran(harness, first)
    assert visit(harness, task) == Visit("wait", (second.id,))
    ran(harness, second)
    # Whoever was to release it did not come to that.
    assert visit(harness, task) == Visit("free", tier="batch")
    assert harness.store.promoted([Move(task.id, 0, 1, "batch", "returned")]) == [True]
    assert visit(harness, task) == Visit("over")


def test_a_message_that_comes_round_after_its_deadline_ends_its_task(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = dependent(harness, need, expires_at_s=500.0, submitted_at_s=0.0)
    last = dependent(harness, task)
    harness.advance(501)
    assert visit(harness, task) == Visit("over")
    assert [harness.store.get(one.id).state for one in (task, last)] == ["expired", "failed"]
    assert (counted(harness), away(harness)) == ({"admitted": 3, "pending": 1, "expired": 1, "failed": 1}, {})


def test_after_a_loss_a_message_makes_its_record_again_and_waits_on(harness: StoreHarness) -> None:
    first, second = submitted(harness), submitted(harness)
    task = dependent(harness, first, second)
    harness.lose_all()
    both = tuple(sorted((first.id, second.id)))
    assert visit(harness, task) == Visit("wait", both, both)
    record = harness.store.get(task.id)
    assert (record.state, record.lane, record.waits_for, record.tier_first) == ("waiting", "returned", both, "offline")
    assert (counted(harness), away(harness)) == ({"admitted": 1, "waiting": 1}, {"batch": 1})
    # Their messages are seen again, and so are their ends.
    assert ran(harness, first) == []
    assert visit(harness, task) == Visit("wait", (second.id,), (second.id,))
    assert ran(harness, second) == [Freed(task.id, 0, 0, "batch", "its message")]


def test_after_a_loss_a_failed_dependency_is_still_learnt(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = dependent(harness, need)
    harness.lose_all()
    ran(harness, need, "failed")
    assert visit(harness, task) == Visit("unburied")
    assert harness.store.get(task.id).state == "failed"


def test_without_its_message_a_freed_task_starts_when_its_own_comes_round(harness: StoreHarness) -> None:
    need = submitted(harness)
    task = new(lane="returned", depends_on=(need.id,))
    harness.store.submit([task])
    assert ran(harness, need) == []
    assert harness.store.get(task.id).state == "waiting"
    assert visit(harness, task) == Visit("free", tier="batch")


def test_of_very_many_that_wait_the_rest_learns_it_when_its_messages_come_round(real: RedisHarness) -> None:
    need = submitted(real)
    tasks = [new(tier="offline", lane="returned", depends_on=(need.id,), message="m") for _ in range(1500)]
    real.store.submit(tasks)
    freed = {one.id for one in ran(real, need)}
    assert len(freed) == 1000
    left = [task for task in tasks if task.id not in freed]
    assert [visit(real, task) for task in left[:3]] == [Visit("free", tier="offline")] * 3


def test_nothing_of_what_waits_is_kept_without_an_end(real: RedisHarness) -> None:
    need = submitted(real)
    task = dependent(real, need)
    kept = [key for key in real.stored_keys() if "{" in key]
    assert {key.rpartition(":")[2] for key in kept} == {"task", "needs", "dependents", "message"}
    assert all(real.client.ttl(key) > 0 for key in kept)
    real.store.cancel([(task.id, "")])
    ran(real, need)
    left = {key.rpartition(":")[2] for key in real.stored_keys() if "{" in key}
    assert left == {"task", "result"}
