"""What every task store does when tasks inherit a tier from those that wait for them: on the fake and on Redis."""

from __future__ import annotations

from inference_tasks.state.records import Freed, Lift, Move, NewTask, ShareKey, SubmitAnswer, Verdict
from tests.contract.test_depending import dependent, ran
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

REALTIME = "inference.realtime.returned"
BATCH = "inference.batch"
NOT_KEPT = "its message is not kept (state.lift_body_bytes)"


def kept(harness: StoreHarness, **fields: object) -> NewTask:
    return submitted(harness, message="kept", tier_first="batch", **fields)


def wishes(task: NewTask, *needs: NewTask, tier: str = "realtime") -> list[tuple[str, str, str]]:
    return [(need.id, tier, task.id) for need in needs]


def marked(harness: StoreHarness, lift: Lift) -> bool:
    move = Move(lift.id, lift.generation, lift.hop + 1, lift.tier, "returned", lift.because)
    return harness.store.promoted([move]) == [True]


def lifted(harness: StoreHarness) -> tuple[NewTask, NewTask, Lift]:
    """A task of batch that a realtime one waits for, and its lift; the copy is published, and marked."""
    need = kept(harness)
    task = dependent(harness, need, tier="realtime")
    (lift,) = harness.store.to_lift(wishes(task, need))
    assert marked(harness, lift)
    return need, task, lift


def test_a_waiting_task_inherits_the_tier_of_the_one_that_waits_for_it(harness: StoreHarness) -> None:
    need, task, lift = lifted(harness)
    assert lift == Lift(need.id, 0, 0, "realtime", task.id, "kept")
    record = harness.store.get(need.id)
    assert (record.tier, record.lane, record.hop, record.tier_first) == ("realtime", "returned", 1, "batch")
    assert (record.lifted_from, record.lifted_by, record.not_lifted) == ("batch", task.id, None)
    assert (ids_in(harness, REALTIME), ids_in(harness, BATCH)) == ([need.id], [])
    assert away(harness) == {"realtime": 2}
    # It has that tier by now, and somebody needs it there.
    assert harness.store.to_lift(wishes(task, need)) == []
    assert harness.store.to_lower() == []
    assert claimed(harness, need) == Verdict.SUPERSEDED
    assert claimed(harness, need, tier="realtime", lane="returned", hop=1) == Verdict.RUN
    assert away(harness) == {"realtime": 1}
    assert counted(harness, "batch") == {"admitted": 1, "processing": 1}
    assert harness.store.get(need.id).lifted_by == task.id


def test_a_task_that_has_started_is_not_marked(harness: StoreHarness) -> None:
    need = kept(harness)
    task = dependent(harness, need, tier="realtime")
    (lift,) = harness.store.to_lift(wishes(task, need))
    assert claimed(harness, need) == Verdict.RUN
    assert not marked(harness, lift)
    record = harness.store.get(need.id)
    assert (record.tier, record.hop, record.lifted_from) == ("batch", 0, None)
    assert harness.store.to_lift(wishes(task, need)) == []


def test_what_waits_itself_starts_in_the_tier_and_so_does_what_it_waits_for(harness: StoreHarness) -> None:
    first = kept(harness)
    second = dependent(harness, first)
    third = dependent(harness, second, tier="realtime")
    assert [one.id for one in harness.store.to_lift(wishes(third, second))] == [first.id]
    record = harness.store.get(second.id)
    assert (record.state, record.tier, record.lifted_from, record.lifted_by) == ("waiting", "batch", "batch", third.id)
    assert ran(harness, first) == [Freed(second.id, 0, 0, "realtime", "its message")]
    assert harness.store.promoted([Move(second.id, 0, 1, "realtime", "returned")]) == [True]
    record = harness.store.get(second.id)
    assert (record.tier, record.lifted_from) == ("realtime", "batch")
    assert ids_in(harness, REALTIME) == [second.id]


def test_a_lift_ends_when_nobody_needs_it(harness: StoreHarness) -> None:
    need, task, _ = lifted(harness)
    other = dependent(harness, need, tier="realtime", worker_published=True)
    harness.store.cancel([(task.id, "")])
    assert harness.store.to_lower() == []
    harness.store.cancel([(other.id, "")])
    assert harness.store.to_lower() == [Lift(need.id, 0, 1, "batch", "-", "kept")]
    assert marked(harness, harness.store.to_lower()[0])
    record = harness.store.get(need.id)
    assert (record.tier, record.lane, record.hop, record.lifted_from, record.lifted_by) == (
        "batch",
        "returned",
        2,
        None,
        None,
    )
    assert claimed(harness, need, tier="realtime", lane="returned", hop=1) == Verdict.SUPERSEDED
    assert harness.store.to_lower() == []
    assert claimed(harness, need, lane="returned", hop=2) == Verdict.RUN


def test_the_lift_of_what_waits_itself_ends_too(harness: StoreHarness) -> None:
    first = kept(harness)
    second = dependent(harness, first)
    third = dependent(harness, second, tier="realtime")
    (lift,) = harness.store.to_lift(wishes(third, second))
    assert marked(harness, lift)
    harness.store.cancel([(third.id, "")])
    # What it waits for has its turn when it is lowered itself.
    found = harness.store.to_lower() or harness.store.to_lower()
    assert found == [Lift(first.id, 0, 1, "batch", "-", "kept")]
    assert harness.store.get(second.id).lifted_from is None
    assert marked(harness, found[0])
    assert [one.tier for one in ran(harness, first, lane="returned", hop=2)] == ["batch"]


def test_a_lift_falls_to_the_tier_that_somebody_still_needs(harness: StoreHarness) -> None:
    need = submitted(harness, tier="offline", message="kept")
    task, other = dependent(harness, need, tier="realtime"), dependent(harness, need)
    # Both want it: one copy, in the higher tier.
    (lift,) = harness.store.to_lift([*wishes(other, need, tier="batch"), *wishes(task, need)])
    assert (lift.tier, lift.because) == ("realtime", task.id)
    assert marked(harness, lift)
    harness.store.cancel([(task.id, "")])
    (lower,) = harness.store.to_lower()
    assert lower.tier == "batch"
    assert marked(harness, lower)
    assert (harness.store.get(need.id).tier, harness.store.get(need.id).lifted_from) == ("batch", "offline")
    harness.store.cancel([(other.id, "")])
    assert [one.tier for one in harness.store.to_lower()] == ["offline"]


def test_what_cannot_be_lifted_says_why(harness: StoreHarness) -> None:
    large = submitted(harness)
    parked = kept(harness)
    (claim,) = harness.store.claim([message(parked)], "w1", LEASE_S)
    harness.store.finish(parked.id, claim.token, 0, "retrying", OOPS, due_at_s=harness.now_s() + 60)
    task = dependent(harness, large, parked, tier="realtime")
    assert harness.store.to_lift(wishes(task, large, parked)) == []
    assert harness.store.get(large.id).not_lifted == NOT_KEPT
    assert harness.store.get(parked.id).not_lifted == "it is parked until it is tried again"
    assert harness.store.to_lift([("nobody", "realtime", "x")]) == []


def test_a_submit_of_a_higher_tier_that_joins_a_task_lifts_it_until_it_leaves(harness: StoreHarness) -> None:
    key = (ShareKey("digest", 60.0),)
    need = kept(harness, shared=key, nonce="low")
    answer = harness.store.submit([new(tier="realtime", shared=key, nonce="high")])[0]
    assert (answer.shares, answer.lift) == (need.id, "realtime")
    (lift,) = harness.store.to_lift([(need.id, answer.lift, "shared")])
    assert marked(harness, lift)
    assert harness.store.get(need.id).lifted_by == "shared"
    assert harness.store.to_lower() == []
    harness.store.cancel([(need.id, "high")])
    assert [one.tier for one in harness.store.to_lower()] == ["batch"]


def test_a_message_is_kept_only_until_its_task_starts_or_ends(real: RedisHarness) -> None:
    task, gone = kept(real), kept(real)
    assert real.store.submit([task]) == [SubmitAnswer(False, "pending")]
    found = [key for key in real.stored_keys() if key.endswith(":message")]
    assert len(found) == 2
    assert all(real.client.ttl(key) > 0 for key in found)
    assert claimed(real, task) == Verdict.RUN
    real.store.cancel([(gone.id, "")])
    assert not [key for key in real.stored_keys() if key.endswith(":message")]


def test_the_list_of_what_is_lifted_has_an_end_and_forgets_what_has_started(real: RedisHarness) -> None:
    need, _, _ = lifted(real)
    key = f"{real.prefix}lifted"
    assert real.client.zrange(key, 0, -1) == [need.id]
    assert claimed(real, need, tier="realtime", lane="returned", hop=1) == Verdict.RUN
    assert real.store.to_lower() == []
    assert real.client.exists(key) == 0
