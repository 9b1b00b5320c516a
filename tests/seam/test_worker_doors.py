"""What the worker relies on inside Celery, kombu, billiard and py-amqp: each part is there and behaves as needed."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from io import BytesIO
from struct import unpack
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import amqp
import pytest
from amqp import spec
from billiard.exceptions import WorkerLostError
from billiard.pool import ApplyResult
from celery import Celery
from celery.concurrency.asynpool import AsynPool
from celery.concurrency.prefork import TaskPool as PreforkPool
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool
from celery.worker import WorkController
from celery.worker import state as worker_state
from celery.worker.consumer import Consumer
from celery.worker.consumer.tasks import Tasks
from celery.worker.request import Request
from kombu.asynchronous.hub import Hub
from kombu.message import Message

from inference_tasks.worker import seam

# Their stubs know only the public parts.
kept: Any = amqp
channel_class: Any = amqp.Channel


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.connected = True

    def write(self, data: bytes) -> None:
        self.data += bytes(data)


# Frames.


def frames(data: bytes) -> list[tuple[int, tuple[int, int], bytes]]:
    found, stream = [], BytesIO(data)
    while head := stream.read(7):
        kind, channel, size = unpack(">BHI", head)
        payload = stream.read(size)
        assert (kind, stream.read(1)) == (1, b"\xce")
        found.append((channel, unpack(">HH", payload[:4]), payload[4:]))
    return found


def by_amqp(method: tuple[int, int], format: str, arguments: tuple[object, ...]) -> bytes:
    """The frame that py-amqp itself writes for a method."""
    wire = Wire()
    writer = kept.method_framing.frame_writer(SimpleNamespace(frame_max=131072, bytes_sent=0), wire)
    writer(1, 5, method, kept.serialization.dumps(format, arguments), None)
    return wire.data


class FakeChannel:
    channel_id = 5

    def __init__(self) -> None:
        self.connection: object | None = object()
        self.callbacks: dict[str, object] = {}
        self._callbacks: dict[object, Any] = {}
        self.cancel_callbacks: dict[str, object] = {}
        self.collected = False

    def collect(self) -> None:
        self.collected, self.connection = True, None


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def outbox(wire: Wire) -> seam.Outbox:
    return seam.Outbox(SimpleNamespace(connection=SimpleNamespace(transport=wire, bytes_sent=0)))


@pytest.fixture
def channel(outbox: seam.Outbox) -> Any:
    made: Any = FakeChannel()
    outbox.adopt(made)
    return made


def test_frames_are_those_of_py_amqp(outbox: seam.Outbox, channel: Any, wire: Wire) -> None:
    channel.basic_ack(7)
    channel.basic_reject(8, requeue=True)
    outbox.get(channel, "q")
    outbox.look(channel, "q", print)
    outbox.consume(channel, "q", "tag", 3, print, print)
    outbox.cancel(channel, "tag")
    assert wire.data == b""
    outbox.flush()
    assert wire.data == (
        by_amqp(spec.Basic.Ack, "Lb", (7, False))
        + by_amqp(spec.Basic.Reject, "Lb", (8, True))
        + by_amqp(spec.Basic.Get, "Bsb", (0, "q", False))
        + by_amqp(spec.Queue.Declare, "BsbbbbbF", (0, "q", True, False, False, False, False, None))
        + by_amqp(spec.Basic.Qos, "lBb", (0, 3, False))
        + by_amqp(spec.Basic.Consume, "BssbbbbF", (0, "q", "tag", False, False, False, True, None))
        + by_amqp(spec.Basic.Cancel, "sb", ("tag", True))
    )
    assert (channel.callbacks, channel.cancel_callbacks) == ({"tag": print}, {"tag": print})


def test_a_nack_returns_one_message(outbox: seam.Outbox, channel: Any, wire: Wire) -> None:
    channel.inference_nack(9)
    outbox.flush()
    ((number, method, arguments),) = frames(wire.data)
    assert (number, method) == (5, (60, 120))
    tag, bits = unpack(">QB", arguments)
    assert (tag, bool(bits & 1), bool(bits & 2)) == (9, False, True)


def test_acknowledgements_alone_may_wait_but_not_for_ever(outbox: seam.Outbox, channel: Any, wire: Wire) -> None:
    channel.basic_ack(1)
    outbox.flush(acks_can_wait=True)
    assert wire.data == b""
    outbox.get(channel, "q")
    outbox.flush(acks_can_wait=True)
    assert len(frames(wire.data)) == 2
    for tag in range(seam.MOST_ACKS):
        channel.basic_ack(tag)
    outbox.flush(acks_can_wait=True)
    assert len(frames(wire.data)) == 2 + seam.MOST_ACKS


def test_nothing_more_is_said_on_a_closed_channel(outbox: seam.Outbox, channel: Any, wire: Wire) -> None:
    channel.basic_ack(1)
    other: Any = FakeChannel()
    other.channel_id = 6
    outbox.adopt(other)
    other.basic_ack(2)
    channel._do_revive()
    assert channel.collected
    with pytest.raises(seam.RecoverableConnectionError):
        channel.basic_ack(3)
    outbox.flush()
    assert [number for number, _, _ in frames(wire.data)] == [6]


def test_py_amqp_revives_a_closed_channel_by_the_method_that_is_replaced() -> None:
    closing = inspect.getsource(channel_class._on_close)
    assert "self._do_revive()" in closing
    assert closing.index("self._do_revive()") < closing.index("raise error_for_code")
    assert "connection.channels.pop" in inspect.getsource(amqp.Channel.collect)


# py-amqp and kombu.


def test_answers_to_a_get_come_through_the_channels_callbacks() -> None:
    channel: Any = SimpleNamespace(_callbacks={}, _on_get_ok=lambda *a: ("raw", *a))
    got: list[Any] = []
    seam.on_get_answers(channel, got.append)
    channel._callbacks[spec.Basic.GetOk](1, False, "x", "k", 0, "body")
    channel._callbacks[spec.Basic.GetEmpty]("")
    assert got == [("raw", 1, False, "x", "k", 0, "body"), None]
    assert list(inspect.signature(channel_class._on_get_ok).parameters)[1:] == [
        "delivery_tag",
        "redelivered",
        "exchange",
        "routing_key",
        "message_count",
        "msg",
    ]
    # Set once per channel, and found there by the method's numbers.
    assert "_callbacks[method_sig]" in inspect.getsource(kept.abstract_channel.AbstractChannel.dispatch_method)


def test_a_look_is_a_passive_declaration_and_its_answer_tells_the_depth(outbox: seam.Outbox, channel: Any) -> None:
    depths: list[int] = []
    outbox.look(channel, "q", depths.append)
    channel._callbacks[spec.Queue.DeclareOk]("q", 3, 1)
    assert depths == [3]
    source = inspect.getsource(amqp.Channel.queue_declare)
    assert "argsig='BsbbbbbF'" in source
    assert "(0, queue, passive, durable, exclusive, auto_delete," in source
    assert kept.channel.queue_declare_ok_t._fields == ("queue", "message_count", "consumer_count")


def test_a_connection_knows_when_it_last_heard_of_its_peer() -> None:
    source = inspect.getsource(amqp.Connection.heartbeat_tick)
    assert "last_heartbeat_received" in source
    assert "monotonic" in source
    assert callable(amqp.Connection.send_heartbeat)
    assert "bytes_sent" in inspect.getsource(amqp.Connection.heartbeat_tick)


def test_a_message_says_that_it_was_settled() -> None:
    message: Any = Message()
    assert not message.acknowledged
    message._state = "REQUEUED"
    assert message.acknowledged


def test_a_message_is_settled_by_the_delivery_that_has_replaced_its_own() -> None:
    first, second = Mock(no_ack_consumers=None), Mock(no_ack_consumers=None)
    message: Any = Message(channel=first, delivery_tag="1")
    again: Any = Message(channel=second, delivery_tag="7")
    settle = message.ack_log_error  # as Celery's request keeps it
    seam.replace_delivery(message, again)
    settle(logging.getLogger(), (OSError,))
    second.basic_ack.assert_called_once_with("7", multiple=False)
    first.basic_ack.assert_not_called()
    assert message.acknowledged


def test_json_is_accepted_by_its_content_type() -> None:
    assert seam.accepted_content(["json"]) == {"application/json"}


def test_reading_tells_whether_there_was_anything() -> None:
    def raising(error: Exception) -> Any:
        def drain_events(timeout: float) -> None:
            raise error

        return SimpleNamespace(drain_events=drain_events)

    assert seam.read_frame(SimpleNamespace(drain_events=lambda timeout: None))
    assert not seam.read_frame(raising(TimeoutError()))
    assert not seam.read_frame(raising(BlockingIOError(11, "again")))
    with pytest.raises(ConnectionResetError):
        seam.read_frame(raising(ConnectionResetError(104, "reset")))


def test_a_half_dead_connection_is_dropped_whatever_it_does() -> None:
    def collect() -> None:
        raise ValueError("half dead")

    seam.collect(SimpleNamespace(collect=collect))


def test_the_hub_keeps_its_ticks_in_a_set_and_polls_readers() -> None:
    hub: Any = Hub()
    assert isinstance(hub.on_tick, set)
    assert {"fds", "callback"} <= set(inspect.signature(hub.add_reader).parameters)
    hub.close()


def test_jobs_handed_over_are_written_to_idle_processes_before_the_pools_own_tick() -> None:
    calls: list[object] = []
    hub: Any = SimpleNamespace(on_tick=set(), consolidate_callback=lambda fds: calls.append(sorted(fds)))
    processes: Any = SimpleNamespace(
        on_poll_start=lambda: calls.append("pool"),
        outbound_buffer=[],
        _all_inqueues={7, 8, 9},
        _active_writes={8},
        _busy_workers={9},
    )
    hub.on_tick.add(processes.on_poll_start)
    tick = seam.order_tick(hub, SimpleNamespace(_pool=processes), lambda: calls.append("ours"))
    assert hub.on_tick == {tick}
    tick()
    tick()
    assert calls == ["ours", "pool", "ours"]  # the pool's tick does nothing with nothing to write, and is left out
    calls.clear()
    processes.outbound_buffer.append("job")
    tick()
    assert calls == ["ours", [7], "pool"]


def test_the_prefork_pool_has_what_writes_its_jobs() -> None:
    source = inspect.getsource(AsynPool)
    for name in ("outbound_buffer", "_all_inqueues", "_active_writes", "_busy_workers", "hub.consolidate_callback ="):
        assert name in source


# Celery.


def test_the_consumer_keeps_celerys_steps_except_for_delays() -> None:
    assert "celery.worker.consumer.delayed_delivery:DelayedDelivery" in Consumer.Blueprint.default_steps
    assert "celery.worker.consumer.tasks:Tasks" in Consumer.Blueprint.default_steps


@pytest.mark.parametrize("seed", ["0", "1", "2", "3"])
def test_our_step_follows_celerys_tasks_in_every_order_of_hashes(seed: str) -> None:
    code = (
        "from inference_tasks.worker.consumer import InferenceConsumer as C\n"
        "b = C.Blueprint()\n"
        "print([step.__name__ for step in b._finalize_steps(b.claim_steps())])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = done.stdout
    assert names.index("'Tasks'") < names.index("'TierStep'")
    assert "DelayedDelivery" not in names


def test_requests_reach_the_pool_past_celerys_semaphore() -> None:
    controller: Any = WorkController
    instance = controller.__new__(controller)
    assert seam.ungated(instance._process_task_sem) == instance._process_task

    def somebody_elses(request: Any) -> None: ...

    assert seam.ungated(somebody_elses) is somebody_elses


def test_every_request_passes_the_pools_apply_async_with_its_callbacks() -> None:
    source = inspect.getsource(Request.execute_using_pool)
    for name in ("apply_async", "callback=", "error_callback=", "timeout_callback=", "correlation_id="):
        assert name in source


def test_a_thread_tells_its_end_by_a_future() -> None:
    pool: Any = ThreadPool(limit=1, app=Celery(set_as_current=False))
    pool.start()
    try:
        job = pool.on_apply(lambda: 1, (), {}, callback=lambda *a: None, accept_callback=None, pid=1)
        job.f.result(timeout=10)
    finally:
        pool.stop()


def test_solo_has_no_job() -> None:
    ran: list[int] = []
    pool: Any = SoloPool(limit=1, app=Celery(set_as_current=False), forking_enable=False)
    assert pool.on_apply(lambda: 1, (), {}, callback=ran.append, accept_callback=None) is None
    assert ran == [1]


def test_the_pools_know_how_many_there_are() -> None:
    for pool in (PreforkPool, ThreadPool, SoloPool):
        assert hasattr(pool, "num_processes")


def test_a_process_is_ready_once_it_can_be_written_to() -> None:
    assert "_fileno_to_inq" in inspect.getsource(AsynPool)
    assert seam.ready_processes(SimpleNamespace(_pool=None)) == 0
    assert seam.process_ids(SimpleNamespace(_pool=None)) == []
    assert seam.process_ids(SimpleNamespace(_pool=SimpleNamespace(_pool=[SimpleNamespace(pid=7)]))) == [7]
    assert seam.ready_processes(SimpleNamespace(_pool=SimpleNamespace(_fileno_to_inq={1: 2}))) == 1


def test_a_job_says_whether_a_process_took_it() -> None:
    assert callable(ApplyResult.accepted)
    assert seam.unaccepted(SimpleNamespace(accepted=lambda: False))
    assert not seam.unaccepted(SimpleNamespace(accepted=lambda: True))
    assert not seam.unaccepted(None)


def test_a_lost_process_is_told_from_other_errors() -> None:
    assert seam.is_lost_child(SimpleNamespace(type=WorkerLostError))
    assert not seam.is_lost_child(SimpleNamespace(type=ValueError))
    assert not seam.is_lost_child("text")


def test_tasks_is_the_step_that_ours_follows() -> None:
    assert seam.Tasks is Tasks


def test_a_request_under_way_is_known_by_its_id_and_can_be_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[object, object]] = []
    told: list[tuple[str, dict[str, object]]] = []
    request = SimpleNamespace(
        terminate=lambda pool, signal: ended.append((pool, signal)),
        send_event=lambda kind, **fields: told.append((kind, fields)),
    )
    monkeypatch.setitem(worker_state.requests, "known", request)
    assert seam.terminate("known", "pool")
    assert not seam.terminate("unknown", "pool")
    seam.tell_revoked("known")
    seam.tell_revoked("unknown")
    assert ended == [("pool", "SIGKILL")]
    assert told == [("task-revoked", {"terminated": False, "signum": None, "expired": False})]
    assert list(inspect.signature(Request.terminate).parameters) == ["self", "pool", "signal"]


def test_what_is_revoked_here_is_skipped_by_celery() -> None:
    seam.revoke_here("unwanted")
    assert "unwanted" in worker_state.revoked
    worker_state.revoked.discard("unwanted")
    assert "self.id in revoked_tasks" in inspect.getsource(Request.revoked)
