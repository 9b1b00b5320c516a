"""The status page for people, and the one answer that it asks for once a second."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response

from inference_tasks.gateway.documents import OverviewBody, as_json
from inference_tasks.gateway.openapi import described, problems_of
from inference_tasks.gateway.service import Gateway
from inference_tasks.state.records import TaskRecord

__all__ = ["add_page_routes"]


def add_page_routes(router: APIRouter, gateway: Gateway) -> None:
    """Add these routes to a router."""
    page = files(__package__).joinpath("page.html").read_bytes()
    headers = {
        "Content-Security-Policy": _policy(page.decode()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @router.get("/", response_model=None, name="inference_page", include_in_schema=False)
    async def show() -> Response:
        # Without a key: it holds nothing, and asks for one.
        return Response(page, 200, headers, "text/html; charset=utf-8")

    @router.get(
        "/v1/overview",
        response_model=None,
        name="inference_overview",
        tags=["tiers"],
        summary="What the status page shows",
        responses=described({200: ("All tiers, and the latest tasks.", OverviewBody)})
        | problems_of(401, 403, 429, 500, 503),
    )
    async def overview(request: Request) -> Response:
        """Return what the tiers are doing and the latest tasks that this gateway process has accepted.

        Of a task neither arguments nor results are told, nor the text of its error, which may quote them.
        """
        key = gateway.access.authenticate(request)
        tiers = await gateway.readiness.tiers()
        tasks = [_row(one) for one in await gateway.recent.tasks(key)]
        body = {"at_s": time.time(), "tiers": [one.as_dict() for one in tiers], "tasks": tasks}
        return Response(as_json(body), 200, {"Cache-Control": "no-store"}, "application/json")


def _row(record: TaskRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "task": record.name,
        "state": record.state,
        "tier": record.tier,
        "tier_first": record.tier_first,
        "attempts": record.attempts,
        "submitted_at_s": record.submitted_at_s,
        "started_at_s": record.started_at_s,
        "finished_at_s": record.finished_at_s,
        "error_type": record.error["type"] if record.error else None,
    }


def _policy(page: str) -> str:
    """Return the policy that lets the page's own script and style run, and nothing that may have got into it."""
    sources = {
        tag: " ".join(f"'sha256-{_digest(part)}'" for part in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(part: str) -> str:
    return base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
