"""The gateway as an app of its own, and as a router for an app that exists."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from celery import Celery
from fastapi import APIRouter, FastAPI, Request, Response, Security
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException

from inference_tasks.app import inference_of
from inference_tasks.gateway.access import Access
from inference_tasks.gateway.keys import KeyFile, KeyRing
from inference_tasks.gateway.openapi import DESCRIPTION
from inference_tasks.gateway.problems import problem_of_status, problem_response
from inference_tasks.gateway.route import route_class
from inference_tasks.gateway.routes_batches import add_batch_routes
from inference_tasks.gateway.routes_health import add_health_routes
from inference_tasks.gateway.routes_page import add_page_routes
from inference_tasks.gateway.routes_tasks import add_task_routes
from inference_tasks.gateway.routes_why import add_why_route
from inference_tasks.gateway.service import Gateway

__all__ = ["create_app", "gateway_app", "gateway_for", "router"]


def router(app: Celery, *, keys: Path | KeyRing | None = None, is_open: bool = False) -> APIRouter:
    """Return the gateway as a router: ``web.include_router(router(app), prefix="/inference")``.

    It connects when the app that it is included in starts, and disconnects when that ends.

    Args:
        app: the app whose tasks are submitted.
        keys: the API keys, or the file of them; None for the setting ``gateway.keys``.
        is_open: without keys, whether others than this machine may ask. Only for an app that checks by itself who asks.

    Raises:
        SettingsError: the app's settings, or the keys, are wrong.
    """
    return _router(gateway_for(app, keys=keys, is_open=is_open))


def create_app(app: Celery, *, keys: Path | KeyRing | None = None, is_open: bool = False) -> FastAPI:
    """Return the gateway as an ASGI app of its own, for any server; see ``router``."""
    return gateway_app(gateway_for(app, keys=keys, is_open=is_open))


def gateway_for(app: Celery, *, keys: Path | KeyRing | None, is_open: bool = False) -> Gateway:
    """Return what answers for an app; not connected yet."""
    inference = inference_of(app)
    if keys is None and inference.settings.gateway.keys:
        keys = Path(inference.settings.gateway.keys)
    return Gateway(inference, Access(KeyFile(keys) if isinstance(keys, Path) else keys, is_open=is_open))


def gateway_app(gateway: Gateway) -> FastAPI:
    """Return a gateway as an ASGI app."""
    web = FastAPI(
        title="inference-tasks",
        version="1",
        description=DESCRIPTION,
        # Their pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    web.include_router(_router(gateway))

    @web.exception_handler(HTTPException)
    async def of_the_framework(request: Request, error: HTTPException) -> Response:
        problem = problem_of_status(error.status_code, str(error.detail), error.headers)
        gateway.metrics.answered("other", "other", error.status_code, 0.0)
        return problem_response(problem, request)

    return web


def _router(gateway: Gateway) -> APIRouter:
    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    # For the document only: the routes read the headers themselves, to answer with problems.
    documented = [
        Security(HTTPBearer(auto_error=False)),
        Security(APIKeyHeader(name="X-API-Key", auto_error=False)),
    ]
    made = APIRouter(route_class=route_class(gateway), lifespan=lifespan, dependencies=documented)
    add_task_routes(made, gateway)
    add_why_route(made, gateway)
    add_batch_routes(made, gateway)
    add_health_routes(made, gateway)
    add_page_routes(made, gateway)
    return made
