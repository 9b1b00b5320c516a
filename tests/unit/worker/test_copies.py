"""Messages that go elsewhere: confirmed first, noted, and only then let go; parked ones with the right delay."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from inference_routing.lane import QueueKey
from inference_tasks.broker.addressing import is_delayed
from inference_tasks.broker.embedded import parked
from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, TooLarge, Unavailable
from inference_tasks.dependencies import Waits
from inference_tasks.errors import StateUnavailableError
from inference_tasks.settings import Settings
from inference_tasks.state.records import DeadLetter
from inference_tasks.worker.copies import Mover
from inference_tasks.worker.dead import Death, Undertaker
from inference_tasks.worker.parking import Parking

KEY = QueueKey("batch", "fresh", "n.batch")
QUEUES = {("batch", "returned"): "n.batch.returned", ("batch", "aged"): "n.batch.aged"}
OURS = {"v": 1, "tier": "batch", "tier_first": "offline", "gen": 2, "hop": 3, "lane": "fresh", "submitted_at_s": 5.0}


@dataclass
class Message:
    headers: Any = field(default_factory=lambda: {"id": "a", "task": "t", "inference": dict(OURS), "x-death": [1]})
    body: bytes = b"[[], {}, {}]"
    content_type: str = "application/json"
    content_encoding: str = "utf-8"
    properties: Mapping[str, object] = field(default_factory=dict)
    acknowledged: bool = False
    rejected: bool = False

    def ack(self) -> None:
        assert not self.acknowledged
        self.acknowledged = True

    def reject(self) -> None:
        self.rejected = True


class Bench:
    """Broker, index, loop and timer of one worker, each moving only when told to."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = deque(outcomes)
        self.sent: list[Outgoing] = []
        self.calls: deque[Callable[[], None]] = deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.buried: list[list[DeadLetter]] = []
        self.failed: list[str] = []
        self.away = False
        self.mover = Mover(post=self.post, on_main=self.calls.append, later=self.later)
        self.undertaker = Undertaker(
            self.mover,
            cast(Any, self),
            on_main=self.calls.append,
            later=self.later,
            namespace="n",
            dead_queue="n.dead",
            worker="w",
        )
        self.parking = Parking(
            self.mover,
            later=self.later,
            delay_prefix="n",
            queue_by_lane=QUEUES,
            waits=Waits(Settings(namespace="n"), QUEUES),
        )

    def post(self, outgoing: Outgoing) -> Future[Outcome]:
        self.sent.append(outgoing)
        future: Future[Outcome] = Future()
        future.set_result(self.outcomes.popleft() if self.outcomes else Accepted())
        return future

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timers.append((delay_s, call))

    def bury(self, letters: list[DeadLetter]) -> None:
        if self.away:
            raise StateUnavailableError("away")
        self.buried.append(letters)

    def fail_unclaimed(self, task_id: str, **_: str) -> bool:
        self.failed.append(task_id)
        return True

    def turn(self) -> None:
        while self.calls:
            self.calls.popleft()()

    def pass_time(self) -> None:
        timers, self.timers = self.timers, []
        for _, call in timers:
            call()
        self.turn()


def gone(message: Message) -> bool:
    return message.acknowledged


def dead(message: Message, bench: Bench, **changes: Any) -> None:
    death = Death("permanent error", "no", "a", "t", {"type": "E", "message": "no"}, 2, 2, 0, **changes)
    bench.undertaker.bury(cast(Any, message), KEY, death)


def test_a_message_is_let_go_once_its_copy_is_confirmed_and_in_the_index() -> None:
    bench, message = Bench(), Message()
    dead(message, bench)
    assert not gone(message)
    bench.turn()
    assert gone(message)
    (copy,), ((letter,),) = bench.sent, bench.buried
    assert (copy.exchange, copy.routing_key, copy.properties.message_id) == ("n", "n.dead", letter.message_id)
    assert copy.properties.headers["inference"] == OURS
    assert "x-death" not in copy.properties.headers
    said: Any = copy.properties.headers["inference_dead"]
    assert (said["reason"], said["queue"], said["error"]["type"]) == ("permanent error", "n.batch", "E")
    assert (letter.id, letter.tier_first, letter.generation, letter.submitted_at_s) == ("a", "offline", 2, 5.0)
    assert not bench.failed
    assert (bench.mover.under_way, bench.undertaker.is_busy) == (0, False)


def test_what_the_broker_does_not_take_is_tried_again_until_it_does() -> None:
    bench, message = Bench(Unavailable("away"), Unavailable("away")), Message()
    dead(message, bench)
    bench.turn()
    assert (message.acknowledged, bench.mover.under_way) == (False, 1)
    bench.pass_time()
    bench.pass_time()
    assert gone(message)
    assert len(bench.sent) == 3


def test_without_an_index_the_message_stays_and_the_copy_is_not_sent_twice() -> None:
    bench, message = Bench(), Message()
    bench.away = True
    dead(message, bench)
    bench.turn()
    bench.pass_time()
    assert not gone(message)
    assert bench.undertaker.is_busy
    assert [delay_s for delay_s, _ in bench.timers] == [2.0]
    bench.away = False
    bench.pass_time()
    assert gone(message)
    assert len(bench.sent) == 1


def test_those_confirmed_together_are_noted_in_one_call() -> None:
    bench, messages = Bench(), [Message() for _ in range(5)]
    for message in messages:
        dead(message, bench)
    bench.turn()
    assert [len(letters) for letters in bench.buried] == [5]
    assert all(message.acknowledged for message in messages)


def test_a_task_that_nobody_has_failed_yet_is_failed_first() -> None:
    bench = Bench()
    dead(Message(), bench, is_failed=False)
    bench.turn()
    assert bench.failed == ["a"]


def test_what_becomes_too_large_by_its_header_is_left_to_the_broker() -> None:
    bench, message = Bench(TooLarge(9, 5)), Message()
    dead(message, bench)
    bench.turn()
    assert (message.rejected, bench.buried, bench.mover.under_way) == (True, [], 0)


@pytest.mark.parametrize("headers", [None, [], {"inference": 5}, {"id": "a"}])
def test_a_message_of_any_shape_can_be_buried(headers: object) -> None:
    bench, message = Bench(), Message(headers)
    bench.undertaker.bury(cast(Any, message), KEY, Death("malformed", "x", None, None, is_replayable=False))
    bench.turn()
    ((letter,),) = bench.buried
    assert letter.id == f"message:{letter.message_id}"
    assert gone(message)


@pytest.mark.parametrize(
    ("lane", "delay_s", "expected"),
    [
        ("fresh", 1.0, ("n.batch.returned", 1)),
        ("aged", 2.1, ("n.batch.aged", 3)),
        ("returned", -5, ("n.batch.returned", 1)),
    ],
)
def test_a_parked_message_comes_back_through_returned_or_aged_of_its_tier(
    lane: str, delay_s: float, expected: tuple[str, int]
) -> None:
    bench, message = Bench(), Message()
    bench.parking.park(cast(Any, message), QueueKey("batch", lane, "q"), delay_s)
    bench.turn()
    (copy,) = bench.sent
    assert is_delayed(copy.routing_key)
    assert parked(copy.routing_key) == expected
    header: Any = copy.properties.headers["inference"]
    assert (header["hop"], header["lane"], "met" in header) == (3, expected[0].rpartition(".")[2], False)
    assert gone(message)


def test_who_meets_a_live_claim_waits_a_second_and_then_as_long_as_it_may_last() -> None:
    bench, headers, delays = Bench(), Message().headers, []
    for held_for_s in (20.0, 20.0, 900.0, -3.0):
        message = Message(headers)
        bench.parking.met_claim(cast(Any, message), KEY, time.time() + held_for_s, 30.0)
        bench.turn()
        headers = dict(bench.sent[-1].properties.headers)
        delays.append(parked(bench.sent[-1].routing_key)[1])
    assert delays == [1, 21, 31, 1]
    assert headers["inference"]["met"] == 4


def test_a_message_of_a_task_that_waits_comes_round_later_each_time_where_such_are_looked_at() -> None:
    bench, message = Bench(), Message()
    bench.parking.waits(cast(Any, message), KEY)
    bench.turn()
    assert gone(message)
    headers: Any = bench.sent[0].properties.headers
    assert bench.sent[0].routing_key.endswith(".n.waiting")
    assert (headers["inference"]["hop"], headers["inference"]["waited_s"]) == (3, 60)
    bench.parking.waits(cast(Any, Message(headers)), KEY)
    headers = bench.sent[1].properties.headers
    assert headers["inference"]["waited_s"] == 120
