"""Taking messages from the heads of queues, many in one round trip, and settling them by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Self

from kombu import Connection

from inference_tasks.broker.dial import dial
from inference_tasks.errors import BrokerUnavailableError
from inference_tasks.worker import seam

__all__ = ["Pull", "Taken"]

log = logging.getLogger(__name__)

#: The longest wait for any answer of the broker.
ANSWER_S = 10.0
#: The same for the end of the connection, which nobody needs to know.
FAREWELL_S = 1.0

#: Messages that are on their way back at a time: of more than 32 that it has not taken back yet, a quorum queue loses
#: the order (measured on 3.10).
RETURNED_AT_ONCE = 16

#: The longest wait until some have been taken back. They do not show where a worker takes them at once.
TAKEN_BACK_S = 0.25
LOOK_AGAIN_S = 0.002


@dataclass(frozen=True, slots=True)
class Taken:
    """A message as the broker sent it; it stays ours until it is acknowledged or given back.

    Attributes:
        headers: as decoded; a header can hold anything.
        properties: the other properties, by their names in AMQP.
    """

    queue: str
    tag: int
    body: bytes
    headers: Mapping[str, object]
    properties: Mapping[str, object]


class Pull:
    """One connection, opened when it is needed and kept between rounds. For one thread.

    ``basic.get`` and not a subscription: it brings exactly as many as were asked for, and says when there are no more.
    Gets are sent together and so cost one round trip, however many. Not kombu's ``Message``: it decompresses the body,
    and what is published again must be what came.

    Attributes:
        round_trips: how often the broker's answer was waited for.
    """

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._connection: Connection | None = None
        self._outbox: Any = None
        self._channels: dict[str, Any] = {}
        self._answers: list[Any] = []
        self.round_trips = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an error the connection is closed, and with it everything that is still held goes back."""
        if error is not None:
            self._drop()

    def close(self) -> None:
        """Close the connection; the next call opens it again.

        What was settled stays so, but for what comes last of a whole batch: a quorum queue takes 32 at a time.
        """
        if self._connection is not None and self._connection.connected:
            # RabbitMQ does not heed the last words of a connection that breaks off.
            raw = self._connection.connection
            with suppress(*self._errors), raw.transport.having_timeout(FAREWELL_S):
                raw.close()
        self._drop()

    def _drop(self) -> None:
        """Without a word: it would wait for a peer that may be frozen."""
        connection, self._connection, self._outbox = self._connection, None, None
        self._channels.clear()
        if connection is not None:
            seam.collect(connection)

    def ready(self, queue: str) -> int:
        """Return how many messages a queue has that nobody holds; 0 if there is no such queue.

        Raises:
            BrokerUnavailableError: the broker does not answer.
        """
        try:
            self.round_trips += 1
            return int(self._channel(queue).queue_declare(queue, passive=True).message_count)
        except seam.CHANNEL_ERRORS as exc:
            self._missing(queue, exc)
            return 0
        except self._errors as exc:
            raise self._lost(exc) from exc

    def take(self, queue: str, count: int) -> list[Taken]:
        """Take up to ``count`` messages from the head of a queue, in their order.

        Raises:
            BrokerUnavailableError: the broker does not answer; what was taken goes back.
        """
        if count <= 0:
            return []
        try:
            channel = self._channel(queue)
            self._answers = []
            for _ in range(count):
                self._outbox.get(channel, queue)
            self.round_trips += 1
            self._outbox.flush()
            end = monotonic() + ANSWER_S
            while len(self._answers) < count:
                if not seam.read_frame(self._connection, ANSWER_S) and monotonic() > end:
                    raise TimeoutError(f"no answer within {ANSWER_S:g} s")
            return [_taken(queue, raw) for raw in self._answers if raw is not None]
        except seam.CHANNEL_ERRORS as exc:
            self._missing(queue, exc)
            return []
        except self._errors as exc:
            raise self._lost(exc) from exc

    def settle(self, *, done: Iterable[Taken] = (), back: Iterable[Taken] = ()) -> None:
        """Acknowledge what is done and return the rest to its place, in its order.

        Raises:
            BrokerUnavailableError: the connection is lost; all of it goes back.
        """
        try:
            for one in done:
                self._channels[one.queue].basic_ack(one.tag)
            if self._outbox is not None:
                self._outbox.flush()
            by_queue: dict[str, list[int]] = {}
            for one in sorted(back, key=lambda each: each.tag):
                by_queue.setdefault(one.queue, []).append(one.tag)
            for queue, tags in by_queue.items():
                self._give_back(queue, tags)
        except self._errors as exc:
            raise self._lost(exc) from exc

    def _give_back(self, queue: str, tags: Sequence[int]) -> None:
        before = self.ready(queue) if len(tags) > RETURNED_AT_ONCE else 0
        for begin in range(0, len(tags), RETURNED_AT_ONCE):
            for tag in tags[begin : begin + RETURNED_AT_ONCE]:
                self._channels[queue].inference_nack(tag)
            self._outbox.flush()
            end = begin + RETURNED_AT_ONCE
            if end < len(tags):
                self._wait_taken_back(queue, before + end)

    def _wait_taken_back(self, queue: str, ready: int) -> None:
        until_s = monotonic() + TAKEN_BACK_S
        while self.ready(queue) < ready and monotonic() < until_s:
            sleep(LOOK_AGAIN_S)

    @property
    def _errors(self) -> tuple[type[BaseException], ...]:
        return (*seam.CONNECTION_ERRORS, OSError, KeyError)

    def _channel(self, queue: str) -> Any:
        if self._connection is None:
            self._connection = dial(self._url, self._connect_timeout_s, answer_timeout_s=ANSWER_S)
            self._outbox = seam.Outbox(self._connection)
        if queue not in self._channels:
            # One for each queue: a queue that is missing closes the channel, and what is held on it goes back.
            channel: Any = self._connection.channel()
            self._channels[queue] = channel
            # The bytes as they came: decoded, and encoded once more, they may be others.
            channel.auto_decode = False
            seam.on_get_answers(channel, lambda raw: self._answers.append(raw))
            self._outbox.adopt(channel)
        return self._channels[queue]

    def _missing(self, queue: str, exc: BaseException) -> None:
        log.warning("cannot read queue %s, it counts as empty: %s", queue, exc)
        self._channels.pop(queue, None)

    def _lost(self, exc: BaseException) -> BrokerUnavailableError:
        self._drop()
        return BrokerUnavailableError(str(exc) or type(exc).__name__)


def _taken(queue: str, raw: Any) -> Taken:
    properties = dict(raw.properties)
    headers = properties.pop("application_headers", None)
    return Taken(
        queue=queue,
        tag=int(raw.delivery_tag),
        body=bytes(raw.body),
        headers=headers if isinstance(headers, Mapping) else {},
        properties=properties,
    )
