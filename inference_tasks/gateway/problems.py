"""What clients are told when something is wrong: one table from error to status, and the body of RFC 9457."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from inference_tasks.errors import (
    BrokerUnavailableError,
    BusyError,
    CallerError,
    DeadlineError,
    IdempotencyConflictError,
    InferenceError,
    InvalidArgumentsError,
    MessageTooLargeError,
    OutcomeUnknownError,
    QueueFullError,
    StateUnavailableError,
    TaskNotFoundError,
    TierPausedError,
    UnknownTaskError,
    UnknownTierError,
)

__all__ = ["MEDIA_TYPE", "ProblemError", "problem_of", "problem_response", "problem_type"]

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_TYPE = "urn:inference-tasks:problem:"


class _Kind(NamedTuple):
    """How errors of one class are told: status, last part of the problem's type, title."""

    status: int
    name: str
    title: str


# The first class that fits; so the narrow ones stand before their families.
_TABLE: tuple[tuple[type[InferenceError], _Kind], ...] = (
    (TierPausedError, _Kind(503, "tier-paused", "An operator has paused the tier")),
    (QueueFullError, _Kind(429, "queue-full", "The tier accepts nothing now")),
    (DeadlineError, _Kind(429, "deadline", "The task could not start in time")),
    (BrokerUnavailableError, _Kind(503, "broker-unavailable", "The message broker is away")),
    (StateUnavailableError, _Kind(503, "state-unavailable", "The state store is away")),
    (OutcomeUnknownError, _Kind(503, "outcome-unknown", "It is unknown whether the task was accepted")),
    (BusyError, _Kind(503, "busy", "Not now")),
    (TaskNotFoundError, _Kind(404, "task-not-found", "There is no such task")),
    (UnknownTaskError, _Kind(404, "unknown-task", "There is no task of this name")),
    (MessageTooLargeError, _Kind(413, "too-large", "The request is too large")),
    (InvalidArgumentsError, _Kind(422, "invalid-arguments", "The arguments do not fit the task")),
    (IdempotencyConflictError, _Kind(422, "idempotency-conflict", "The key was used for another request")),
    (UnknownTierError, _Kind(422, "unknown-tier", "There is no such tier")),
    (CallerError, _Kind(422, "invalid-request", "The request cannot be meant")),
    (InferenceError, _Kind(500, "internal", "The server cannot do this now")),
)

# What an error may tell of itself, by its attributes; one list for all, so that a client finds the same names anywhere.
_EXTENSIONS = (
    "tier",
    "limit",
    "ahead",
    "reason",
    "retry_after_s",
    "task_id",
    "nearest",
    "size_bytes",
    "limit_bytes",
    "errors",
)


class ProblemError(Exception):
    """A problem of HTTP's own, or of the gateway's: it ends the request with this status.

    Attributes:
        status: of the answer.
        name: last part of the problem's type.
        title: the same for all problems of the type.
        detail: what is wrong with this request, and what to do.
        extensions: further members of the body.
        headers: of the answer.
    """

    def __init__(
        self,
        status: int,
        name: str,
        title: str,
        detail: str = "",
        *,
        extensions: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail or title)
        self.status = status
        self.name = name
        self.title = title
        self.detail = detail
        self.extensions = dict(extensions or {})
        self.headers = dict(headers or {})


def problem_type(name: str) -> str:
    """Return the type of a problem, a URI that names it and leads nowhere."""
    return _TYPE + name


def problem_of(error: InferenceError) -> ProblemError:
    """Return what a client is told of an error."""
    kind = next(kind for known, kind in _TABLE if isinstance(error, known))
    if kind.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        # It may name servers and settings: for the log, not for clients.
        log.error("A request failed: %s", error, exc_info=error)
        return ProblemError(*kind, "The reason is in the log of the gateway.")
    said = {name: getattr(error, name) for name in _EXTENSIONS if getattr(error, name, None) not in (None, "")}
    return ProblemError(*kind, str(error), extensions=said)


def problem_response(problem: ProblemError, request: Request) -> Response:
    """Return a problem as the answer to a request."""
    headers = dict(problem.headers)
    retry_after_s = problem.extensions.get("retry_after_s")
    if isinstance(retry_after_s, int | float):
        headers.setdefault("Retry-After", str(max(1, math.ceil(retry_after_s))))
    body = {
        "type": problem_type(problem.name),
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail or problem.title,
        "instance": request.url.path,
        **problem.extensions,
    }
    return JSONResponse(body, problem.status, headers, MEDIA_TYPE)


def problem_of_status(status: int, detail: str, headers: Mapping[str, str] | None) -> ProblemError:
    """Return an error that the web framework found by itself as a problem: an unknown path, a wrong method."""
    title = HTTPStatus(status).phrase
    return ProblemError(status, title.lower().replace(" ", "-"), title, detail, headers=headers)
