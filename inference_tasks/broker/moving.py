"""Moving the messages of a queue to an exchange: each is acknowledged once the broker has confirmed its copy."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

from inference_tasks.broker.session import Session
from inference_tasks.errors import DeploymentError

__all__ = ["move"]

log = logging.getLogger(__name__)

# Messages under way at a time: enough to keep the broker busy, few enough to come back at once after a kill.
WINDOW = 200

# Without a delivery for so long, the queue is asked whether it is empty.
QUIET_S = 0.2


def move(session: Session, queue: str, exchange: str, *, told_every: int = 1000) -> Iterator[int]:
    """Move messages until the queue has none that is ready; yield how many have been moved, now and at the end.

    Body, properties, headers and routing key stay as they are, and so does the order, among the messages that are moved
    by one call. A message can be moved twice if the process is killed between confirm and acknowledgement, never lost.
    What others hold is not waited for.

    Raises:
        DeploymentError: no queue takes the messages at the other end.
    """
    mover = _Mover(session, queue, exchange)
    try:
        mover.start()
        told = 0
        while not mover.is_done():
            if mover.moved - told >= told_every:
                told = mover.moved
                yield told
        mover.stop()
        yield mover.moved
    finally:
        mover.close()


class _Mover:
    """Works with confirms by delivery tag: py-amqp's own waiting confirms credit a late answer to the wrong message."""

    def __init__(self, session: Session, queue: str, exchange: str) -> None:
        self._session = session
        self._queue = queue
        self._exchange = exchange
        self._channel: Any = session.connection.channel()
        # Not published from the callback: a publish of py-amqp reads frames, so one would nest in the other.
        self._arrived: deque[Any] = deque()
        self._sent = 0
        self._source_tags: dict[int, int] = {}
        self._lowest = 1
        self._returned = ""
        self._refused = False
        self.moved = 0

    def start(self) -> None:
        channel = self._channel
        channel.confirm_select()
        channel.events["basic_ack"].add(self._confirmed)
        channel.events["basic_nack"].add(self._nacked)
        channel.events["basic_return"].add(self._unroutable)
        channel.basic_qos(0, WINDOW, False)
        channel.basic_consume(
            self._queue, consumer_tag="moving", callback=self._arrived.append, on_cancel=lambda _tag: None
        )

    def is_done(self) -> bool:
        """Handle what comes next from the broker; whether nothing is left to do."""
        connection = self._session.connection
        try:
            connection.drain_events(timeout=QUIET_S)
        except TimeoutError:
            connection.heartbeat_check()
            return not self._source_tags and not self._arrived and not self._session.ready(self._queue)
        while self._arrived:
            self._copy(self._arrived.popleft())
        if self._returned:
            raise DeploymentError(
                f"Nothing takes the messages of {self._queue!r}: {self._returned}. They are where they were; "
                "run `inference-tasks topology apply` again."
            )
        if self._refused:
            # The other end is full, or its leader away: what was refused has gone back and comes again.
            self._refused = False
            self._session.pause(QUIET_S)
        return False

    def stop(self) -> None:
        """End the subscription and see through what arrived meanwhile."""
        self._channel.basic_cancel("moving")
        while self._source_tags or self._arrived:
            self.is_done()

    def close(self) -> None:
        """Close the channel; the broker puts back what was not acknowledged."""
        if self._channel.is_open:
            self._channel.close()

    def _copy(self, message: Any) -> None:
        properties = dict(message.properties)
        # The broker refuses a message that names another user than the one who publishes it.
        properties.pop("user_id", None)
        headers = dict(properties.pop("application_headers", None) or {})
        # The old queue's own; the new one counts anew.
        headers.pop("x-delivery-count", None)
        self._sent += 1
        self._source_tags[self._sent] = message.delivery_tag
        copy = self._channel.prepare_message(
            message.body,
            properties.pop("priority", None),
            properties.pop("content_type", None),
            properties.pop("content_encoding", None),
            headers,
            properties,
        )
        self._channel.basic_publish(
            copy,
            exchange=self._exchange,
            routing_key=message.delivery_info["routing_key"],
            mandatory=True,
        )

    def _settled(self, tag: int, multiple: bool) -> Iterator[int]:
        for each in range(self._lowest, tag + 1) if multiple else (tag,):
            source = self._source_tags.pop(each, None)
            if source is not None:
                yield source
        if multiple:
            self._lowest = max(self._lowest, tag + 1)

    def _confirmed(self, tag: int, multiple: bool) -> None:
        for source in self._settled(tag, multiple):
            if not self._returned:
                self._channel.basic_ack(source)
                self.moved += 1

    def _nacked(self, tag: int, multiple: bool) -> None:
        self._refused = True
        for source in self._settled(tag, multiple):
            self._channel.basic_reject(source, requeue=True)

    def _unroutable(self, exc: BaseException, *_message: object) -> None:
        # Comes before the confirm of the same message, which must not count then; nothing is acknowledged any more.
        self._returned = str(exc)
