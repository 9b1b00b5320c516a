"""Telling clients why their task is where it is."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from inference_tasks.gateway.documents import as_json
from inference_tasks.gateway.openapi import described, problems_of
from inference_tasks.gateway.service import Gateway
from inference_tasks.observe.why import Why
from inference_tasks.state.records import State

__all__ = ["WhyBody", "add_why_route", "why_body"]


class PauseBody(BaseModel):
    """What an operator has switched off."""

    target: str
    at_s: float
    because: str


class DeadLetterBody(BaseModel):
    """How the message of a failed task came into the dead letters."""

    reason: str
    is_replayable: bool
    dead_at_s: float


class WhyBody(BaseModel):
    """Why a task is where it is. Times are unix seconds."""

    id: str
    state: State
    reason: str = Field(
        description="queued, fetched, paused, no worker, workers paused, running, lost, retrying, delayed, "
        "dependencies, dead, or the state of a task that has ended."
    )
    sentence: str = Field(description="The same for people.")
    at_s: float
    tier: str
    lane: str
    position: int | None = Field(description="Its place in its queue, from 1.")
    queue_waiting: int | None = Field(description="How many wait in that queue.")
    ahead_by_tier: dict[str, int] = Field(
        description="Tasks that wait for the same slots; in its queue those before it."
    )
    share: float | None
    starts_per_s: float | None
    expected_start_at_s: float | None = Field(description="An estimate.")
    promotion_at_s: float | None
    promotion_to: str | None
    due_at_s: float | None
    expires_at_s: float | None
    waits_for: dict[str, str] = Field(description="Tasks that must succeed first, and their states.")
    workers: int = Field(description="Live workers that serve its tier.")
    paused: PauseBody | None = None
    dead_letter: DeadLetterBody | None = None


# Not here: who paused it, and which worker runs it. That is for those who run the service.
_SHOWN = tuple(name for name in WhyBody.model_fields if name not in ("paused", "dead_letter"))


def why_body(found: Why) -> dict[str, object]:
    """Return an explanation as clients see it."""
    body: dict[str, object] = {name: getattr(found, name) for name in _SHOWN}
    if found.switch:
        body["paused"] = {name: found.switch[name] for name in PauseBody.model_fields}
    if found.dead_letter:
        body["dead_letter"] = {name: found.dead_letter[name] for name in DeadLetterBody.model_fields}
    return body


def add_why_route(router: APIRouter, gateway: Gateway) -> None:
    """Add the route to a router."""

    @router.get(
        "/v1/tasks/{task_id}/why",
        response_model=None,
        name="inference_why",
        tags=["tasks"],
        summary="Why a task is where it is",
        responses=described({200: ("Where it is, and what it waits for.", WhyBody)})
        | problems_of(401, 403, 404, 429, 500, 503),
    )
    async def tell_why(task_id: str, request: Request) -> Response:
        """Say where a task is: its place, who is before it, when it should start, what keeps it. For Redis one look."""
        key = gateway.access.authenticate(request)
        found = await gateway.why(key, task_id)
        return Response(as_json(why_body(found)), 200, {"Cache-Control": "no-store"}, "application/json")
