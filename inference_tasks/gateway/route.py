"""One route of the gateway: errors become problems, and the answer is counted, wherever the router is mounted."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from inference_tasks.broker.publisher import Publisher
from inference_tasks.errors import InferenceError
from inference_tasks.gateway.problems import ProblemError, problem_of, problem_response
from inference_tasks.gateway.service import Gateway

__all__ = ["GatewayRoute", "route_class"]


class GatewayRoute(APIRoute):
    """A route that answers errors itself: a router has no error handlers, those belong to the app it is mounted in."""

    gateway: ClassVar[Gateway]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            started_at_s = time.monotonic()
            try:
                with _trace_of(request.headers):
                    response = await handle(request)
            except ProblemError as problem:
                response = problem_response(problem, request)
            except InferenceError as error:
                response = problem_response(problem_of(error), request)
            except RequestValidationError as error:
                said = "; ".join(str(one["msg"]) for one in error.errors())
                unfit = ProblemError(422, "invalid-request", "The request cannot be meant", said)
                response = problem_response(unfit, request)
            self.gateway.metrics.answered(
                self.path_format, request.method, response.status_code, time.monotonic() - started_at_s
            )
            return response

        return answer


def _trace_of(headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Within this, what is submitted belongs to the trace that a request names."""
    if Publisher.tracer is None:
        return nullcontext()
    # OpenTelemetry is there only where somebody traces.
    from inference_tasks.observe.tracing import incoming

    return incoming(headers)


def route_class(gateway: Gateway) -> type[GatewayRoute]:
    """Return the class of the routes of one gateway."""
    return type("BoundGatewayRoute", (GatewayRoute,), {"gateway": gateway})
