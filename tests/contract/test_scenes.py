"""What every task store tells of a task and what is around it, in one look: on the fake and on Redis."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.records import DeadLetter, WorkerBeat
from inference_tasks.state.scenes import Place, Scene
from inference_tasks.state.store import TaskStore
from inference_tasks.state.switches import Action
from tests.support.task_stores import LEASE_S, OOPS, RedisHarness, StoreHarness, failed, message, started, submitted

QUEUES = ("inference.realtime", "inference.batch", "inference.batch.returned", "inference.offline")


def scene(harness: StoreHarness, task_id: str) -> Scene:
    found = harness.store.scene(task_id, QUEUES)
    assert found is not None
    assert found.record == harness.store.get(task_id)
    assert found.at_s == pytest.approx(harness.now_s(), abs=5)
    return found


def test_a_task_without_a_record_has_no_scene(harness: StoreHarness) -> None:
    assert harness.store.scene("nobody", QUEUES) is None


def test_a_waiting_task_learns_its_place_and_what_else_waits(harness: StoreHarness) -> None:
    first = submitted(harness, tier="offline")
    harness.advance(1)
    second = submitted(harness, tier="offline")
    harness.advance(1)
    submitted(harness, tier="realtime")
    submitted(harness, tier="offline")
    parked = submitted(harness, due_at_s=harness.now_s() + 60)
    assert dict(scene(harness, second.id).places) == {
        "inference.realtime": Place(1),
        "inference.batch": Place(0),
        "inference.batch.returned": Place(0),
        "inference.offline": Place(3, ahead=1),
    }
    assert scene(harness, first.id).places["inference.offline"] == Place(3, ahead=0)
    assert scene(harness, parked.id).places["inference.batch.returned"] == Place(0, ahead=0)


def test_a_running_task_is_listed_nowhere_and_its_worker_is_seen(harness: StoreHarness) -> None:
    task, token = started(harness)
    beat = WorkerBeat("w1", 7, "GPU-1", "prefork", 2, 0, ("batch",), 1, started_per_s={"batch": 2.0})
    harness.store.renew([(task.id, token, message(task))], "w1", LEASE_S, beat)
    harness.store.switch("tier:batch", Action.PAUSE, by="ann")
    found = scene(harness, task.id)
    assert all(place.ahead is None for place in found.places.values())
    assert [(one.node, one.gpu, one.started_per_s) for one in found.workers] == [("w1", "GPU-1", {"batch": 2.0})]
    assert found.switches == harness.store.switches()
    assert (found.letter, found.needs) == (None, {})


def test_a_task_that_waits_for_others_learns_how_they_stand(harness: StoreHarness) -> None:
    runs, _ = started(harness)
    waits = submitted(harness, lane="returned", worker_published=True)
    task = submitted(harness, worker_published=True, depends_on=(runs.id, waits.id), message="m")
    found = scene(harness, task.id)
    assert found.record.state == "waiting"
    assert found.needs == dict(sorted({runs.id: "processing", waits.id: "pending"}.items()))


def test_a_dead_one_brings_its_letter(harness: StoreHarness) -> None:
    task = failed(harness)
    letter = DeadLetter(
        task.id, task.name, "batch", "offline", "fresh", "attempts exhausted", "", OOPS, 1, 1, 0, 0, 1.0, 2.0, True, "m"
    )
    harness.store.bury([letter])
    assert scene(harness, task.id).letter == letter


def test_the_gateways_store_tells_the_same(real: RedisHarness, redis_url: str) -> None:
    task = submitted(real)
    expected = real.store.scene(task.id, QUEUES)
    assert expected is not None

    async def look() -> Scene | None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            return await AsyncTaskStore(client, real.prefix).scene(task.id, QUEUES)

    found = asyncio.run(look())
    assert found is not None
    assert (found.record, found.places) == (expected.record, expected.places)


def test_a_look_is_one_round_trip_however_much_waits(real: RedisHarness) -> None:
    class Counting:
        count = 0

        def execute_command(self, *args: object, **options: object) -> object:
            self.count += 1
            return real.client.execute_command(*args, **options)

    task = submitted(real)
    for number in range(300):
        submitted(real, tier="offline")
        harness_beat = WorkerBeat(f"w{number}", 7, None, "prefork", 2, 0, ("batch",), 1)
        if number < 30:
            real.store.renew([], harness_beat.node, 600.0, harness_beat)  # outlives the submits
    client = Counting()
    store = TaskStore(client, real.prefix)
    assert store.scene(task.id, QUEUES) is not None
    client.count = 0
    found = store.scene(task.id, QUEUES)
    assert found is not None
    assert (len(found.workers), client.count) == (30, 1)
