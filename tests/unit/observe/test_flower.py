from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from celery.events import state as events

from inference_tasks.observe.flower_pages import (
    COLUMNS,
    HIDDEN,
    HidingFailedError,
    hide_arguments,
    show_columns,
    show_queues,
)

tasks = pytest.importorskip("flower.views.tasks")
search = pytest.importorskip("flower.utils.search")

# Their stubs know only some of the attributes.
State: Any = events.State
Task: Any = events.Task

LANES = {"n.batch": ("batch", "fresh"), "n.realtime.aged": ("realtime", "aged")}


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Task, "_fields", Task._fields)
    monkeypatch.setattr(tasks, "TASK_COLUMNS", dict(tasks.TASK_COLUMNS))
    monkeypatch.setattr(search, "_task_sort_key", search._task_sort_key)
    assert show_columns(LANES.get)
    yield State()
    for name in COLUMNS:
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
    assert dict(tasks.visible_task_columns(",".join(COLUMNS))) == COLUMNS
    fields = Task._fields
    assert show_columns(LANES.get)
    assert Task._fields == fields


def test_a_flower_with_its_columns_elsewhere_works_without_the_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(tasks, "TASK_COLUMNS")
    assert not show_columns(LANES.get)
    assert "no column for the tier" in caplog.text


def test_a_task_that_started_brings_its_wait_and_its_gpu(state: Any) -> None:
    assert (tell(state, "task-received", 1).wait, state.tasks["1"].gpu) == (None, None)
    task = tell(state, "task-started", 2, wait=10.25, gpu="gpu0")
    assert (task.as_dict()["wait"], task.as_dict()["gpu"]) == (10.25, "gpu0")


def test_waits_are_sorted_as_numbers_and_unknown_ones_apart(state: Any) -> None:
    def key(clock: int, **fields: object) -> Any:
        return search._task_sort_key(tell(State(), "task-started", clock, **fields), "wait", str(clock))

    nine, ten, none = key(1, wait=9.0), key(2, wait=10.0), key(3)
    assert sorted([ten, none, nine]) == [none, nine, ten]
    task = tell(state, "task-started", 4, tier="batch")
    assert search._task_sort_key(task, "tier", "1")[1] == "batch"


class Result:
    def __init__(self, state: str) -> None:
        self.state, self.result, self.traceback = state, "the answer", None


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (
        ("flower.events.EventsState", "event"),
        ("flower.inspector.Inspector", "_on_update"),
        ("flower.api.tasks.BaseTaskHandler", "update_response_result"),
    ):
        monkeypatch.setattr(f"{place}.{name}", getattr(pkgutil.resolve_name(place), name))
    hide_arguments()


@pytest.mark.usefixtures("hidden")
def test_neither_arguments_nor_results_get_into_the_memory_of_flower() -> None:
    from flower.events import EventsState

    state = EventsState()
    tell(state, "task-received", 1, name="a", args="('secret',)", kwargs="{}")
    task = tell(state, "task-succeeded", 2, result="'secret'", runtime=0.5)
    assert (task.args, task.kwargs, task.result, task.runtime) == (HIDDEN, HIDDEN, HIDDEN, 0.5)
    assert "secret" not in repr(vars(task))
    assert tell(state, "task-failed", 3, exception="ValueError('why')").exception == "ValueError('why')"


@pytest.mark.usefixtures("hidden")
def test_what_a_worker_says_of_its_tasks_is_shown_without_arguments() -> None:
    from flower.inspector import Inspector

    inspector = object.__new__(Inspector)
    inspector.workers = defaultdict(dict)
    inspector._on_update("w", "active", [{"id": "1", "args": "secret", "kwargs": {}}])
    inspector._on_update("w", "scheduled", [{"eta": 1, "request": {"id": "2", "args": ["secret"], "kwargs": {}}}])
    inspector._on_update("w", "stats", {"broker": {}, "pid": 3})
    assert "secret" not in repr(inspector.workers)
    assert inspector.workers["w"]["active"] == [{"id": "1", "args": HIDDEN, "kwargs": HIDDEN}]
    assert inspector.workers["w"]["scheduled"][0]["request"]["id"] == "2"
    assert inspector.workers["w"]["stats"]["pid"] == 3


@pytest.mark.usefixtures("hidden")
@pytest.mark.parametrize(("state", "shown"), [("SUCCESS", HIDDEN), ("PROGRESS", HIDDEN), ("FAILURE", "the answer")])
def test_the_interface_for_programs_gives_away_errors_only(state: str, shown: str) -> None:
    from flower.api.tasks import BaseTaskHandler

    response: dict[str, object] = {}
    BaseTaskHandler.update_response_result(object.__new__(BaseTaskHandler), response, Result(state))
    assert response["result"] == shown


def test_a_flower_that_cannot_hide_arguments_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("flower.inspector.Inspector._on_update")
    with pytest.raises(HidingFailedError, match="INFERENCE_FLOWER__SHOW_ARGUMENTS"):
        hide_arguments()


def test_queues_that_no_worker_consumes_are_listed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from flower.views import BaseHandler

    monkeypatch.setattr(BaseHandler, "get_active_queue_names", lambda handler: ["n.batch"])
    show_queues(["n.dead", "n.batch"])
    assert BaseHandler.get_active_queue_names(object.__new__(BaseHandler)) == ["n.batch", "n.dead"]
