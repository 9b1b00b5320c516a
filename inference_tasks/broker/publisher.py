"""Publishing with confirms, for threads and coroutines alike, safe across forks."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import ClassVar

from redis.asyncio import Redis

from inference_tasks.broker.embedded_link import EmbeddedLinkSettings
from inference_tasks.broker.link import LinkSettings, broker_urls
from inference_tasks.broker.messages import Outcome, Outgoing, TooLarge, Unknown
from inference_tasks.broker.pipeline import BATCH, Pipeline, PipelineSettings
from inference_tasks.broker.sending import Tracer
from inference_tasks.broker.state_port import StatePort
from inference_tasks.broker.tickets import Encoded, Ticket
from inference_tasks.broker.wire import HEADER_FRAME_BYTES
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.calling import DEFAULT_NAMESPACE
from inference_tasks.state.records import NewTask, SubmitAnswer
from inference_tasks.state.store import UNFINISHED_TTL_S, plain_url

__all__ = ["Publisher", "StatePort", "redis_records"]

_MIB = 1024 * 1024

# How much longer than the loop's own deadline a caller waits before it gives the loop up for dead.
_GRACE_S = 5.0

_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()

# A child of a fork must neither use nor collect what its parent's loop owns: closing the copied event loop
# unregisters descriptors from the parent's own epoll. So the child keeps it, unused, until it ends.
_of_the_parent: list[Pipeline] = []


class _RedisRecords(AsyncTaskStore):
    def __init__(
        self,
        client: Redis[bytes],
        prefix: str,
        *,
        unfinished_ttl_s: float,
        namespace: str,
        bounds: Mapping[str, int] | None,
        revive: Callable[[], object] | None,
    ) -> None:
        super().__init__(client, prefix, unfinished_ttl_s=unfinished_ttl_s, namespace=namespace, bounds=bounds)
        self._redis = client
        self._revive = revive

    async def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        try:
            return await super().submit(tasks)
        except StateUnavailableError:
            if self._revive is None:
                raise
            await asyncio.to_thread(self._revive)
            return await super().submit(tasks)

    async def aclose(self) -> None:
        await self._redis.connection_pool.disconnect()


def redis_records(
    url: str,
    prefix: str,
    *,
    unfinished_ttl_s: float = UNFINISHED_TTL_S,
    socket_timeout_s: float = 2.0,
    namespace: str = DEFAULT_NAMESPACE,
    bounds: Mapping[str, int] | None = None,
    revive: Callable[[], object] | None = None,
) -> Callable[[], StatePort]:
    """Return what makes the publisher's state port on a Redis; called again in every process that publishes.

    Args:
        bounds: {tier: bound}, for the refusal of what is new while too much is parked.
        revive: starts the server again when it is gone, where it is the embedded broker's.
    """

    def make() -> StatePort:
        client = Redis.from_url(
            plain_url(url), socket_timeout=socket_timeout_s, socket_connect_timeout=socket_timeout_s
        )
        return _RedisRecords(
            client, prefix, unfinished_ttl_s=unfinished_ttl_s, namespace=namespace, bounds=bounds, revive=revive
        )

    return make


class Publisher:
    """Sends messages over one connection per process, each with a deadline and a typed outcome.

    Outcomes are returned, not raised: :class:`Accepted`, :class:`Refused` (queue full), :class:`TooLarge`,
    :class:`Unavailable` (surely not accepted), :class:`Unknown` (written, no answer). A refusal keeps the connection.
    The connection and its thread start with the first message; after a fork the child starts its own.

    Attributes:
        tracer: told of every call that sends, by any publisher of this process; None while nobody traces.
    """

    tracer: ClassVar[Tracer | None] = None

    def __init__(
        self,
        broker_url: str,
        *,
        state: Callable[[], StatePort] | None = None,
        rates: Callable[[], Mapping[str, float]] | None = None,
        declare: Callable[[], object] | None = None,
        exchanges: Iterable[str] = (),
        confirm_timeout_s: float = 5.0,
        connect_timeout_s: float = 3.0,
        heartbeat_s: int = 10,
        max_body_bytes: int = _MIB,
        lift_body_bytes: int = 0,
        embedded: EmbeddedLinkSettings | None = None,
    ) -> None:
        """Prepare a publisher; nothing is connected yet.

        Args:
            broker_url: as Celery reads it; alternatives are separated by ``;``.
            state: makes the port that writes task records, in the publisher's own loop. None keeps no records.
            rates: {tier: tasks drained per second}, for the time after which a refused caller may come again.
            declare: declares the topology; called in a thread of its own before the first message is written.
            exchanges: the exchanges that ``declare`` makes sure of.
            confirm_timeout_s: how long the broker may take to answer for a message.
            max_body_bytes: limit of body and headers together.
            lift_body_bytes: largest body of a message that is kept with its record, so that it can be lifted; 0: none.
            embedded: how to reach the embedded broker, if ``broker_url`` names one.
        """
        self._confirm_timeout_s = confirm_timeout_s
        self._max_body_bytes = max_body_bytes
        self._system = "rabbitmq" if embedded is None else "redis"
        self._topology_exists = threading.Event()
        self._settings = PipelineSettings(
            link=embedded
            or LinkSettings(
                urls=broker_urls(broker_url),
                connect_timeout_s=connect_timeout_s,
                heartbeat_s=heartbeat_s,
                prepare=declare,
                is_prepared=self._topology_exists,
                exchanges=frozenset({"", *exchanges}),
            ),
            confirm_timeout_s=confirm_timeout_s,
            state=state,
            rates=rates,
            lift_body_bytes=lift_body_bytes or -1,
        )
        self._lock = threading.Lock()
        self._pipeline: Pipeline | None = None
        self._end: weakref.finalize[..., Publisher] | None = None
        _publishers.add(self)

    def send(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        """Publish one message and wait for its outcome, at most ``timeout_s`` (default: the confirm time-out)."""
        if (tracer := Publisher.tracer) is None:
            return self._wait(self._start([outgoing], timeout_s, urgent=True), timeout_s)[0]
        with tracer(self._system) as sending:
            marked = sending.marked([outgoing])
            return sending.ended(self._wait(self._start(marked, timeout_s, urgent=True), timeout_s))[0]

    def send_many(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        """Publish messages pipelined; outcomes come in the order of the messages.

        Without ``timeout_s`` the call lasts as long as answers keep coming, and ends the confirm time-out after the
        last one. Messages are sent while ``outgoings`` is still being read.
        """
        if (tracer := Publisher.tracer) is None:
            return self._wait(self._start(outgoings, timeout_s, urgent=False), timeout_s)
        with tracer(self._system) as sending:
            marked = sending.marked(outgoings)
            return sending.ended(self._wait(self._start(marked, timeout_s, urgent=False), timeout_s))

    async def send_async(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        """Like :meth:`send`, for any event loop. Cancelling it stops the waiting, not the message."""
        return (await self._sent_async([outgoing], timeout_s, urgent=True))[0]

    async def send_many_async(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        """Like :meth:`send_many`, for any event loop."""
        return await self._sent_async(outgoings, timeout_s, urgent=False)

    async def _sent_async(
        self, outgoings: Iterable[Outgoing], timeout_s: float | None, *, urgent: bool
    ) -> list[Outcome]:
        if (tracer := Publisher.tracer) is None:
            return await asyncio.wrap_future(self._start(outgoings, timeout_s, urgent=urgent).future)
        with tracer(self._system) as sending:
            marked = sending.marked(outgoings)
            return sending.ended(await asyncio.wrap_future(self._start(marked, timeout_s, urgent=urgent).future))

    def post(self, outgoing: Outgoing, timeout_s: float | None = None, *, may_linger: bool = False) -> Future[Outcome]:
        """Hand one message over and return at once; the future ends with the outcome, in the publisher's thread.

        A message that ``may_linger`` leaves together with the next one, or after some milliseconds.
        """
        result: Future[Outcome] = Future()
        result.set_running_or_notify_cancel()
        ticket = self._start([outgoing], timeout_s, urgent=True, may_linger=may_linger)
        ticket.future.add_done_callback(lambda done: result.set_result(done.result()[0]))
        return result

    def topology_exists(self) -> None:
        """Say that the queues have been declared, as who runs a task from one of them knows.

        Declaring them takes some hundred round trips, which the first message of each process would wait for.
        """
        self._topology_exists.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the connection; a later message opens it again."""
        with self._lock:
            pipeline, self._pipeline = self._pipeline, None
            if self._end is not None:
                self._end.detach()
        if pipeline is not None:
            pipeline.stop(timeout_s)

    def _start(
        self, outgoings: Iterable[Outgoing], timeout_s: float | None, *, urgent: bool, may_linger: bool = False
    ) -> Ticket:
        pipeline = self._running()
        ticket = Ticket(urgent=urgent, patience_s=self._confirm_timeout_s, timeout_s=timeout_s, may_linger=may_linger)
        chunk: list[tuple[Outgoing, Encoded | Outcome]] = []
        try:
            for outgoing in outgoings:
                chunk.append((outgoing, self._encode(outgoing)))
                if len(chunk) == BATCH:
                    pipeline.hand_over(ticket, chunk, last=False)
                    chunk = []
        finally:
            # Also when reading the messages fails half-way: what was handed over must come to an end.
            pipeline.hand_over(ticket, chunk, last=True)
        return ticket

    def _encode(self, outgoing: Outgoing) -> Encoded | Outcome:
        if len(outgoing.body) > self._max_body_bytes:
            return TooLarge(len(outgoing.body), self._max_body_bytes)
        encoded = self._settings.link.encode(outgoing)
        if encoded.size_bytes > self._max_body_bytes:
            return TooLarge(encoded.size_bytes, self._max_body_bytes)
        if encoded.size_bytes - len(outgoing.body) > HEADER_FRAME_BYTES:
            return TooLarge(encoded.size_bytes - len(outgoing.body), HEADER_FRAME_BYTES)
        return encoded

    def _wait(self, ticket: Ticket, timeout_s: float | None) -> list[Outcome]:
        if self._running().is_own_thread():
            raise RuntimeError("An outcome cannot be waited for inside the publisher's own thread; use post().")
        if timeout_s is None:
            # The loop ends the call when nothing moves any more, so this waits for no longer than that.
            while True:
                try:
                    return ticket.future.result(self._confirm_timeout_s + _GRACE_S)
                except FutureTimeoutError:
                    if not self._running().is_alive():
                        break
        else:
            try:
                return ticket.future.result(timeout_s + _GRACE_S)
            except FutureTimeoutError:
                pass
        return [Unknown("the publisher's thread does not answer")] * max(1, len(ticket.outcomes))

    def _running(self) -> Pipeline:
        pipeline = self._pipeline
        if pipeline is None:
            with self._lock:
                pipeline = self._pipeline
                if pipeline is None:
                    pipeline = self._pipeline = Pipeline(self._settings)
                    # Runs at the latest when the interpreter ends, while other threads can still run.
                    self._end = weakref.finalize(self, _stop, pipeline, os.getpid())
        return pipeline


def _stop(pipeline: Pipeline, pid: int) -> None:
    if pid == os.getpid():
        pipeline.stop(2.0)


def _after_fork_in_child() -> None:
    for publisher in list(_publishers):
        # The lock may have been held by a thread that does not exist here.
        publisher._lock = threading.Lock()
        if publisher._pipeline is not None:
            _of_the_parent.append(publisher._pipeline)
            publisher._pipeline = None
        if publisher._end is not None:
            publisher._end.detach()
            publisher._end = None


os.register_at_fork(after_in_child=_after_fork_in_child)
