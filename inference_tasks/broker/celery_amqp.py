"""Celery publishes through here: ``delay``, ``apply_async``, ``send_task``, canvas, ``retry`` and beat.

``amqp_cls`` is the door. ``InferenceAMQP`` hands Celery producers that look like kombu's as far as Celery looks, and
send through the one :class:`Publisher` of the process: with confirms, ``mandatory`` and typed errors, and without a
connection of kombu's. A call's ``tier=`` and ``timeout_s=`` arrive here because Celery passes on, as properties of the
message, the options that it does not know.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

from celery.app.amqp import AMQP
from kombu import Connection, Exchange, Queue
from kombu import Producer as KombuProducer
from kombu.compression import compress
from kombu.entity import maybe_delivery_mode
from kombu.serialization import dumps
from kombu.utils.functional import retry_over_time

from inference_tasks.broker.addressing import Address, TierDoor, TierRequest, address, first_headers
from inference_tasks.broker.entities import declarations
from inference_tasks.broker.messages import PERSISTENT, Outgoing, Properties, error_for
from inference_tasks.canvas import inherited_tier
from inference_tasks.errors import (
    BrokerUnavailableError,
    BugError,
    InferenceError,
    OutcomeUnknownError,
    StateUnavailableError,
    kept_delay_s,
)
from inference_tasks.routes import HEADER

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["InferenceAMQP", "PublisherPool", "TierProducer", "open_door"]

log = logging.getLogger(__name__)

TRANSIENT = 1

_DOOR = "_inference_door"


def open_door(app: Celery, door: Callable[[], TierDoor]) -> None:
    """Tell an app's ``InferenceAMQP`` how to reach the tiers; ``door`` is called at the first publish."""
    setattr(app, _DOOR, door)


class InferenceAMQP(AMQP):
    """``app.amqp`` with producers that publish through the :class:`Publisher`.

    Attributes:
        publishes_as_worker: set in a worker's own process: what it publishes outside of a running task (the callbacks
            of a task it failed, for example) is admitted work too.
    """

    publishes_as_worker = False

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self._door: TierDoor | None = None
        self._pool: PublisherPool | None = None

    @property
    def door(self) -> TierDoor:
        """The way into the tiers, built at its first use."""
        if self._door is None:
            make = getattr(self.app, _DOOR, None)
            if make is None:
                raise BugError("The app publishes to the tiers before it was told of them.")
            self._door = make()
        return self._door

    @property
    def producer_pool(self) -> PublisherPool:  # type: ignore[override]  # what Celery uses of a pool
        """What ``app.producer_pool`` is; there is nothing to wait for in it."""
        if self._pool is None:
            self._pool = PublisherPool(self)
        return self._pool

    publisher_pool = producer_pool  # type: ignore[assignment]

    def Producer(  # type: ignore[override]  # noqa: N802  # a class in Celery, only ever called
        self, channel: Any = None, *args: Any, **kwargs: Any
    ) -> TierProducer | KombuProducer:
        """Return a producer for a connection: ours, unless the connection leads to another broker."""
        if channel is None or self._leads_home(channel):
            return TierProducer(self, channel if isinstance(channel, Connection) else None, **_known(kwargs))
        return KombuProducer(channel, *args, **kwargs)

    def as_task_v2(
        self,
        task_id: str,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        *others: Any,
        **options: Any,
    ) -> Any:
        """Build a task message as Celery does; a delay below zero has passed, one that nothing can keep is an error.

        Raises:
            CallerError: the delay is no number, or longer than the broker can keep a message.
        """
        if countdown is not None:
            countdown = kept_delay_s("countdown", countdown)
        return super().as_task_v2(task_id, name, args, kwargs, countdown, *others, **options)

    def _leads_home(self, channel: Any) -> bool:
        connection = channel if isinstance(channel, Connection) else getattr(channel, "connection", None)
        connection = getattr(connection, "client", connection)
        if not isinstance(connection, Connection):
            return False
        home = self.app.connection_for_write()
        return bool(
            (connection.hostname, connection.port, connection.virtual_host)
            == (home.hostname, home.port, home.virtual_host)
        )


def _known(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in kwargs.items()
        if name in ("exchange", "routing_key", "serializer", "compression")
    }


class PublisherPool:
    """The producer pool Celery acquires from; it has one producer, which all threads share."""

    def __init__(self, amqp: InferenceAMQP) -> None:
        self._producer = TierProducer(amqp)
        self.limit: int | None = None

    @property
    def connections(self) -> _Connections:
        """What Celery asks for the kind of broker behind the pool."""
        return _Connections(self._producer.connection)

    def acquire(self, block: bool = False, timeout: float | None = None) -> TierProducer:
        """Return the producer, at once."""
        return self._producer

    def release(self, resource: object) -> None:
        """Nothing was taken, so nothing is given back."""

    def force_close_all(self, *args: object, **kwargs: object) -> None:
        """Nothing is held that could be closed: the publisher ends with its process."""


class _Connections:
    """What Celery asks for the kind of broker: by ours it would work out delayed routing keys of its own.

    Those are worked out in ``address``; Celery's cut a delay to whole seconds, early, and fail below one.
    """

    def __init__(self, connection: _HomeConnection) -> None:
        self.connection = SimpleNamespace(transport=SimpleNamespace(driver_type="tiers"), home=connection)


class _HomeConnection:
    """The connection of our producers: a kombu connection that is opened only if somebody really uses it."""

    # Celery repeats the publish of a worker's callback on these.
    recoverable_connection_errors = (BrokerUnavailableError, OutcomeUnknownError, StateUnavailableError)
    recoverable_channel_errors: tuple[type[Exception], ...] = ()

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._connection: Connection | None = None

    def _reraise_as_library_errors(self, *args: object, **kwargs: object) -> AbstractContextManager[None]:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._connection is None:
            self._connection = self._connect()
        return getattr(self._connection, name)


class TierProducer:
    """A producer as Celery uses one: ``publish``, ``connection`` and a context to hold it in. Threads may share it."""

    auto_declare = False
    supports_batch_publish = False

    def __init__(
        self,
        amqp: InferenceAMQP,
        connection: Connection | None = None,
        *,
        exchange: Exchange | str | None = None,
        routing_key: str = "",
        serializer: str | None = None,
        compression: str | None = None,
    ) -> None:
        self._amqp = amqp
        self.connection = _HomeConnection(lambda: connection or amqp.app.connection_for_write())
        self.exchange = exchange if exchange is not None else Exchange("")
        self.routing_key = routing_key
        self.serializer = serializer
        self.compression = compression

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Keep everything: an error of one message says nothing about the connection."""

    def release(self) -> None:
        """Nothing is held."""

    close = release

    def revive(self, channel: object) -> None:
        """Nothing to revive: the publisher connects again by itself."""

    def declare(self) -> None:
        """What must exist is declared with the message that needs it."""

    def maybe_declare(self, entity: object, retry: bool = False, **retry_policy: object) -> bool:
        """What must exist is declared with the message that needs it."""
        return False

    @property
    def channel(self) -> Any:
        """A channel of kombu's, for whoever insists; opens a connection."""
        return self.connection.default_channel

    def publish(  # kombu's signature
        self,
        body: Any,
        routing_key: str | None = None,
        delivery_mode: int | str | None = None,
        mandatory: bool = False,
        immediate: bool = False,  # RabbitMQ has no such thing
        priority: int | None = 0,
        content_type: str | None = None,
        content_encoding: str | None = None,
        serializer: str | None = None,
        headers: Mapping[str, Any] | None = None,
        compression: str | None = None,
        exchange: Exchange | str | None = None,
        retry: bool = False,
        retry_policy: Mapping[str, Any] | None = None,
        declare: Sequence[Exchange | Queue] | None = None,
        expiration: float | None = None,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        **properties: Any,
    ) -> None:
        """Publish one message and wait until the broker has it; the arguments are kombu's.

        Beside these, ``tier`` and ``timeout_s`` are read from ``properties``. ``retry`` repeats what was surely not
        sent because the broker is away, and nothing else: a full queue does not become emptier by asking at once again.

        Raises:
            QueueFullError, BrokerUnavailableError, OutcomeUnknownError, StateUnavailableError, MessageTooLargeError.
        """
        embed = body[2] if isinstance(body, list | tuple) and len(body) == 3 else None
        payload, content_type, content_encoding = _payload(
            body, content_type, content_encoding, serializer or self.serializer
        )
        headers = dict(headers or {})
        compression = compression or self.compression
        if compression:
            payload, headers["compression"] = compress(payload, compression)
        target = exchange if exchange is not None else self.exchange
        exchange_name: str = target.name if isinstance(target, Exchange) else target
        routing_key = self.routing_key if routing_key is None else routing_key
        asked_tier, timeout_s = properties.pop("tier", None), properties.pop("timeout_s", None)
        found = self._address(routing_key, headers, asked_tier, timeout_s, embed)
        if found is not None:
            exchange_name, routing_key = found.exchange, found.routing_key
            headers = {**first_headers(headers), HEADER: dict(found.header)}
            # A time to live in the broker would take the message away without a trace in its record.
            expiration = None
        is_task = "task" in headers
        mode = maybe_delivery_mode(delivery_mode or getattr(target, "delivery_mode", None)) or PERSISTENT
        reply_to = properties.get("reply_to")
        outgoing = Outgoing(
            body=payload,
            exchange=exchange_name,
            routing_key=routing_key,
            properties=Properties(
                content_type=content_type,
                content_encoding=content_encoding,
                headers=headers,
                delivery_mode=mode,
                priority=priority,
                correlation_id=properties.get("correlation_id"),
                reply_to=reply_to.name if isinstance(reply_to, Queue) else reply_to,
                expiration=str(int(expiration * 1000)) if expiration is not None else None,
                message_id=properties.get("message_id"),
            ),
            mandatory=mandatory or is_task,
            task=found.task if found is not None else None,
            declare=() if found is not None else tuple(declarations(declare or ())),
        )
        publisher = self._amqp.door.publisher
        running = self._amqp.app.current_worker_task
        if running is not None and hasattr(running.request, "inference_gen"):
            publisher.topology_exists()
        if not is_task and mode == TRANSIENT:
            # Events: worth a message, not worth a caller's waiting.
            publisher.post(outgoing, may_linger=True)
            return
        tier = found.tier if found is not None else ""
        limit_s = confirm_timeout if confirm_timeout is not None else timeout

        def once() -> None:
            error = error_for(
                publisher.send(outgoing, limit_s), outgoing, tier=tier, bound=self._amqp.door.bounds.get(tier)
            )
            if error is not None:
                raise error

        if retry:
            _with_policy(once, retry_policy or {})
        else:
            once()
        if found is not None and running is not None and running.request.id == found.task.id:
            # For the record, which the result backend writes: Celery tells it of the error that led to a retry only.
            running.request.update(inference_due_at_s=found.task.due_at_s or time.time())

    def _address(
        self, routing_key: str, headers: Mapping[str, Any], asked_tier: object, timeout_s: float | None, embed: object
    ) -> Address | None:
        if "task" not in headers or "id" not in headers:
            return None
        door, app = self._amqp.door, self._amqp.app
        lane = door.lane_of(routing_key)
        if lane is None:
            return None
        # Not app.tasks of an app that is still being built: reading it would end the building.
        task = app.tasks.get(headers["task"]) if getattr(app, "finalized", False) else None
        request = TierRequest(
            tier=asked_tier if isinstance(asked_tier, str) else None,
            timeout_s=timeout_s if timeout_s is not None else getattr(task, "timeout_s", None),
            crash_limit=getattr(task, "max_crashes", None),
            by_worker=self._amqp.publishes_as_worker,
            inherited_tier=inherited_tier(app, embed, lane[0], door.default_tier) if task is not None else None,
        )
        return address(app, door, lane, headers, request)


def _payload(
    body: Any, content_type: str | None, content_encoding: str | None, serializer: str | None
) -> tuple[bytes, str, str]:
    """Serialize as kombu's producer does."""
    if not content_type:
        content_type, content_encoding, body = dumps(body, serializer=serializer)
    if isinstance(body, str):
        content_encoding = content_encoding or "utf-8"
        return (
            body.encode("utf-8" if content_encoding == "binary" else content_encoding),
            content_type,
            content_encoding,
        )
    return bytes(body), content_type, content_encoding or "binary"


def _with_policy(publish: Callable[[], None], policy: Mapping[str, Any]) -> None:
    """Repeat a publish that the broker's absence prevented, as often and after such pauses as Celery's policy says."""
    attempts = policy.get("max_retries")

    def pause(exc: InferenceError, intervals: Iterator[float], retries: int) -> float:
        wait_s = next(intervals)
        log.debug("publishing again in %s s (%d): %s", wait_s, retries, exc)
        return wait_s

    retry_over_time(
        publish,
        (BrokerUnavailableError,),
        errback=pause,  # type: ignore[arg-type]  # its stub names an older signature
        # None means for ever in kombu; a caller must come back some time.
        max_retries=attempts if attempts is not None else 3,
        interval_start=policy.get("interval_start", 0),
        interval_step=policy.get("interval_step", 0.2),
        interval_max=policy.get("interval_max", 0.2),
    )
