"""What is changed inside Flower: columns and queues that it does not know, and arguments that it should not show.

None of it is Flower's public interface. So what fails to add something says so and leaves Flower as it is; what fails
to hide something ends Flower (``HidingFailedError``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from inference_tasks.errors import DeploymentError

__all__ = ["COLUMNS", "HIDDEN", "HidingFailedError", "hide_arguments", "show_columns", "show_queues"]

log = logging.getLogger(__name__)

LaneOf = Callable[[str], tuple[str, str] | None]

# {field of a task: heading}
COLUMNS = {"tier": "Tier", "lane": "Lane", "wait": "Wait (s)", "gpu": "GPU"}

HIDDEN = "(hidden)"
_PRIVATE = ("args", "kwargs", "result")
_PRIVATE_OF_REQUEST = ("args", "kwargs", "argsrepr", "kwargsrepr")
_STATES_OF_ERRORS = ("FAILURE", "RETRY", "REVOKED")
_LISTS_OF_REQUESTS = ("active", "reserved", "scheduled")


class HidingFailedError(DeploymentError):
    """This version of Flower keeps arguments where they cannot be hidden."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(
            f"Arguments and results cannot be hidden in this version of Flower ({problem!r}). Install flower 2.2, or "
            "let everybody who may see Flower see them: INFERENCE_FLOWER__SHOW_ARGUMENTS=true."
        )


def show_columns(lane_of: LaneOf) -> bool:
    """Teach Flower the fields of ``COLUMNS``; false if this version keeps its columns elsewhere.

    A task has the tier that its events name: of the submit, then of the queue that it was started from. Where Celery's
    own event of a publish names none, the routing key tells. ``wait`` and ``gpu`` are known from the start on.
    """
    try:
        from celery.events.state import Task
        from flower.views.tasks import TASK_COLUMNS

        # Not Flower's own door (format_task): it is given a copy made of the known fields only, and neither sorting nor
        # the API goes through it.
        for name, label in COLUMNS.items():
            setattr(Task, name, property(_field(name, lane_of)))
            if name not in Task._fields:  # type: ignore[attr-defined]  # its stub leaves it out
                Task._fields += (name,)  # type: ignore[attr-defined]
            TASK_COLUMNS[name] = label
    except Exception as exc:
        log.warning("This version of Flower keeps its columns elsewhere; there is no column for the tier: %r", exc)
        return False
    _sort_waits_as_numbers()
    return True


def _field(name: str, lane_of: LaneOf) -> Callable[[Any], object]:
    def read(task: Any) -> object:
        told = vars(task).get(name)
        if told is None and name in ("tier", "lane") and task.routing_key:
            lane = lane_of(task.routing_key)
            return lane and lane[name == "lane"]
        return told

    return read


def _sort_waits_as_numbers() -> None:
    """Flower compares all but its own times as text: ten seconds would come before nine."""
    try:
        from flower.utils import search

        by_text = search._task_sort_key
    except (ImportError, AttributeError):
        return

    def key(task: Any, sort_by: str, task_id: str) -> tuple[bool, object, str]:
        if sort_by == "wait":
            return task.wait is not None, float(task.wait or 0.0), task_id
        found: tuple[bool, object, str] = by_text(task, sort_by, task_id)
        return found

    search._task_sort_key = key


def show_queues(names: Iterable[str]) -> None:
    """Have the Broker tab list these queues too; by itself it shows only what a worker consumes."""
    ours = set(names)
    try:
        from flower.views import BaseHandler

        consumed = BaseHandler.get_active_queue_names
    except (ImportError, AttributeError) as exc:
        log.warning("This version of Flower chooses the queues elsewhere; dead letters are not listed: %r", exc)
        return
    BaseHandler.get_active_queue_names = lambda handler: sorted({*consumed(handler), *ours})


def hide_arguments() -> None:
    """Keep arguments and results out of Flower: out of its memory, pages, search and API.

    The text of errors stays, for that is what one comes to Flower for.

    Raises:
        HidingFailedError: This version of Flower has them elsewhere.
    """
    try:
        from flower.api.tasks import BaseTaskHandler
        from flower.events import EventsState
        from flower.inspector import Inspector

        note, update, answer = EventsState.event, Inspector._on_update, BaseTaskHandler.update_response_result
    except (ImportError, AttributeError) as exc:
        raise HidingFailedError(exc) from exc

    def event(state: Any, event: Mapping[str, object]) -> object:
        return note(state, _masked(event, _PRIVATE))

    def on_update(inspector: Any, worker: str, method: str, response: Any) -> object:
        if method in _LISTS_OF_REQUESTS:
            response = [_without_arguments(one) for one in response]
        return update(inspector, worker, method, response)

    def update_response_result(handler: Any, response: dict[str, object], result: Any) -> None:
        answer(handler, response, result)
        if result.state not in _STATES_OF_ERRORS and "result" in response:
            response["result"] = HIDDEN

    EventsState.event = event
    Inspector._on_update = on_update
    BaseTaskHandler.update_response_result = update_response_result


def _masked(told: Mapping[str, Any], private: Iterable[str]) -> dict[str, Any]:
    return {**told, **{name: HIDDEN for name in private if name in told}}


def _without_arguments(told: Mapping[str, Any]) -> dict[str, Any]:
    """Mask what a worker says of one of its tasks; a scheduled one says it of its request."""
    masked = _masked(told, _PRIVATE_OF_REQUEST)
    request = masked.get("request")
    if isinstance(request, Mapping):
        masked["request"] = _masked(request, _PRIVATE_OF_REQUEST)
    return masked
