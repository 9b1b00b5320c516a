"""The two task stores behind one handle, with time and loss under the test's control."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import redis

from inference_tasks.state.records import Claimant, NewTask, State, TaskError, Verdict
from inference_tasks.state.store import TaskStore
from inference_tasks.testing.store import FakeTaskStore

LEASE_S = 30.0
OOPS: TaskError = {"type": "ValueError", "message": "oops"}
BOUNDS = {"realtime": 2, "batch": 2}

_MOMENTS = ("submitted_at_s", "started_at_s", "finished_at_s", "expires_at_s", "held_until_s", "ready_at_s", "due_at_s")


class StoreHarness(Protocol):
    """A store and what a test does to the world around it."""

    @property
    def store(self) -> TaskStore | FakeTaskStore: ...

    def now_s(self) -> float: ...

    def advance(self, seconds: float) -> None: ...

    def lose_all(self) -> None: ...

    def result(self, task_id: str) -> str | None: ...

    def waits(self, queues: Sequence[str]) -> dict[str, dict[str, float]]: ...


@dataclass
class FakeHarness:
    """The fake, whose clock is a number."""

    store: FakeTaskStore = field(default_factory=FakeTaskStore)

    def now_s(self) -> float:
        return self.store.now_s

    def advance(self, seconds: float) -> None:
        self.store.advance(seconds)

    def lose_all(self) -> None:
        self.store.forget_everything()

    def result(self, task_id: str) -> str | None:
        found = self.store.results.get(task_id)
        return found.decode() if isinstance(found, bytes) else found

    def waits(self, queues: Sequence[str]) -> dict[str, dict[str, float]]:
        """{queue: {task in its index: for how many seconds}}; fewer than none for what is still parked."""
        return {
            queue: {task_id: self.now_s() - at_s for task_id, at_s in self.store.oldest(queue, math.inf)}
            for queue in queues
        }


class RedisHarness:
    """The scripts on a real Redis under a prefix of their own.

    The server's clock cannot be set, so time passes by moving every stored moment into the past.
    """

    def __init__(self, url: str, bounds: Mapping[str, int] | None = None) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.prefix = f"test-{uuid.uuid4().hex[:8]}:"
        self.store = TaskStore.from_url(url, self.prefix, bounds=bounds)

    def now_s(self) -> float:
        seconds, micros = self.client.time()
        return float(seconds + micros / 1e6)

    def advance(self, seconds: float) -> None:
        for key in self.stored_keys():
            if key.endswith(":task"):
                for name in _MOMENTS:
                    value = self.client.hget(key, name)
                    if value:
                        self.client.hset(key, name, f"{float(value) - seconds:.6f}")
            elif key.startswith(f"{self.prefix}ready:"):
                for member, score in self.client.zrange(key, 0, -1, withscores=True):
                    self.client.zadd(key, {member: f"{score - seconds:.6f}"})
            elif key.endswith(":holders"):
                for nonce, held in self.client.hgetall(key).items():
                    tier, _, at_s = held.partition("|")
                    if at_s:
                        self.client.hset(key, nonce, f"{tier}|{float(at_s) - seconds:.6f}")
            elif key.startswith(tuple(f"{self.prefix}{name}:" for name in ("worker", "lease", "shared"))):
                self.client.pexpire(key, max(0, int(self.client.pttl(key) - seconds * 1000)))

    def lose_all(self) -> None:
        # Not FLUSHALL: the server is shared. Everything of this test goes, and the scripts that the server knows.
        keys = self.stored_keys()
        if keys:
            self.client.delete(*keys)
        self.client.script_flush()

    def result(self, task_id: str) -> str | None:
        return self.results([task_id])[0]

    def results(self, task_ids: Sequence[str]) -> list[str | None]:
        found = self.client.mget([f"{self.prefix}{{{task_id}}}:result" for task_id in task_ids])
        return [None if one is None else str(one) for one in found]

    def waits(self, queues: Sequence[str]) -> dict[str, dict[str, float]]:
        """{queue: {task in its index: for how many seconds}}; fewer than none for what is still parked."""
        with self.client.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.zrange(f"{self.prefix}ready:{queue}", 0, -1, withscores=True)
            found = pipeline.execute()
        now_s = self.now_s()
        return {
            queue: {task_id: now_s - at_s for task_id, at_s in index}
            for queue, index in zip(queues, found, strict=True)
        }

    def stored_keys(self) -> list[str]:
        return [str(key) for key in self.client.scan_iter(f"{self.prefix}*", count=1000)]

    def close(self) -> None:
        keys = self.stored_keys()
        if keys:
            self.client.delete(*keys)
        self.client.close()
        self.store.close()


def new(**fields: object) -> NewTask:
    """A task of its own, submitted to offline and by now in batch."""
    task = NewTask(uuid.uuid4().hex, "vision.classify", "batch", "offline", "fresh", 0, "n1")
    return task._replace(**fields)  # type: ignore[arg-type]


def message(task: NewTask, **fields: object) -> Claimant:
    said = Claimant(task.id, task.name, task.tier, task.lane, task.generation, tier_first=task.tier_first, hop=task.hop)
    return said._replace(**fields)  # type: ignore[arg-type]


def submitted(harness: StoreHarness, **fields: object) -> NewTask:
    task = new(**fields)
    harness.store.submit([task])
    return task


def started(harness: StoreHarness, **fields: object) -> tuple[NewTask, int]:
    task = submitted(harness, **fields)
    (claim,) = harness.store.claim([message(task)], "w1", LEASE_S)
    assert claim.verdict == Verdict.RUN
    return task, claim.token


def counted(harness: StoreHarness, tier: str = "offline") -> dict[str, int]:
    """The counts of a tier that are not nought; that their sum is right is checked on the way."""
    counts = harness.store.accounts().by_tier.get(tier, {})
    assert counts.get("admitted", 0) == sum(counts.get(state, 0) for state in State)
    return {name: number for name, number in counts.items() if number}


def away(harness: StoreHarness) -> dict[str, int]:
    """{tier: tasks that are parked or lie in `returned`}."""
    return harness.store.accounts().away


def ids_in(harness: StoreHarness, queue: str) -> list[str]:
    return list(harness.waits([queue])[queue])


def claimed(harness: StoreHarness, task: NewTask, **fields: object) -> Verdict:
    return harness.store.claim([message(task, **fields)], "w1", LEASE_S)[0].verdict


def failed(harness: StoreHarness, **fields: object) -> NewTask:
    task, token = started(harness, **fields)
    assert harness.store.finish(task.id, token, task.generation, "failed", OOPS, b"{}")
    return task
