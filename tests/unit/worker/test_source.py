"""The source over a connection in memory: order of answers, subscriptions, and a channel that is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amqp  # noqa: TID251 - the channels below stand in for its
import pytest

from inference_tasks.worker.source import KEPT_TAGS, AmqpSource


class Raw:
    """A message as py-amqp hands it out."""

    def __init__(self, body: str, channel: Channel) -> None:
        self.body, self.channel = body, channel
        self.delivery_info: dict[str, object] = {}


class Message:
    def __init__(self, raw: Raw) -> None:
        self.raw, self.body, self.channel = raw, raw.body, raw.channel
        self.delivery_tag, self.acknowledged = 1, False
        self.accept: object = None
        self.requeued = False

    def requeue(self) -> None:
        self.requeued = True


class Channel:
    """What the source and its outbox use of a channel."""

    def __init__(self, number: int) -> None:
        self.channel_id = number
        self.connection: object = object()
        self.is_open = True
        self.callbacks: dict[str, Callable[..., None]] = {}
        self.cancel_callbacks: dict[str, Callable[..., None]] = {}
        self._callbacks: dict[Any, Callable[..., None]] = {}

    def collect(self) -> None:
        self.is_open, self.connection = False, None

    def message_to_python(self, raw: Raw) -> Message:
        return Message(raw)

    def _on_get_ok(self, *arguments: Any) -> Raw:
        return Raw(arguments[-1], self)

    def answer(self, body: str | None) -> None:
        """Answer the oldest get on this channel."""
        if body is None:
            self._callbacks[amqp.spec.Basic.GetEmpty]()
        else:
            self._callbacks[amqp.spec.Basic.GetOk](1, False, "", "", 0, body)

    def count(self, messages: int) -> None:
        """Answer the oldest look on this channel."""
        self._callbacks[amqp.spec.Queue.DeclareOk]("", messages, 0)

    def close_by_broker(self, error: Exception) -> None:
        """What py-amqp does when the broker closes a channel."""
        self._do_revive()
        raise error

    def _do_revive(self) -> None:
        raise AssertionError("a channel that is opened anew has forgotten everything")


class Connection:
    """One connection; `events` are what the next reads find."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self.events: deque[Callable[[], None] | Exception] = deque()
        self.written: list[bytes] = []
        self.connection = self
        self.transport = self
        self.bytes_sent = 0
        self.refused: Exception | None = None

    def channel(self) -> Channel:
        if self.refused is not None:
            raise self.refused
        self.channels.append(Channel(len(self.channels) + 1))
        return self.channels[-1]

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def drain_events(self, timeout: float | None = None) -> None:
        if not self.events:
            raise TimeoutError
        event = self.events.popleft()
        if isinstance(event, Exception):
            raise event
        event()

    @contextmanager
    def having_timeout(self, timeout: float | None) -> Iterator[None]:
        yield

    def read_frame(self) -> None:
        self.drain_events()

    def on_inbound_frame(self, frame: None) -> None:
        """The event has been handled when it was read."""


class Bench:
    def __init__(self) -> None:
        self.connection = Connection()
        self.lost: list[str] = []
        self.answers: list[tuple[str, str | None]] = []
        self.looks: list[tuple[str, bool]] = []
        self.pushes: list[tuple[str, str]] = []
        self.source = AmqpSource(self.connection, ["json"], self.lost.append)
        self.source.on_answer = lambda queue, message: self.answers.append((queue, body(message)))
        self.source.on_look = lambda queue, found: self.looks.append((queue, found))
        self.source.on_push = lambda queue, message: self.pushes.append((queue, body(message) or ""))

    def channel(self, number: int) -> Channel:
        return self.connection.channels[number]

    def read(self, *events: Callable[[], None] | Exception) -> None:
        self.connection.events.extend(events)
        self.source.drain()


def body(message: Any) -> str | None:
    return None if message is None else message.body


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_queue_has_a_channel_of_its_own(bench: Bench) -> None:
    bench.source.ask(["a", "b", "a"])
    bench.source.subscribe(["a", "b"])
    assert len(bench.connection.channels) == 2


def test_nothing_is_sent_before_flush_and_then_all_of_it_at_once(bench: Bench) -> None:
    bench.source.ask(["a", "b"])
    bench.source.subscribe(["a"])
    assert bench.connection.written == []
    bench.source.flush()
    assert len(bench.connection.written) == 1
    bench.source.flush()
    assert len(bench.connection.written) == 1


def test_answers_are_handed_on_in_the_order_of_asking(bench: Bench) -> None:
    bench.source.ask(["a", "b", "a"])
    a, b = bench.connection.channels
    bench.read(lambda: b.answer("b1"))
    assert bench.answers == []
    bench.read(lambda: a.answer(None))
    assert bench.answers == [("a", None), ("b", "b1")]
    bench.read(lambda: a.answer("a1"))
    assert bench.answers[2:] == [("a", "a1")]


def test_looks_and_gets_are_answered_in_one_line(bench: Bench) -> None:
    bench.source.look(["a", "b"])
    bench.source.ask(["b"])
    a, b = bench.connection.channels
    bench.read(lambda: b.count(3), lambda: b.answer("b1"))
    assert (bench.looks, bench.answers) == ([], [])
    bench.read(lambda: a.count(0))
    assert (bench.looks, bench.answers) == ([("a", False), ("b", True)], [("b", "b1")])


def test_a_look_at_a_queue_whose_channel_is_closed_finds_it_empty(bench: Bench) -> None:
    bench.source.look(["a"])
    channel = bench.channel(0)
    bench.read(lambda: channel.close_by_broker(amqp.exceptions.NotFound("no queue a")))
    bench.connection.refused = amqp.exceptions.AccessRefused("not yours")
    bench.source.look(["a"])
    assert bench.looks == [("a", False), ("a", False)]
    assert bench.lost == ["a", "a"]


def test_messages_accept_json_only(bench: Bench) -> None:
    accepted: list[Any] = []
    bench.source.on_answer = lambda queue, message: accepted.append(message.accept)  # type: ignore[union-attr]
    bench.source.ask(["a"])
    bench.read(lambda: bench.channel(0).answer("x"))
    assert accepted == [{"application/json"}]


def test_a_pushed_message_carries_its_queue(bench: Bench) -> None:
    bench.source.subscribe(["a", "b"])
    channel = bench.channel(1)
    (tag,) = channel.callbacks
    bench.read(lambda: channel.callbacks[tag](Raw("x", channel)))
    assert bench.pushes == [("b", "x")]


def test_each_subscription_has_a_new_tag_and_late_messages_of_the_old_ones_are_taken(bench: Bench) -> None:
    for _ in range(KEPT_TAGS + 10):
        bench.source.subscribe(["a"])
        bench.source.unsubscribe(["a"])
    tags = list(bench.channel(0).callbacks)
    assert len(tags) == len(set(tags)) == KEPT_TAGS
    bench.channel(0).callbacks[tags[0]](Raw("late", bench.channel(0)))
    assert bench.pushes == [("a", "late")]


def test_unsubscribing_from_what_was_never_used_opens_no_channel(bench: Bench) -> None:
    bench.source.unsubscribe(["a"])
    assert bench.connection.channels == []


def test_a_channel_that_the_broker_closes_loses_its_queue_alone(bench: Bench) -> None:
    bench.source.ask(["a", "b", "a"])
    a, b = bench.connection.channels

    def close() -> None:
        a.close_by_broker(amqp.exceptions.NotFound("no queue a"))

    bench.read(close, lambda: b.answer("b1"))
    assert bench.lost == ["a"]
    assert bench.answers == [("a", None), ("b", "b1"), ("a", None)]
    bench.source.ask(["a"])
    assert len(bench.connection.channels) == 3


def test_a_channel_that_cannot_be_opened_counts_as_an_empty_queue(bench: Bench) -> None:
    bench.connection.refused = amqp.exceptions.AccessRefused("not yours")
    bench.source.ask(["a"])
    bench.source.subscribe(["a"])
    bench.source.drain()
    assert bench.answers == [("a", None)]
    assert bench.lost == ["a", "a"]


def test_a_subscription_ended_by_the_broker_is_told(bench: Bench) -> None:
    bench.source.subscribe(["a"])
    channel = bench.channel(0)
    (tag,) = channel.cancel_callbacks
    bench.read(lambda: channel.cancel_callbacks[tag](tag))
    assert bench.lost == ["a"]


def test_a_lost_connection_is_not_taken_for_a_lost_channel(bench: Bench) -> None:
    bench.source.ask(["a"])
    with pytest.raises(ConnectionResetError):
        bench.read(ConnectionResetError())
    assert bench.answers == []


def test_finish_waits_for_the_answers_on_their_way_and_no_longer(bench: Bench) -> None:
    bench.source.ask(["a"])
    bench.connection.events.append(lambda: bench.channel(0).answer("x"))
    bench.source.finish(lambda: 1 - len(bench.answers), 5.0)
    assert bench.answers == [("a", "x")]
    bench.source.finish(lambda: 1, 0.01)
