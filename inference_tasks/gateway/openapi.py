"""What the OpenAPI document says of answers and headers beside the bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from inference_tasks.gateway.problems import MEDIA_TYPE, problem_type

__all__ = ["DESCRIPTION", "TERMINATE", "described", "headers_of", "problems_of"]

DESCRIPTION = """\
Submit inference tasks of three service classes (tiers) and learn what becomes of them.

A task is accepted (`202`) only once the broker has stored it. A full tier answers `429` with the time to come back.
Errors are problems by RFC 9457.
"""


class Problem(BaseModel):
    """What is wrong (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    instance: str


_MEANING = {
    400: ("The body is not JSON.", "malformed-json"),
    401: ("An API key is needed.", "unauthorized"),
    403: ("The key may not do this.", "tier-not-allowed"),
    404: ("There is no such task.", "unknown-task"),
    409: ("The task has ended.", "ended"),
    413: ("The body is too large.", "too-large"),
    415: ("The body must be JSON.", "unsupported-media-type"),
    422: ("The request, or the task's arguments, cannot be meant.", "invalid-arguments"),
    429: ("Not now: the tier is full, or the key's limit is reached.", "queue-full"),
    500: ("Somebody must change the deployment.", "internal"),
    503: ("Not now: the broker or Redis is away, or it is unknown whether the task was accepted.", "busy"),
}
_RETRIED = (429, 503)

_HEADERS: Mapping[str, dict[str, Any]] = {
    "Location": {"description": "Where to look the task up.", "schema": {"type": "string"}},
    "Retry-After": {"description": "Seconds after which to ask again.", "schema": {"type": "integer", "minimum": 1}},
    "Preference-Applied": {"description": "Which preference was followed.", "schema": {"type": "string"}},
}

_PARAMETERS: Mapping[str, dict[str, Any]] = {
    "Prefer": {
        "description": "`wait=N`: wait up to N seconds for the result (RFC 7240).",
        "schema": {"type": "string"},
        "example": "wait=2",
    },
    "Idempotency-Key": {
        "description": "Submits with the same key and the same body are one task.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        "example": '"4f1c0d5e"',
    },
    "Last-Event-ID": {
        "description": "The last event that was seen; what has not changed since is not told again.",
        "schema": {"type": "string"},
    },
}


TERMINATE: Mapping[str, Any] = {
    "name": "terminate",
    "in": "query",
    "required": False,
    "description": "Whether the process that runs it is ended, not only asked.",
    "schema": {"type": "boolean", "default": False},
}


WHY: Mapping[str, Any] = {
    "name": "why",
    "in": "query",
    "required": False,
    "description": "Whether to say why it is where it is.",
    "schema": {"type": "string", "enum": ["0", "1"], "default": "0"},
}


def described(
    bodies: Mapping[int, tuple[str, type[BaseModel]]], *, headers: Mapping[int, tuple[str, ...]] | None = None
) -> dict[int | str, dict[str, Any]]:
    """Return what the document says of the good answers: {status: (meaning, body)}, and their headers."""
    return {
        status: {
            "description": text,
            "model": body,
            "headers": {name: _HEADERS[name] for name in (headers or {}).get(status, ())},
        }
        for status, (text, body) in bodies.items()
    }


def problems_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what the document says of these problems."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        text, name = _MEANING[status]
        example = {
            "type": problem_type(name),
            "title": text.rstrip("."),
            "status": status,
            "detail": text,
            "instance": "/v1/tasks/classify",
        }
        if status in _RETRIED:
            example |= {"tier": "realtime", "limit": 1000, "reason": "full", "retry_after_s": 3.0}
        found[status] = {
            "description": text,
            "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema(), "example": example}},
            "headers": {"Retry-After": _HEADERS["Retry-After"]} if status in _RETRIED else {},
        }
    return found


def headers_of(*names: str) -> list[dict[str, Any]]:
    """Return what the document says of headers of a request; none is required."""
    return [{"name": name, "in": "header", "required": False, **_PARAMETERS[name]} for name in names]
