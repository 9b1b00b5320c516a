"""The one place where private parts of Celery, kombu, billiard and py-amqp are touched.

``tests/seam`` pins each of them. Everything else in this package goes through documented doors: ``worker_consumer``,
bootsteps, ``amqp_cls``, ``task_routes``, the ``Task`` base class and the result backend.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from struct import pack
from time import monotonic
from typing import Any

import amqp
import billiard.einfo
from amqp import spec
from amqp.serialization import dumps
from billiard.exceptions import Terminated, WorkerLostError
from celery.bootsteps import RUN  # type: ignore[attr-defined]
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request
from kombu.serialization import prepare_accept_content

__all__ = [
    "CHANNEL_ERRORS",
    "CONNECTION_ERRORS",
    "RUN",
    "Consumer",
    "Outbox",
    "RecoverableConnectionError",
    "Request",
    "SoloHeartbeat",
    "Tasks",
    "accepted_content",
    "bound",
    "collect",
    "einfo",
    "error_of",
    "failure_in",
    "is_lost_child",
    "nack",
    "on_get_answers",
    "order_tick",
    "process_ids",
    "read_all",
    "read_by_hand",
    "read_frame",
    "ready_processes",
    "replace_delivery",
    "revoke_here",
    "settled",
    "stop_worker",
    "tell_revoked",
    "terminate",
    "unaccepted",
    "ungated",
]

RecoverableConnectionError = amqp.exceptions.RecoverableConnectionError
#: How errors cross from the pool's processes; its stub is older.
einfo: Any = billiard.einfo
CONNECTION_ERRORS: tuple[type[BaseException], ...] = amqp.Connection.connection_errors
#: In basic.nack: one message, and back to its queue.
REQUEUE_BIT = 0b10
#: Acknowledgements that are kept back at the most.
MOST_ACKS = 16
FRAME_END = b"\xce"
CHANNEL_ERRORS: tuple[type[BaseException], ...] = (amqp.exceptions.ChannelError,)


def accepted_content(types: Sequence[str]) -> set[str]:
    """Return the content types behind kombu's names for them."""
    return set(prepare_accept_content(types) or ())


def on_get_answers(channel: Any, callback: Callable[[Any], None]) -> None:
    """Call back with the raw message, or None, for each answer to a ``basic.get``.

    Not ``channel.basic_get``: it waits for the answer, eight round trips for eight gets, for ever if none comes.
    """

    def got(delivery_tag: int, redelivered: bool, exchange: str, routing_key: str, count: int, raw: Any) -> None:
        callback(channel._on_get_ok(delivery_tag, redelivered, exchange, routing_key, count, raw))

    channel._callbacks[spec.Basic.GetOk] = got
    channel._callbacks[spec.Basic.GetEmpty] = lambda *_: callback(None)


@cache
def _naming(arguments: str, queue: str, *flags: object) -> bytes:
    """The arguments of a method that names a queue; the same few are sent for ever."""
    return bytes(dumps(arguments, (0, queue, *flags)))


class Outbox:
    """Gathers the small frames of one connection and sends them in one write.

    A task costs a get and an acknowledgement, each a system call of its own through py-amqp: together a third of a
    worker's time with tasks of a millisecond. Frames keep their order, and ``flush`` comes before anything waits.
    """

    def __init__(self, connection: Any) -> None:
        self._raw = connection.connection
        self._frames: list[bytes] = []
        self._acks = 0

    def adopt(self, channel: Any) -> None:
        """Send the channel's acknowledgements and rejections through here."""
        number = channel.channel_id

        def ack(delivery_tag: int, multiple: bool = False, **_: object) -> None:
            self._add(channel, number, spec.Basic.Ack, pack(">QB", delivery_tag, multiple))
            self._acks += 1

        def reject(delivery_tag: int, requeue: bool, **_: object) -> None:
            self._add(channel, number, spec.Basic.Reject, pack(">QB", delivery_tag, requeue))

        # py-amqp opens a channel anew that the broker has closed, waits for that, and hides that its subscriptions, the
        # answers still to come and every delivery tag are gone.
        channel._do_revive = lambda: self._forget(channel, number)
        channel.basic_ack = ack
        channel.basic_reject = reject
        channel.inference_nack = lambda tag: self._add(channel, number, spec.Basic.Nack, pack(">QB", tag, REQUEUE_BIT))

    def _forget(self, channel: Any, number: int) -> None:
        """The broker has closed the channel: what it was yet to be told must not reach the next one of that number."""
        head = pack(">BH", 1, number)
        self._frames = [frame for frame in self._frames if not frame.startswith(head)]
        channel.collect()

    def get(self, channel: Any, queue: str) -> None:
        """Ask for one message without waiting for it."""
        self._add(channel, channel.channel_id, spec.Basic.Get, _naming("Bsb", queue, False))

    def look(self, channel: Any, queue: str, callback: Callable[[int], None]) -> None:
        """Ask how many messages wait, by a passive declaration: no entry in a quorum queue's log, unlike a get."""
        channel._callbacks[spec.Queue.DeclareOk] = lambda name, messages, consumers: callback(messages)
        passive = _naming("BsbbbbbF", queue, True, False, False, False, False, None)
        self._add(channel, channel.channel_id, spec.Queue.Declare, passive)

    def consume(
        self, channel: Any, queue: str, tag: str, prefetch: int, callback: Callable[[Any], None], on_cancel: Any
    ) -> None:
        """Subscribe with a prefetch of its own, without waiting for the answers."""
        self._add(channel, channel.channel_id, spec.Basic.Qos, dumps("lBb", (0, prefetch, False)))
        channel.callbacks[tag] = callback
        channel.cancel_callbacks[tag] = on_cancel
        arguments = dumps("BssbbbbF", (0, queue, tag, False, False, False, True, None))
        self._add(channel, channel.channel_id, spec.Basic.Consume, arguments)

    def cancel(self, channel: Any, tag: str) -> None:
        """End a subscription without waiting for the answer."""
        self._add(channel, channel.channel_id, spec.Basic.Cancel, dumps("sb", (tag, True)))

    def _add(self, channel: Any, number: int, method: tuple[int, int], arguments: bytes) -> None:
        if channel.connection is None:
            raise RecoverableConnectionError("the channel is closed")
        size = 4 + len(arguments)
        self._frames.append(pack(">BHIHH", 1, number, size, *method) + arguments + FRAME_END)

    def flush(self, *, acks_can_wait: bool = False) -> None:
        """Send what has been gathered; acknowledgements alone may wait for company, if there are not many."""
        if self._frames and not (acks_can_wait and len(self._frames) == self._acks < MOST_ACKS):
            data = b"".join(self._frames)
            self._frames.clear()
            self._acks = 0
            self._raw.transport.write(data)
            self._raw.bytes_sent += 1


def nack(message: Any) -> None:
    """Return a message to its place.

    Not kombu's ``requeue``: that is ``basic.reject``, which counts as a failure from RabbitMQ 4.3 on.
    """
    channel = message.channel
    if channel is None or message.acknowledged:
        return
    if isinstance(channel, amqp.Channel):
        if channel.connection is not None:
            channel.inference_nack(message.delivery_tag)  # type: ignore[attr-defined]
            message._state = "REQUEUED"
    else:
        message.requeue()


def replace_delivery(message: Any, again: Any) -> None:
    """Have a message settled by another delivery of it; Celery's request of a running task keeps the first one."""
    message.channel, message.delivery_tag = again.channel, again.delivery_tag
    message.delivery_info, message._state = again.delivery_info, again._state


def read_frame(connection: Any, timeout_s: float = 0) -> bool:
    """Handle one event of the connection; false if there was none within the time."""
    try:
        connection.drain_events(timeout=timeout_s)
    except TimeoutError:
        return False
    except OSError as exc:
        if exc.errno in (errno.EAGAIN, errno.EINTR):
            return False
        raise
    return True


def read_all(connection: Any) -> None:
    """Handle every frame that has arrived, without waiting.

    Not ``drain_events`` frame by frame: that switches the socket to non-blocking and back for each of them.
    """
    raw = connection.connection
    try:
        with raw.transport.having_timeout(0):
            while True:
                raw.on_inbound_frame(raw.transport.read_frame())
    except TimeoutError:
        return
    except OSError as exc:
        if exc.errno not in (errno.EAGAIN, errno.EINTR):
            raise


def read_by_hand(hub: Any, connection: Any, callback: Callable[[], None]) -> None:
    """Let ``callback`` read the connection's socket. kombu's own reader takes one frame per turn of the loop."""
    hub.add_reader(connection.connection.sock, callback)


def bound(connection: Any, seconds: float) -> Any:
    """Give every blocking read and write of the connection an end, and return it.

    Opening a channel waits for the broker inside py-amqp, without a time-out of its own: a frozen peer would hang the
    worker there, and its heartbeats with it. Reads that do not block are not touched.
    """
    raw = connection.connection
    sock = getattr(raw, "sock", None)
    if isinstance(sock, socket.socket):
        limit = pack("ll", int(seconds), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        raw.transport.raise_on_initial_eintr = True
    return connection


def collect(connection: Any) -> None:
    """Drop a connection without talking to its peer, which may be frozen."""
    with suppress(Exception):  # a half-dead connection may fail in any way, and nothing of it is needed any more
        connection.collect()


def order_tick(hub: Any, pool: Any, pump: Callable[[], None]) -> Callable[[], None]:
    """Run ``pump`` before each poll, then have what it handed over written to idle processes at once.

    Two things Celery's prefork pool does are in the way. It writes jobs only when the next poll has found the pipes
    writable; and its own tick, which watches the pipes, asks the kernel at every turn though there be nothing to write.
    Beside that, the hub keeps its ticks in a set: in the wrong order a job waits for the next event.
    """
    if not hasattr(getattr(pool, "_pool", None), "on_poll_start"):
        hub.on_tick.add(pump)
        return pump
    hub.on_tick.discard(pool._pool.on_poll_start)
    watches = True

    def tick() -> None:
        nonlocal watches
        pump()
        processes = pool._pool
        if processes is None:
            return
        if processes.outbound_buffer:
            taken = processes._active_writes | processes._busy_workers
            idle = [fd for fd in processes._all_inqueues if fd not in taken]
            if idle:
                hub.consolidate_callback(idle)
        if processes.outbound_buffer or watches:
            watches = bool(processes.outbound_buffer)
            processes.on_poll_start()

    hub.on_tick.add(tick)
    return tick


def ungated(on_task_request: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the worker's way to the pool without Celery's own semaphore, which the slots replace.

    It loses a place for ever when a message chokes on its way.
    """
    controller = getattr(on_task_request, "__self__", None)
    return getattr(controller, "_process_task", on_task_request)


def ready_processes(pool: Any) -> int:
    """Processes of a prefork pool that have finished their start-up, models included."""
    return len(pool._pool._fileno_to_inq) if pool._pool is not None else 0


def process_ids(pool: Any) -> list[int]:
    """The ids of a prefork pool's processes."""
    return [process.pid for process in pool._pool._pool] if pool._pool is not None else []


def unaccepted(job: object) -> bool:
    """Whether a prefork job was never accepted by a process; a lost connection discards those in silence."""
    accepted = getattr(job, "accepted", None)
    return callable(accepted) and not accepted()


def settled(callback: object) -> None:
    """Tell a request, by one of its bound methods, that its message is taken care of."""
    request = getattr(callback, "__self__", None)
    if request is not None:
        request.acknowledged = True


def stop_worker(exit_code: int) -> None:
    """Have the worker end in order, with this exit status."""
    worker_state.should_stop = exit_code  # type: ignore[assignment]


def terminate(task_id: str, pool: Any) -> bool:
    """Kill the process that runs a task, and record the task as revoked; false if the task does not run here."""
    request = worker_state.requests.get(task_id)
    if request is None:
        return False
    request.terminate(pool, signal="SIGKILL")
    return True


def revoke_here(task_id: str) -> None:
    """Have this worker skip a task when it comes to the pool, as Celery's own ``revoke`` has."""
    worker_state.revoked.add(task_id)


def tell_revoked(task_id: str) -> None:
    """Tell monitors of a running task that it has ended as cancelled."""
    request = worker_state.requests.get(task_id)
    if request is not None:
        request.send_event("task-revoked", terminated=False, signum=None, expired=False)


def is_lost_child(info: object) -> bool:
    """Whether a job's error says that its process died."""
    kind = getattr(info, "type", None)
    return isinstance(kind, type) and issubclass(kind, WorkerLostError)


def error_of(info: object) -> BaseException | None:
    """Return the error in a job's error information."""
    error = getattr(info, "exception", None)
    error = getattr(error, "exc", error) if isinstance(error, einfo.ExceptionWithTraceback) else error
    # The others say that the process ends: Celery makes lost processes of them, or was asked to end the task.
    return error if isinstance(error, Exception) and not isinstance(error, MemoryError | Terminated) else None


def failure_in(result: Sequence[object]) -> object | None:
    """Return the error information in what a job returns, (failed, value, run time); None if it has not failed."""
    answer = result[0] if result else None
    return answer[1] if isinstance(answer, tuple) and len(answer) == 3 and answer[0] else None


class SoloHeartbeat:
    """Keeps the broker's connections alive while the main thread runs a task (solo pool): a context manager.

    A thread sends heartbeats; nobody reads the sockets meanwhile, so the other side's silence is forgiven at the end.
    """

    def __init__(self, connection: Any, dispatcher: Any) -> None:
        connections = [connection, dispatcher.connection if dispatcher else None]
        self._raw = [one.connection for one in connections if one is not None and one.connection is not None]
        self._raw = [raw for raw in self._raw if getattr(raw, "heartbeat", 0)]
        self._busy = False
        self._stopped = threading.Event()
        if self._raw:
            threading.Thread(target=self._run, name="inference-solo-heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self._stopped.wait(min(raw.heartbeat for raw in self._raw) / 3):
            if self._busy:
                try:
                    for raw in self._raw:
                        raw.send_heartbeat()
                except Exception:
                    return  # the connection is gone; the main thread finds out when it reads

    def __enter__(self) -> None:
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False
        for raw in self._raw:
            raw.last_heartbeat_received = monotonic()

    def stop(self) -> None:
        self._stopped.set()
