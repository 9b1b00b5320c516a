"""Where a worker's messages come from on the embedded broker: fetched by script, woken by a bell instead of polling."""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from inference_tasks.broker.embedded import DIFFERENCES, delivery, load_broker_script
from inference_tasks.broker.embedded_line import Line, Reply, ReplyError
from inference_tasks.broker.embedded_server import EmbeddedServer, socket_path
from inference_tasks.errors import DeploymentError
from inference_tasks.state import keys
from inference_tasks.worker import seam

if TYPE_CHECKING:
    from inference_tasks.worker.intake import Delivery
    from inference_tasks.worker.source import Answer, Look, Push

__all__ = ["EmbeddedSource"]

logger = logging.getLogger(__name__)

#: After this many silent seconds a consumer is dead and others return what it held; renewed three times within them.
LEASE_S = 3.0
#: Longest time between two looks at leases, at delayed messages and, if the bell was missed, at subscribed queues.
KEEP_S = 1.0
#: Most messages that one look moves.
KEEP_MESSAGES = 1000
CLOSE_S = 1.0

_BELL = keys.bell("")


class _Watch(Enum):
    """Whether a message of a subscribed queue has been asked for, and whether its bell has rung since."""

    NONE = auto()
    ASKED = auto()
    RUNG = auto()


class EmbeddedSource:
    """The embedded broker through two connections of its own, watched by Celery's event loop.

    A subscription is the queue's bell (publish/subscribe): once the server has confirmed it, and at each ring, one
    message is asked for, so none is missed in between. A thread renews the lease, also while a solo worker's only
    thread runs a task. Lost, everything held goes back to its queue by the lease.
    """

    def __init__(self, url: str, accept: Sequence[str], dead_queue: str) -> None:
        path = socket_path(url)
        logger.warning("using the embedded broker at %s, meant for development: %s", path, "; ".join(DIFFERENCES))
        self.consumer = uuid.uuid4().hex
        self._accept = seam.accepted_content(accept)
        self._held = keys.held(self.consumer)
        self._dead_queue = dead_queue
        self._commands, self._bell = Line(path), Line(path)
        self._take = self._load("take")
        self._settle = self._load("settle")
        self._depths = self._load("depths")
        self._handlers: deque[Callable[[Any], None]] = deque()
        self._watched: dict[str, _Watch] = {}
        self._returning: list[str] = []
        self._lock = threading.RLock()
        self._is_urgent = False
        self._is_closed = False
        self._keeper = _Keeper(url, self.consumer)
        self.on_answer: Answer = lambda queue, message: None
        self.on_look: Look = lambda queue, found: None
        self.on_push: Push = lambda queue, message: None

    def _load(self, name: str) -> str:
        script = load_broker_script(name)
        reply = self._commands.call("SCRIPT", "LOAD", script.source)
        if isinstance(reply, ReplyError):
            raise ConnectionRefusedError(f"the embedded broker refuses the script {name}: {reply}")
        return script.sha

    # -- what the dispatcher calls -------------------------------------------------------------------------------------

    def look(self, queues: Sequence[str]) -> None:
        if queues:
            self._command(partial(self._counted, tuple(queues)), self._depths, *queues)

    def ask(self, queues: Sequence[str]) -> None:
        if queues:
            self._command(partial(self._answered, tuple(queues)), self._take, self.consumer, LEASE_S, *queues)

    def subscribe(self, queues: Sequence[str]) -> None:
        if queues:
            self._watched.update((queue, _Watch.NONE) for queue in queues)
            self._bell.put("SUBSCRIBE", *map(keys.bell, queues))

    def unsubscribe(self, queues: Sequence[str]) -> None:
        if queues:
            for queue in queues:
                self._watched.pop(queue, None)
            self._bell.put("UNSUBSCRIBE", *map(keys.bell, queues))

    def give_back(self, message: Delivery) -> None:
        seam.nack(message)

    def return_stale(self, now: float | None = None) -> None:
        """Nothing is fetched ahead."""

    def drain(self) -> None:
        """Hand on every reply that has arrived."""
        for reply in self._commands.replies():
            if isinstance(reply, ReplyError):
                raise ConnectionResetError(f"the embedded broker refused a command: {reply}")
            self._handlers.popleft()(reply)
        self._tend(
            said[1].decode().removeprefix(_BELL)
            for said in self._bell.replies()
            if isinstance(said, list) and said[0] in (b"subscribe", b"message") and isinstance(said[1], bytes)
        )
        self.flush()

    def flush(self, *, acks_can_wait: bool = False) -> None:
        with self._lock:
            if self._returning:
                tags, self._returning = self._returning, []
                self._command(_ignore, self._settle, self.consumer, "", *tags)
            if self._is_urgent or not acks_can_wait:
                self._is_urgent = False
                self._commands.flush()
            self._bell.flush()

    def close(self) -> None:
        """Give back what is still held, and let the connections go."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(ConnectionError):
            self.flush()
            end = monotonic() + CLOSE_S
            while self._handlers and monotonic() < end:
                self._commands.wait(0.05)
                self.drain()
        self._keeper.stop()
        self._commands.close()
        self._bell.close()

    # -- what the consumer calls ---------------------------------------------------------------------------------------

    def register(self, hub: Any, readable: Callable[[], None]) -> None:
        """Read both sockets from the event loop, all that has come at each turn."""
        hub.add_reader(self._commands, readable)
        hub.add_reader(self._bell, readable)
        hub.call_repeatedly(KEEP_S, self._tend_all)
        if not self._keeper.is_alive():
            self._keeper.start()

    def finish(self, unanswered: Callable[[], int], timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the answers that are still on their way."""
        end = monotonic() + timeout_s
        self.flush()
        while unanswered() and monotonic() < end:
            self._commands.wait(0.05)
            self.drain()
        self.flush()

    # -- what a message calls, as its channel --------------------------------------------------------------------------

    no_ack_consumers = None

    def decode_body(self, body: object, encoding: object = None) -> object:
        return body

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        with self._lock:
            self._handlers.append(_ignore)
            self._commands.put("HDEL", self._held, delivery_tag)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        with self._lock:
            if requeue:
                self._returning.append(delivery_tag)
            else:
                self._command(_ignore, self._settle, self.consumer, self._dead_queue, delivery_tag)

    # -- replies -------------------------------------------------------------------------------------------------------

    def _command(self, handler: Callable[[Any], None], sha: str, *arguments: str | float) -> None:
        with self._lock:
            self._is_urgent = True
            self._handlers.append(handler)
            self._commands.put("EVALSHA", sha, 0, *map(str, arguments))

    def _answered(self, queues: Sequence[str], replies: Sequence[bytes | None]) -> None:
        for queue, reply in zip(queues, replies, strict=True):
            self.on_answer(queue, self._message(reply))

    def _counted(self, queues: Sequence[str], depths: Sequence[int]) -> None:
        for queue, depth in zip(queues, depths, strict=True):
            self.on_look(queue, depth > 0)

    def _tend(self, queues: Iterable[str]) -> None:
        """Ask for one message of each subscribed queue; once more if its bell rang while that was under way."""
        to_ask: list[str] = []
        for queue in dict.fromkeys(queues):
            watch = self._watched.get(queue)
            if watch is _Watch.NONE:
                to_ask.append(queue)
            elif watch is _Watch.ASKED:
                # Two sockets: the answer to the first may be older than the ring, though it is read later.
                self._watched[queue] = _Watch.RUNG
        if to_ask:
            self._ask_pushed(to_ask)

    def _ask_pushed(self, queues: Sequence[str]) -> None:
        self._watched.update((queue, _Watch.ASKED) for queue in queues)
        self._command(partial(self._seen, queues), self._take, self.consumer, LEASE_S, *queues)

    def _seen(self, queues: Sequence[str], replies: Sequence[bytes | None]) -> None:
        for queue, reply in zip(queues, replies, strict=True):
            watch = self._watched.pop(queue, None)
            if reply is not None:
                self.on_push(queue, self._message(reply))
            elif watch is not None:
                self._watched[queue] = _Watch.NONE
                if watch is _Watch.RUNG:
                    self._tend([queue])

    def _tend_all(self) -> None:
        """The net below the bell."""
        if not self._is_closed:
            self._tend([queue for queue, watch in self._watched.items() if watch is _Watch.NONE])
            self.flush()

    def _message(self, reply: bytes | None) -> Any:
        if reply is None:
            return None
        tag, _, message = reply.partition(b"\x1f")
        return delivery(message, tag.decode(), self, self._accept)


class _Keeper(threading.Thread):
    """Renews a consumer's lease, returns what dead consumers held, moves what is due, and revives the server."""

    def __init__(self, url: str, consumer: str) -> None:
        super().__init__(name="inference-keeper", daemon=True)
        self._path = socket_path(url)
        self._server = EmbeddedServer.at(url)
        self._consumer = consumer
        self._script = load_broker_script("keep")
        self._line: Line | None = None
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(self._renew(LEASE_S)):
            pass

    def stop(self) -> None:
        """End the lease: what is still held goes back at once."""
        self._stopping.set()
        if self.is_alive():
            self.join(CLOSE_S)
        self._renew(0)
        if self._line is not None:
            self._line.close()

    def _renew(self, lease_s: float) -> float:
        """Return after how many seconds to renew it again."""
        try:
            if self._line is None:
                self._line = Line(self._path)
            reply = self._call(self._line, lease_s)
        except ConnectionError as exc:
            logger.debug("the lease could not be renewed: %s", exc)
            if self._line is not None:
                self._line.close()
            self._line = None
            if lease_s:
                self._revive()
            return KEEP_S
        returned, due, wait_ms = reply
        if returned and lease_s:
            logger.warning("%d message(s) of a worker that is gone are back in their queues", returned)
        if returned >= KEEP_MESSAGES or due >= KEEP_MESSAGES:
            return 0.0
        return KEEP_S if wait_ms < 0 else min(KEEP_S, wait_ms / 1000 + 0.001)

    def _revive(self) -> None:
        """Start the server again: nobody else watches it, and its data is in its directory."""
        try:
            if self._server.start():
                logger.warning("the embedded broker had ended and was started again")
        except DeploymentError as exc:
            logger.error("the embedded broker cannot be started again: %s", exc)

    def _call(self, line: Line, lease_s: float) -> tuple[int, int, int]:
        arguments = (0, self._consumer, str(lease_s), KEEP_MESSAGES)
        reply: Reply = line.call("EVALSHA", self._script.sha, *arguments)
        if isinstance(reply, ReplyError):
            line.call("SCRIPT", "LOAD", self._script.source)
            reply = line.call("EVALSHA", self._script.sha, *arguments)
        if not isinstance(reply, list):
            raise ConnectionResetError(f"the embedded broker refuses to renew the lease: {reply!r}")
        returned, due, wait_ms = (int(one) for one in reply if isinstance(one, int))
        return returned, due, wait_ms


def _ignore(_: object) -> None: ...
