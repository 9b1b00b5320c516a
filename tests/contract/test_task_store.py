"""What every task store does: one suite, run on the fake and on the scripts in a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
import redis
import redis.asyncio

from inference_tasks.errors import TaskNotFoundError
from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.records import Claimant, Finish, Move, Renewal, SubmitAnswer, Verdict, WorkerBeat
from inference_tasks.state.store import TaskStore
from inference_tasks.state.switches import Action
from tests.support.task_stores import LEASE_S, OOPS, RedisHarness, StoreHarness, message, new, started, submitted

# Submitting.


def test_a_submitted_task_is_pending_and_knows_both_tiers(harness: StoreHarness) -> None:
    task = submitted(harness)
    record = harness.store.get(task.id)
    assert (record.state, record.name, record.tier, record.tier_first) == ("pending", task.name, "batch", "offline")
    assert (record.lane, record.generation, record.attempts, record.token) == ("fresh", 0, 0, None)
    assert record.submitted_at_s == pytest.approx(harness.now_s(), abs=5)


def test_only_the_first_submission_makes_the_record(harness: StoreHarness) -> None:
    task = new()
    assert harness.store.submit([task, new()]) == [SubmitAnswer(True, "pending")] * 2
    assert harness.store.submit([task._replace(nonce="n2")]) == [SubmitAnswer(False, "pending")]
    harness.store.claim([message(task)], "w1", LEASE_S)
    assert harness.store.submit([task]) == [SubmitAnswer(False, "processing")]


def test_a_deadline_counts_from_the_stores_clock_whatever_the_clients_clock_says(harness: StoreHarness) -> None:
    task = submitted(harness, submitted_at_s=5000.0, expires_at_s=5002.0)
    record = harness.store.get(task.id)
    assert record.submitted_at_s is not None
    assert record.expires_at_s is not None
    assert record.expires_at_s - record.submitted_at_s == pytest.approx(2.0, abs=0.001)
    assert record.submitted_at_s == pytest.approx(harness.now_s(), abs=5)


def test_a_refused_submission_leaves_nothing(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert harness.store.retract([task.id], "n1") == 1
    with pytest.raises(TaskNotFoundError):
        harness.store.get(task.id)


def test_a_record_is_not_taken_back_by_another_submission_nor_once_it_is_claimed(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert harness.store.retract([task.id], "n2") == 0
    harness.store.claim([message(task)], "w1", LEASE_S)
    assert harness.store.retract([task.id], "n1") == 0
    assert harness.store.get(task.id).state == "processing"


def test_a_record_that_was_ever_claimed_is_not_taken_back(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.release([(task.id, token)])
    assert harness.store.retract([task.id], "n1") == 0
    assert harness.store.get(task.id).state == "pending"


def test_an_unknown_id_is_not_found(harness: StoreHarness) -> None:
    task = submitted(harness)
    with pytest.raises(TaskNotFoundError):
        harness.store.get("nobody")
    found = harness.store.get_many([task.id, "nobody"])
    assert [record and record.id for record in found] == [task.id, None]


def test_empty_batches_do_nothing(harness: StoreHarness) -> None:
    assert harness.store.submit([]) == []
    assert harness.store.claim([], "w1", LEASE_S) == []
    assert harness.store.retract([], "n1") == 0
    assert harness.store.renew([], "w1", LEASE_S) == Renewal([], {})
    assert harness.store.get_many([]) == []
    harness.store.release([])


# Claiming.


def test_a_claim_starts_the_task_and_tells_how_long_it_waited(harness: StoreHarness) -> None:
    task = submitted(harness)
    harness.advance(7)
    (claim,) = harness.store.claim([message(task, tier="realtime", lane="aged")], "w1", LEASE_S)
    assert (claim.verdict, claim.attempts, claim.tier_first) == (Verdict.RUN, 1, "offline")
    assert claim.wait_s == pytest.approx(7, abs=2)
    assert claim.held_until_s == pytest.approx(harness.now_s() + LEASE_S, abs=5)
    record = harness.store.get(task.id)
    assert (record.state, record.worker, record.token) == ("processing", "w1", claim.token)
    assert (record.tier, record.lane) == ("realtime", "aged")


def test_a_held_task_names_its_holder(harness: StoreHarness) -> None:
    task, token = started(harness)
    (second,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert (second.verdict, second.worker, second.token) == (Verdict.HELD, "w1", token)
    assert second.held_until_s == harness.store.get(task.id).held_until_s


def test_of_two_messages_of_one_task_in_a_batch_one_runs(harness: StoreHarness) -> None:
    task = submitted(harness)
    claims = harness.store.claim([message(task), message(task)], "w1", LEASE_S)
    assert [claim.verdict for claim in claims] == [Verdict.RUN, Verdict.HELD]


def test_a_message_whose_record_is_lost_makes_it_again(harness: StoreHarness) -> None:
    task = submitted(harness)
    harness.lose_all()
    (claim,) = harness.store.claim([message(task, submitted_at_s=harness.now_s() - 3)], "w1", LEASE_S)
    assert (claim.verdict, claim.tier_first) == (Verdict.RUN, "offline")
    assert claim.wait_s == pytest.approx(3, abs=2)
    assert harness.store.get(task.id).name == task.name


def test_tokens_grow_even_when_everything_is_lost(harness: StoreHarness) -> None:
    task, first = started(harness)
    harness.lose_all()
    (claim,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert claim.token > first


def test_a_token_grows_by_one_where_the_last_is_ahead_of_the_clock(harness: StoreHarness) -> None:
    task = new()
    ahead = round((harness.now_s() + 1000) * 1_000_000)
    harness.store.renew([(task.id, ahead, message(task))], "w1", LEASE_S)
    harness.advance(LEASE_S + 1)
    assert harness.store.claim([message(task)], "w2", LEASE_S)[0].token == ahead + 1


def test_the_end_of_a_lease_counts_a_crash_and_lets_another_worker_run(harness: StoreHarness) -> None:
    task, first = started(harness)
    harness.advance(LEASE_S + 1)
    (claim,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert (claim.verdict, claim.attempts, claim.wait_s) == (Verdict.RUN, 2, None)
    assert claim.token > first
    assert harness.store.get(task.id).crashes == 1


@pytest.mark.parametrize(("limit", "runs"), [(None, 3), (1, 1), (2, 2)])
def test_a_task_that_kills_its_workers_ends_at_its_crash_limit(
    harness: StoreHarness, limit: int | None, runs: int
) -> None:
    task = submitted(harness)
    for _ in range(runs):
        (claim,) = harness.store.claim([message(task, crash_limit=limit)], "w1", LEASE_S)
        assert claim.verdict == Verdict.RUN
        harness.advance(LEASE_S + 1)
    for verdict in (Verdict.CRASHED, Verdict.UNBURIED):
        (claim,) = harness.store.claim([message(task, crash_limit=limit)], "w1", LEASE_S)
        assert (claim.verdict, claim.attempts) == (verdict, runs)
    record = harness.store.get(task.id)
    assert (record.state, record.crashes, record.error and record.error["type"]) == ("failed", runs, "WorkerLostError")
    document = json.loads(harness.result(task.id) or "")
    assert (document["status"], document["task_id"]) == ("FAILURE", task.id)
    assert document["result"]["exc_type"] == "WorkerLostError"


def test_a_task_is_not_started_after_its_deadline(harness: StoreHarness) -> None:
    task = submitted(harness, submitted_at_s=0.0, expires_at_s=10.0)
    harness.advance(11)
    verdicts = [harness.store.claim([message(task)], "w1", LEASE_S)[0].verdict for _ in range(2)]
    assert verdicts == [Verdict.EXPIRED, Verdict.EXPIRED]
    record = harness.store.get(task.id)
    assert (record.state, record.attempts, record.is_finished) == ("expired", 0, True)
    assert json.loads(harness.result(task.id) or "")["status"] == "REVOKED"


def test_a_finished_task_is_not_started_again(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "success")
    assert harness.store.claim([message(task)], "w2", LEASE_S)[0].verdict == Verdict.FINISHED


def test_a_cancelled_task_is_never_started(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert harness.store.finish(task.id, None, None, "cancelled")
    assert harness.store.claim([message(task)], "w1", LEASE_S)[0].verdict == Verdict.CANCELLED


def test_a_message_of_an_older_generation_is_superseded(harness: StoreHarness) -> None:
    task = submitted(harness, generation=1)
    assert harness.store.claim([message(task, generation=0)], "w1", LEASE_S)[0].verdict == Verdict.SUPERSEDED


def test_a_replayed_message_starts_a_failed_task_anew_but_no_other_ended_one(harness: StoreHarness) -> None:
    failed, token = started(harness)
    harness.store.finish(failed.id, token, 0, "failed", OOPS, b"{}")
    (claim,) = harness.store.claim([message(failed, generation=1)], "w1", LEASE_S)
    assert (claim.verdict, claim.attempts) == (Verdict.RUN, 2)
    record = harness.store.get(failed.id)
    assert (record.generation, record.failures, record.crashes, record.error) == (1, 0, 0, None)
    assert record.finished_at_s is None
    assert harness.result(failed.id) is None

    done, token = started(harness)
    harness.store.finish(done.id, token, 0, "success")
    assert harness.store.claim([message(done, generation=1)], "w1", LEASE_S)[0].verdict == Verdict.FINISHED


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_replayed_task_does_not_expire_by_the_deadline_of_its_life_before(
    harness: StoreHarness, is_marked: bool
) -> None:
    (task, token) = started(harness, submitted_at_s=harness.now_s(), expires_at_s=harness.now_s() + 0.2)
    harness.store.finish(task.id, token, 0, "failed", OOPS, b"{}")
    if is_marked:
        assert harness.store.replayed(task.id, 1)
    harness.advance(0.3)
    (claim,) = harness.store.claim([message(task, generation=1, expires_at_s=None)], "w1", LEASE_S)
    assert claim.verdict == Verdict.RUN
    assert harness.store.get(task.id).expires_at_s is None


def test_a_name_with_a_separator_in_it_spoils_no_batch(harness: StoreHarness) -> None:
    good, bad = new(), Claimant("id\x1fwith\x1e", "na\x1fme", "batch", "fresh", crash_limit=1)
    claims = harness.store.claim([bad, message(good)], "w1", LEASE_S)
    assert [claim.verdict for claim in claims] == [Verdict.RUN, Verdict.RUN]
    assert harness.store.submit([new(name="na\x1fme")])[0].created


# Giving back.


def test_a_released_claim_is_as_if_it_had_not_been_made(harness: StoreHarness) -> None:
    task = submitted(harness)
    before = harness.store.get(task.id)
    (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
    harness.store.release([(task.id, claim.token - 1)])
    assert harness.store.get(task.id).state == "processing"
    harness.store.release([(task.id, claim.token), ("nobody", 1)])
    after = harness.store.get(task.id)
    assert (after.state, after.attempts, after.worker, after.started_at_s) == ("pending", 0, None, None)
    assert (after.submitted_at_s, after.token) == (before.submitted_at_s, claim.token)
    (again,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert (again.verdict, again.attempts) == (Verdict.RUN, 1)
    assert again.wait_s is not None


def test_a_crash_gives_the_claim_back_at_once_until_the_limit(harness: StoreHarness) -> None:
    task = submitted(harness)
    for crashes in (1, 2, 3):
        (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
        assert claim.verdict == Verdict.RUN
        assert harness.store.crashed(task.id, claim.token, "w1") == (crashes, crashes == 3)
        assert harness.store.crashed(task.id, claim.token, "w1") == (crashes, crashes == 3)  # counted once
    assert harness.store.get(task.id).state == "failed"
    assert harness.store.claim([message(task)], "w1", LEASE_S)[0].verdict == Verdict.UNBURIED
    assert harness.result(task.id) is not None
    assert harness.store.crashed("nobody", 1, "w1") == (0, False)


def test_the_crash_of_an_older_run_does_not_end_the_present_one(harness: StoreHarness) -> None:
    task, old = started(harness)
    harness.advance(LEASE_S + 1)
    (claim,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert harness.store.crashed(task.id, old, "w1") == (1, False)
    record = harness.store.get(task.id)
    assert (record.state, record.worker, record.token, record.crashes) == ("processing", "w2", claim.token, 1)


# Renewing.


def test_renewing_keeps_a_claim(harness: StoreHarness) -> None:
    task, token = started(harness)
    for _ in range(3):
        harness.advance(LEASE_S * 0.8)
        assert harness.store.renew([(task.id, token, message(task))], "w1", LEASE_S).lost == []
    assert harness.store.claim([message(task)], "w2", LEASE_S)[0].verdict == Verdict.HELD


def test_a_claim_is_lost_once_another_worker_holds_or_ends_the_task(harness: StoreHarness) -> None:
    taken, old = started(harness)
    harness.advance(LEASE_S + 1)
    harness.store.claim([message(taken)], "w2", LEASE_S)
    ended, token = started(harness)
    harness.store.finish(ended.id, token, 0, "success")
    kept, good = started(harness)
    running = [(taken.id, old, message(taken)), (kept.id, good, message(kept)), (ended.id, token, message(ended))]
    assert harness.store.renew(running, "w1", LEASE_S).lost == [taken.id, ended.id]


def test_renewing_makes_a_lost_record_again(harness: StoreHarness) -> None:
    lost, first = started(harness)
    resubmitted, second = started(harness)
    unnamed, third = started(harness)
    harness.lose_all()
    harness.store.submit([resubmitted])
    running = [
        (lost.id, first, message(lost)),
        (resubmitted.id, second, message(resubmitted)),
        (unnamed.id, third, None),
    ]
    assert harness.store.renew(running, "w1", LEASE_S).lost == []
    for task, token in ((lost, first), (resubmitted, second), (unnamed, third)):
        record = harness.store.get(task.id)
        assert (record.state, record.token, record.worker, record.attempts) == ("processing", token, "w1", 1)
        assert harness.store.finish(task.id, token, 0, "success")


def test_a_claim_that_was_taken_over_after_a_loss_is_not_taken_back(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.lose_all()
    harness.store.claim([message(task)], "w2", LEASE_S)
    assert harness.store.renew([(task.id, token, message(task))], "w1", LEASE_S).lost == [task.id]


def test_not_even_a_higher_token_takes_a_live_lease(harness: StoreHarness) -> None:
    task, token = started(harness)
    assert harness.store.renew([(task.id, token + 10**9, message(task))], "w2", LEASE_S).lost == [task.id]
    assert harness.store.get(task.id).worker == "w1"


# Finishing.


def test_a_result_is_written_with_the_record(harness: StoreHarness) -> None:
    task, token = started(harness)
    assert harness.store.finish(task.id, token, 0, "success", None, b'{"status": "SUCCESS"}', 60)
    record = harness.store.get(task.id)
    assert (record.state, record.held_until_s, record.error) == ("success", None, None)
    assert record.finished_at_s == pytest.approx(harness.now_s(), abs=5)
    assert harness.result(task.id) == '{"status": "SUCCESS"}'


def test_a_failure_keeps_its_reason_and_success_forgets_it(harness: StoreHarness) -> None:
    task, token = started(harness)
    assert harness.store.finish(task.id, token, 0, "retrying", OOPS)
    record = harness.store.get(task.id)
    assert (record.state, record.failures, record.error, record.finished_at_s) == ("retrying", 1, OOPS, None)
    (claim,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert (claim.verdict, claim.attempts) == (Verdict.RUN, 2)
    assert harness.store.finish(task.id, claim.token, 0, "success")
    record = harness.store.get(task.id)
    assert (record.failures, record.error) == (1, None)


def test_a_late_writer_is_refused_and_counted(harness: StoreHarness) -> None:
    task, late = started(harness)
    harness.advance(LEASE_S + 1)
    (claim,) = harness.store.claim([message(task)], "w2", LEASE_S)
    assert harness.store.write(task.id, late, 0, "success", None, b"late") == Finish.STALE
    assert harness.store.finish(task.id, claim.token, 0, "success", None, b"good")
    assert harness.store.write(task.id, late, 0, "success", None, b"late") == Finish.STALE
    assert harness.result(task.id) == "good"
    assert harness.store.stale_writes() == 2


def test_a_write_is_refused_after_the_claim_was_given_back(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.release([(task.id, token)])
    assert harness.store.write(task.id, token, 0, "success") == Finish.STALE
    assert harness.store.get(task.id).state == "pending"


def test_a_write_of_an_older_generation_is_refused(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "failed", OOPS)
    (claim,) = harness.store.claim([message(task, generation=1)], "w1", LEASE_S)
    assert harness.store.write(task.id, claim.token, 0, "success") == Finish.STALE
    assert harness.store.write(task.id, claim.token, 1, "success") == Finish.WRITTEN


@pytest.mark.parametrize("end", ["success", "failed", "cancelled", "expired", "dropped"])
def test_end_states_are_final(harness: StoreHarness, end: str) -> None:
    task, token = started(harness)
    if end == "dropped":  # no run ends so
        harness.store.release([(task.id, token)])
        assert harness.store.dropped([(task.id, 0, 0)], "gone") == 1
    else:
        assert harness.store.finish(task.id, token, 0, end)
    announced = harness.result(task.id)
    for state in ("success", "failed", "cancelled", "retrying", None):
        for by in (token, None):
            harness.store.write(task.id, by, 0, state, OOPS)
            harness.store.write(task.id, by, None, state, OOPS, b"more")
    assert harness.store.get(task.id).state == end
    assert harness.result(task.id) == announced
    assert harness.store.crashed(task.id, token, "w1").over


def test_repeating_a_write_whose_answer_was_lost_is_harmless(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "retrying", OOPS)
    assert harness.store.write(task.id, token, 0, "retrying", OOPS) == Finish.REPEATED
    assert harness.store.get(task.id).failures == 1
    (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
    harness.store.finish(task.id, claim.token, 0, "success")
    assert harness.store.finish(task.id, claim.token, 0, "success")


def test_progress_leaves_the_record_as_it_is(harness: StoreHarness) -> None:
    task, token = started(harness)
    before = harness.store.get(task.id)
    assert harness.store.write(task.id, token, 0, None, None, b"42 %") == Finish.WRITTEN
    assert harness.store.write(task.id, None, None, None, None, b"43 %") == Finish.WRITTEN
    assert harness.store.get(task.id) == before
    assert harness.result(task.id) == "43 %"


def test_a_write_from_outside_does_not_touch_a_task_that_is_held(harness: StoreHarness) -> None:
    task, _ = started(harness)
    assert harness.store.write(task.id, None, None, "failed", OOPS, b"{}") == Finish.HELD
    assert harness.store.get(task.id).state == "processing"
    assert harness.result(task.id) is None


def test_a_write_from_outside_makes_a_record_only_where_it_may(harness: StoreHarness) -> None:
    assert harness.store.write("other", None, None, "success", may_create=False) == Finish.MISSING
    assert harness.store.get_many(["other"]) == [None]
    assert harness.store.write("other", None, None, "success", None, b"{}", name="mail.send", tier="batch")
    record = harness.store.get("other")
    assert (record.state, record.name, record.tier, record.attempts) == ("success", "mail.send", "batch", 0)


def test_a_result_is_kept_though_its_record_was_lost(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.lose_all()
    assert harness.store.finish(task.id, token, 0, "success", None, b"{}", name=task.name, tier=task.tier)
    record = harness.store.get(task.id)
    assert (record.state, record.token, record.name, record.attempts) == ("success", token, task.name, 1)


def test_an_unfit_message_fails_its_task_for_those_who_wait(harness: StoreHarness) -> None:
    task = submitted(harness)
    assert harness.store.fail_unclaimed(task.id, name=task.name, tier="batch", error_type="malformed", error="no body")
    record = harness.store.get(task.id)
    assert (record.state, record.error, record.failures) == ("failed", {"type": "malformed", "message": "no body"}, 0)
    assert json.loads(harness.result(task.id) or "")["result"]["exc_message"] == ["no body"]
    held, _ = started(harness)
    assert not harness.store.fail_unclaimed(held.id, name=held.name, tier="batch", error_type="malformed", error="")


def test_control_characters_and_long_texts_in_an_error_are_tamed(harness: StoreHarness) -> None:
    task, token = started(harness)
    harness.store.finish(task.id, token, 0, "failed", {"type": "E", "message": "a\x1fb\x1e" + "é" * 5000})
    error = harness.store.get(task.id).error
    assert error is not None
    assert error["message"].startswith("a b é")
    assert len(error["message"]) == 1000


# Workers.


def beat(node: str, **fields: object) -> WorkerBeat:
    return WorkerBeat(node, 7, "0", "prefork", 2, 1, ("realtime", "batch"), 1, **fields)  # type: ignore[arg-type]


def test_a_heartbeat_is_seen_until_its_worker_falls_silent_or_leaves(harness: StoreHarness) -> None:
    said = beat("w1", starts_60s={"batch": {"offline": 3}}, started_per_s={"batch": 2.0})
    harness.store.renew([], "w1", LEASE_S, said)
    harness.store.renew([], "w2", LEASE_S, beat("w2", started_per_s={"batch": 0.5, "offline": 1.0}))
    first, second = harness.store.workers()
    assert (first.node, second.node) == ("w1", "w2")
    assert (first.tiers, first.starts_60s) == (("realtime", "batch"), {"batch": {"offline": 3}})
    assert first.seen_at_s == pytest.approx(harness.now_s(), abs=5)
    assert harness.store.rates() == {"batch": 2.5, "offline": 1.0}
    harness.store.leave("w2")
    assert [worker.node for worker in harness.store.workers()] == ["w1"]
    harness.advance(LEASE_S + 1)
    assert harness.store.workers() == []


# Only a real Redis.


def test_every_key_of_one_task_or_worker_has_an_end(real: RedisHarness) -> None:
    submitted(real)
    done, token = started(real)
    real.store.finish(done.id, token, 0, "success", None, b"{}", 60)
    real.store.write(done.id, token - 1, 0, "success")
    real.store.renew([], "w1", LEASE_S, beat("w1"))
    lost, token = started(real)
    real.client.delete(f"{real.prefix}{{{lost.id}}}:task")
    real.store.renew([(lost.id, token, message(lost))], "w1", LEASE_S)
    real.store.claim([message(new())], "w1", LEASE_S)
    ends = {key: real.client.ttl(key) for key in real.stored_keys()}
    for lasting in ("accounts", "ready:inference.batch"):
        assert ends.pop(f"{real.prefix}{lasting}") == -1
    assert len(ends) == 8
    assert all(0 < ttl_s <= 30 * 86400 for ttl_s in ends.values()), ends
    assert ends[f"{real.prefix}{{{done.id}}}:task"] <= 86400


def test_a_result_is_announced_on_the_channel_of_its_key(real: RedisHarness) -> None:
    task, token = started(real)
    with real.client.pubsub(ignore_subscribe_messages=True) as waiting:
        waiting.subscribe(f"{real.prefix}{{{task.id}}}:result")
        waiting.get_message(timeout=5)
        real.store.finish(task.id, token, 0, "success", None, b"the document", 60)
        heard = waiting.get_message(timeout=5)
    assert heard is not None
    assert heard["data"] == "the document"


class CountingCommands:
    """Passes commands on and counts them."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.count = 0

    def execute_command(self, *args: object, **options: object) -> object:
        self.count += 1
        return self._client.execute_command(*args, **options)


def test_every_call_is_one_round_trip(real: RedisHarness) -> None:
    counting = CountingCommands(real.client)
    store = TaskStore(counting, real.prefix)
    tasks = [new() for _ in range(50)]
    running = [(task.id, 1, message(task)) for task in tasks]
    calls: dict[str, Callable[[], object]] = {
        "submit": lambda: store.submit(tasks),
        "claim": lambda: store.claim([message(task) for task in tasks], "w1", LEASE_S),
        "get": lambda: store.get(tasks[0].id),
        "get_many": lambda: store.get_many([task.id for task in tasks]),
        "renew": lambda: store.renew(running, "w1", LEASE_S, beat("w1")),
        "release": lambda: store.release([(task.id, 1) for task in tasks]),
        "crashed": lambda: store.crashed(tasks[0].id, 1, "w1"),
        "finish": lambda: store.finish(tasks[0].id, 1, 0, "success", None, b"{}"),
        "retract": lambda: store.retract([task.id for task in tasks], "n1"),
        "oldest": lambda: store.oldest("inference.batch"),
        "waiting": lambda: store.waiting(["inference.batch", "inference.offline"]),
        "promoted": lambda: store.promoted([Move(task.id, 0, 1, "batch", "aged") for task in tasks]),
        "note_ready": lambda: store.note_ready("inference.batch", [(task.id, 1.0) for task in tasks]),
        "forget_ready": lambda: store.forget_ready("inference.batch", [task.id for task in tasks]),
        "dropped": lambda: store.dropped([(task.id, 0, 0) for task in tasks], "gone"),
        "lease": lambda: store.lease("sweep", "w1", 9.0),
        "unlease": lambda: store.unlease("sweep", "w1"),
        "dead_letters": store.dead_letters,
        "dead_letter": lambda: store.dead_letter(tasks[0].id),
        "dead_count": store.dead_count,
        "replayed": lambda: store.replayed(tasks[0].id, 1),
        "dead_dropped": lambda: store.dead_dropped([task.id for task in tasks]),
        "accounts": store.accounts,
        "workers": store.workers,
        "rates": store.rates,
        "leave": lambda: store.leave("w1"),
        "switch": lambda: store.switch("tier:batch", Action.PAUSE, by="me"),
        "unswitch": lambda: store.unswitch("tier:batch", by="me"),
        "switches": store.switches,
        "operator_log": store.operator_log,
    }
    for call in calls.values():
        call()  # the server may have to be told a script first
    trips = {}
    for name, call in calls.items():
        counting.count = 0
        call()
        trips[name] = counting.count
    assert trips == dict.fromkeys(calls, 1)


def test_the_publishers_store_writes_the_same_records(real: RedisHarness, redis_url: str) -> None:
    task, refused = new(), new()

    async def publish() -> list[SubmitAnswer]:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            store = AsyncTaskStore(client, real.prefix)
            answers = await store.submit([task, refused])
            assert await store.retract([refused.id], "n1") == 1
            assert await store.submit([]) == []
            return answers

    real.client.script_flush()
    assert asyncio.run(publish()) == [SubmitAnswer(True, "pending")] * 2
    assert real.store.submit([task]) == [SubmitAnswer(False, "pending")]
    assert real.store.get_many([task.id, refused.id])[1] is None
