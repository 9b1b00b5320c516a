"""The scripts on a real Redis, driven at random beside the fake store, and watched by rules that neither may break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

from inference_tasks.state.records import END_STATES, Claim, Claimant, NewTask, TaskError, TaskRecord, Verdict
from tests.support.task_stores import FakeHarness, RedisHarness

LEASE_S = 1000.0
DEADLINE_S = 2500.0
IDS = ("a", "b")
WORKERS = ("w1", "w2", "w3")
ids = st.sampled_from(IDS)
workers = st.sampled_from(WORKERS)
generations = st.sampled_from((0, 0, 0, 1))
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
    harness = RedisHarness(redis_url)
    yield harness
    harness.close()


class TaskLife(RuleBasedStateMachine):
    """Anything that publishers, workers and operators may do, in any order, with any loss."""

    real: RedisHarness

    @initialize()
    def begin(self) -> None:
        self.real.lose_all()
        self.fake = FakeHarness()
        self.held: list[Held] = []
        self.clock_s = 0.0
        self.highest_token = dict.fromkeys(IDS, 0)
        self.highest_attempts = dict.fromkeys(IDS, 0)
        self.ended: dict[str, tuple[int, str]] = {}

    def _message(self, task_id: str, generation: int) -> Claimant:
        return Claimant(task_id, "f", "batch", "returned", generation, tier_first="offline", crash_limit=2)

    @rule(task_id=ids, nonce=st.sampled_from(("n1", "n2")), generation=generations, has_deadline=st.booleans())
    def submit(self, task_id: str, nonce: str, generation: int, has_deadline: bool) -> None:
        deadline_s = DEADLINE_S if has_deadline else None
        task = NewTask(task_id, "f", "batch", "offline", "fresh", generation, nonce, 0.0, deadline_s)
        assert self.real.store.submit([task]) == self.fake.store.submit([task])

    @rule(task_ids=st.lists(ids, max_size=2), nonce=st.sampled_from(("n1", "n2")))
    def retract(self, task_ids: list[str], nonce: str) -> None:
        assert self.real.store.retract(task_ids, nonce) == self.fake.store.retract(task_ids, nonce)
        for task_id in task_ids:
            if self.fake.store.get_many([task_id]) == [None]:
                self._forget(task_id)

    @rule(task_ids=st.lists(ids, min_size=1, max_size=3), worker=workers, generation=generations)
    def claim(self, task_ids: list[str], worker: str, generation: int) -> None:
        self._claim(task_ids, worker, generation)

    def _claim(self, task_ids: list[str], worker: str, generation: int) -> None:
        messages = [self._message(task_id, generation) for task_id in task_ids]
        answers = self.real.store.claim(messages, worker, LEASE_S)
        expected = self.fake.store.claim(messages, worker, LEASE_S)
        for task_id, answer, model in zip(task_ids, answers, expected, strict=True):
            assert _plain(answer) == _plain(model)
            if answer.verdict == Verdict.RUN:
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
            held.is_open = held.id not in lost
            if held.is_open:
                held.until_s = self.clock_s + LEASE_S
                self.highest_token[held.id] = max(self.highest_token[held.id], held.token)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), state=states)
    def finish(self, data: st.DataObject, state: str | None) -> None:
        held = data.draw(st.sampled_from(self.held))
        why: TaskError | None = {"type": "E", "message": "m"} if state in ("failed", "retrying") else None
        answer = self.real.store.write(held.id, held.token, held.generation, state, why, b"x", 60)
        assert answer == self.fake.store.write(held.id, held.fake_token, held.generation, state, why, b"x", 60)
        if state is not None:
            held.is_open = False

    @rule(task_id=ids, state=outside_states, may_create=seldom)
    def write_from_outside(self, task_id: str, state: str | None, may_create: bool) -> None:
        answer = self.real.store.write(task_id, None, None, state, None, b"y", 60, may_create=may_create)
        assert answer == self.fake.store.write(task_id, None, None, state, None, b"y", 60, may_create=may_create)

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
            for task_id in IDS:
                assert (self.real.result(task_id) is None) == (self.fake.result(task_id) is None)

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
        record.token is None,
        *(moment is None for moment in moments),
    )


def test_the_scripts_keep_their_promises_whatever_happens(harness: RedisHarness) -> None:
    class Life(TaskLife):
        real = harness

    run_state_machine_as_test(Life, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))
