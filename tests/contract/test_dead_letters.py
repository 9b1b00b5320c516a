"""What every task store knows of the dead: one suite, run on the fake and on Redis."""

from __future__ import annotations

from inference_tasks.state.records import DeadLetter, NewTask, Verdict
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

RETURNED = "inference.batch.returned"


def letter(task: NewTask, **fields: object) -> DeadLetter:
    said = DeadLetter(
        id=task.id,
        task=task.name,
        tier=task.tier,
        tier_first=task.tier_first,
        lane=task.lane,
        reason="permanent error",
        detail="é",
        error=OOPS,
        attempts=1,
        failures=1,
        crashes=0,
        generation=task.generation,
        submitted_at_s=12.5,
        dead_at_s=100.25,
        is_replayable=True,
        message_id=None,
    )
    return DeadLetter(**{**said.as_dict(), **fields})  # type: ignore[arg-type]


def test_a_failed_task_is_unburied_until_its_message_is_known_to_lie_among_the_dead(harness: StoreHarness) -> None:
    task = failed(harness)
    (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
    assert (claim.verdict, claim.attempts, claim.tier_first) == (Verdict.UNBURIED, 1, "offline")
    harness.store.bury([letter(task)])
    harness.store.bury([letter(task)])
    assert harness.store.get(task.id).dead == "replayable"
    assert claimed(harness, task) == Verdict.FINISHED
    assert counted(harness) == {"admitted": 1, "failed": 1, "dead:replayable": 1}


def test_an_unfit_message_is_buried_under_its_task(harness: StoreHarness) -> None:
    task = submitted(harness)
    harness.store.fail_unclaimed(task.id, name=task.name, tier="batch", error_type="malformed", error="no body")
    assert claimed(harness, task) == Verdict.UNBURIED
    harness.store.bury([letter(task, is_replayable=False)])
    assert counted(harness) == {"admitted": 1, "failed": 1, "dead:unfit": 1}


def test_letters_are_listed_by_their_time_of_death(harness: StoreHarness) -> None:
    letters = [letter(new(), dead_at_s=float(at_s)) for at_s in (3, 1, 2)]
    harness.store.bury(letters)
    assert harness.store.dead_count() == 3
    newest = [letters[0], letters[2], letters[1]]
    assert harness.store.dead_letters() == newest
    assert harness.store.dead_letters(newest_first=False, limit=2) == [letters[1], letters[2]]
    assert harness.store.dead_letters(offset=1, limit=1) == [letters[2]]
    assert harness.store.dead_letters(limit=0) == []
    assert harness.store.dead_letter(letters[1].id) == letters[1]
    assert harness.store.dead_letter("nobody") is None
    assert counted(harness) == {}  # without a failed task they count nowhere


def test_a_replayed_task_waits_in_returned_in_its_next_life(harness: StoreHarness) -> None:
    task = failed(harness)
    harness.store.bury([letter(task)])
    assert harness.store.replayed(task.id, 1)
    record = harness.store.get(task.id)
    assert (record.state, record.generation, record.hop, record.lane) == ("pending", 1, 0, "returned")
    assert (record.failures, record.crashes, record.error, record.dead, record.finished_at_s) == (
        0,
        0,
        None,
        None,
        None,
    )
    assert (counted(harness), away(harness)) == ({"admitted": 1, "pending": 1}, {"batch": 1})
    assert (harness.store.dead_count(), harness.result(task.id)) == (0, None)
    assert ids_in(harness, RETURNED) == [task.id]
    assert harness.store.replayed(task.id, 1)
    assert claimed(harness, task) == Verdict.SUPERSEDED
    assert claimed(harness, task, generation=1, lane="returned") == Verdict.RUN


def test_a_replay_may_be_marked_after_its_copy_has_been_claimed(harness: StoreHarness) -> None:
    task = failed(harness)
    harness.store.bury([letter(task)])
    assert claimed(harness, task, generation=1) == Verdict.RUN
    assert (counted(harness), harness.store.dead_count()) == ({"admitted": 1, "processing": 1}, 0)
    assert harness.store.replayed(task.id, 1)
    assert harness.store.get(task.id).state == "processing"


def test_only_a_failed_task_is_replayed(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "success")
    assert not harness.store.replayed(task.id, 1)
    assert harness.store.get(task.id).state == "success"
    assert harness.store.replayed("nobody", 1)


def test_a_replayed_letter_without_a_record_makes_it(harness: StoreHarness) -> None:
    task = new()
    harness.store.bury([letter(task, attempts=4)])
    assert harness.store.replayed(task.id, 1)
    record = harness.store.get(task.id)
    assert (record.state, record.name, record.tier, record.tier_first) == ("pending", task.name, "batch", "offline")
    assert (record.attempts, record.submitted_at_s, record.generation) == (4, 12.5, 1)
    assert counted(harness) == {"admitted": 1, "pending": 1}


def test_a_letter_that_an_operator_drops_stays_failed_and_is_counted_so(harness: StoreHarness) -> None:
    task, foreign = failed(harness), new()
    harness.store.bury([letter(task), letter(foreign)])
    for _ in range(2):
        harness.store.dead_dropped([task.id, foreign.id, "nobody"])
    assert (harness.store.dead_count(), harness.store.get(task.id).dead) == (0, "dropped")
    assert counted(harness) == {"admitted": 1, "failed": 1, "dead:dropped": 1}
    assert claimed(harness, task) == Verdict.FINISHED


def test_a_letter_of_an_earlier_life_replaces_no_later_one_and_buries_nothing(harness: StoreHarness) -> None:
    task = failed(harness)
    claimed(harness, task, generation=1)
    harness.store.bury([letter(task)])
    assert counted(harness) == {"admitted": 1, "processing": 1}
    later = letter(task, generation=1)
    harness.store.bury([later])
    harness.store.bury([letter(task)])
    assert harness.store.dead_letter(task.id) == later


def test_the_dead_are_accounted_for_though_their_records_have_ended_their_days(real: RedisHarness) -> None:
    replayed, dropped, claimed_first = failed(real), failed(real), failed(real)
    real.store.bury([letter(task) for task in (replayed, dropped, claimed_first)])
    for task in (replayed, dropped, claimed_first):
        real.client.delete(f"{real.prefix}{{{task.id}}}:task")
    real.store.bury([letter(replayed)])
    assert counted(real) == {"admitted": 3, "failed": 3, "dead:replayable": 3}
    assert real.store.replayed(replayed.id, 1)
    real.store.dead_dropped([dropped.id])
    assert claimed(real, claimed_first, generation=1) == Verdict.RUN
    assert counted(real) == {"admitted": 3, "pending": 1, "failed": 1, "dead:dropped": 1, "processing": 1}
    assert real.store.dead_count() == 0
