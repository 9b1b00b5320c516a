"""What the tier column stands on inside Flower and Celery's events; a Flower that fails here loses the column only."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
from celery.events import state as events

from inference_tasks.worker.events import TierRequest

tasks = pytest.importorskip("flower.views.tasks")

# Their stubs know only some of the attributes.
State: Any = events.State
Task: Any = events.Task


def test_flower_keeps_its_columns_in_a_mapping_of_names_to_labels() -> None:
    assert {"name", "state", "worker"} <= tasks.TASK_COLUMNS.keys()
    assert all(isinstance(label, str) for label in tasks.TASK_COLUMNS.values())
    assert tasks.visible_task_columns("state,nothing") == [("state", tasks.TASK_COLUMNS["state"])]


def test_the_fields_of_a_task_event_are_a_tuple_and_reach_its_dictionary() -> None:
    assert isinstance(Task._fields, tuple)
    state = State()
    when = {"timestamp": 1.0, "local_received": 1.0, "hostname": "a", "clock": 1}
    state.event({"type": "task-sent", "uuid": "1", "tier": "batch", **when})
    assert vars(state.tasks["1"])["tier"] == "batch"
    assert vars(copy.copy(state.tasks["1"]))["uuid"] == "1"


def test_requests_send_their_events_by_a_method_that_can_be_extended() -> None:
    base: Any = TierRequest.__mro__[1]
    assert list(inspect.signature(base.send_event).parameters) == ["self", "type", "fields"]
    assert "self.send_event('task-started')" in inspect.getsource(base.on_accepted)
