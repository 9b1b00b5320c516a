"""The publisher's connection: opened when needed, given up as a whole, with what must be declared before a publish."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from aiormq.abc import AbstractChannel
from aiormq.connection import Connection
from aiormq.exceptions import AMQPError, ChannelNotFoundEntity, ChannelPreconditionFailed
from yarl import URL

from inference_tasks.broker.messages import Declaration, ExchangeDeclaration, Outgoing, QueueDeclaration
from inference_tasks.broker.tickets import Encoded, Flight, Verdict
from inference_tasks.broker.wire import ConfirmChannel, encode

__all__ = ["Link", "LinkSettings", "LinkUnavailableError", "broker_urls"]

log = logging.getLogger(__name__)


class LinkUnavailableError(Exception):
    """No connection could be opened, or an exchange does not exist; stays inside this package."""


def broker_urls(url: str) -> tuple[str, ...]:
    """Return the addresses in a broker URL as aiormq reads them: split at ``;``, kombu's scheme names resolved."""
    return tuple(
        part.strip().replace("pyamqp://", "amqp://", 1).replace("amqp+ssl://", "amqps://", 1)
        for part in url.split(";")
        if part.strip()
    )


@dataclass(frozen=True)
class LinkSettings:
    """How to reach the broker.

    Attributes:
        urls: tried in turn.
        prepare: declares the topology; run once, in a thread, before the first message is written.
        is_prepared: set once it is known that ``prepare`` has been run elsewhere; then it is run here only if something
            turns out to be missing.
        exchanges: those that ``prepare`` makes sure of. Others are declared or looked for before their first use,
            because a publish to an exchange that does not exist closes the channel, with every message under way on it.
    """

    urls: tuple[str, ...]
    connect_timeout_s: float
    heartbeat_s: int
    name: str = "inference-tasks publisher"
    prepare: Callable[[], object] | None = None
    is_prepared: threading.Event = field(default_factory=threading.Event)
    exchanges: frozenset[str] = frozenset({""})

    def open(
        self,
        on_verdict: Callable[[Flight, Verdict], None],
        on_lost: Callable[[Sequence[Flight], str], None],
    ) -> Link:
        """Return a link for one event loop; nothing is connected yet."""
        return Link(self, on_verdict, on_lost)

    def encode(self, outgoing: Outgoing) -> Encoded:
        """Write a message as frames; may be called in any thread."""
        return encode(outgoing)


class Link:
    """At most one open connection; used from one event loop only."""

    def __init__(
        self,
        settings: LinkSettings,
        on_verdict: Callable[[Flight, Verdict], None],
        on_lost: Callable[[Sequence[Flight], str], None],
    ) -> None:
        self._settings = settings
        self._on_verdict = on_verdict
        self._on_lost = on_lost
        self._connection: Connection | None = None
        self._channel: ConfirmChannel | None = None
        self._closed: asyncio.Future[None] | None = None
        self._control: AbstractChannel | None = None
        self._declared: set[Declaration | str] = set()
        self._prepared = settings.prepare is None or settings.is_prepared.is_set()
        self._closers: set[asyncio.Task[None]] = set()

    @property
    def unsettled(self) -> int:
        """How many written messages have no answer yet."""
        return len(self._channel.unsettled) if self._channel is not None else 0

    async def connect(self) -> None:
        """Make sure that a connection is open and the topology declared.

        Raises:
            LinkUnavailableError: with the reason, for the last address tried.
        """
        if self._channel is not None and not self._channel.is_closed:
            if not self._prepared:
                await self._prepare()
            return
        problem = "no broker URL is configured"
        for url in self._settings.urls:
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await self._open(url)
                break
            except TimeoutError:
                problem = f"no connection within {self._settings.connect_timeout_s:g} s"
            except (AMQPError, OSError, RuntimeError) as exc:
                problem = _text(exc)
        else:
            raise LinkUnavailableError(problem)
        if not self._prepared:
            await self._prepare()

    async def _open(self, url: str) -> None:
        address = URL(url).update_query(heartbeat=str(self._settings.heartbeat_s), name=self._settings.name)
        connection = Connection(address)
        try:
            await connection.connect()
            channel = ConfirmChannel(connection, self._on_verdict)
            await channel.open_confirming(self._settings.connect_timeout_s)
        except BaseException:
            self._close_later(connection)
            raise
        self._connection, self._channel, self._control = connection, channel, None
        self._declared.clear()
        self._closed = connection.closing
        # An error of the channel (a wrong exchange) ends the connection too: one state less to be in.
        for closing in (self._closed, channel.closing):
            closing.add_done_callback(lambda done, channel=channel: self._on_closed(channel, done))  # type: ignore[misc]

    async def _prepare(self) -> None:
        prepare = self._settings.prepare
        if prepare is None:
            return
        try:
            await asyncio.to_thread(prepare)
        except Exception as exc:
            raise LinkUnavailableError(f"the queues could not be declared: {_text(exc)}") from exc
        self._prepared = True

    def prepare_again(self) -> bool:
        """Declare the topology again before the next write; False if there is nothing to declare it with."""
        self._prepared = self._settings.prepare is None
        return not self._prepared

    async def ensure(self, exchange: str, declarations: Iterable[Declaration]) -> None:
        """Declare what a message names, and look for its exchange, each once per connection.

        What exists with other arguments is used as it is.

        Raises:
            LinkUnavailableError: the exchange does not exist, or the broker refused a declaration.
        """
        for declaration in declarations:
            if declaration not in self._declared and declaration.name not in self._settings.exchanges:
                await self._declare(declaration)
                self._declared.add(declaration)
                if isinstance(declaration, ExchangeDeclaration):
                    self._declared.add(declaration.name)
        if exchange not in self._settings.exchanges and exchange not in self._declared:
            try:
                await self._find(exchange)
            except LinkUnavailableError as exc:
                if not (isinstance(exc.__cause__, ChannelNotFoundEntity) and self._settings.is_prepared.is_set()):
                    raise
                self._settings.is_prepared.clear()
                await self._prepare()
                await self._find(exchange)
            self._declared.add(exchange)

    async def _find(self, exchange: str) -> None:
        channel = await self._control_channel()
        try:
            await channel.exchange_declare(exchange, passive=True, timeout=self._settings.connect_timeout_s)
        except (AMQPError, TimeoutError) as exc:
            self._refuse(exc, f"there is no exchange {exchange!r}")

    async def _declare(self, wanted: Declaration) -> None:
        channel = await self._control_channel()
        timeout_s = self._settings.connect_timeout_s
        try:
            if isinstance(wanted, ExchangeDeclaration):
                await channel.exchange_declare(
                    wanted.name,
                    exchange_type=wanted.type,
                    durable=wanted.durable,
                    auto_delete=wanted.auto_delete,
                    arguments=dict(wanted.arguments),  # type: ignore[arg-type]  # a table of plain values
                    timeout=timeout_s,
                )
            else:
                await self._declare_queue(channel, wanted)
        except ChannelPreconditionFailed as exc:
            log.warning(
                "%s %r exists with other arguments and is used as it is: %s", type(wanted).__name__, wanted.name, exc
            )
            self._control = None
        except (AMQPError, TimeoutError) as exc:
            self._refuse(exc, f"{wanted.name!r} could not be declared")

    async def _declare_queue(self, channel: AbstractChannel, wanted: QueueDeclaration) -> None:
        timeout_s = self._settings.connect_timeout_s
        await channel.queue_declare(
            wanted.name,
            durable=wanted.durable,
            exclusive=wanted.exclusive,
            auto_delete=wanted.auto_delete,
            arguments=dict(wanted.arguments),  # type: ignore[arg-type]  # a table of plain values
            timeout=timeout_s,
        )
        for exchange, key in wanted.bindings:
            await channel.queue_bind(wanted.name, exchange, key, timeout=timeout_s)

    async def _control_channel(self) -> AbstractChannel:
        if self._connection is None or self._connection.is_closed:
            raise LinkUnavailableError("the connection was lost")
        if self._control is None or self._control.is_closed:
            # Of its own: an error in a declaration closes the channel it came on.
            try:
                self._control = await self._connection.channel(
                    publisher_confirms=False, timeout=self._settings.connect_timeout_s
                )
            except (AMQPError, TimeoutError, RuntimeError) as exc:
                self._refuse(exc, "no channel could be opened")
        return self._control

    def _refuse(self, exc: BaseException, what: str) -> NoReturn:
        self._control = None
        detail = "" if isinstance(exc, ChannelNotFoundEntity) else f": {_text(exc)}"
        raise LinkUnavailableError(what + detail) from exc

    async def writable(self) -> bool:
        """Wait until the broker takes messages again (alarms); False if the connection was lost meanwhile."""
        connection, closed = self._connection, self._closed
        if connection is None or closed is None or connection.is_closed:
            return False
        if not _is_ready(connection):
            ready = asyncio.ensure_future(connection.ready())
            try:
                await asyncio.wait((ready, closed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready.cancel()
        while connection.write_queue.full() and not closed.done():
            await asyncio.wait((closed,), timeout=0.005)
        return not closed.done() and self._channel is not None and not self._channel.is_closed

    @property
    def is_blocked(self) -> bool:
        """Whether the broker has said that it takes nothing for now."""
        return self._connection is not None and not _is_ready(self._connection)

    async def write(self, flights: Sequence[Flight], now_s: float) -> None:
        """Write messages at once, and wait until the socket has taken a large write, or is gone.

        Call only after :meth:`writable` said yes, without waiting in between.
        """
        assert self._channel is not None  # writable() said so
        assert self._closed is not None
        drained = self._channel.publish(flights, now_s)
        if drained is not None:
            await asyncio.wait((drained, self._closed), return_when=asyncio.FIRST_COMPLETED)

    def oldest_written_at_s(self) -> float | None:
        """When the longest unanswered message was written."""
        return self._channel.oldest_written_at_s() if self._channel is not None else None

    def drop(self, reason: str) -> None:
        """Give the connection up; what has no answer is lost to view."""
        connection, channel = self._connection, self._channel
        self._connection = self._channel = self._control = self._closed = None
        if channel is not None and (lost := channel.take_unsettled()):
            self._on_lost(lost, reason)
        if connection is not None and not connection.is_closed:
            self._close_later(connection)

    async def close(self, reason: str) -> None:
        """Drop the connection and wait, for a moment, until the broker knows."""
        self.drop(reason)
        if self._closers:
            await asyncio.wait(self._closers, timeout=1.0)

    def _on_closed(self, channel: ConfirmChannel, done: asyncio.Future[None]) -> None:
        error = None if done.cancelled() else done.exception()
        if channel is self._channel:
            self.drop(f"the connection was lost ({_text(error)})" if error is not None else "the connection was closed")

    def _close_later(self, connection: Connection) -> None:
        async def close() -> None:
            try:
                await connection.close(timeout=1.0)
            except (AMQPError, OSError, TimeoutError, asyncio.CancelledError) as exc:
                log.debug("closing a connection failed: %r", exc)

        task = asyncio.get_running_loop().create_task(close())
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)


def _is_ready(connection: Connection) -> bool:
    """Whether ``ready()`` would return at once; asking by a task would cost as much as the write itself."""
    asking = connection.ready()
    try:
        asking.send(None)
    except StopIteration:
        return True
    asking.close()
    return False


def _text(exc: BaseException) -> str:
    """A sentence of an exception, whose own text is often empty."""
    return str(exc) or type(exc).__name__
