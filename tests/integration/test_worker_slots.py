"""Late binding on real pools: what a worker takes, what it leaves in the broker, and that no slot is ever lost."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping

import pytest

from inference_tasks.app import inference_of
from tests.support.brokers import depths, publish_raw, until
from tests.support.history import Entry
from tests.support.processes import WorkerProcess
from tests.support.rig import POOLS, Rig, most_at_once, task

SLOTS = {"prefork": 2, "threads": 2, "solo": 1}


def worker_of(rig: Rig, pool: str, slots: int, name: str = "worker", **options: object) -> WorkerProcess:
    return rig.worker(*POOLS[pool], "--concurrency", str(slots), name=name, **options)


# What stays in the broker.


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("pool", POOLS)
def test_while_long_tasks_run_exactly_those_have_left_the_broker(rig: Rig, pool: str) -> None:
    slots, app, gate = SLOTS[pool], rig.app(), rig.gate()
    ids = [task(app, "gated.batch").submit(number, str(gate)).id for number in range(6)]
    with worker_of(rig, pool, slots):
        rig.history.wait_for("start", count=slots)
        rig.wait_waiting(app, 6 - slots)
        later = [task(app, "gated.realtime").submit(number, str(gate)).id for number in (10, 11)]
        rig.wait_waiting(app, 8 - slots)
        rig.wait_states(app, ids + later, processing=slots, pending=8 - slots)
        gate.open()
        rig.wait_states(app, ids + later, success=8)
    assert set(rig.starts().values()) == {1}


@pytest.mark.serial
def test_a_second_worker_gets_what_waits_at_once(rig: Rig) -> None:
    app, first, second = rig.app(), rig.gate("first"), rig.gate("second")
    with worker_of(rig, "prefork", 1, "busy"):
        task(app, "gated.batch").submit(0, str(first))
        rig.wait_started(0)
        for number in (1, 2, 3):
            task(app, "gated.batch").submit(number, str(second))
        with worker_of(rig, "prefork", 1, "idle"):
            rig.wait_started(1)
            rig.wait_waiting(app, 2)
            second.open()
            rig.wait_started(2, 3)
            rig.history.wait_for("end", count=3)
            # Idle again: what comes now is pushed to it, while the other one is still busy.
            submitted_at_s = time.time()
            task(app, "step.realtime").submit(4)
            rig.wait_started(4)
            (start,) = [entry for entry in rig.history.of("start") if entry["number"] == 4]
            assert start.at_s - submitted_at_s < 1.0
        first.open()
    assert len({entry.pid for entry in rig.history.of("start")}) == 2


# Tiers and reserve.


def test_a_worker_for_realtime_leaves_the_other_tiers_alone(rig: Rig) -> None:
    app = rig.app()
    batch = [task(app, "step.batch").submit(number).id for number in range(3)]
    with rig.worker(worker={"tiers": ["realtime"]}):
        realtime = [task(app, "step.realtime").submit(10 + number).id for number in range(5)]
        rig.wait_states(app, realtime, success=5)
        assert rig.states(app, batch) == {"pending": 3}
        assert rig.waiting(app) == 3
        (beat,) = inference_of(app).store.workers()
        assert beat.tiers == ("realtime",)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_reserved_slot_is_free_for_realtime_however_much_else_waits(rig: Rig, pool: str) -> None:
    app, gate = rig.app(), rig.gate()
    waiting = [
        task(app, f"gated.{tier}").submit(number, str(gate)).id for number, tier in enumerate(["batch", "offline"] * 4)
    ]
    with worker_of(rig, pool, 2, worker={"slots": 2, "reserve": 1}):
        rig.history.wait_for("start")
        for number in (20, 21, 22):
            assert task(app, "step.realtime").submit(number).result(timeout_s=60) == number
        rig.wait_states(app, waiting, processing=1, pending=7)
        gate.open()
        rig.wait_states(app, waiting, success=8)
    lower = [entry for entry in rig.history if entry.event in ("start", "end") and entry["tier"] != "realtime"]
    assert most_at_once(lower) == 1


# Slots are neither invented nor lost.


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize(("pool", "slots"), [("prefork", 3), ("threads", 3), ("solo", 1)])
def test_no_more_tasks_run_at_once_than_there_are_slots(rig: Rig, pool: str, slots: int) -> None:
    app = rig.app()
    for tier in ("realtime", "batch", "offline"):
        task(app, f"step.{tier}").submit_many([(number, 0.01) for number in range(40)])
    with worker_of(rig, pool, slots):
        rig.history.wait_for("end", count=120)
    assert most_at_once(list(rig.history)) == slots


def _limit_rates(rig: Rig) -> None:
    app = rig.app()
    ids = [task(app, "limited").submit(100 + number).id for number in range(4)]
    rig.wait_states(app, ids, success=4)


def _count_down(rig: Rig) -> None:
    app = rig.app()
    ids = [task(app, "step.batch").apply_async((100 + number,), countdown=1).id for number in range(3)]
    rig.wait_states(app, ids, success=3)


def _eta_in_the_message(rig: Rig) -> None:
    """What a client without this package sends: the worker itself has to wait."""
    app = rig.app()
    eta = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() + 2))
    ids = [f"{rig.namespace}-eta-{number}" for number in range(3)]
    for task_id in ids:
        _raw(rig, {"id": task_id, "task": "step.batch", "lang": "py", "eta": eta}, b"[[100], {}, {}]")
    rig.wait_states(app, ids, success=3)


def _expired(rig: Rig) -> None:
    app = rig.app()
    ids = [f"{rig.namespace}-expired-{number}" for number in range(3)]
    for task_id in ids:
        headers = {"id": task_id, "task": "step.batch", "lang": "py", "expires": "2020-01-01T00:00:00+00:00"}
        _raw(rig, headers, b"[[100], {}, {}]")
    rig.wait_states(app, ids, expired=3)


def _raising(rig: Rig) -> None:
    app = rig.app()
    ids = [task(app, "raises").submit(100).id for _ in range(5)]
    rig.wait_states(app, ids, failed=5)


def _raw(rig: Rig, headers: Mapping[str, object], body: bytes) -> None:
    publish_raw(rig.app(), "batch", body, headers)


@pytest.mark.parametrize("pool", POOLS)
def test_no_slot_is_lost_to_tasks_that_end_otherwise(rig: Rig, pool: str) -> None:
    slots, app = SLOTS[pool], rig.app()
    with worker_of(rig, pool, slots):
        for trouble in (_limit_rates, _count_down, _eta_in_the_message, _expired, _raising):
            trouble(rig)
        numbers = range(200, 230)
        task(app, "step.batch").submit_many([(number, 0.05) for number in numbers])
        rig.history.wait_until(lambda history: len(_of_these(rig, "end", numbers)) == len(numbers))
        until(lambda: inference_of(app).store.workers()[0].busy == 0, "the worker says that it is idle")
    entries = _of_these(rig, "start", numbers) + _of_these(rig, "end", numbers)
    assert most_at_once(entries) == slots
    # What raised is a dead letter; all else is done.
    assert +Counter(depths(app)) == {inference_of(app).topology.dead.name: 5}


def _of_these(rig: Rig, event: str, numbers: range) -> list[Entry]:
    return [entry for entry in rig.history.of(event) if entry["number"] in numbers]


def test_rate_limited_tasks_hold_up_no_other_task_and_keep_their_rate(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        limited = [task(app, "limited").submit(number).id for number in range(8)]
        rig.wait_started(0)
        for number in (100, 101, 102):
            assert task(app, "step.realtime").submit(number).result(timeout_s=60) == number
        rig.wait_states(app, limited, success=8)
    at_s = [entry.mono_s for entry in rig.history.of("start") if entry["number"] < 100]  # type: ignore[operator]
    gaps = [later - earlier for earlier, later in itertools.pairwise(at_s)]
    assert sum(gaps) > 0.8, gaps
