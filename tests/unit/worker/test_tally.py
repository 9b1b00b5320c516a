"""The counts of the last minute that a worker tells in its heartbeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from inference_routing.lane import QueueKey
from inference_tasks.observe.events import EVENTS, WAIT_BUCKETS_S, subscribe, unsubscribe
from inference_tasks.signals import slot_freed, slot_taken
from inference_tasks.worker.intake import Intake
from inference_tasks.worker.slots import Ticket
from inference_tasks.worker.tally import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tally(clock: Clock) -> Tally:
    return Tally(clock)


def ticket(tier: str = "realtime", first: str | None = None, started_s: float = 1000.0) -> Ticket:
    intake = Intake("a", "classify", tier, first or tier, "aged", 0, None, None, None)
    key = QueueKey(tier, "aged", "q")
    return Ticket(intake, cast(Any, None), key, None, 1, started_s, 0.1, reserved=False, held_s=0.02)


def test_starts_and_slot_time_are_told_by_tier_served_and_first_tier(tally: Tally) -> None:
    tally.started(ticket("realtime"))
    tally.started(ticket("realtime", "batch"))
    tally.started(ticket("realtime", "batch"))
    tally.finished(ticket("realtime", "batch"), 0.25)
    tally.finished(ticket("realtime", "batch"), 0.5)
    assert tally.starts() == {"realtime": {"realtime": 1, "batch": 2}}
    assert tally.slot_s() == {"realtime": {"realtime": 0.0, "batch": 0.75}}


def test_what_is_older_than_a_minute_is_forgotten(tally: Tally, clock: Clock) -> None:
    tally.started(ticket("batch"))
    clock.now += 59
    tally.started(ticket("offline"))
    assert set(tally.starts()) == {"batch", "offline"}
    clock.now += 2
    assert tally.starts() == {"offline": {"offline": 1}}
    clock.now += 120
    assert (tally.starts(), tally.slot_s(), tally.per_s()) == ({}, {}, {})


def test_memory_is_bounded_however_many_tasks_start(tally: Tally, clock: Clock) -> None:
    for _ in range(5000):
        clock.now += 0.1
        tally.started(ticket())
    assert sum(tally.starts()["realtime"].values()) == pytest.approx(600, abs=11)
    assert len(tally._seconds) <= 62


def test_the_rate_is_over_the_last_minute_or_since_the_start(tally: Tally, clock: Clock) -> None:
    for _ in range(20):
        tally.started(ticket("batch"))
    assert tally.per_s() == {"batch": 20.0}
    clock.now += 10
    assert tally.per_s() == {"batch": 2.0}


def test_waits_and_ends_are_by_the_tier_of_the_submit(tally: Tally, clock: Clock) -> None:
    for wait_s, first in ((0.003, "realtime"), (0.15, "realtime"), (99999.0, "batch"), (None, "batch")):
        tally.started(replace(ticket("realtime", first), wait_s=wait_s))
    assert tally.waits() == {"realtime": {0: 1, 5: 1}, "batch": {len(WAIT_BUCKETS_S): 1}}
    assert tally.longest_wait_s() == {"realtime": 0.15, "batch": 99999.0}
    for outcome in ("success", "failed", "retried", "crashed", "cancelled", "failed"):
        tally.finished(replace(ticket("realtime", "batch"), outcome=outcome), 0.1)
    assert (tally.ended(), tally.failed()) == ({"batch": 3}, {"batch": 2})
    clock.now += 61
    assert (tally.waits(), tally.longest_wait_s(), tally.ended(), tally.failed()) == ({}, {}, {}, {})
    assert set(tally.last_start_at_s()) == {"realtime"}


def test_starts_ends_and_floors_are_events_without_ids(tally: Tally) -> None:
    told: list[tuple[str, dict[str, object]]] = []

    def hear(name: str, values: Mapping[str, object]) -> None:
        told.append((name, dict(values)))

    subscribe(hear)
    try:
        tally.started(replace(ticket("realtime", "batch"), wait_s=2.0))
        tally.finished(ticket("realtime", "batch"), 0.5)
        tally.floor("offline", is_met=False)
    finally:
        unsubscribe(hear)
    assert told == [
        (
            "task.started",
            {
                "task": "classify",
                "tier": "realtime",
                "tier_first": "batch",
                "lane": "aged",
                "wait_s": 2.0,
                "held_s": 0.02,
            },
        ),
        (
            "task.ended",
            {"task": "classify", "tier": "realtime", "tier_first": "batch", "outcome": "success", "slot_s": 0.5},
        ),
        ("floor.held", {"tier": "offline", "outcome": "violated"}),
    ]
    known = {event.name: {*event.measurements, *event.labels} for event in EVENTS}
    assert all(set(values) == known[name] for name, values in told)
    assert tally.floor_violations() == {"offline": 1}


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []

    def hear(**said: Any) -> None:
        told.append({key: value for key, value in said.items() if key not in ("signal", "sender")})

    slot_taken.connect(hear, weak=False)
    slot_freed.connect(hear, weak=False)
    yield told
    slot_taken.disconnect(hear)
    slot_freed.disconnect(hear)


def test_each_start_and_end_is_a_signal(tally: Tally, heard: list[dict[str, Any]]) -> None:
    tally.started(ticket("realtime", "batch"))
    tally.finished(ticket("realtime", "batch"), 0.5)
    about = {"task_id": "a", "name": "classify", "tier": "realtime", "tier_first": "batch", "lane": "aged"}
    assert heard == [about | {"at_s": 1000.0, "held_s": 0.02}, about | {"at_s": 1000.5, "cost_s": 0.5}]


def test_a_receiver_that_raises_stops_no_task(tally: Tally) -> None:
    def broken(**_: object) -> None:
        raise ValueError("no")

    slot_taken.connect(broken, weak=False)
    try:
        tally.started(ticket())
    finally:
        slot_taken.disconnect(broken)
    assert tally.starts() == {"realtime": {"realtime": 1}}
