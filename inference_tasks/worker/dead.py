"""The way to the dead-letter queue: published with a confirm on another connection, then acknowledged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.errors import InferenceError

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey
    from inference_tasks.broker.messages import Outcome
    from inference_tasks.worker.intake import Delivery, Unfit

__all__ = ["Undertaker", "as_text"]

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class Undertaker:
    """Moves messages that can never run to the dead-letter queue, with the reason in a header.

    The message is acknowledged only after the broker has confirmed the copy; until then it stays unacknowledged and the
    copy is tried again every second, so a crash between the two leaves the original. Nothing here waits.
    """

    def __init__(
        self,
        *,
        post: Callable[[Outgoing], Future[Outcome]],
        on_main: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
        fail: Callable[[Unfit, QueueKey], None],
        namespace: str,
        dead_queue: str,
        worker: str,
    ) -> None:
        self._post = post
        self._on_main = on_main
        self._later = later
        self._fail = fail
        self._namespace = namespace
        self._dead_queue = dead_queue
        self._worker = worker

    def bury(self, message: Delivery, key: QueueKey, unfit: Unfit) -> None:
        where = self._dead_queue
        logger.error("message %s of %s goes to %s: %s: %s", unfit.id, key.name, where, unfit.reason, unfit.detail)
        self._send(message, self._copy(message, key, unfit), key, unfit)

    def _copy(self, message: Delivery, key: QueueKey, unfit: Unfit) -> Outgoing:
        found: object = message.headers
        headers: dict[str, Any] = dict(found) if isinstance(found, dict) else {}
        for name in [name for name in headers if name.startswith(("inference_", "x-"))]:
            del headers[name]
        headers["inference_dead"] = {
            "reason": unfit.reason,
            "detail": unfit.detail,
            "queue": key.name,
            "tier": key.tier,
            "lane": key.lane,
            "worker": self._worker,
            "at_s": time.time(),
        }
        return Outgoing(
            body=raw_body(message),
            exchange=self._namespace,
            routing_key=self._dead_queue,
            properties=Properties(
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=headers,
                correlation_id=as_text(message.properties.get("correlation_id")),
                reply_to=as_text(message.properties.get("reply_to")),
            ),
        )

    def _send(self, message: Delivery, copy: Outgoing, key: QueueKey, unfit: Unfit) -> None:
        def done(future: Future[Outcome]) -> None:
            self._on_main(lambda: self._settle(future, message, copy, key, unfit))

        self._post(copy).add_done_callback(done)

    def _settle(self, future: Future[Outcome], message: Delivery, copy: Outgoing, key: QueueKey, unfit: Unfit) -> None:
        error = None if future.cancelled() else future.exception()
        outcome = None if error or future.cancelled() else future.result()
        if isinstance(outcome, Accepted):
            try:
                self._fail(unfit, key)
            except InferenceError as exc:
                logger.warning("the record of %s could not be marked as failed: %s", unfit.id, exc)
            message.ack()
            return
        logger.warning("the copy for %s was not accepted (%s); trying again", self._dead_queue, error or outcome)
        self._later(RETRY_S, lambda: self._send(message, copy, key, unfit))


def raw_body(message: Delivery) -> bytes:
    """The body as it came, as bytes."""
    body = message.body
    if isinstance(body, str):
        return body.encode("utf-8", "surrogateescape")
    return bytes(body)


def as_text(value: object) -> str | None:
    """Return the value if it is text: headers may hold anything."""
    return value if isinstance(value, str) else None
