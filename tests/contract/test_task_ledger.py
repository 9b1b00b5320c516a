"""What every task store counts, and what it knows of work that waits, is parked or dead: on the fake and on Redis."""

from __future__ import annotations

import json

import pytest

from inference_tasks.state.records import PARKED, Claimant, Move, NewTask, SubmitAnswer, Verdict
from inference_tasks.state.switches import Action
from tests.support.task_stores import (
    LEASE_S,
    OOPS,
    RedisHarness,
    StoreHarness,
    away,
    claimed,
    counted,
    failed,
    ids_in,
    message,
    new,
    started,
    submitted,
)

FRESH, RETURNED, AGED = "inference.batch", "inference.batch.returned", "inference.batch.aged"


def parked(harness: StoreHarness, delay_s: float = 60.0, **fields: object) -> NewTask:
    """A task that has been started once and waits for its next run, with the message that will come."""
    task, token = started(harness, **fields)
    due_at_s = harness.now_s() + delay_s
    assert harness.store.finish(task.id, token, 0, "retrying", OOPS, due_at_s=due_at_s)
    return task._replace(hop=task.hop + 1, lane="aged" if task.lane == "aged" else "returned")


# Counts.


def test_each_task_is_counted_under_the_tier_it_was_first_submitted_to(harness: StoreHarness) -> None:
    assert harness.store.accounts().since_s is None
    submitted(harness)
    task, token = started(harness)
    assert counted(harness) == {"admitted": 2, "pending": 1, "processing": 1}
    harness.store.finish(task.id, token, 0, "success")
    assert counted(harness) == {"admitted": 2, "pending": 1, "success": 1}
    assert counted(harness, "batch") == {}
    assert harness.store.accounts().since_s == pytest.approx(harness.now_s(), abs=5)


def test_a_refused_submission_was_never_admitted(harness: StoreHarness) -> None:
    task = submitted(harness, lane="returned")
    assert (away(harness), ids_in(harness, RETURNED)) == ({"batch": 1}, [task.id])
    harness.store.retract([task.id], "n1")
    assert (counted(harness), away(harness), ids_in(harness, RETURNED)) == ({}, {}, [])


def test_refused_submits_are_counted_by_their_reason_and_are_part_of_no_sum(harness: StoreHarness) -> None:
    of_batch = {"tier": "batch", "tier_first": "batch"}
    task, other = submitted(harness, **of_batch), submitted(harness, tier="offline", tier_first="offline")
    harness.store.retract([task.id, other.id], "n1", "full")
    harness.store.retract([task.id], "n1", "full")  # it is gone
    harness.store.switch("tier:batch", Action.REFUSE, by="somebody")
    for _ in range(2):
        (answer,) = harness.store.submit([new(**of_batch)])
        assert answer.state == "paused"
    harness.store.unswitch("tier:batch", by="somebody")
    submitted(harness, **of_batch)
    (answer,) = harness.store.submit([new(**of_batch, max_ahead=0)])
    assert answer.state == "late"
    accounts = harness.store.accounts()
    assert accounts.refused == {"batch": {"full": 1, "paused": 2, "late": 1}, "offline": {"full": 1}}
    assert counted(harness, "batch") == {"admitted": 1, "pending": 1}


@pytest.mark.parametrize("end", ["success", "failed", "cancelled", "expired"])
def test_every_end_is_counted_once(harness: StoreHarness, end: str) -> None:
    task, token = started(harness)
    for _ in range(2):
        harness.store.finish(task.id, token, 0, end)
        harness.store.finish(task.id, None, None, "cancelled")
    assert counted(harness) == {"admitted": 1, end: 1}


def test_a_task_that_ends_while_it_waits_leaves_its_queue(harness: StoreHarness) -> None:
    task = submitted(harness, lane="returned")
    harness.store.finish(task.id, None, None, "cancelled")
    assert (counted(harness), away(harness)) == ({"admitted": 1, "cancelled": 1}, {})
    assert ids_in(harness, RETURNED) == []


def test_the_deadline_and_the_crash_limit_are_counted_where_the_claim_finds_them(harness: StoreHarness) -> None:
    late = submitted(harness, submitted_at_s=0.0, expires_at_s=5.0)
    doomed, _ = started(harness)
    harness.advance(LEASE_S + 1)
    assert claimed(harness, late) == Verdict.EXPIRED
    assert claimed(harness, doomed, crash_limit=1) == Verdict.CRASHED
    assert counted(harness) == {"admitted": 2, "expired": 1, "failed": 1}


def test_what_redis_forgot_is_counted_anew_from_a_later_date(harness: StoreHarness) -> None:
    waits, (runs, token) = submitted(harness), started(harness)
    harness.lose_all()
    assert harness.store.accounts().by_tier == {}
    harness.store.renew([(runs.id, token, message(runs))], "w1", LEASE_S)
    claimed(harness, waits)
    harness.store.finish(runs.id, token, 0, "success")
    assert counted(harness) == {"admitted": 2, "processing": 1, "success": 1}
    assert harness.store.accounts().since_s == pytest.approx(harness.now_s(), abs=5)


def test_work_without_a_tier_is_counted_apart_and_waits_nowhere(harness: StoreHarness) -> None:
    harness.store.write("other", None, None, "retrying", OOPS, name="mail.send")
    assert (counted(harness, ""), away(harness)) == ({"admitted": 1, "retrying": 1}, {})
    harness.store.write("other", None, None, "success")
    assert counted(harness, "") == {"admitted": 1, "success": 1}


# Hops.


def test_a_message_that_a_copy_has_replaced_is_superseded_whatever_the_state(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert harness.store.promoted([Move(task.id, 0, 1, "realtime", "aged")]) == [True]
    assert claimed(harness, task) == Verdict.SUPERSEDED
    assert claimed(harness, task, hop=1) == Verdict.RUN
    assert claimed(harness, task) == Verdict.SUPERSEDED
    assert harness.store.get(task.id).hop == 1


def test_a_copy_whose_mark_is_missing_is_believed(harness: StoreHarness) -> None:
    task, token = started(harness)
    assert claimed(harness, task, hop=2) == Verdict.HELD
    assert harness.store.get(task.id).hop == 0
    harness.store.release([(task.id, token)])
    assert claimed(harness, task, hop=2) == Verdict.RUN
    assert harness.store.get(task.id).hop == 2
    assert claimed(harness, task) == Verdict.SUPERSEDED


def test_hops_count_within_a_generation(harness: StoreHarness) -> None:
    task = failed(harness, hop=3)
    assert claimed(harness, task, hop=0, generation=1) == Verdict.RUN
    assert harness.store.get(task.id).hop == 0


def test_a_copy_that_was_never_confirmed_supersedes_nothing(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.lose_all()
    copy = task._replace(hop=1, lane="returned", due_at_s=harness.now_s() + 5)
    assert harness.store.submit([copy])[0].created
    # The run goes on to say that the copy is parked: the record is not its own, and keeps its hop.
    harness.store.finish(task.id, token, 0, "retrying", OOPS, due_at_s=harness.now_s() + 5)
    assert harness.store.get(task.id).hop == 0
    assert claimed(harness, copy) == Verdict.RUN


# Parking.


def test_a_parked_task_says_when_it_is_due_and_its_old_message_does_not_run_early(harness: StoreHarness) -> None:
    copy = parked(harness)
    record = harness.store.get(copy.id)
    assert (record.state, record.hop, record.lane, record.attempts) == ("retrying", 1, "returned", 1)
    assert record.due_at_s == record.ready_at_s == pytest.approx(harness.now_s() + 60, abs=5)
    assert (counted(harness), away(harness)) == ({"admitted": 1, "retrying": 1}, {"batch": 1})
    assert harness.waits([RETURNED]) == {RETURNED: {copy.id: pytest.approx(-60, abs=5)}}
    assert harness.store.waiting([RETURNED]) == {RETURNED: (0, None)}
    assert harness.store.oldest(RETURNED) == []
    assert claimed(harness, copy, hop=0) == Verdict.SUPERSEDED
    harness.advance(61)
    assert harness.store.waiting([RETURNED])[RETURNED].waiting == 1
    assert claimed(harness, copy) == Verdict.RUN
    record = harness.store.get(copy.id)
    assert (record.state, record.attempts, record.due_at_s) == ("processing", 2, None)
    assert (away(harness), ids_in(harness, RETURNED)) == ({}, [])


def test_aged_work_stays_aged_when_it_is_parked_and_is_away_only_then(harness: StoreHarness) -> None:
    copy = parked(harness, lane="aged")
    assert harness.store.get(copy.id).lane == "aged"
    assert (away(harness), ids_in(harness, AGED)) == ({"batch": 1}, [copy.id])
    (claim,) = harness.store.claim([message(copy)], "w1", LEASE_S)
    harness.store.release([(copy.id, claim.token)])
    assert (away(harness), ids_in(harness, AGED)) == ({}, [copy.id])


def test_a_tier_with_as_much_work_away_as_its_bound_takes_nothing_new_from_outside(harness: StoreHarness) -> None:
    first = parked(harness)
    submitted(harness, lane="returned")
    assert away(harness) == {"batch": 2}
    refused = SubmitAnswer(False, PARKED)
    assert harness.store.submit([new(), new(due_at_s=harness.now_s() + 9)]) == [refused, refused]
    assert counted(harness) == {"admitted": 2, "retrying": 1, "pending": 1}
    # Canvas steps, copies, other tiers and tasks that exist are not refused.
    admitted = [new(worker_published=True), new(hop=1), new(generation=1), new(lane="returned"), new(tier="realtime")]
    assert [answer.created for answer in harness.store.submit(admitted)] == [True] * 5
    assert harness.store.submit([first]) == [SubmitAnswer(False, "retrying")]
    harness.store.claim([message(first), message(admitted[3])], "w1", LEASE_S)
    assert harness.store.submit([new()])[0].created


def test_a_batch_of_delayed_submits_ends_at_the_bound(harness: StoreHarness) -> None:
    tasks = [new(due_at_s=1030.0, submitted_at_s=1000.0) for _ in range(3)]
    assert [answer.state for answer in harness.store.submit(tasks)] == ["pending", "pending", PARKED]
    record = harness.store.get(tasks[0].id)
    assert record.due_at_s == pytest.approx(harness.now_s() + 30, abs=5)
    assert (record.lane, sorted(ids_in(harness, RETURNED))) == ("returned", sorted(task.id for task in tasks[:2]))


# Waiting.


def test_a_task_waits_where_and_since_when_it_did_after_a_release_or_a_crash(harness: StoreHarness) -> None:
    task = submitted(harness, lane="returned")
    harness.advance(50)
    for end in (
        lambda token: harness.store.release([(task.id, token)]),
        lambda token: harness.store.crashed(task.id, token, "w1"),
    ):
        (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
        assert (ids_in(harness, RETURNED), away(harness)) == ([], {})
        end(claim.token)
        assert harness.waits([RETURNED]) == {RETURNED: {task.id: pytest.approx(50, abs=5)}}
        assert away(harness) == {"batch": 1}


def test_a_claim_takes_the_task_out_of_the_queue_that_its_record_names(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert claimed(harness, task, tier="realtime", lane="aged", hop=1) == Verdict.RUN
    assert (ids_in(harness, FRESH), ids_in(harness, "inference.realtime.aged")) == ([], [])


def test_a_run_that_is_taken_up_again_waits_nowhere(harness: StoreHarness) -> None:
    task, token = started(harness, lane="returned")
    harness.lose_all()
    harness.store.submit([task])
    assert (ids_in(harness, RETURNED), away(harness)) == ([task.id], {"batch": 1})
    harness.store.renew([(task.id, token, message(task))], "w1", LEASE_S)
    assert harness.store.get(task.id).token == token
    assert (ids_in(harness, RETURNED), away(harness)) == ([], {})
    assert counted(harness) == {"admitted": 1, "processing": 1}


def test_the_oldest_come_first_and_only_those_old_enough(harness: StoreHarness) -> None:
    tasks = []
    for _ in range(3):
        tasks.append(submitted(harness))
        harness.advance(100)
    found = harness.store.oldest(FRESH, harness.now_s() - 150)
    assert [one.id for one in found] == [task.id for task in tasks[:2]]
    assert [one.id for one in harness.store.oldest(FRESH, limit=1)] == [tasks[0].id]
    assert harness.store.oldest(FRESH)[0].ready_at_s == pytest.approx(harness.now_s() - 300, abs=5)
    backlog = harness.store.waiting([FRESH, AGED])
    assert (backlog[FRESH].waiting, backlog[AGED]) == (3, (0, None))
    assert backlog[FRESH].oldest_ready_at_s == found[0].ready_at_s


def test_a_promoted_task_waits_in_its_new_queue_since_now(harness: StoreHarness) -> None:
    task, (running, _) = submitted(harness), started(harness)
    parked_one, other_life = parked(harness), submitted(harness, generation=1)
    harness.advance(30)
    moves = [Move(one.id, 0, one.hop + 1, "realtime", "aged") for one in (task, running, parked_one, other_life)]
    assert harness.store.promoted([*moves, Move("nobody", 0, 1, "realtime", "aged")]) == [True, *[False] * 4]
    assert harness.store.promoted([Move(task.id, 0, 1, "realtime", "aged")]) == [False]
    record = harness.store.get(task.id)
    assert (record.state, record.tier, record.tier_first, record.lane, record.hop) == (
        "pending",
        "realtime",
        "offline",
        "aged",
        1,
    )
    assert harness.waits([FRESH, "inference.realtime.aged"]) == {
        FRESH: {other_life.id: pytest.approx(30, abs=5)},
        "inference.realtime.aged": {task.id: pytest.approx(0, abs=5)},
    }


def test_a_parked_task_that_is_due_can_be_promoted(harness: StoreHarness) -> None:
    copy = parked(harness)
    harness.advance(100)
    assert harness.store.promoted([Move(copy.id, 0, 2, "realtime", "aged")]) == [True]
    assert counted(harness) == {"admitted": 1, "pending": 1}
    assert away(harness) == {}


def test_an_index_that_was_lost_is_noted_again(harness: StoreHarness) -> None:
    lost, (running, _) = new(), started(harness)
    seen = [(lost.id, harness.now_s() - 70), (running.id, harness.now_s())]
    assert harness.store.note_ready(FRESH, seen) == 1
    assert harness.waits([FRESH]) == {FRESH: {lost.id: pytest.approx(70, abs=5)}}
    assert claimed(harness, lost) == Verdict.RUN
    assert ids_in(harness, FRESH) == []


def test_only_what_does_not_wait_in_a_queue_can_be_forgotten_there(harness: StoreHarness) -> None:
    waits, gone = submitted(harness), new()
    harness.store.note_ready(FRESH, [(gone.id, harness.now_s())])
    assert harness.store.forget_ready(FRESH, [waits.id, gone.id, "nobody"]) == 1
    assert ids_in(harness, FRESH) == [waits.id]


def test_a_task_whose_message_is_gone_is_dropped_and_those_who_wait_learn_why(harness: StoreHarness) -> None:
    task, (running, _), moved = submitted(harness), started(harness), submitted(harness)
    harness.store.promoted([Move(moved.id, 0, 1, "realtime", "aged")])
    gone = [(task.id, 0, 0), (running.id, 0, 0), (moved.id, 0, 0), ("nobody", 0, 0)]
    assert harness.store.dropped(gone, "queue full") == 1
    assert harness.store.dropped(gone, "queue full") == 0
    record = harness.store.get(task.id)
    assert (record.state, record.error) == ("dropped", {"type": "dropped", "message": "queue full"})
    assert record.finished_at_s is not None
    assert json.loads(harness.result(task.id) or "")["result"]["exc_message"] == ["dropped: queue full"]
    assert counted(harness) == {"admitted": 3, "dropped": 1, "processing": 1, "pending": 1}
    assert ids_in(harness, FRESH) == []
    assert claimed(harness, task) == Verdict.FINISHED


# Leases.


def test_a_lease_has_one_holder_until_it_ends_or_is_given_back(harness: StoreHarness) -> None:
    assert harness.store.lease("sweep", "m1", 30.0)
    assert harness.store.lease("sweep", "m1", 30.0)
    assert not harness.store.lease("sweep", "m2", 30.0)
    harness.store.unlease("sweep", "m2")
    assert not harness.store.lease("sweep", "m2", 30.0)
    harness.store.unlease("sweep", "m1")
    assert harness.store.lease("sweep", "m2", 30.0)
    harness.advance(31)
    assert harness.store.lease("sweep", "m1", 30.0)


# Only a real Redis.


def test_a_large_batch_is_counted_whole(real: RedisHarness) -> None:
    tasks = [new() for _ in range(5000)]
    real.store.submit(tasks)
    assert counted(real) == {"admitted": 5000, "pending": 5000}
    claims = real.store.claim([Claimant(task.id, "f", "batch", "fresh") for task in tasks], "w1", LEASE_S)
    assert {claim.verdict for claim in claims} == {Verdict.RUN}
    assert (counted(real), ids_in(real, FRESH)) == ({"admitted": 5000, "processing": 5000}, [])
