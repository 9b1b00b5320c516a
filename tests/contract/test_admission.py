"""What every task store does with submits that share one task, and with deadlines: on the fake and on Redis."""

from __future__ import annotations

import pytest

from inference_tasks.state.records import CONFLICT, LATE, Cancellation, NewTask, ShareKey, SubmitAnswer, Verdict
from tests.support.task_stores import OOPS, RedisHarness, StoreHarness, claimed, counted, message, new, started

KEY = ShareKey("equal", 60.0)
MADE = SubmitAnswer(True, "pending")


def alike(nonce: str, *, expires_at_s: float | None = None, key: ShareKey = KEY, tier: str = "batch") -> NewTask:
    """One more submit of the same, with a deadline so many seconds from now."""
    fields = {"tier": tier, "tier_first": tier, "submitted_at_s": 0.0, "expires_at_s": expires_at_s}
    return new(nonce=nonce, shared=(key,), **fields)


def joined(task: NewTask, state: str = "pending", *, is_unsure: bool = False, lift: str = "") -> SubmitAnswer:
    return SubmitAnswer(False, state, shares=task.id, is_unsure=is_unsure, lift=lift)


def submit(harness: StoreHarness, task: NewTask) -> SubmitAnswer:
    return harness.store.submit([task])[0]


def first(harness: StoreHarness, **fields: object) -> NewTask:
    task = alike("n1", **fields)  # type: ignore[arg-type]
    assert submit(harness, task) == MADE
    harness.store.confirmed([task.id])
    return task


def run(harness: StoreHarness, task: NewTask) -> int:
    (claim,) = harness.store.claim([message(task)], "w1", 30.0)
    assert claim.verdict == Verdict.RUN
    return claim.token


# Joining.


def test_an_equal_submit_joins_the_first_whatever_its_own_id(harness: StoreHarness) -> None:
    task = first(harness)
    assert submit(harness, alike("n2")) == joined(task)
    assert submit(harness, alike("n3", key=KEY._replace(digest="other"))) == MADE
    assert submit(harness, new()) == MADE
    assert counted(harness, "batch") == {"admitted": 2, "pending": 2}
    token = run(harness, task)
    assert submit(harness, alike("n4")) == joined(task, "processing")
    harness.store.finish(task.id, token, 0, "retrying", OOPS)
    assert submit(harness, alike("n5")) == joined(task, "retrying")


def test_a_batch_may_hold_equal_ones_and_others_and_is_answered_in_order(harness: StoreHarness) -> None:
    one, other, two = alike("n1"), new(), alike("n2")
    assert harness.store.submit([one, other, two]) == [MADE, MADE, joined(one, is_unsure=True)]


def test_one_that_joins_before_the_first_is_confirmed_is_told(harness: StoreHarness) -> None:
    task = alike("n1")
    submit(harness, task)
    assert submit(harness, alike("n2")) == joined(task, is_unsure=True)
    harness.store.confirmed([task.id, "nobody"])
    assert submit(harness, alike("n3")) == joined(task)
    unsure = alike("n1", key=KEY._replace(digest="other"))
    submit(harness, unsure)
    run(harness, unsure)
    assert submit(harness, alike("n2", key=KEY._replace(digest="other"))) == joined(unsure, "processing")


@pytest.mark.parametrize("end", ["failed", "cancelled", "expired", "dropped", "success"])
def test_after_its_end_an_equal_submit_is_a_new_task(harness: StoreHarness, end: str) -> None:
    task = first(harness)
    if end == "dropped":  # no run ends so
        assert harness.store.dropped([(task.id, 0, 0)], "gone") == 1
    else:
        harness.store.finish(task.id, run(harness, task), 0, end)
    another = alike("n2")
    assert submit(harness, another) == MADE
    assert submit(harness, alike("n3")) == joined(another, is_unsure=True)


def test_a_fresh_result_is_handed_out_again_if_that_is_wished(harness: StoreHarness) -> None:
    task = first(harness)
    harness.store.finish(task.id, run(harness, task), 0, "success", None, b"{}")
    reusing = KEY._replace(reuse_s=20.0)
    assert submit(harness, alike("n2", key=reusing)) == joined(task, "success")
    harness.advance(21)
    assert submit(harness, alike("n3", key=reusing)) == MADE


def test_after_the_window_an_equal_submit_is_a_new_task(harness: StoreHarness) -> None:
    first(harness)
    harness.advance(61)
    assert submit(harness, alike("n2")) == MADE


def test_nobody_joins_a_task_that_was_asked_to_stop(harness: StoreHarness) -> None:
    task = first(harness)
    run(harness, task)
    assert harness.store.cancel([(task.id, "")]) == [Cancellation.ASKED]
    assert submit(harness, alike("n2")) == MADE


def test_a_key_whose_record_is_lost_holds_nobody_up(harness: StoreHarness) -> None:
    first(harness)
    harness.lose_all()
    assert submit(harness, alike("n2")) == MADE


def test_a_key_that_was_used_for_something_else_is_a_conflict(harness: StoreHarness) -> None:
    key = KEY._replace(print="this")
    task = first(harness, key=key)
    assert submit(harness, alike("n2", key=key)) == joined(task)
    other = alike("n3", key=key._replace(print="that"))
    assert submit(harness, other) == SubmitAnswer(False, CONFLICT, shares=task.id)
    assert harness.store.get_many([other.id]) == [None]
    harness.store.finish(task.id, run(harness, task), 0, "failed", OOPS)
    assert submit(harness, other) == MADE


def test_of_two_keys_the_first_that_finds_a_task_decides_and_the_other_leads_there_too(harness: StoreHarness) -> None:
    one, two = (KEY._replace(digest=digest) for digest in ("one", "two"))
    task = first(harness, key=one)
    assert submit(harness, alike("n2")._replace(shared=(two, one))) == joined(task)
    assert submit(harness, alike("n3", key=two)) == joined(task)


def test_the_same_id_again_is_the_same_task(harness: StoreHarness) -> None:
    task = first(harness)
    assert submit(harness, task) == SubmitAnswer(False, "pending")
    assert submit(harness, task._replace(nonce="n2", shared=())) == SubmitAnswer(False, "pending")


# Holding.


def test_the_deadline_is_the_latest_of_the_holders(harness: StoreHarness) -> None:
    task = first(harness, expires_at_s=50.0)

    def left_s() -> float | None:
        at_s = harness.store.get(task.id).expires_at_s
        return None if at_s is None else at_s - harness.now_s()

    submit(harness, alike("n2", expires_at_s=20.0))
    assert left_s() == pytest.approx(50, abs=3)
    submit(harness, alike("n3", expires_at_s=100.0))
    assert left_s() == pytest.approx(100, abs=3)
    submit(harness, alike("n4"))
    assert left_s() is None
    assert harness.store.cancel([(task.id, "n4")]) == [Cancellation.LEFT]
    assert left_s() == pytest.approx(100, abs=3)
    harness.store.cancel([(task.id, "n3"), (task.id, "n1")])
    assert left_s() == pytest.approx(20, abs=3)


def test_the_wanted_tier_is_the_highest_of_the_holders(harness: StoreHarness) -> None:
    task = first(harness, tier="offline")
    assert harness.store.get(task.id).tier_wanted == "offline"
    assert submit(harness, alike("n2", tier="realtime")) == joined(task, lift="realtime")
    assert submit(harness, alike("n3", tier="batch")) == joined(task, lift="batch")
    record = harness.store.get(task.id)
    assert (record.tier, record.tier_wanted) == ("offline", "realtime")
    harness.store.cancel([(task.id, "n2")])
    assert harness.store.get(task.id).tier_wanted == "batch"


def test_a_shared_task_ends_when_its_last_holder_cancels(harness: StoreHarness) -> None:
    task = first(harness)
    submit(harness, alike("n2"))
    for _ in range(2):
        assert harness.store.cancel([(task.id, "n1")]) == [Cancellation.LEFT]
        assert harness.store.get(task.id).state == "pending"
    assert harness.store.cancel([(task.id, "n2")]) == [Cancellation.CANCELLED]
    assert claimed(harness, task) == Verdict.CANCELLED
    assert counted(harness, "batch") == {"admitted": 1, "cancelled": 1}


def test_the_run_of_a_shared_task_is_asked_to_stop_by_the_last_holder(harness: StoreHarness) -> None:
    task = first(harness)
    submit(harness, alike("n2"))
    token = run(harness, task)
    assert harness.store.cancel([(task.id, "n2")], terminate=True) == [Cancellation.LEFT]
    assert harness.store.renew([(task.id, token, message(task))], "w1", 30.0).stopping == {}
    assert harness.store.cancel([(task.id, "n1")]) == [Cancellation.ASKED]
    assert harness.store.renew([(task.id, token, message(task))], "w1", 30.0).stopping == {task.id: False}


def test_an_operator_ends_it_for_all(harness: StoreHarness) -> None:
    task = first(harness)
    submit(harness, alike("n2"))
    assert harness.store.cancel([(task.id, "")]) == [Cancellation.CANCELLED]


# Taking back.


def test_a_refused_submit_leaves_no_key(harness: StoreHarness) -> None:
    task = alike("n1")
    submit(harness, task)
    assert harness.store.retract([task.id], "n1") == 1
    assert counted(harness, "batch") == {}
    assert submit(harness, alike("n2")) == MADE


def test_who_has_joined_survives_the_refusal_of_the_first(harness: StoreHarness) -> None:
    task = alike("n1")
    submit(harness, task)
    submit(harness, alike("n2"))
    assert harness.store.retract([task.id], "n1") == 0
    assert submit(harness, alike("n3")) == joined(task, is_unsure=True)
    assert harness.store.retract([task.id], "n3") == 0
    assert harness.store.retract([task.id], "n2") == 1
    assert harness.store.get_many([task.id]) == [None]
    assert submit(harness, alike("n4")) == MADE


def test_a_shared_task_that_has_been_claimed_is_not_taken_back(harness: StoreHarness) -> None:
    task = alike("n1")
    submit(harness, task)
    run(harness, task)
    assert harness.store.retract([task.id], "n1") == 0
    assert harness.store.get(task.id).state == "processing"


def test_a_refusal_does_not_take_another_tasks_key(harness: StoreHarness) -> None:
    task = alike("n1")
    submit(harness, task)
    harness.advance(61)
    another = alike("n2")
    submit(harness, another)
    assert harness.store.retract([task.id], "n1") == 1
    assert submit(harness, alike("n3")) == joined(another, is_unsure=True)


def test_all_that_is_kept_of_a_shared_task_ends_by_itself(real: RedisHarness) -> None:
    task = first(real)
    submit(real, alike("n2"))
    keys = [key for key in real.stored_keys() if "ready:" not in key and not key.endswith(("accounts", "away"))]
    assert len(keys) == 3
    assert all(real.client.ttl(key) > 0 for key in keys)
    real.store.finish(task.id, run(real, task), 0, "success")
    assert not [key for key in real.stored_keys() if key.endswith(":holders")]


# Deadlines.


def test_a_submit_is_refused_when_more_wait_than_may(harness: StoreHarness) -> None:
    for lane in ("fresh", "fresh", "returned"):
        submit(harness, new(tier="offline", lane=lane))
    submit(harness, new(tier="offline", due_at_s=100.0, submitted_at_s=0.0))
    submit(harness, new(tier="realtime"))
    assert submit(harness, new(tier="offline", max_ahead=2)) == SubmitAnswer(False, LATE, ahead=3)
    assert submit(harness, new(max_ahead=2, tier="offline", worker_published=True)) == MADE
    late = new(tier="offline", max_ahead=2)
    answers = harness.store.submit([new(tier="offline", max_ahead=4), new(tier="offline", max_ahead=4), late])
    assert answers == [MADE, SubmitAnswer(False, LATE, ahead=5), SubmitAnswer(False, LATE, ahead=5)]
    assert harness.store.get_many([late.id]) == [None]


def test_an_equal_submit_joins_though_it_would_be_too_late_itself(harness: StoreHarness) -> None:
    task = first(harness)
    started(harness)
    submit(harness, new())
    assert submit(harness, alike("n2")._replace(max_ahead=0)) == joined(task)
    assert submit(harness, alike("n3", key=KEY._replace(digest="o"))._replace(max_ahead=0)).state == LATE
