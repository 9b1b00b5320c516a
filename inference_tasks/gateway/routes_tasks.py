"""Submitting tasks, looking them up, following them."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from inference_tasks.errors import CallerError
from inference_tasks.gateway.documents import TaskBody, as_json, read_submit, submit_schema, task_body
from inference_tasks.gateway.events import EVENTS_HEADERS, EVENTS_TYPE, follow
from inference_tasks.gateway.limits import read_json
from inference_tasks.gateway.openapi import TERMINATE, WHY, described, headers_of, problems_of
from inference_tasks.gateway.prefer import Preferences, preferences
from inference_tasks.gateway.service import Gateway, Submitted
from inference_tasks.gateway.waiting import version_of
from inference_tasks.state.records import TaskRecord
from inference_tasks.task import SUBMIT_OPTIONS

__all__ = ["add_task_routes"]

JSON = "application/json"
POLL_FIRST_S = 1.0
POLL_LONGEST_S = 30.0
POLL_SHARE = 0.1
_EVENTS_EXAMPLE = 'retry: 2000\n\nid: 0.1.0-realtime-success\nevent: state\ndata: {"id": "…", "state": "success"}\n\n'
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Its state now, and again whenever it changes, until it has ended.",
        "content": {EVENTS_TYPE: {"schema": {"type": "string"}, "example": _EVENTS_EXAMPLE}},
    },
    204: {"description": "It has ended, and the client has seen that: it need not come back."},
}
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_IDEMPOTENCY_KEY = re.compile(r'"([\x20-\x21\x23-\x5b\x5d-\x7e]{1,255})"|([\x21\x23-\x7e]{1,255})')


def add_task_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of tasks to a router."""

    @router.post(
        "/v1/tasks/{name}",
        status_code=202,
        response_model=None,
        name="inference_submit",
        tags=["tasks"],
        summary="Submit a task",
        responses=described(
            {202: ("The broker has stored it.", TaskBody), 200: ("It has ended within the wait.", TaskBody)},
            headers={202: ("Location", "Retry-After", "Preference-Applied"), 200: ("Location", "Preference-Applied")},
        )
        | problems_of(400, 401, 403, 404, 413, 415, 422, 429, 500, 503),
        openapi_extra={
            "requestBody": {"required": True, "content": {JSON: {"schema": submit_schema()}}},
            "parameters": headers_of("Prefer", *_idempotency()),
        },
    )
    async def submit(name: str, request: Request) -> Response:
        """Submit one call of a task, by its name or the last part of it; answered once the broker has stored it.

        With `Prefer: wait=N` the answer comes with the result if the task ends within N seconds: `200`, whether it has
        succeeded or failed; its state says which.
        """
        key = gateway.access.authenticate(request)
        gateway.task(name)
        body = read_submit(await read_json(request, gateway.settings.max_body_bytes))
        preferred = preferences(request.headers.getlist("prefer"))
        wait_s = min(preferred.wait_s or 0.0, gateway.settings.wait_max_s)
        idempotency_key = _idempotency_key(request)
        gone = asyncio.create_task(_gone(request)) if wait_s > 0 else None
        try:
            submitted = await gateway.submit(key, name, body, wait_s=wait_s, gone=gone, idempotency_key=idempotency_key)
        finally:
            if gone is not None:
                gone.cancel()
        links = _links(request, submitted.id)
        headers = {"Location": links["self"], **_applied(preferred, wait_s)}
        if submitted.record is None:
            content = _accepted(submitted, links)
            return Response(as_json(content), 202, {**headers, "Retry-After": f"{POLL_FIRST_S:.0f}"}, JSON)
        content = task_body(submitted.record, links, await gateway.document(submitted.record))
        return Response(as_json(content), 200, headers, JSON)

    @router.get(
        "/v1/tasks/{task_id}",
        response_model=None,
        name="inference_task",
        tags=["tasks"],
        summary="Look a task up",
        responses=described({200: ("The task.", TaskBody)}, headers={200: ("Retry-After",)})
        | problems_of(401, 403, 404, 422, 429, 500, 503),
        openapi_extra={"parameters": [WHY]},
    )
    async def look_up(task_id: str, request: Request) -> Response:
        """Return a task, with its result once it has succeeded. `Retry-After` says when to ask again while it runs."""
        key = gateway.access.authenticate(request)
        wants_why = _flag(request, "why")
        record = await gateway.look_up(key, task_id)
        content = task_body(record, _links(request, record.id), await gateway.document(record))
        headers = {"Cache-Control": "no-store"}
        if not record.is_finished:
            pause_s = _pause_s(record)
            content["retry_after_s"] = pause_s
            headers["Retry-After"] = f"{pause_s:.0f}"
        if wants_why:
            content["why"] = (await gateway.why(key, task_id)).sentence
        return Response(as_json(content), 200, headers, JSON)

    @router.delete(
        "/v1/tasks/{task_id}",
        status_code=202,
        response_model=None,
        name="inference_cancel",
        tags=["tasks"],
        summary="Cancel a task",
        responses=described({202: ("It will not run, or was asked to stop.", TaskBody)})
        | problems_of(401, 403, 404, 409, 422, 429, 500, 503),
        openapi_extra={"parameters": [TERMINATE]},
    )
    async def cancel(task_id: str, request: Request) -> Response:
        """Cancel a task, whoever waits for it.

        One that waits never runs after this. One that runs is asked to stop, and with `terminate=true` its process is
        ended; its state tells when it has stopped.
        """
        key = gateway.access.authenticate(request)
        record = await gateway.cancel(key, task_id, terminate=_flag(request, "terminate"))
        return Response(as_json(task_body(record, _links(request, record.id), None)), 202, media_type=JSON)

    @router.get(
        "/v1/tasks/{task_id}/events",
        response_model=None,
        name="inference_events",
        tags=["tasks"],
        summary="Follow a task",
        responses=_EVENTS | problems_of(401, 403, 404, 429, 500, 503),
        openapi_extra={"parameters": headers_of("Last-Event-ID")},
    )
    async def events(task_id: str, request: Request) -> Response:
        """Follow a task as server-sent events; each holds the task, as its look-up does."""
        key = gateway.access.authenticate(request)
        record = await gateway.look_up(key, task_id)
        seen = request.headers.get("last-event-id")
        if record.is_finished and seen == version_of(record):
            return Response(status_code=204)
        followed = follow(gateway, key, record, _links(request, record.id), seen)
        return StreamingResponse(followed, 200, EVENTS_HEADERS, EVENTS_TYPE)


def _flag(request: Request, name: str) -> bool:
    """Read a flag of the query.

    Raises:
        CallerError: it is neither true nor false.
    """
    found = _FLAGS.get(request.query_params.get(name, "false").lower())
    if found is None:
        raise CallerError(f"{name}: expected true or false.")
    return found


async def _gone(request: Request) -> None:
    """Return when the client has left; to be asked once the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _links(request: Request, task_id: str) -> dict[str, str]:
    # By the routes' names: the router may be mounted anywhere.
    return {
        "self": request.url_for("inference_task", task_id=task_id).path,
        "events": request.url_for("inference_events", task_id=task_id).path,
    }


def _accepted(submitted: Submitted, links: dict[str, str]) -> dict[str, Any]:
    return {
        "id": submitted.id,
        "task": submitted.task,
        "state": submitted.state,
        "tier": submitted.tier,
        "links": links,
        "retry_after_s": POLL_FIRST_S,
    }


def _applied(preferred: Preferences, wait_s: float) -> dict[str, str]:
    if wait_s > 0:
        return {"Preference-Applied": f"wait={wait_s:.0f}"}
    return {"Preference-Applied": "respond-async"} if preferred.is_async else {}


def _pause_s(record: TaskRecord) -> float:
    """Return when to ask again: the longer it has taken already, the later."""
    waited_s = time.time() - record.submitted_at_s if record.submitted_at_s else 0.0
    return float(round(min(max(POLL_FIRST_S, waited_s * POLL_SHARE), POLL_LONGEST_S)))


def _idempotency() -> tuple[str, ...]:
    return ("Idempotency-Key",) if "idempotency_key" in SUBMIT_OPTIONS else ()


def _idempotency_key(request: Request) -> str | None:
    """Read the header as the draft has it, a quoted text; without quotes too, as many clients send it.

    Raises:
        CallerError: it cannot be read; or this version keeps none, and to ignore it would break what it asks for.
    """
    text = request.headers.get("idempotency-key")
    if text is None:
        return None
    if not _idempotency():
        raise CallerError("Idempotency-Key: this version keeps no idempotency keys. Submit without one.")
    found = _IDEMPOTENCY_KEY.fullmatch(text.strip())
    if found is None:
        raise CallerError('Idempotency-Key: expected up to 255 printable characters in quotes, such as "4f1c".')
    return found[1] or found[2]
