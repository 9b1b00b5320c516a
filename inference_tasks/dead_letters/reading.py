"""Reading a queue without taking from it: everything is held until the end, and what was not taken goes back in place.

Measured on RabbitMQ 3.10, quorum and classic: what one consumer holds returns in its order when the channel closes,
also after some of it was acknowledged. ``basic.nack`` with ``multiple`` mixes up more than 32 messages of a quorum
queue, a stream of single nacks likewise, and messages held by ``basic.get`` return in any order at a close.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Protocol, cast

from kombu.serialization import prepare_accept_content
from redis.exceptions import RedisError

from inference_tasks.app import Inference
from inference_tasks.broker.embedded import delivery, load_broker_script
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.session import Session, open_session
from inference_tasks.errors import BrokerUnavailableError, DeadLettersBusyError, StateUnavailableError
from inference_tasks.state import keys
from inference_tasks.state.store import client_from_url

if TYPE_CHECKING:
    from inference_tasks.worker.intake import Delivery

__all__ = ["MOST_HELD", "Reading", "open_reading"]

log = logging.getLogger(__name__)

#: Messages that one reading may hold at a time. A prefetch is a number of 16 bits, and none at all means 2000 on a
#: quorum queue.
MOST_HELD = 65_535

#: Without a delivery for so long, the queue is asked whether it is empty.
QUIET_S = 0.2
#: What is not in the queue any more may be on its way here for this long.
ON_ITS_WAY_S = 3.0
#: The longest wait for any one answer of the broker.
ANSWER_S = 10.0
#: How long the end of another reading is waited for; that of a killed one is known at once.
LOCK_S = 5.0
HEARTBEAT_S = 60

_EMBEDDED_LEASE_S = 60


class Reading(Protocol):
    """What lay in the queue when the reading began, from its head on; new arrivals are not read.

    Attributes:
        is_complete: once the iteration has ended, whether it came to the end of what lay there.
    """

    is_complete: bool

    def __iter__(self) -> Iterator[Delivery]: ...

    def take(self, message: Delivery) -> None:
        """Take a message out of the queue for good."""

    def pause(self, seconds: float) -> None:
        """Wait, and keep what is held meanwhile."""


@contextmanager
def open_reading(inference: Inference, *, wait_s: float = LOCK_S) -> Iterator[Reading]:
    """Read the dead letters; at the end what was not taken is where it was, also after a kill.

    One reading at a time in a namespace: two would hide messages from each other. Each reading counts as a delivery of
    what it has returned; the queue allows for a million.

    Args:
        wait_s: how long the end of another reading is waited for.

    Raises:
        DeadLettersBusyError: another reading goes on.
        BrokerUnavailableError: the broker does not answer.
    """
    url = cast(str, inference.settings.broker.url)
    queue = inference.topology.dead.name
    accept = set(prepare_accept_content(inference.celery_app.conf.accept_content) or ())
    if is_embedded(url):
        reading = _EmbeddedReading(url, queue, accept)
        try:
            yield reading
        finally:
            reading.close()
        return
    with open_session(
        url,
        inference.settings.broker.connect_timeout_s,
        heartbeat_s=HEARTBEAT_S,
        answer_timeout_s=ANSWER_S,
    ) as session:
        _lock(session, f"{queue}.reading", wait_s)
        held = _AmqpReading(session, queue, accept)
        try:
            yield held
        except session.connection.connection_errors:
            # A broker that no longer hears gives everything back by itself.
            raise
        except BaseException:
            held.close()
            raise
        held.close()


def _lock(session: Session, name: str, wait_s: float) -> None:
    deadline = monotonic() + wait_s
    while not session.lock(name):
        if monotonic() >= deadline:
            raise DeadLettersBusyError(name)
        session.pause(min(QUIET_S, max(0.0, deadline - monotonic())))


class _AmqpReading:
    """One consumer on a channel of its own, whose end returns what is held."""

    def __init__(self, session: Session, queue: str, accept: set[str]) -> None:
        self.is_complete = False
        self._session = session
        self._queue = queue
        self._accept = accept
        self._channel: Any = session.connection.channel()
        self._arrived: deque[Any] = deque()
        self._held = 0
        self._is_cancelled = False

    def __iter__(self) -> Iterator[Delivery]:
        expected = self._session.ready(self._queue)
        self._channel.basic_qos(0, MOST_HELD, False)
        if expected:
            self._channel.basic_consume(
                self._queue, consumer_tag="reading", callback=self._arrived.append, on_cancel=self._cancelled
            )
        for _ in range(expected):
            raw = self._next()
            if raw is None:
                return
            message = self._channel.message_to_python(raw)
            message.accept = self._accept
            self._held += 1
            yield message
        self.is_complete = True

    def take(self, message: Delivery) -> None:
        message.ack()
        self._held -= 1

    def pause(self, seconds: float) -> None:
        # Not session.pause(): it would read on, and everything that the queue holds would gather here.
        sleep(seconds)
        self._session.connection.heartbeat_check()

    def close(self) -> None:
        """End the subscription first, so that nothing is on its way while the channel closes; then return the rest."""
        with suppress(*self._session.connection.channel_errors):
            if self._channel.is_open:
                if "reading" in self._channel.callbacks:
                    self._channel.callbacks["reading"] = lambda _message: None
                    self._channel.basic_cancel("reading")
                self._channel.close()

    def _next(self) -> Any:
        silent_since = monotonic()
        while not self._arrived:
            if self._held >= MOST_HELD or self._is_cancelled:
                return None
            try:
                self._session.connection.drain_events(timeout=QUIET_S)
            except TimeoutError:
                self._session.connection.heartbeat_check()
                if monotonic() - silent_since > ON_ITS_WAY_S and not self._session.ready(self._queue):
                    # Somebody else has taken them meanwhile; whether all was seen is not known then.
                    return None
                if monotonic() - silent_since > ANSWER_S:
                    raise TimeoutError(f"{self._queue} delivers nothing") from None
        return self._arrived.popleft()

    def _cancelled(self, _tag: str) -> None:
        self._is_cancelled = True


class _EmbeddedReading:
    """A consumer of the embedded broker's own kind; what a killed one held comes back when its lease ends."""

    no_ack_consumers = None

    def __init__(self, url: str, queue: str, accept: set[str]) -> None:
        self.is_complete = False
        self._client: Any = client_from_url(url)
        self._queue = queue
        self._accept = accept
        self._consumer = f"reading-{uuid.uuid4().hex}"
        self._take, self._keep, self._depths = map(load_broker_script, ("take", "keep", "depths"))

    def __iter__(self) -> Iterator[Delivery]:
        with _as_broker():
            (expected,) = self._depths.call(self._client, (), (self._queue,))
        for index in range(min(int(expected), MOST_HELD)):
            with _as_broker():
                if index % 100 == 0:
                    self._renew(_EMBEDDED_LEASE_S)
                (answer,) = self._take.call(self._client, (), (self._consumer, _EMBEDDED_LEASE_S, self._queue))
            if answer is None:
                return
            tag, _, message = bytes(answer).partition(b"\x1f")
            yield delivery(message, tag.decode(), self, self._accept)
        self.is_complete = int(expected) <= MOST_HELD

    def take(self, message: Delivery) -> None:
        message.ack()

    def pause(self, seconds: float) -> None:
        sleep(seconds)
        with _as_broker():
            self._renew(_EMBEDDED_LEASE_S)

    def close(self) -> None:
        """Return what is held, and close the connection."""
        with suppress(StateUnavailableError):
            self._renew(0)
        self._client.connection_pool.disconnect()

    def _renew(self, lease_s: int) -> None:
        self._keep.call(self._client, (), (self._consumer, lease_s, 0 if lease_s else MOST_HELD))

    # -- what a message calls, as its channel --------------------------------------------------------------------------

    def decode_body(self, body: object, encoding: object = None) -> object:
        return body

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        try:
            self._client.execute_command("HDEL", keys.held(self._consumer), delivery_tag)
        except RedisError as exc:
            raise BrokerUnavailableError(str(exc)) from exc


@contextmanager
def _as_broker() -> Iterator[None]:
    """Here the broker is a Redis, so its silence is the broker's."""
    try:
        yield
    except StateUnavailableError as exc:
        raise BrokerUnavailableError(exc.reason) from exc
