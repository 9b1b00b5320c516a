"""Batches: uploading many tasks at once, their progress and their results."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from kombu.utils.json import loads
from starlette.requests import ClientDisconnect

from inference_tasks.errors import CallerError
from inference_tasks.gateway.batches import LineBody, Upload
from inference_tasks.gateway.documents import BatchBody, as_json
from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.openapi import described, problems_of
from inference_tasks.gateway.problems import ProblemError
from inference_tasks.gateway.service import Gateway
from inference_tasks.state.batches import Batch
from inference_tasks.state.records import State

__all__ = ["add_batch_routes"]

JSON = "application/json"
JSONL = "application/jsonl"
_TYPES = (JSONL, "application/x-ndjson", "application/x-jsonlines", "application/json-lines")
MAX_WAIT_S = 30.0
MAX_WAIT_LONGEST_S = 3600.0
# Results may be large, and all of a page are held at once.
_RESULTS_AT_ONCE = 50
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,3})?")
_MAX_WAIT: dict[str, Any] = {
    "name": "max_wait_s",
    "in": "query",
    "required": False,
    "description": "How long reading may stop while nothing is accepted, before the rest is refused.",
    "schema": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_LONGEST_S, "default": MAX_WAIT_S},
}
_LINE = '{"task": "classify", "args": ["cat.png"], "custom_id": "cat"}\n'
_RESULT = '{"line": 1, "id": "batch-…", "custom_id": "cat", "state": "success", "result": "cat"}\n'
_RESULTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A line for each line that was accepted, in that order.",
        "content": {JSONL: {"schema": {"type": "string"}, "example": _RESULT}},
    }
}


def add_batch_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of batches to a router."""

    @router.post(
        "/v1/batches",
        status_code=201,
        response_model=None,
        name="inference_upload",
        tags=["batches"],
        summary="Submit many tasks",
        responses=described({201: ("What was accepted, and what was not.", BatchBody)}, headers={201: ("Location",)})
        | problems_of(401, 403, 415, 422, 429, 500, 503),
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": f"A task in each line, as JSON; its fields: {', '.join(LineBody.model_fields)}.",
                "content": {JSONL: {"schema": {"type": "string"}, "example": _LINE}},
            },
            "parameters": [_MAX_WAIT],
        },
    )
    async def upload(request: Request) -> Response:
        """Submit a task for each line of the body, of any size, while it is being sent.

        When a tier is full reading stops, up to `max_wait_s` without progress; then the rest is refused, by line
        numbers. Lines with a `custom_id` may be sent again, in any later upload: they are the same tasks.
        """
        key = gateway.access.authenticate(request)
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in _TYPES or request.headers.get("content-encoding", "identity") != "identity":
            detail = f"Expected {JSONL}, uncompressed."
            raise ProblemError(415, "unsupported-media-type", "The body must be JSON lines", detail)
        taken = Upload(gateway, key, max_wait_s=_max_wait_s(request))
        try:
            await taken.read(request.stream())
        except ClientDisconnect:
            # Nobody reads this.
            return Response(status_code=400)
        batch = await _found(gateway, key, taken.id)
        body = _body(request, batch)
        body |= {
            "refused_lines": sorted(taken.refusals.ranges, key=lambda one: int(one["first"])),
            "is_cut": taken.refusals.is_cut,
        }
        return Response(as_json(body), 201, {"Location": body["links"]["self"]}, JSON)

    @router.get(
        "/v1/batches/{batch_id}",
        response_model=None,
        name="inference_batch",
        tags=["batches"],
        summary="Look a batch up",
        responses=described({200: ("The batch.", BatchBody)}) | problems_of(401, 403, 404, 429, 500, 503),
    )
    async def look_up(batch_id: str, request: Request) -> Response:
        """Return how many lines stand how; the same work for any number of them."""
        key = gateway.access.authenticate(request)
        body = _body(request, await _found(gateway, key, batch_id))
        return Response(as_json(body), 200, {"Cache-Control": "no-store"}, JSON)

    @router.get(
        "/v1/batches/{batch_id}/results",
        response_model=None,
        name="inference_results",
        tags=["batches"],
        summary="The results of a batch",
        responses=_RESULTS | problems_of(401, 403, 404, 429, 500, 503),
    )
    async def results(batch_id: str, request: Request) -> Response:
        """Return a line for each accepted line: its state, and its result or error once it has ended.

        Results are kept as long as those of other tasks; of one that is gone the state is told alone.
        """
        key = gateway.access.authenticate(request)
        await _found(gateway, key, batch_id)
        return StreamingResponse(_results(gateway, batch_id), 200, {"Cache-Control": "no-store"}, JSONL)


async def _found(gateway: Gateway, key: ApiKey, batch_id: str) -> Batch:
    batch = await gateway.batches.get(batch_id)
    if batch is None or not key.may_see(batch.tenant):
        detail = f"There is no batch {batch_id[:100]!r}, or it was uploaded too long ago."
        raise ProblemError(404, "batch-not-found", "There is no such batch", detail)
    return batch


def _body(request: Request, batch: Batch) -> dict[str, Any]:
    links = {
        "self": request.url_for("inference_batch", batch_id=batch.id).path,
        "results": request.url_for("inference_results", batch_id=batch.id).path,
    }
    return {
        "id": batch.id,
        "state": batch.state,
        "created_at_s": batch.created_at_s,
        "lines": batch.lines,
        "accepted": batch.accepted,
        "refused": batch.refused,
        "counts": {"pending": batch.accepted - sum(batch.ended.values()), **batch.ended},
        "links": links,
    }


async def _results(gateway: Gateway, batch_id: str) -> AsyncIterator[bytes]:
    start = 0
    while lines := await gateway.batches.lines(batch_id, start, _RESULTS_AT_ONCE):
        start += len(lines)
        ids = [line.task_id for line in lines]
        records = await gateway.store.get_many(ids)
        documents = await gateway.batches.documents(ids)
        page = b""
        for line, record, document in zip(lines, records, documents, strict=True):
            state = record.state if record is not None else line.ended_as
            row: dict[str, Any] = {
                "line": line.number,
                "id": line.task_id,
                "custom_id": line.custom_id or None,
                "state": state,
            }
            if state == State.SUCCESS:
                row["result"] = loads(document).get("result") if document is not None else None
                row["is_kept"] = document is not None
            elif record is not None and record.error is not None:
                row["error"] = record.error
            page += as_json(row) + b"\n"
        yield page


def _max_wait_s(request: Request) -> float:
    text = request.query_params.get("max_wait_s")
    if text is None:
        return MAX_WAIT_S
    if not _SECONDS.fullmatch(text) or float(text) > MAX_WAIT_LONGEST_S:
        raise CallerError(f"max_wait_s: expected seconds from 0 to {MAX_WAIT_LONGEST_S:g}.")
    return float(text)
