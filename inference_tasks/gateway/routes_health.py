"""Whether the gateway works, what the tiers are doing, and the gateway's figures."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from inference_tasks.gateway.documents import TiersBody, as_json
from inference_tasks.gateway.metrics import METRICS_TYPE
from inference_tasks.gateway.openapi import described, problems_of
from inference_tasks.gateway.problems import ProblemError
from inference_tasks.gateway.service import Gateway

__all__ = ["add_health_routes"]

JSON = "application/json"
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def _good(description: str) -> dict[int | str, dict[str, Any]]:
    content = {JSON: {"schema": {"type": "object"}, "example": {"status": "ok"}}}
    return {200: {"description": description, "content": content}}


def add_health_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add these routes to a router."""

    @router.get(
        "/v1/tiers",
        response_model=None,
        name="inference_tiers",
        tags=["tiers"],
        summary="What the tiers are doing",
        responses=described({200: ("All tiers, the highest first.", TiersBody)}) | problems_of(401, 403, 429, 500, 503),
    )
    async def tiers(request: Request) -> Response:
        """Return what waits in each tier, who serves it, and its share of the last minute; a second old at most."""
        gateway.access.authenticate(request)
        found = await gateway.readiness.tiers()
        return Response(as_json({"tiers": [one.as_dict() for one in found]}), 200, media_type=JSON)

    @router.get(
        "/healthz",
        response_model=None,
        name="inference_healthz",
        tags=["operation"],
        summary="Whether the process works",
        responses=_good("It does."),
    )
    async def healthz() -> Response:
        """Answer, whatever the broker and Redis do: the process needs no restart because they are away."""
        return Response(as_json({"status": "ok"}), 200, media_type=JSON)

    @router.get(
        "/readyz",
        response_model=None,
        name="inference_readyz",
        tags=["operation"],
        summary="Whether tasks can be accepted",
        responses=_good("They can.") | problems_of(503),
    )
    async def readyz() -> Response:
        """Answer whether broker and Redis answer and the queues are declared; if not, what is missing."""
        missing = await gateway.readiness.missing()
        if missing:
            said = "; ".join(f"{name} {why}" for name, why in missing.items())
            extensions = {"missing": sorted(missing), "retry_after_s": 1.0}
            raise ProblemError(503, "not-ready", "Tasks cannot be accepted now", f"{said}.", extensions=extensions)
        return Response(as_json({"status": "ok"}), 200, media_type=JSON)

    @router.get(
        "/metrics",
        response_model=None,
        name="inference_metrics",
        tags=["operation"],
        summary="The gateway's figures, for Prometheus",
        responses=_METRICS | problems_of(401, 403, 429),
    )
    async def metrics(request: Request) -> Response:
        """Return what this process has counted."""
        gateway.access.authenticate(request)
        return Response(gateway.metrics.text(), 200, media_type=METRICS_TYPE)
