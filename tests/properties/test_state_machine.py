"""The scripts on a real Redis, driven at random beside the fake store, and watched by rules that neither may break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference_tasks.state.records import (
    END_STATES,
    Cancellation,
    Claim,
    Claimant,
    DeadLetter,
    Lift,
    Move,
    NewTask,
    ShareKey,
    State,
    TaskError,
    TaskRecord,
    Verdict,
    Visit,
    Visitor,
)
from inference_tasks.state.store import TaskStore
from inference_tasks.testing.store import FakeTaskStore
from tests.support.state_changes import WatchedStore
from tests.support.task_stores import FakeHarness, RedisHarness

LEASE_S = 1000.0
DEADLINE_S = 2500.0
DELAY_S = 550.0
BOUNDS = {"realtime": 2, "batch": 2}
IDS = ("a", "b", "c")
LANES = {"fresh": "", "returned": ".returned", "aged": ".aged"}
QUEUES = tuple(f"inference.{tier}{suffix}" for tier in ("realtime", "batch", "offline") for suffix in LANES.values())
WORKERS = ("w1", "w2", "w3")
ids = st.sampled_from(IDS)
messages = st.sampled_from(("", "its message"))
workers = st.sampled_from(WORKERS)
nonces = st.sampled_from(("n1", "n2"))
generations = st.sampled_from((0, 0, 0, 1))
hops = st.sampled_from((0, 0, 0, 1, 2))
lanes = st.sampled_from(("fresh", "returned", "returned", "aged"))
queues = st.sampled_from(("inference.batch", "inference.batch.returned", "inference.batch.aged"))
# Ends are rare, and so are losses: a task that has ended, or is forgotten, has no more life to get wrong.
states = st.sampled_from(("retrying",) * 4 + (None,) * 3 + ("failed", "failed", "success", "cancelled"))
outside_states = st.sampled_from((None,) * 6 + ("retrying", "retrying", "cancelled"))
seldom = st.sampled_from((False,) * 7 + (True,))


@dataclass
class Held:
    """A claim as its worker remembers it: both stores' tokens, and until when its lease runs by this test's count."""

    id: str
    worker: str
    token: int
    fake_token: int
    generation: int
    until_s: float
    is_open: bool = True


@pytest.fixture
def harness(redis_url: str) -> Iterator[RedisHarness]:
    harness = RedisHarness(redis_url, bounds=BOUNDS)
    yield harness
    harness.close()


class TaskLife(RuleBasedStateMachine):
    """Anything that publishers, workers and operators may do, in any order, with any loss."""

    real: RedisHarness

    @initialize()
    def begin(self) -> None:
        self.real.lose_all()
        self.fake = FakeHarness(FakeTaskStore(bounds=BOUNDS))
        self.held: list[Held] = []
        self.clock_s = 0.0
        self.highest_token = dict.fromkeys(IDS, 0)
        self.highest_attempts = dict.fromkeys(IDS, 0)
        self.ended: dict[str, tuple[int, str]] = {}

    def _message(self, task_id: str, generation: int, hop: int = 0, lane: str = "returned") -> Claimant:
        return Claimant(task_id, "f", "batch", lane, generation, tier_first="offline", crash_limit=2, hop=hop)

    @rule(
        task_ids=st.lists(ids, min_size=1, max_size=3),
        nonce=nonces,
        generation=generations,
        lane=lanes,
        has_deadline=st.booleans(),
        is_delayed=seldom,
        by_worker=seldom,
        message=messages,
    )
    def submit(
        self,
        task_ids: list[str],
        nonce: str,
        generation: int,
        lane: str,
        has_deadline: bool,
        is_delayed: bool,
        by_worker: bool,
        message: str,
    ) -> None:
        blank = NewTask("", "f", "batch", "offline", lane, generation, nonce, 0.0, worker_published=by_worker)
        tasks = [
            blank._replace(
                id=task_id,
                expires_at_s=DEADLINE_S if has_deadline else None,
                due_at_s=DELAY_S if is_delayed else None,
                message=message,
            )
            for task_id in task_ids
        ]
        assert self.real.store.submit(tasks) == self.fake.store.submit(tasks)

    @rule(
        task_id=ids, nonce=nonces, needs=st.lists(ids, min_size=1, max_size=2, unique=True), has_deadline=st.booleans()
    )
    def submit_to_wait(self, task_id: str, nonce: str, needs: list[str], has_deadline: bool) -> None:
        expires_at_s = DEADLINE_S if has_deadline else None
        task = NewTask(
            task_id, "f", "batch", "offline", "returned", 0, nonce, 0.0, expires_at_s, depends_on=tuple(needs)
        )
        assert self.real.store.submit([task]) == self.fake.store.submit([task])

    @rule(task_ids=st.lists(ids, min_size=1, max_size=2, unique=True), is_marked=st.booleans())
    def lift(self, task_ids: list[str], is_marked: bool) -> None:
        wishes = [(task_id, "realtime", "x") for task_id in task_ids]
        self._move(self.real.store.to_lift(wishes), self.fake.store.to_lift(wishes), is_marked)

    @rule(order=st.permutations(IDS), is_left=st.booleans())
    def one_waits_in_realtime_for_another(self, order: list[str], is_left: bool) -> None:
        blank = NewTask("", "f", "batch", "offline", "returned", 0, "n1", 0.0, worker_published=True)
        need, dependent = order[0], order[1]
        tasks = [
            blank._replace(id=need, message="its message"),
            blank._replace(id=dependent, tier="realtime", depends_on=(need,)),
        ]
        assert self.real.store.submit(tasks) == self.fake.store.submit(tasks)
        self.lift([need], True)
        if is_left:
            self.cancel(dependent, False, True)
            self.lower(True)

    @rule(is_marked=st.booleans())
    def lower(self, is_marked: bool) -> None:
        # Each looks at them in an order of its own, and one that waits is lowered before what it waits for.
        for _ in IDS:
            lifts, expected = self.real.store.to_lower(), self.fake.store.to_lower()
        self._move(lifts, expected, is_marked)

    def _move(self, lifts: list[Lift], expected: list[Lift], is_marked: bool) -> None:
        assert sorted(lifts) == sorted(expected)
        if is_marked:
            moves = [Move(one.id, one.generation, one.hop + 1, one.tier, "returned", one.because) for one in lifts]
            assert self.real.store.promoted(moves) == self.fake.store.promoted(moves)

    @rule(task_id=ids, needs=st.lists(ids, min_size=1, max_size=2, unique=True), generation=generations, hop=hops)
    def what_waits_comes_round(self, task_id: str, needs: list[str], generation: int, hop: int) -> None:
        (record,) = self.real.store.get_many([task_id])
        if record is None or record.state != State.WAITING:
            return
        visitor = Visitor(self._message(task_id, generation, hop), tuple(needs))
        answers, expected = self.real.store.visited([visitor]), self.fake.store.visited([visitor])
        assert [_sorted(one) for one in answers] == [_sorted(one) for one in expected]

    @rule(task_ids=st.lists(ids, max_size=2), nonce=nonces)
    def retract(self, task_ids: list[str], nonce: str) -> None:
        assert self.real.store.retract(task_ids, nonce) == self.fake.store.retract(task_ids, nonce)
        for task_id in task_ids:
            if self.fake.store.get_many([task_id]) == [None]:
                self._forget(task_id)

    @rule(task_ids=st.lists(ids, min_size=1, max_size=3), worker=workers, generation=generations, hop=hops, lane=lanes)
    def claim(self, task_ids: list[str], worker: str, generation: int, hop: int, lane: str) -> None:
        self._claim(task_ids, worker, generation, hop, lane)

    @rule(task_id=ids, worker=workers)
    def the_present_message_comes(self, task_id: str, worker: str) -> None:
        (record,) = self.real.store.get_many([task_id])
        if record is not None:
            self._claim([task_id], worker, record.generation, record.hop, record.lane or "fresh")

    def _claim(self, task_ids: list[str], worker: str, generation: int, hop: int = 0, lane: str = "returned") -> None:
        messages = [self._message(task_id, generation, hop, lane) for task_id in task_ids]
        hops_before = {record.id: record for record in self.real.store.get_many(task_ids) if record is not None}
        answers = self.real.store.claim(messages, worker, LEASE_S)
        expected = self.fake.store.claim(messages, worker, LEASE_S)
        for task_id, answer, model in zip(task_ids, answers, expected, strict=True):
            assert _plain(answer) == _plain(model)
            if answer.verdict == Verdict.RUN:
                before = hops_before.get(task_id)
                assert before is None or before.cancel_asked is None or before.generation < generation, (
                    "a task ran again that was asked to stop"
                )
                is_replaced = before is not None and before.generation == generation and before.hop > hop
                assert not is_replaced, "a message ran that a copy had replaced"
                self._hold(task_id, worker, generation, answer, model)

    @rule(task_id=ids, worker=workers, seconds=st.sampled_from((0.0, 400.0, 1100.0)))
    def another_message_comes(self, task_id: str, worker: str, seconds: float) -> None:
        """The commonest trouble: a second message of a task, early or late in its lease."""
        if seconds:
            self._pass(seconds)
        self._claim([task_id], worker, 0)

    def _hold(self, task_id: str, worker: str, generation: int, answer: Claim, model: Claim) -> None:
        live = [held for held in self.held if held.id == task_id and held.is_open and held.until_s > self.clock_s]
        assert not live, "two live leases for one task"
        assert answer.token > self.highest_token[task_id], "a token did not grow"
        self.highest_token[task_id] = answer.token
        for held in self.held:
            if held.id == task_id:
                held.is_open = False
        self.held.append(Held(task_id, worker, answer.token, model.token, generation, self.clock_s + LEASE_S))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        before = self.real.store.get_many([held.id])[0]
        self.real.store.release([(held.id, held.token)])
        self.fake.store.release([(held.id, held.fake_token)])
        after = self.real.store.get_many([held.id])[0]
        if before and after and before != after:
            assert after.attempts == before.attempts - 1
            self.highest_attempts[held.id] = after.attempts
        held.is_open = False

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        answer = self.real.store.crashed(held.id, held.token, held.worker)
        assert answer == self.fake.store.crashed(held.id, held.fake_token, held.worker)
        held.is_open = False

    @precondition(lambda self: self.held)
    @rule(data=st.data(), worker=workers)
    def renew(self, data: st.DataObject, worker: str) -> None:
        mine = [held for held in self.held if held.worker == worker]
        chosen = data.draw(st.lists(st.sampled_from(mine), unique_by=lambda held: held.id, max_size=2)) if mine else []
        messages = [self._message(held.id, held.generation) for held in chosen]
        lost = self.real.store.renew(
            [(held.id, held.token, said) for held, said in zip(chosen, messages, strict=True)], worker, LEASE_S
        )
        lost_by_fake = self.fake.store.renew(
            [(held.id, held.fake_token, said) for held, said in zip(chosen, messages, strict=True)], worker, LEASE_S
        )
        assert lost == lost_by_fake
        for held in chosen:
            held.is_open = held.id not in lost.lost
            if held.is_open:
                held.until_s = self.clock_s + LEASE_S
                self.highest_token[held.id] = max(self.highest_token[held.id], held.token)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), state=states, is_parked=st.booleans())
    def finish(self, data: st.DataObject, state: str | None, is_parked: bool) -> None:
        held = data.draw(st.sampled_from(self.held))
        why: TaskError | None = {"type": "E", "message": "m"} if state in ("failed", "retrying") else None
        for_both = (held.generation, state, why, b"x", 60)
        delay_s = DELAY_S if is_parked and state == "retrying" else None
        due_at_s, fake_due_at_s = (delay_s and harness.now_s() + delay_s for harness in (self.real, self.fake))
        answer = self.real.store.write(held.id, held.token, *for_both, due_at_s=due_at_s)
        assert answer == self.fake.store.write(held.id, held.fake_token, *for_both, due_at_s=fake_due_at_s)
        if state is not None:
            held.is_open = False

    @rule(task_id=ids, state=outside_states, may_create=seldom)
    def write_from_outside(self, task_id: str, state: str | None, may_create: bool) -> None:
        answer = self.real.store.write(task_id, None, None, state, None, b"y", 60, may_create=may_create)
        assert answer == self.fake.store.write(task_id, None, None, state, None, b"y", 60, may_create=may_create)

    @rule(
        task_id=ids,
        nonce=nonces,
        digest=st.sampled_from(("k1", "k1", "k2")),
        tier=st.sampled_from(("realtime", "batch", "offline")),
        has_deadline=st.booleans(),
        reuse_s=st.sampled_from((0.0, 500.0)),
        is_stored=st.booleans(),
    )
    def submit_alike(
        self, task_id: str, nonce: str, digest: str, tier: str, has_deadline: bool, reuse_s: float, is_stored: bool
    ) -> None:
        expires_at_s = DEADLINE_S if has_deadline else None
        shared = (ShareKey(digest, 800.0, reuse_s),)
        task = NewTask(task_id, "f", tier, tier, "fresh", 0, nonce, 0.0, expires_at_s, shared=shared)
        (answer,) = self.real.store.submit([task])
        assert [answer] == self.fake.store.submit([task])
        if answer.shares:
            (record,) = self.real.store.get_many([answer.shares])
            assert record is not None, "a submit joined a task that nobody knows"
            assert not record.is_finished or (record.state == State.SUCCESS and reuse_s), (
                "a submit joined an ended task"
            )
            assert record.cancel_asked is None or record.is_finished, "a submit joined a task that is to stop"
        if is_stored and (answer.created or answer.shares):
            for store in (self.real.store, self.fake.store):
                store.confirmed([answer.shares or task_id])

    @rule(task_id=ids, nonce=nonces)
    def give_up(self, task_id: str, nonce: str) -> None:
        wishes = [(task_id, nonce)]
        (record,) = self.real.store.get_many([task_id])
        if record is None or record.tier_wanted is None:
            return
        assert self.real.store.cancel(wishes) == self.fake.store.cancel(wishes)

    @rule(task_id=ids, terminate=st.booleans(), is_meant=seldom)
    def cancel(self, task_id: str, terminate: bool, is_meant: bool) -> None:
        (record,) = self.real.store.get_many([task_id])
        # What has ended has no more life to get wrong, so most wishes are for what runs.
        if not is_meant and (record is None or record.state != State.PROCESSING):
            return
        wishes = [(task_id, "")]
        answers = self.real.store.cancel(wishes, terminate=terminate)
        assert answers == self.fake.store.cancel(wishes, terminate=terminate)
        if answers == [Cancellation.CANCELLED]:
            assert record is not None
            self.ended[task_id] = (record.generation, State.CANCELLED)

    @rule(task_id=ids, generation=generations, hop=hops, tier=st.sampled_from(("realtime", "batch")), lane=lanes)
    def promote(self, task_id: str, generation: int, hop: int, tier: str, lane: str) -> None:
        (record,) = self.real.store.get_many([task_id])
        next_hop = record.hop + 1 if record is not None and hop else hop
        move = Move(task_id, generation, next_hop, tier, lane)
        assert self.real.store.promoted([move]) == self.fake.store.promoted([move])

    @rule(queue=queues, task_ids=st.lists(ids, min_size=1, max_size=2, unique=True))
    def note_what_waits(self, queue: str, task_ids: list[str]) -> None:
        seen, fake_seen = ([(one, harness.now_s() - 5) for one in task_ids] for harness in (self.real, self.fake))
        assert self.real.store.note_ready(queue, seen) == self.fake.store.note_ready(queue, fake_seen)

    @rule(queue=queues, task_ids=st.lists(ids, min_size=1, max_size=2, unique=True))
    def forget_what_waits(self, queue: str, task_ids: list[str]) -> None:
        assert self.real.store.forget_ready(queue, task_ids) == self.fake.store.forget_ready(queue, task_ids)

    @precondition(lambda self: self.clock_s > 0)
    @rule(task_id=ids, generation=generations, hop=hops)
    def drop(self, task_id: str, generation: int, hop: int) -> None:
        gone = [(task_id, generation, hop)]
        assert self.real.store.dropped(gone, "gone") == self.fake.store.dropped(gone, "gone")

    @rule(task_id=ids, generation=generations, is_replayable=st.booleans())
    def bury(self, task_id: str, generation: int, is_replayable: bool) -> None:
        self._bury(task_id, generation, is_replayable)

    def _bury(self, task_id: str, generation: int, is_replayable: bool) -> None:
        letter = DeadLetter(
            id=task_id,
            task="f",
            tier="batch",
            tier_first="offline",
            lane="returned",
            reason="permanent error",
            detail="",
            error=None,
            attempts=self.highest_attempts[task_id],
            failures=1,
            crashes=0,
            generation=generation,
            submitted_at_s=1.5,
            dead_at_s=float(IDS.index(task_id)),
            is_replayable=is_replayable,
            message_id=None,
        )
        self.real.store.bury([letter])
        self.fake.store.bury([letter])

    @rule(task_id=ids, is_replayable=st.booleans(), is_replayed=st.booleans())
    def the_dead_are_buried_and_some_replayed(self, task_id: str, is_replayable: bool, is_replayed: bool) -> None:
        (record,) = self.real.store.get_many([task_id])
        if record is not None and record.state == "failed":
            self._bury(task_id, record.generation, is_replayable)
            if is_replayed:
                self.replay(task_id, record.generation + 1)

    @rule(task_id=ids, generation=st.sampled_from((1, 2)))
    def replay(self, task_id: str, generation: int) -> None:
        assert self.real.store.replayed(task_id, generation) == self.fake.store.replayed(task_id, generation)

    @rule(task_ids=st.lists(ids, min_size=1, max_size=2))
    def drop_dead_letters(self, task_ids: list[str]) -> None:
        self.real.store.dead_dropped(task_ids)
        self.fake.store.dead_dropped(task_ids)

    @rule(seconds=st.sampled_from((400.0, 1100.0)))
    def time_passes(self, seconds: float) -> None:
        self._pass(seconds)

    def _pass(self, seconds: float) -> None:
        self.clock_s += seconds
        self.real.advance(seconds)
        self.fake.advance(seconds)

    @rule(is_lost=seldom)
    def redis_loses_everything(self, is_lost: bool) -> None:
        if not is_lost:
            return
        self.real.lose_all()
        self.fake.lose_all()
        for task_id in IDS:
            self._forget(task_id)

    def _forget(self, task_id: str) -> None:
        # What nobody remembers binds nobody: only tokens must still grow.
        self.highest_attempts[task_id] = 0
        self.ended.pop(task_id, None)
        for held in self.held:
            held.is_open = held.is_open and held.id != task_id

    @invariant()
    def both_know_the_same(self) -> None:
        if hasattr(self, "fake"):
            real, fake = self.real.store.get_many(IDS), self.fake.store.get_many(IDS)
            assert [_facts(record) for record in real] == [_facts(record) for record in fake]
            fake_results = [self.fake.result(task_id) for task_id in IDS]
            assert [one is None for one in self.real.results(IDS)] == [one is None for one in fake_results]

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if not hasattr(self, "fake"):
            return
        accounts, expected = self.real.store.accounts(), self.fake.store.accounts()
        for counts in accounts.by_tier.values():
            assert counts["admitted"] == sum(counts[state] for state in State)
            assert counts["failed"] >= sum(counts[f"dead:{kind}"] for kind in ("replayable", "unfit", "dropped"))
            assert min(counts.values()) >= 0
        # The fake counts its records when it is asked; the scripts have counted each change.
        assert (accounts.by_tier, accounts.away) == (expected.by_tier, expected.away)
        assert (accounts.since_s is None) == (expected.since_s is None)

    @invariant()
    def the_indices_say_what_the_records_say(self) -> None:
        if not hasattr(self, "fake"):
            return
        waits, expected = self.real.waits(QUEUES), self.fake.waits(QUEUES)
        # Rounded: the clock of the real one goes on by itself.
        assert waits == {
            queue: {task_id: pytest.approx(age_s, abs=100.0) for task_id, age_s in index.items()}
            for queue, index in expected.items()
        }
        real, fake = self.real.store.waiting(QUEUES), self.fake.store.waiting(QUEUES)
        assert [real[queue].waiting for queue in QUEUES] == [fake[queue].waiting for queue in QUEUES]
        assert self.real.store.dead_letters() == self.fake.store.dead_letters()

    @invariant()
    def promises_hold(self) -> None:
        for record in self.real.store.get_many(IDS) if hasattr(self, "fake") else ():
            if record is None:
                continue
            assert record.attempts >= self.highest_attempts[record.id], "attempts shrank"
            self.highest_attempts[record.id] = record.attempts
            end = self.ended.get(record.id)
            if end is not None and end[0] == record.generation:
                assert record.state == end[1], "an end state was left"
            if end is not None and end[0] != record.generation:
                assert end[1] == "failed", "only a failed task may get another generation"
                assert record.generation > end[0]
                del self.ended[record.id]
            if record.state in END_STATES:
                self.ended[record.id] = (record.generation, record.state)
            assert (record.held_until_s is not None) == (record.state == "processing")


def _sorted(visit: Visit) -> Visit:
    return Visit(visit.outcome, tuple(sorted(visit.needs)), tuple(sorted(visit.missing)))


def _plain(claim: Claim) -> tuple[object, ...]:
    moments = (claim.held_until_s is None, claim.wait_s is None)
    return (claim.verdict, claim.attempts, claim.tier_first, claim.worker, *moments)


def _facts(record: TaskRecord | None) -> tuple[object, ...] | None:
    if record is None:
        return None
    moments = (
        record.submitted_at_s,
        record.started_at_s,
        record.finished_at_s,
        record.expires_at_s,
        record.held_until_s,
        record.ready_at_s,
        record.due_at_s,
    )
    return (
        record.state,
        record.tier,
        record.tier_first,
        record.lane,
        record.generation,
        record.attempts,
        record.failures,
        record.crashes,
        record.worker,
        record.error,
        record.hop,
        record.dead,
        record.cancel_asked,
        record.tier_wanted,
        record.lifted_from,
        record.lifted_by,
        record.not_lifted,
        record.waits_for,
        record.token is None,
        *(moment is None for moment in moments),
    )


@pytest.mark.timeout(300)  # some ten round trips a step
def test_the_scripts_keep_their_promises_whatever_happens(harness: RedisHarness) -> None:
    # Every change of a state is one that there is.
    harness.store = cast(TaskStore, WatchedStore(harness))

    class Life(TaskLife):
        real = harness

    run_state_machine_as_test(Life, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))
