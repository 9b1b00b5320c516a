"""The publisher on a real broker and a real Redis: every outcome, and what keeps it right when the line does not."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from redis.asyncio import Redis

from inference_tasks.broker.messages import (
    Accepted,
    Outcome,
    Outgoing,
    Properties,
    Refused,
    TooLarge,
    Unavailable,
    Unknown,
)
from inference_tasks.broker.pipeline import Pipeline
from inference_tasks.broker.publisher import Publisher, redis_records
from inference_tasks.errors import TaskNotFoundError
from inference_tasks.state.aio import AsyncTaskStore
from inference_tasks.state.records import NewTask, SubmitAnswer
from inference_tasks.state.store import TaskStore
from tests.support.proxy import FaultProxy
from tests.support.servers import RabbitMQNode

EXCHANGE = "tiers"
WIDE, NARROW, GONE = "tiers.wide", "tiers.narrow", "tiers.gone"
NARROW_BOUND = 2

MakePublisher = Callable[..., Publisher]


def declare_queues(url: str, *, narrow_type: str = "classic") -> None:
    exchange = Exchange(EXCHANGE, type="topic")
    wide = Queue(WIDE, exchange, routing_key=f"#.{WIDE}")
    narrow = Queue(
        NARROW,
        exchange,
        routing_key=f"#.{NARROW}",
        queue_arguments={"x-queue-type": narrow_type, "x-max-length": NARROW_BOUND, "x-overflow": "reject-publish"},
    )
    with Connection(url) as connection:
        for queue in (wide, narrow):
            queue(connection.default_channel).declare()


def take(url: str, queue: str) -> list[Any]:
    taken = []
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            taken.append(message)
    return taken


def message(number: int = 0, key: str = WIDE, *, recorded: bool = False, body: bytes = b"[]") -> Outgoing:
    task_id = f"task-{number}"
    return Outgoing(
        body,
        EXCHANGE,
        key,
        Properties(headers={"id": task_id, "task": "t", "at": 2**40, "none": None}, correlation_id=task_id),
        task=NewTask(task_id, "t", "batch", "batch", "fresh", 0, f"nonce-{number}") if recorded else None,
    )


@pytest.fixture
def url(amqp_url: str) -> str:
    declare_queues(amqp_url)
    return amqp_url


@pytest.fixture
def publishers() -> Iterator[MakePublisher]:
    made: list[Publisher] = []

    def make(url: str, **options: Any) -> Publisher:
        made.append(Publisher(url, **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def store(redis_url: str, namespace: str) -> TaskStore:
    return TaskStore.from_url(redis_url, f"{namespace}:")


@pytest.fixture
def recording(publishers: MakePublisher, url: str, redis_url: str, namespace: str) -> Publisher:
    return publishers(url, state=redis_records(redis_url, f"{namespace}:"))


def kinds(outcomes: Sequence[Outcome]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]


class TestAccepted:
    def test_it_is_in_the_queue_as_it_was_sent_and_its_record_is_pending(
        self, recording: Publisher, url: str, store: TaskStore
    ) -> None:
        body = os.urandom(20_000)
        assert recording.send(message(1, recorded=True, body=body)) == Accepted()
        assert store.get("task-1").state == "pending"
        (found,) = take(url, WIDE)
        assert found.body == body
        assert found.headers == {"id": "task-1", "task": "t", "at": 2**40, "none": None}
        assert found.properties["delivery_mode"] == 2
        assert found.properties["correlation_id"] == "task-1"

    def test_what_is_handed_over_before_the_loop_has_begun_gets_its_record_too(
        self, recording: Publisher, store: TaskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a busy machine the caller is faster than the new thread: the first message of a process."""
        run, handed_over = Pipeline._run, threading.Event()

        def late(pipeline: Pipeline) -> None:
            handed_over.wait(10)
            run(pipeline)

        monkeypatch.setattr(Pipeline, "_run", late)
        future = recording.post(message(1, recorded=True))
        handed_over.set()
        assert future.result(10) == Accepted()
        assert store.get("task-1").state == "pending"

    def test_a_second_try_keeps_its_record_when_that_of_the_first_came_too_late(
        self, publishers: MakePublisher, url: str, store: TaskStore, redis_url: str
    ) -> None:
        taken_back = threading.Event()
        publisher = publishers(url, state=lambda: Late(redis_url, store.prefix, taken_back))
        assert kinds([publisher.send(message(1, recorded=True), 0.2)]) == ["Unavailable"]
        assert publisher.send(message(1, recorded=True)) == Accepted()
        assert taken_back.wait(10)
        assert store.get("task-1").state == "pending"

    def test_a_task_that_has_ended_is_accepted_and_not_published_again(
        self, publishers: MakePublisher, url: str
    ) -> None:
        publisher = publishers(url, state=lambda: Answering("success"))
        assert publisher.send(message(1, recorded=True)) == Accepted(published=False)
        assert take(url, WIDE) == []

    def test_the_same_id_again_is_published_again_while_it_waits(self, recording: Publisher, url: str) -> None:
        assert kinds([recording.send(message(1, recorded=True)) for _ in range(2)]) == ["Accepted"] * 2
        assert len(take(url, WIDE)) == 2

    def test_many_arrive_in_their_order(self, recording: Publisher, url: str) -> None:
        outcomes = recording.send_many(message(number, recorded=True) for number in range(2000))
        assert set(kinds(outcomes)) == {"Accepted"}
        assert [found.headers["id"] for found in take(url, WIDE)] == [f"task-{number}" for number in range(2000)]

    def test_nothing_is_a_call_too(self, recording: Publisher) -> None:
        assert recording.send_many([]) == []

    def test_64_threads_share_one_connection(
        self, recording: Publisher, url: str, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        barrier = threading.Barrier(64)

        def send(thread: int) -> list[Outcome]:
            barrier.wait(10)
            return [recording.send(message(thread * 10 + number, recorded=True)) for number in range(10)]

        with ThreadPoolExecutor(64) as pool:
            outcomes = [outcome for each in pool.map(send, range(64)) for outcome in each]
        assert set(kinds(outcomes)) == {"Accepted"}
        assert rabbitmq.connections(vhost) == 1
        assert len(take(url, WIDE)) == 640

    def test_coroutines_of_any_loop_may_send(self, recording: Publisher, url: str) -> None:
        async def send_all() -> list[Outcome]:
            single = await asyncio.gather(*(recording.send_async(message(number)) for number in range(100)))
            return [*single, *await recording.send_many_async(message(number) for number in range(100, 200))]

        for _ in range(2):
            assert set(kinds(asyncio.run(send_all()))) == {"Accepted"}
        assert len(take(url, WIDE)) == 400

    def test_a_posted_message_ends_in_a_future(self, recording: Publisher) -> None:
        assert recording.post(message(1)).result(10) == Accepted()

    def test_a_message_that_may_linger_leaves_with_the_next_or_alone_soon(self, recording: Publisher, url: str) -> None:
        lingering = recording.post(message(1), may_linger=True)
        assert recording.send(message(2)) == Accepted()
        assert lingering.result(10) == Accepted()
        assert recording.post(message(3), may_linger=True).result(10) == Accepted()
        assert [found.headers["id"] for found in take(url, WIDE)] == ["task-1", "task-2", "task-3"]

    def test_what_lingers_when_the_publisher_is_closed_is_sent(self, recording: Publisher, url: str) -> None:
        assert recording.send(message(1)) == Accepted()
        lingering = recording.post(message(2), may_linger=True)
        recording.close()
        assert lingering.result(10) == Accepted()
        assert len(take(url, WIDE)) == 2


class TestRefused:
    def test_the_bound_of_a_classic_queue_is_exact_and_the_refused_leave_no_record(
        self, recording: Publisher, url: str, store: TaskStore
    ) -> None:
        outcomes = recording.send_many(message(number, NARROW, recorded=True) for number in range(300))
        assert kinds(outcomes) == ["Accepted"] * NARROW_BOUND + ["Refused"] * (300 - NARROW_BOUND)
        assert len(take(url, NARROW)) == NARROW_BOUND
        found = store.get_many([f"task-{number}" for number in range(300)])
        assert [record is not None for record in found] == [True] * NARROW_BOUND + [False] * (300 - NARROW_BOUND)

    @pytest.mark.serial
    def test_it_costs_no_connection_and_the_next_message_is_accepted(
        self, recording: Publisher, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        assert kinds([recording.send(message(number, NARROW)) for number in range(NARROW_BOUND)]) == ["Accepted"] * 2
        took_s = []
        for number in range(30):
            began_s = time.perf_counter()
            assert recording.send(message(number, NARROW, recorded=True)) == Refused("full", None)
            took_s.append(time.perf_counter() - began_s)
        assert recording.send(message(99)) == Accepted()
        assert rabbitmq.connections(vhost) == 1
        assert sorted(took_s)[15] < 0.05

    def test_a_record_that_another_submit_made_stays(self, recording: Publisher, store: TaskStore) -> None:
        recording.send_many(message(number, NARROW) for number in range(NARROW_BOUND))
        store.submit([NewTask("task-7", "t", "batch", "batch", "fresh", 0, "somebody-else")])
        assert recording.send(message(7, NARROW, recorded=True)) == Refused("full", None)
        assert store.get("task-7").state == "pending"

    def test_it_tells_how_fast_the_tier_drains_and_asks_that_once_a_second(
        self, publishers: MakePublisher, url: str
    ) -> None:
        asked: list[float] = []

        def rates() -> dict[str, float]:
            asked.append(time.monotonic())
            return {"batch": 12.5}

        publisher = publishers(url, state=lambda: Answering("pending"), rates=rates)
        outcomes = publisher.send_many(message(number, NARROW, recorded=True) for number in range(50))
        assert outcomes[-1] == Refused("full", 12.5)
        assert publisher.send(message(51, NARROW, recorded=True)) == Refused("full", 12.5)
        assert len(asked) == 1


class TestNotSent:
    def test_what_no_queue_takes_is_unavailable_and_leaves_no_record(
        self, recording: Publisher, store: TaskStore, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        outcomes = recording.send_many([message(1, recorded=True), message(2, GONE, recorded=True), message(3)])
        assert kinds(outcomes) == ["Accepted", "Unavailable", "Accepted"]
        assert GONE in str(outcomes[1])
        with pytest.raises(TaskNotFoundError):
            store.get("task-2")
        assert rabbitmq.connections(vhost) == 1

    def test_queues_that_are_missing_are_declared_and_the_message_is_sent_once_more(
        self, publishers: MakePublisher, amqp_url: str
    ) -> None:
        declared: list[None] = []

        def declare() -> None:
            # The first time they disappear right after: somebody else deletes them.
            declare_queues(amqp_url)
            declared.append(None)
            if len(declared) == 1:
                with Connection(amqp_url) as connection:
                    channel: Any = connection.default_channel
                    channel.queue_delete(WIDE)

        publisher = publishers(amqp_url, declare=declare, exchanges=[EXCHANGE])
        assert publisher.send(message(1)) == Accepted()
        assert len(declared) == 2
        assert len(take(amqp_url, WIDE)) == 1

    def test_one_wrong_exchange_harms_no_other_message(self, recording: Publisher, url: str) -> None:
        wrong = Outgoing(b"[]", "no-such-exchange", "key", Properties())
        outcomes = recording.send_many([*(message(number) for number in range(100)), wrong, message(100)])
        assert kinds(outcomes) == ["Accepted"] * 100 + ["Unavailable", "Accepted"]
        assert len(take(url, WIDE)) == 101

    def test_too_large_is_told_before_anything_is_sent(
        self, publishers: MakePublisher, url: str, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        publisher = publishers(url, max_body_bytes=1000)
        outcome = publisher.send(message(1, body=b"x" * 990))
        assert isinstance(outcome, TooLarge)
        assert outcome.size_bytes > outcome.limit_bytes == 1000
        assert rabbitmq.connections(vhost) == 0

    def test_without_a_broker_it_is_unavailable_at_once(self, publishers: MakePublisher) -> None:
        began_s = time.monotonic()
        outcome = publishers("amqp://guest:guest@127.0.0.1:1//").send(message(1))
        assert isinstance(outcome, Unavailable)
        assert outcome.part == "broker"
        assert time.monotonic() - began_s < 2

    def test_a_second_address_is_tried(self, publishers: MakePublisher, url: str) -> None:
        assert publishers(f"amqp://guest:guest@127.0.0.1:1//;{url}").send(message(1)) == Accepted()

    def test_without_the_state_store_tasks_are_not_sent_and_other_messages_are(
        self, publishers: MakePublisher, url: str
    ) -> None:
        publisher = publishers(url, state=redis_records("redis://127.0.0.1:1/0", "p:"))
        outcome = publisher.send(message(1, recorded=True))
        assert isinstance(outcome, Unavailable)
        assert outcome.part == "state"
        assert publisher.send(message(2)) == Accepted()
        assert [found.headers["id"] for found in take(url, WIDE)] == ["task-2"]


class TestUnknown:
    @pytest.fixture
    def proxied(self, url: str, rabbitmq_proxy: FaultProxy) -> str:
        return rabbitmq_proxy.url(url)

    def test_a_late_confirm_settles_its_own_message_and_no_other(
        self, publishers: MakePublisher, url: str, proxied: str, rabbitmq_proxy: FaultProxy
    ) -> None:
        publisher = publishers(proxied, confirm_timeout_s=30)
        assert kinds([publisher.send(message(number, NARROW)) for number in range(NARROW_BOUND)]) == ["Accepted"] * 2
        rabbitmq_proxy.black_hole()
        assert kinds([publisher.send(message(number), timeout_s=0.3) for number in (10, 11)]) == ["Unknown"] * 2
        rabbitmq_proxy.resume()
        # The confirms of 10 and 11 come now; the full queue's nack must not be mistaken for one.
        assert publisher.send(message(12, NARROW)) == Refused("full", None)
        assert [found.headers["id"] for found in take(url, WIDE)] == ["task-10", "task-11"]

    def test_a_connection_that_confirms_nothing_is_given_up(
        self, publishers: MakePublisher, proxied: str, rabbitmq_proxy: FaultProxy
    ) -> None:
        publisher = publishers(proxied, confirm_timeout_s=2)
        assert publisher.send(message(0)) == Accepted()
        rabbitmq_proxy.black_hole()
        began_s = time.monotonic()
        assert isinstance(publisher.send(message(1), timeout_s=40), Unknown)
        assert time.monotonic() - began_s < 20
        rabbitmq_proxy.resume()
        assert publisher.send(message(2)) == Accepted()
        assert rabbitmq_proxy.accepted == 2

    def test_a_record_of_an_unknown_outcome_stays(
        self,
        publishers: MakePublisher,
        proxied: str,
        rabbitmq_proxy: FaultProxy,
        redis_url: str,
        namespace: str,
        store: TaskStore,
    ) -> None:
        publisher = publishers(proxied, state=redis_records(redis_url, f"{namespace}:"))
        assert publisher.send(message(0)) == Accepted()
        rabbitmq_proxy.black_hole()
        assert isinstance(publisher.send(message(1, recorded=True), timeout_s=0.3), Unknown)
        assert store.get("task-1").state == "pending"

    def test_a_lost_connection_ends_what_was_under_way_and_the_next_message_finds_a_new_one(
        self, publishers: MakePublisher, proxied: str, rabbitmq_proxy: FaultProxy
    ) -> None:
        publisher = publishers(proxied)
        assert publisher.send(message(0)) == Accepted()
        rabbitmq_proxy.black_hole()
        under_way = publisher.post(message(1))
        time.sleep(0.1)
        rabbitmq_proxy.down()
        assert isinstance(under_way.result(5), Unknown)
        assert isinstance(publisher.send(message(2)), Unavailable)
        rabbitmq_proxy.resume()
        assert publisher.send(message(3)) == Accepted()

    def test_an_alarm_ends_calls_at_their_deadline_and_keeps_the_connection(
        self, publishers: MakePublisher, private_rabbitmq: RabbitMQNode
    ) -> None:
        url = private_rabbitmq.url()
        declare_queues(url)
        publisher = publishers(url, confirm_timeout_s=0.4)
        assert publisher.send(message(0)) == Accepted()
        private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.000001)")
        assert isinstance(publisher.send(message(1), timeout_s=1), Unknown)
        assert isinstance(publisher.send(message(2), timeout_s=1), Unavailable)
        private_rabbitmq.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.6)")
        assert publisher.send(message(3), timeout_s=10) == Accepted()
        assert [found.headers["id"] for found in take(url, WIDE)] == ["task-0", "task-1", "task-3"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
class TestFork:
    def test_a_child_publishes_on_its_own_connection_while_the_parent_goes_on(
        self, recording: Publisher, url: str
    ) -> None:
        assert recording.send(message(0)) == Accepted()
        stop = threading.Event()
        outcomes: list[Outcome] = []

        def go_on() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                outcomes.append(recording.send(message(number, recorded=True)))

        thread = threading.Thread(target=go_on)
        thread.start()
        children = []
        for child in range(3):
            pid = os.fork()
            if pid == 0:
                sent = [recording.send(message(10_000 + child * 100 + number, recorded=True)) for number in range(20)]
                os._exit(0 if set(kinds(sent)) == {"Accepted"} else 1)
            children.append(pid)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        stop.set()
        thread.join(10)
        assert ended == [0, 0, 0]
        assert set(kinds(outcomes)) == {"Accepted"}
        assert recording.send(message(20_000)) == Accepted()
        assert len(take(url, WIDE)) == 62 + len(outcomes)


class Late(AsyncTaskStore):
    """A state port whose first record comes after its caller's time, and whose takings back are slow."""

    def __init__(self, url: str, prefix: str, taken_back: threading.Event) -> None:
        self.late_s, self.taken_back = 0.5, taken_back
        super().__init__(Redis.from_url(url), prefix)

    async def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        late_s, self.late_s = self.late_s, 0.0
        await asyncio.sleep(late_s)
        return await super().submit(tasks)

    async def retract(self, task_ids: Iterable[str], nonce: str, refused: str = "") -> int:
        await asyncio.sleep(0.3)
        deleted = await super().retract(task_ids, nonce, refused)
        self.taken_back.set()
        return deleted


class Answering:
    """A state port that answers every submit with the same state."""

    def __init__(self, state: str) -> None:
        self._state = state

    async def submit(self, tasks: Sequence[NewTask], /) -> list[SubmitAnswer]:
        return [SubmitAnswer(False, self._state) for _ in tasks]

    async def retract(self, task_ids: Sequence[str], nonce: str, refused: str = "", /) -> int:
        return 0

    async def aclose(self) -> None:
        pass
