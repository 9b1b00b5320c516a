"""The other side of the benchmark of the gateway: what one writes oneself on FastAPI and stock Celery."""

from __future__ import annotations

from typing import Any

from celery.exceptions import TimeoutError as ResultTimeout
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from kombu.exceptions import OperationalError
from pydantic import BaseModel

from tests.benchmarks.stock import TIERS, app

__all__ = ["web"]

WAIT_S = 30.0

web = FastAPI()


class Submit(BaseModel):
    """One call."""

    args: list[Any] = []
    tier: str = TIERS[1]


# Not coroutines: the calls block, so the framework runs them in its threads.
@web.post("/v1/tasks/{name}")
def submit(name: str, body: Submit) -> Response:
    """Submit a call; a full queue looks like a lost broker here."""
    try:
        sent = app.tasks[name].apply_async(tuple(body.args), queue=body.tier, retry=False)
    except OperationalError:
        return JSONResponse({"detail": "full"}, 429)
    return JSONResponse({"id": sent.id}, 202)


@web.post("/v1/waits/{name}")
def wait(name: str, body: Submit) -> Response:
    """Submit a call and wait for its result."""
    sent = app.tasks[name].apply_async(tuple(body.args), queue=body.tier, retry=False)
    try:
        return JSONResponse({"id": sent.id, "result": sent.get(timeout=WAIT_S)})
    except ResultTimeout:
        return JSONResponse({"id": sent.id}, 202)
