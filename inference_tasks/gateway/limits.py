"""What is refused before it costs anything: too large a body, too many requests of one key."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from fastapi import Request
from pydantic_core import from_json

from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.problems import ProblemError

__all__ = ["Rates", "read_json"]

_JSON = "application/json"
# A number that no float holds: Python reads it as infinite, which is no JSON.
_HUGE = re.compile(rb"\d[eE]\+?\d{3}|\d{300}")


async def read_json(request: Request, limit_bytes: int) -> object:
    """Read the body of a request as JSON, to the letter of RFC 8259.

    not the framework's own reading: that takes any size, NaN, lone surrogates and any depth. The limit holds for what
    is announced, before anything is read, and for what comes, announced or not.

    Raises:
        ProblemError: 415, 413 or 400.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != _JSON:
        found = repr(media_type) if media_type else "none"
        raise ProblemError(415, "unsupported-media-type", "The body must be JSON", f"Expected {_JSON}, found {found}.")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ProblemError(415, "unsupported-media-type", "The body must not be compressed")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    try:
        value = from_json(bytes(body), allow_inf_nan=False)
        if _HUGE.search(body) and _is_infinite(value):
            raise ValueError("a number is too large")
    except ValueError as error:
        raise ProblemError(400, "malformed-json", "The body is not JSON", f"The body is not JSON: {error}.") from error
    return value


def _is_infinite(value: object) -> bool:
    """Whether there is an infinite number anywhere in it; its depth is limited by the parser."""
    if isinstance(value, float):
        return value in (float("inf"), float("-inf"))
    if isinstance(value, dict):
        return any(_is_infinite(one) for one in value.values())
    return isinstance(value, list) and any(_is_infinite(one) for one in value)


def _too_large(limit_bytes: int) -> ProblemError:
    return ProblemError(
        413,
        "too-large",
        "The request is too large",
        f"At most {limit_bytes} bytes are taken (gateway.max_body_bytes). Pass large inputs by reference.",
        extensions={"limit_bytes": limit_bytes},
        # What is left of the body is not read.
        headers={"Connection": "close"},
    )


class Rates:
    """A token bucket for each key: as many requests a second as it may, in bursts of up to one second's worth.

    In this process alone, by its own clock: a request costs no round trip for it. Several gateways side by side let
    through as many times more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # {key: (tokens left, when that was)}
        self._left_by_key: dict[str, tuple[float, float]] = {}

    def take(self, key: ApiKey) -> None:
        """Count one request.

        Raises:
            ProblemError: 429, with the time until the next one is let through.
        """
        rate = key.rate_per_s
        if rate is None:
            return
        now_s = self._clock()
        most = max(1.0, rate)
        left, at_s = self._left_by_key.get(key.id, (most, now_s))
        left = min(most, left + (now_s - at_s) * rate)
        if left < 1.0:
            self._left_by_key[key.id] = (left, now_s)
            raise ProblemError(
                429,
                "rate-limited",
                "Too many requests",
                f"This key may send {rate:g} requests a second.",
                extensions={"reason": "rate", "limit": rate, "retry_after_s": round((1.0 - left) / rate, 3)},
            )
        self._left_by_key[key.id] = (left - 1.0, now_s)
