"""Where a worker's messages come from: the port that the dispatcher sees, and RabbitMQ behind it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from inference_tasks.worker import seam
from inference_tasks.worker.stream import Stream

if TYPE_CHECKING:
    from inference_tasks.worker.intake import Delivery

__all__ = ["AmqpSource", "NoSource", "Source"]

logger = logging.getLogger(__name__)

#: Cancelled subscriptions of a queue whose late messages are still expected.
KEPT_TAGS = 32

Answer = Callable[[str, "Delivery | None"], None]
Push = Callable[[str, "Delivery"], None]
Look = Callable[[str, bool], None]


class Source(Protocol):
    """One broker, as the dispatcher uses it. No call waits for the broker; ``flush`` sends what the others gathered.

    ``on_answer(queue, message or None)`` is called once per asked queue, ``on_look(queue, holds something)`` once per
    queue looked at, all in the order of the calls; ``on_push`` for a message of a subscription, which may arrive after
    its ``unsubscribe``.
    """

    on_answer: Answer
    on_look: Look
    on_push: Push

    def look(self, queues: Sequence[str]) -> None:
        """Ask of each named queue whether it holds anything; takes nothing from it."""

    def ask(self, queues: Sequence[str]) -> None:
        """Ask for one message of each named queue, in this order."""

    def subscribe(self, queues: Sequence[str]) -> None:
        """Have at most one message of each named queue pushed."""

    def unsubscribe(self, queues: Sequence[str]) -> None: ...

    def give_back(self, message: Delivery) -> None:
        """Return an unstarted message to its place in the queue."""

    def drain(self) -> None:
        """Take in what has arrived already, without waiting."""

    def return_stale(self, now: float | None = None) -> None:
        """Return what was fetched ahead of being asked for and is too old; without a time, all of it."""

    def close(self) -> None:
        """Let go: the connection is lost, or another one takes its place."""

    def flush(self, *, acks_can_wait: bool = False) -> None:
        """Send what the calls so far have to say. Acknowledgements may be told to wait for the next flush."""


class NoSource:
    """Before the first connection there is nothing to ask."""

    def look(self, queues: Sequence[str]) -> None: ...
    def ask(self, queues: Sequence[str]) -> None: ...
    def subscribe(self, queues: Sequence[str]) -> None: ...
    def unsubscribe(self, queues: Sequence[str]) -> None: ...
    def give_back(self, message: object) -> None: ...
    def drain(self) -> None: ...
    def return_stale(self, now: float | None = None) -> None: ...
    def close(self) -> None: ...
    def flush(self, *, acks_can_wait: bool = False) -> None: ...

    on_answer: Any = None
    on_look: Any = None
    on_push: Any = None


@dataclass(slots=True, eq=False)
class _Asked:
    """One get or look on its way, and what came of it: a raw message, or how many wait."""

    queue: str
    is_look: bool
    found: Any = None
    is_answered: bool = False

    def answer(self, found: Any) -> None:
        self.found, self.is_answered = found, True


class _QueueChannel:
    """One queue's channel: what happens to that queue can hurt no other."""

    def __init__(self, queue: str, channel: Any, source: AmqpSource) -> None:
        self.queue = queue
        self.channel = channel
        self._source = source
        self.asked: deque[_Asked] = deque()
        self.looks: deque[_Asked] = deque()
        self._number = 0
        self._tags: deque[str] = deque()
        self._tag: str | None = None
        self.stream = Stream(source.hold_s)
        seam.on_get_answers(channel, self._got)
        source.outbox.adopt(channel)

    def _got(self, raw: Any) -> None:
        if raw is None:
            self.end_stream()
        else:
            raw.delivery_info["arrived_s"] = monotonic()
        if self.asked:
            self.asked.popleft().answer(raw)

    def _counted(self, messages: int) -> None:
        if self.looks:
            self.looks.popleft().answer(messages)

    def look(self, entry: _Asked) -> None:
        self.looks.append(entry)
        self._source.outbox.look(self.channel, self.queue, self._counted)

    def ask(self, entry: _Asked, now: float) -> None:
        """Answer from the stock, or ask the broker."""
        self.stream.asked(now)
        if self.stream.stock:
            entry.answer(self.stream.stock.popleft())
        else:
            self.asked.append(entry)
            self._source.outbox.get(self.channel, self.queue)

    def tend_stream(self, now: float) -> None:
        """Open, widen or end the push window, as the rate of asking and the age of the stock say."""
        stream = self.stream
        prefetch = 0 if stream.is_stale(now) else stream.wanted_prefetch(now)
        if prefetch == stream.prefetch:
            return
        if stream.prefetch:
            self.end_stream(keep_stock=prefetch > stream.prefetch)
        if prefetch:
            stream.prefetch = prefetch
            stream.tag = self._consume(prefetch, self._streamed)

    def end_stream(self, *, keep_stock: bool = False) -> None:
        """End the push window; what was not asked for goes back."""
        stream = self.stream
        if stream.tag is not None:
            self._source.outbox.cancel(self.channel, stream.tag)
            stream.tag, stream.prefetch = None, 0
        while stream.stock and not keep_stock:
            self._source.give_back(self._source.message(stream.stock.popleft()))

    def _streamed(self, raw: Any) -> None:
        if raw.delivery_info["consumer_tag"] != self.stream.tag:
            self._source.give_back(self._source.message(raw))
            return
        raw.delivery_info["arrived_s"] = monotonic()
        self.stream.stock.append(raw)

    def consume(self) -> None:
        """Have one message pushed; with the window open, what it brought so far is that message."""
        stock = list(self.stream.stock)
        self.stream.stock.clear()
        self.end_stream()
        self._tag = self._consume(1, self._pushed)
        for raw in stock:
            self._pushed(raw)

    def cancel(self) -> None:
        if self._tag is not None:
            self._source.outbox.cancel(self.channel, self._tag)
            self._tag = None

    def _consume(self, prefetch: int, callback: Callable[[Any], None]) -> str:
        # A tag is used once: on a quorum queue a cancelled consumer lives on until what it holds is acknowledged, and a
        # new one of the same tag would find its prefetch used up.
        self._number += 1
        tag = f"{self.queue}#{self._number}"
        self._tags.append(tag)
        if len(self._tags) > KEPT_TAGS:
            self.channel.callbacks.pop(self._tags.popleft(), None)
        self._source.outbox.consume(self.channel, self.queue, tag, prefetch, callback, self._cancelled)
        return tag

    def _pushed(self, raw: Any) -> None:
        self._source.on_push(self.queue, self._source.message(raw))

    def _cancelled(self, _tag: str) -> None:
        logger.warning("the broker ended the subscription to %s; it counts as empty for now", self.queue)
        self._source.on_lost(self.queue)


class AmqpSource:
    """RabbitMQ through the worker's own py-amqp connection, driven by Celery's event loop.

    One channel per queue: a queue that is missing (404) or whose consumer timed out (406) closes its own channel only,
    and what was unacknowledged on it is lost to that queue alone. Not one channel for all: a single missing queue would
    return every running task of the worker. Answers of several channels may overtake each other; they are handed on in
    the order of asking.
    """

    def __init__(
        self, connection: Any, accept: Sequence[str], on_lost: Callable[[str], None], hold_s: float = 0.0
    ) -> None:
        self._connection = connection
        self.hold_s = hold_s
        self.outbox = seam.Outbox(connection)
        self._accept = seam.accepted_content(accept)
        self._channels: dict[str, _QueueChannel] = {}
        self._order: deque[_Asked] = deque()
        self.on_answer: Answer = lambda queue, message: None
        self.on_look: Look = lambda queue, found: None
        self.on_push: Push = lambda queue, message: None
        self.on_lost = on_lost

    def message(self, raw: Any) -> Any:
        message = raw.channel.message_to_python(raw)
        message.accept = self._accept
        return message

    def look(self, queues: Sequence[str]) -> None:
        for queue in queues:
            entry = _Asked(queue, is_look=True)
            channel = self._line_up(entry)
            if channel is not None:
                channel.look(entry)
        self._hand_on()

    def ask(self, queues: Sequence[str]) -> None:
        now = monotonic()
        for queue in queues:
            entry = _Asked(queue, is_look=False)
            channel = self._line_up(entry)
            if channel is not None:
                channel.ask(entry, now)
        for queue in dict.fromkeys(queues):
            if queue in self._channels:
                self._channels[queue].tend_stream(now)
        self._hand_on()

    def _line_up(self, entry: _Asked) -> _QueueChannel | None:
        """Put an entry in the line of answers; None where the queue's channel cannot be opened."""
        self._order.append(entry)
        try:
            return self._channel(entry.queue)
        except seam.CHANNEL_ERRORS as exc:
            self._lost(entry.queue, exc)
            return None

    def subscribe(self, queues: Sequence[str]) -> None:
        for queue in queues:
            try:
                self._channel(queue).consume()
            except seam.CHANNEL_ERRORS as exc:
                self._lost(queue, exc)

    def unsubscribe(self, queues: Sequence[str]) -> None:
        for queue in queues:
            channel = self._channels.get(queue)
            if channel is not None:
                channel.cancel()

    def give_back(self, message: Delivery) -> None:
        seam.nack(message)

    def drain(self) -> None:
        """Read every frame that has arrived, then hand on the answers in the order of asking."""
        while True:
            try:
                seam.read_all(self._connection)
                break
            except seam.CHANNEL_ERRORS as exc:
                self._drop_closed(exc)
        self._hand_on()

    def flush(self, *, acks_can_wait: bool = False) -> None:
        """Send what the calls so far have to say to the broker."""
        self.outbox.flush(acks_can_wait=acks_can_wait)

    def wait(self, timeout_s: float) -> None:
        """Like ``drain``, but first wait up to ``timeout_s`` seconds for something to arrive."""
        try:
            seam.read_frame(self._connection, timeout_s)
        except seam.CHANNEL_ERRORS as exc:
            self._drop_closed(exc)
        self.drain()

    def register(self, hub: Any, readable: Callable[[], None]) -> None:
        """Read the socket from the event loop, all that has come at each turn."""
        seam.read_by_hand(hub, self._connection, readable)

    def finish(self, unanswered: Callable[[], int], timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the answers that are still on their way."""
        end = monotonic() + timeout_s
        self.flush()
        while unanswered() and monotonic() < end:
            self.wait(0.05)
        self.flush()

    def return_stale(self, now: float | None = None) -> None:
        """Return what was pushed ahead and not asked for in time; without a time, all of it."""
        for channel in self._channels.values():
            if now is None:
                channel.end_stream()
            else:
                channel.tend_stream(now)

    def _hand_on(self) -> None:
        while self._order and self._order[0].is_answered:
            entry = self._order.popleft()
            if entry.is_look:
                self.on_look(entry.queue, bool(entry.found))
            else:
                self.on_answer(entry.queue, None if entry.found is None else self.message(entry.found))

    def _channel(self, queue: str) -> _QueueChannel:
        found = self._channels.get(queue)
        if found is None:
            found = self._channels[queue] = _QueueChannel(queue, self._connection.channel(), self)
        return found

    def _drop_closed(self, exc: BaseException) -> None:
        for queue, channel in list(self._channels.items()):
            if not channel.channel.is_open:
                self._lost(queue, exc)

    def _lost(self, queue: str, exc: BaseException) -> None:
        """A queue's channel is gone: its answers count as empty, and the next use opens a new one."""
        logger.warning("cannot read queue %s for now, it counts as empty: %s", queue, exc)
        channel = self._channels.pop(queue, None)
        if channel is not None:
            channel.stream.stock.clear()
        for entry in self._order:
            if entry.queue == queue:
                entry.answer(None)
        self.on_lost(queue)

    def close(self) -> None:
        """Forget the channels; with its connection the broker takes everything back by itself."""
        self._channels.clear()
        self._order.clear()
