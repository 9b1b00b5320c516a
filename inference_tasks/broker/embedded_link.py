"""The publisher's way into the embedded broker: one script call for many messages, answered at once.

What goes to other exchanges (events, remote control, a user's own queues) is published through kombu's Redis transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu import Connection, Exchange, Queue
from kombu.exceptions import KombuError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from inference_routing.policy import Policy
from inference_routing.topology import Topology
from inference_tasks.broker.embedded import encode_envelope, load_broker_script, parked
from inference_tasks.broker.link import LinkUnavailableError
from inference_tasks.broker.messages import Declaration, ExchangeDeclaration, Outgoing
from inference_tasks.broker.tickets import Encoded, Flight, Verdict
from inference_tasks.errors import InferenceError
from inference_tasks.state.store import plain_url

__all__ = ["EmbeddedLinkSettings"]

log = logging.getLogger(__name__)

#: How long events wait for each other: kombu's transport takes a millisecond for a publish, of one or of a hundred.
GATHER_S = 0.02


@dataclass(frozen=True)
class EmbeddedLinkSettings:
    """How to reach the embedded broker, and what its queues hold.

    Attributes:
        prepare: makes sure that the server runs; called before each connection.
    """

    url: str
    topology: Topology
    policy: Policy
    prepare: Callable[[], object]
    timeout_s: float = 5.0
    limits: Mapping[str, tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        """Work out {queue: (bound as text, empty for none; what a full queue does)}."""
        tiers = {tier.name: tier for tier in self.policy.tiers}
        limits = {queue.name: ("", "") for queue in self.topology.queues}
        for queue in self.topology.queues:
            if queue.tier is not None and queue.lane == "fresh":
                tier = tiers[queue.tier]
                limits[queue.name] = (str(tier.bound), tier.overflow)
        object.__setattr__(self, "limits", limits)

    def open(
        self,
        on_verdict: Callable[[Flight, Verdict], None],
        on_lost: Callable[[Sequence[Flight], str], None],
    ) -> EmbeddedLink:
        """Return a link for one event loop; nothing is connected yet."""
        return EmbeddedLink(self, on_verdict, on_lost)

    def encode(self, outgoing: Outgoing) -> Encoded:
        """Write a message for its queue; may be called in any thread."""
        if self.queue(outgoing) is None:
            # kombu writes it, once it is known where it goes.
            return Encoded(b"", b"", len(outgoing.body), None)
        return encode_envelope(outgoing)

    def queue(self, outgoing: Outgoing) -> str | None:
        """Return the queue of the tiers that a message goes to, None if it goes elsewhere."""
        name, _ = parked(outgoing.routing_key)
        return name if name in self.limits else None


class EmbeddedLink:
    """At most one open connection; used from one event loop only. Has the calls of ``Link``."""

    def __init__(
        self,
        settings: EmbeddedLinkSettings,
        on_verdict: Callable[[Flight, Verdict], None],
        on_lost: Callable[[Sequence[Flight], str], None],
    ) -> None:
        self._settings = settings
        self._on_verdict = on_verdict
        self._on_lost = on_lost
        self._script = load_broker_script("publish")
        self._redis: Redis[bytes] | None = None
        self._other = _Other(settings.url, settings.timeout_s)
        topology = settings.topology
        self._exchanges = {topology.exchange.name, *(level.name for level in topology.delay.exchanges)}
        self._unsettled: dict[Flight, None] = {}
        self._gathered: list[Flight] = []
        self._closers: set[asyncio.Task[None]] = set()

    @property
    def unsettled(self) -> int:
        """How many written messages have no answer yet."""
        return len(self._unsettled)

    async def connect(self) -> None:
        """Make sure that the server runs and a connection to it exists.

        Raises:
            LinkUnavailableError: with the reason.
        """
        if self._redis is not None:
            return
        try:
            await asyncio.to_thread(self._settings.prepare)
        except (InferenceError, OSError, RuntimeError) as exc:
            raise LinkUnavailableError(str(exc)) from exc
        self._redis = Redis.from_url(
            plain_url(self._settings.url),
            socket_timeout=self._settings.timeout_s,
            socket_connect_timeout=self._settings.timeout_s,
            # Never by itself: after a lost connection nobody knows whether the script has run.
            retry=Retry(NoBackoff(), 0),
        )

    def prepare_again(self) -> bool:
        """Queues need no declaration here."""
        return False

    async def ensure(self, exchange: str, declarations: Iterable[Declaration]) -> None:
        """Declare what a message names, for kombu's transport.

        Raises:
            LinkUnavailableError: the broker is gone.
        """
        for declaration in declarations:
            if not self._other.knows(declaration):
                try:
                    self._other.declare(declaration)
                except self._other.errors as exc:
                    raise LinkUnavailableError(str(exc) or type(exc).__name__) from exc

    async def writable(self) -> bool:
        """There are no alarms here."""
        return self._redis is not None

    @property
    def is_blocked(self) -> bool:
        """There are no alarms here."""
        return False

    async def write(self, flights: Sequence[Flight], now_s: float) -> None:
        """Write messages at once and wait for their answers."""
        for flight in flights:
            flight.written_at_s = now_s
            self._unsettled[flight] = None
        await self._publish(flights)

    async def _publish(self, flights: Sequence[Flight]) -> None:
        ours: list[Flight] = []
        other: list[Flight] = []
        for flight in flights:
            if flight.encoded.head:
                ours.append(flight)
            elif flight.outgoing.exchange in self._exchanges:
                self._settle(flight, Verdict.UNROUTABLE)
            else:
                other.append(flight)
        if ours:
            await self._publish_ours(ours)
        if other:
            if not self._gathered:
                asyncio.get_running_loop().call_later(GATHER_S, self._publish_gathered)
            self._gathered += other
            if any(flight.outgoing.mandatory for flight in other):
                self._publish_gathered()

    async def _publish_ours(self, flights: Sequence[Flight]) -> None:
        number_by_queue: dict[str, int] = {}
        messages: list[str | bytes | int] = []
        for flight in flights:
            queue, delay_s = parked(flight.outgoing.routing_key)
            number = number_by_queue.setdefault(queue, len(number_by_queue) + 1)
            messages += (number, delay_s, flight.encoded.head)
        queues = [part for queue in number_by_queue for part in (queue, *self._settings.limits[queue])]
        client = self._redis
        if client is None:
            self._lost(flights, "the connection was lost")
            return
        dead = self._settings.topology.dead.name
        try:
            verdicts = await self._script.call_async(client, (), [dead, len(number_by_queue), *queues, *messages])
        except InferenceError as exc:
            self.drop(str(exc))
            self._lost(flights, str(exc))
            return
        for flight, verdict in zip(flights, bytes(verdicts), strict=True):
            self._settle(flight, Verdict.ACCEPTED if verdict == ord("a") else Verdict.REFUSED)

    def _publish_gathered(self) -> None:
        flights, self._gathered = self._gathered, []
        if not flights:
            return
        try:
            # In this thread, which waits meanwhile: one write to a local socket, and no thread can be asked for it
            # while the interpreter ends.
            self._other.publish([flight.outgoing for flight in flights])
        except self._other.errors as exc:
            self._lost(flights, str(exc) or type(exc).__name__)
            return
        for flight in flights:
            self._settle(flight, Verdict.ACCEPTED)

    def _settle(self, flight: Flight, verdict: Verdict) -> None:
        if flight in self._unsettled:
            del self._unsettled[flight]
            self._on_verdict(flight, verdict)

    def _lost(self, flights: Sequence[Flight], reason: str) -> None:
        lost = [flight for flight in flights if flight in self._unsettled]
        for flight in lost:
            del self._unsettled[flight]
        if lost:
            self._on_lost(lost, reason)

    def oldest_written_at_s(self) -> float | None:
        """When the longest unanswered message was written."""
        return next((flight.written_at_s for flight in self._unsettled), None)

    def drop(self, reason: str) -> None:
        """Give the connection up; what has no answer is lost to view."""
        client, self._redis = self._redis, None
        self._lost(list(self._unsettled), reason)
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.connection_pool.disconnect())
            self._closers.add(task)
            task.add_done_callback(self._closers.discard)

    async def close(self, reason: str) -> None:
        """Let what was gathered go out, and close the connections."""
        self._publish_gathered()
        self.drop(reason)
        if self._closers:
            await asyncio.wait(self._closers, timeout=1.0)
        self._other.close()


class _Other:
    """What is not of the tiers, through kombu."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._connection = Connection(url, transport_options={"socket_timeout": timeout_s})
        self._declared: set[Declaration] = set()
        self.errors: tuple[type[BaseException], ...] = (
            *self._connection.connection_errors,
            *self._connection.channel_errors,
            KombuError,
        )

    def knows(self, declaration: Declaration) -> bool:
        return declaration in self._declared

    def declare(self, wanted: Declaration) -> None:
        channel = self._connection.default_channel
        if isinstance(wanted, ExchangeDeclaration):
            Exchange(wanted.name, wanted.type, durable=wanted.durable, auto_delete=wanted.auto_delete)(
                channel
            ).declare()
        else:
            queue = Queue(
                wanted.name,
                durable=wanted.durable,
                auto_delete=wanted.auto_delete,
                queue_arguments=dict(wanted.arguments),
            )(channel)
            queue.queue_declare()
            for exchange, key in wanted.bindings:
                queue.bind_to(exchange, routing_key=key)
        self._declared.add(wanted)

    def publish(self, outgoings: Sequence[Outgoing]) -> None:
        try:
            channel: Any = self._connection.default_channel
            batch = channel.create_publish_batch(len(outgoings))
            try:
                for outgoing in outgoings:
                    batch.publish(
                        _prepared(channel, outgoing), exchange=outgoing.exchange, routing_key=outgoing.routing_key
                    )
                batch.flush()
            finally:
                batch.close()
        except self.errors:
            self.close()
            raise

    def close(self) -> None:
        self._declared.clear()
        self._connection.collect()


def _prepared(channel: Any, outgoing: Outgoing) -> Any:
    properties = outgoing.properties
    return channel.prepare_message(
        outgoing.body,
        properties.priority,
        properties.content_type,
        properties.content_encoding,
        dict(properties.headers),
        {
            "delivery_mode": properties.delivery_mode,
            "correlation_id": properties.correlation_id,
            "reply_to": properties.reply_to,
        },
    )
