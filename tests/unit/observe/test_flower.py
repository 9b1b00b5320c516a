from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery.events import state as events

from inference_tasks.observe.flower import show_tiers

tasks = pytest.importorskip("flower.views.tasks")

# Their stubs know only some of the attributes.
State: Any = events.State
Task: Any = events.Task

LANES = {"n.batch": ("batch", "fresh"), "n.realtime.aged": ("realtime", "aged")}


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Task, "_fields", Task._fields)
    monkeypatch.setattr(tasks, "TASK_COLUMNS", dict(tasks.TASK_COLUMNS))
    assert show_tiers(LANES.get)
    yield State()
    for name in ("tier", "lane"):
        delattr(Task, name)


def tell(state: Any, kind: str, clock: int, **fields: object) -> Any:
    state.event(
        {
            "type": kind,
            "uuid": "1",
            "timestamp": float(clock),
            "local_received": 0.0,
            "hostname": "w",
            "clock": clock,
            **fields,
        }
    )
    return state.tasks["1"]


def test_a_task_that_was_only_sent_has_the_tier_of_its_routing_key(state: Any) -> None:
    task = tell(state, "task-sent", 1, routing_key="n.batch")
    assert (task.tier, task.lane, task.as_dict()["tier"]) == ("batch", "fresh", "batch")


def test_the_tier_that_served_it_wins_over_the_one_it_was_sent_to(state: Any) -> None:
    tell(state, "task-sent", 1, routing_key="n.batch", tier="batch")
    task = tell(state, "task-started", 2, tier="realtime", lane="aged")
    assert (task.tier, task.lane) == ("realtime", "aged")


def test_a_task_of_another_queue_has_no_tier(state: Any) -> None:
    assert tell(state, "task-sent", 1, routing_key="elsewhere").tier is None
    assert tell(State(), "task-received", 1).tier is None


def test_there_is_a_column_and_asking_twice_changes_nothing(state: Any) -> None:
    assert tasks.visible_task_columns("tier,lane") == [("tier", "Tier"), ("lane", "Lane")]
    fields = Task._fields
    assert show_tiers(LANES.get)
    assert Task._fields == fields


def test_a_flower_with_its_columns_elsewhere_works_without_the_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(tasks, "TASK_COLUMNS")
    assert not show_tiers(LANES.get)
    assert "no column for the tier" in caplog.text
