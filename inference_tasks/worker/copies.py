"""Copies of messages that go elsewhere: published with a confirm, and only then is the message itself let go."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING

from inference_tasks.broker.addressing import first_headers
from inference_tasks.broker.messages import Accepted, Outgoing, Properties, TooLarge

if TYPE_CHECKING:
    from inference_tasks.broker.messages import Outcome
    from inference_tasks.worker.intake import Delivery

__all__ = ["RETRY_S", "Mover", "as_text", "copy_of", "let_go", "raw_body"]

logger = logging.getLogger(__name__)

RETRY_S = 1.0


class Mover:
    """Publishes copies until the broker has confirmed them, on the publisher's connection. Nothing here waits.

    Until its copy is confirmed a message stays unacknowledged and the copy is tried again every second, so a crash
    between the two leaves the message.

    Attributes:
        under_way: how many copies have no confirm yet.
    """

    def __init__(
        self,
        *,
        post: Callable[[Outgoing], Future[Outcome]],
        on_main: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Make a mover.

        Args:
            post: hands a message to the publisher.
            on_main: has something done by the thread of the event loop; may be called in any thread.
            later: has something done by that thread after some seconds; called in that thread.
        """
        self._post = post
        self._on_main = on_main
        self._later = later
        self.under_way = 0

    def move(self, copy: Outgoing, then: Callable[[], None], too_large: Callable[[], None]) -> None:
        """Publish ``copy``, then call ``then`` on the loop's thread, or ``too_large`` if nothing can ever take it."""
        self.under_way += 1
        self._send(copy, then, too_large)

    def _send(self, copy: Outgoing, then: Callable[[], None], too_large: Callable[[], None]) -> None:
        def done(future: Future[Outcome]) -> None:
            self._on_main(lambda: self._settle(future, copy, then, too_large))

        self._post(copy).add_done_callback(done)

    def _settle(
        self, future: Future[Outcome], copy: Outgoing, then: Callable[[], None], too_large: Callable[[], None]
    ) -> None:
        error = None if future.cancelled() else future.exception()
        outcome = None if error or future.cancelled() else future.result()
        if isinstance(outcome, Accepted | TooLarge):
            self.under_way -= 1
            (then if isinstance(outcome, Accepted) else too_large)()
            return
        logger.warning("the copy for %s was not accepted (%s); trying again", copy.routing_key, error or outcome)
        self._later(RETRY_S, lambda: self._send(copy, then, too_large))


def copy_of(
    message: Delivery,
    exchange: str,
    routing_key: str,
    headers: Mapping[str, object],
    *,
    message_id: str | None = None,
) -> Outgoing:
    """Return a copy of a message for another place; ``headers`` are added to those it was first published with."""
    found: object = message.headers
    return Outgoing(
        body=raw_body(message),
        exchange=exchange,
        routing_key=routing_key,
        properties=Properties(
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers={**(first_headers(found) if isinstance(found, dict) else {}), **headers},
            correlation_id=as_text(message.properties.get("correlation_id")),
            reply_to=as_text(message.properties.get("reply_to")),
            message_id=message_id,
        ),
    )


def let_go(message: Delivery) -> None:
    """Acknowledge a message, unless that has happened (a task of the user's may acknowledge early)."""
    if not message.acknowledged:
        message.ack()


def raw_body(message: Delivery) -> bytes:
    """The body as it came, as bytes."""
    body = message.body
    if isinstance(body, str):
        return body.encode("utf-8", "surrogateescape")
    return bytes(body)


def as_text(value: object) -> str | None:
    """Return the value if it is text: headers may hold anything."""
    return value if isinstance(value, str) else None
