"""Celery's own calls, from clients and from tasks: they reach the tiers through the publisher, and nothing else."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.beat import Scheduler
from celery.schedules import schedule
from kombu import Connection, Queue

from inference_tasks import InferenceApp
from inference_tasks.errors import BrokerUnavailableError, MessageTooLargeError, QueueFullError, TaskNotFoundError
from tests.support.processes import WorkerProcess
from tests.support.servers import RabbitMQNode

BOUND = 3


def make_app(amqp_url: str, redis_url: str, namespace: str, **broker: Any) -> InferenceApp:
    app = InferenceApp(
        "vision",
        broker={"url": amqp_url, "queue_type": "classic", **broker},
        state={"url": redis_url, "prefix": f"{namespace}:"},
        tiers={"realtime": {"bound": BOUND}},
    )

    @app.inference(tier="realtime", name="classify", timeout_s=30.0, max_crashes=2)
    def classify(path: str) -> str:
        return path

    @app.inference(name="plain")
    def plain(value: int = 0) -> int:
        return value

    return app


@pytest.fixture
def app(amqp_url: str, redis_url: str, namespace: str) -> Iterator[InferenceApp]:
    app = make_app(amqp_url, redis_url, namespace)
    yield app
    close(app)


def close(app: InferenceApp) -> None:
    amqp: Any = app.amqp
    amqp.door.publisher.close()


def task(app: InferenceApp, name: str) -> Any:
    """A task as Celery has it: its stubs know nothing of options of ours."""
    return app.tasks[name]


def take(url: str, queue: str, wait_s: float = 0.0) -> list[Any]:
    deadline_s = time.monotonic() + wait_s
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        taken: list[Any] = []
        while True:
            message = channel.basic_get(queue, no_ack=True)
            if message is not None:
                taken.append(message)
            elif taken or time.monotonic() > deadline_s:
                return taken
            else:
                time.sleep(0.02)


class TestFromAClient:
    def test_delay_goes_to_the_tier_of_the_decorator_with_header_and_record(
        self, app: InferenceApp, amqp_url: str
    ) -> None:
        before_s = time.time()
        result = task(app, "classify").delay("cat.png")
        (message,) = take(amqp_url, "inference.realtime")
        header = message.headers["inference"]
        assert before_s <= header["submitted_at_s"] <= time.time()
        assert header["expires_at_s"] == pytest.approx(header["submitted_at_s"] + 30, abs=0.1)
        assert {name: header[name] for name in ("v", "tier", "tier_first", "asked", "lane", "gen", "crash_limit")} == {
            "v": 1,
            "tier": "realtime",
            "tier_first": "realtime",
            "asked": None,
            "lane": "fresh",
            "gen": 0,
            "crash_limit": 2,
        }
        assert message.headers["id"] == result.id
        record = app.status(result.id)
        assert (record.state, record.name, record.tier, record.lane) == ("pending", "classify", "realtime", "fresh")

    @pytest.mark.parametrize(
        "way",
        ["apply_async", "signature", "send_task", "send_task_unregistered", "group", "chain", "beat", "connection"],
    )
    def test_a_tier_asked_for_at_the_call_is_used_whichever_way_it_is_sent(
        self, app: InferenceApp, amqp_url: str, way: str, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        classify = task(app, "classify")
        if way == "apply_async":
            classify.apply_async(("a",), tier="P2", timeout_s=5)
        elif way == "signature":
            classify.s("a").set(tier="offline").delay()
        elif way == "send_task":
            app.send_task("classify", ("a",), tier="offline")
        elif way == "send_task_unregistered":
            app.send_task("nobody-knows", ("a",), tier="offline")
        elif way == "group":
            group(classify.s("a").set(tier="offline")).apply_async()
        elif way == "chain":
            chain(classify.s("a").set(tier="offline"), task(app, "plain").si()).apply_async()
        elif way == "beat":
            scheduler = Scheduler(app, lazy=True)
            entry = scheduler.Entry(
                "every", "classify", schedule=schedule(1), args=("a",), options={"tier": "p2"}, app=app
            )
            scheduler.apply_async(entry, producer=app.amqp.Producer(app.connection_for_write(), auto_declare=False))
        else:
            with app.connection_for_write() as connection:
                classify.apply_async(("a",), tier="offline", connection=connection)
        (message,) = take(amqp_url, "inference.offline")
        assert message.headers["inference"]["asked"] == "offline"
        assert "tier" not in message.properties
        assert take(amqp_url, "inference.realtime") == []
        assert rabbitmq.connections(vhost) == 1

    def test_what_names_no_tier_goes_to_the_default_one(self, app: InferenceApp, amqp_url: str) -> None:
        task(app, "plain").delay()
        app.send_task("nobody-knows")
        assert len(take(amqp_url, "inference.batch")) == 2

    def test_expires_is_kept_by_the_header_and_not_by_the_broker(self, app: InferenceApp, amqp_url: str) -> None:
        task(app, "classify").apply_async(("a",), expires=7)
        (message,) = take(amqp_url, "inference.realtime")
        header = message.headers["inference"]
        assert header["expires_at_s"] == pytest.approx(header["submitted_at_s"] + 7, abs=0.5)
        assert "expiration" not in message.properties

    def test_a_countdown_is_kept_by_the_broker_never_early_and_ends_in_the_returned_lane(
        self, app: InferenceApp, amqp_url: str
    ) -> None:
        sent_at_s = time.time()
        result = task(app, "classify").apply_async(("a",), countdown=1.2)
        assert take(amqp_url, "inference.realtime") == []
        (message,) = take(amqp_url, "inference.realtime.returned", wait_s=60)
        assert 2.0 <= time.time() - sent_at_s < 30
        assert message.headers["inference"]["lane"] == "returned"
        assert app.status(result.id).lane == "returned"

    def test_a_full_queue_is_told_by_type_on_the_same_connection(
        self, app: InferenceApp, amqp_url: str, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        classify = task(app, "classify")
        for _ in range(BOUND):
            classify.delay("a")
        for _ in range(5):
            with pytest.raises(QueueFullError) as caught:
                classify.apply_async(("a",), task_id="refused")
            error = caught.value
            assert (error.tier, error.limit, error.reason, error.retry_after_s) == ("realtime", BOUND, "full", 1)
        with pytest.raises(TaskNotFoundError):
            app.status("refused")
        assert rabbitmq.connections(vhost) == 1
        assert len(take(amqp_url, "inference.realtime")) == BOUND

    def test_a_group_that_does_not_fit_raises_and_leaves_what_was_accepted(
        self, app: InferenceApp, amqp_url: str
    ) -> None:
        with pytest.raises(QueueFullError):
            group(task(app, "classify").s(str(number)) for number in range(BOUND + 2)).apply_async()
        assert len(take(amqp_url, "inference.realtime")) == BOUND

    def test_too_large_is_told_before_anything_is_sent(self, app: InferenceApp) -> None:
        with pytest.raises(MessageTooLargeError):
            task(app, "classify").delay("x" * 2_000_000)

    def test_an_absent_broker_is_told_by_type_after_celerys_own_retries(self, redis_url: str, namespace: str) -> None:
        app = make_app("amqp://guest:guest@127.0.0.1:1//", redis_url, namespace)
        began_s = time.monotonic()
        with pytest.raises(BrokerUnavailableError):
            task(app, "classify").apply_async(("a",), task_id="unsent")
        assert time.monotonic() - began_s < 20
        with pytest.raises(BrokerUnavailableError):
            task(app, "classify").apply_async(("a",), retry=False)
        with pytest.raises(TaskNotFoundError):
            app.status("unsent")
        close(app)

    def test_a_queue_of_the_users_own_is_declared_and_gets_the_message_as_it_is(
        self, app: InferenceApp, amqp_url: str, rabbitmq: RabbitMQNode, vhost: str
    ) -> None:
        own = Queue("mine", routing_key="mine", queue_arguments={"x-max-length": 5})
        task(app, "plain").apply_async((1,), queue=own)
        (message,) = take(amqp_url, "mine")
        assert "inference" not in message.headers
        assert rabbitmq.connections(vhost) == 1

    def test_the_sent_event_follows_the_task(self, app: InferenceApp, amqp_url: str) -> None:
        with Connection(amqp_url) as connection:
            channel: Any = connection.default_channel
            channel.exchange_declare("celeryev", "topic", auto_delete=False)
            channel.queue_declare("events", auto_delete=False)
            channel.queue_bind("events", "celeryev", "#")
        result = task(app, "classify").delay("a")
        (event,) = take(amqp_url, "events", wait_s=5)
        assert result.id in event.body
        assert '"queue": "inference.realtime"' in event.body

    def test_remote_control_is_sent_too(self, app: InferenceApp) -> None:
        app.control.broadcast("enable_events")
        assert app.control.ping(timeout=0.2) == []


WORKER_APP = """
from inference_tasks import InferenceApp

app = InferenceApp("vision", tiers={"realtime": {"bound": 1}, "batch": {"bound": 1}}, worker={"pool": "solo"})

@app.inference(tier="realtime", name="first", bind=True)
def first(self, value):
    return [value, self.request.delivery_info["routing_key"]]

@app.inference(tier="batch", name="second", bind=True)
def second(self, before):
    return [before, self.request.delivery_info["routing_key"], self.request.headers["inference"]["tier"]]

@app.inference(tier="batch", name="again", bind=True, max_attempts=2)
def again(self):
    if not self.request.retries:
        raise self.retry(countdown=1)
    return [self.request.delivery_info["routing_key"], self.request.headers["inference"]["lane"]]

@app.inference(tier="realtime", name="parent")
def parent():
    return second.delay("child").id
"""


class TestFromATask:
    @pytest.fixture
    def worker_app(
        self, tmp_path: Path, amqp_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[InferenceApp]:
        (tmp_path / "vision.py").write_text(WORKER_APP)
        environ = {
            "INFERENCE_BROKER__URL": amqp_url,
            "INFERENCE_BROKER__QUEUE_TYPE": "classic",
            "INFERENCE_STATE__URL": redis_url,
            "INFERENCE_STATE__PREFIX": f"{namespace}:",
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        spec = importlib.util.spec_from_file_location("vision", tmp_path / "vision.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        app: InferenceApp = module.app
        with WorkerProcess.celery("vision:app", directory=tmp_path, env=environ) as worker:
            worker.wait_for(WorkerProcess.READY)
            yield app
        close(app)

    def test_the_next_step_of_a_chain_is_admitted_though_its_tier_is_full(
        self, worker_app: InferenceApp, amqp_url: str
    ) -> None:
        first, second = task(worker_app, "first"), task(worker_app, "second")
        result = chain(first.s("a"), second.s()).apply_async()
        assert result.get(timeout=20) == [["a", "inference.realtime"], "inference.batch.returned", "batch"]

    def test_a_tier_asked_for_at_the_start_of_a_canvas_holds_for_its_later_steps(
        self, worker_app: InferenceApp
    ) -> None:
        first, second = task(worker_app, "first"), task(worker_app, "second")
        result = chain(first.s("a").set(tier="offline"), second.s()).apply_async()
        assert result.get(timeout=20) == [["a", "inference.offline"], "inference.offline.returned", "offline"]

    def test_a_tier_of_the_step_itself_comes_first(self, worker_app: InferenceApp) -> None:
        first, second = task(worker_app, "first"), task(worker_app, "second")
        result = chain(first.s("a").set(tier="offline"), second.s().set(tier="realtime")).apply_async()
        assert result.get(timeout=20)[1:] == ["inference.realtime.returned", "realtime"]

    def test_a_chord_calls_back(self, worker_app: InferenceApp) -> None:
        first, second = task(worker_app, "first"), task(worker_app, "second")
        header = [first.s(number).set(tier=tier) for number, tier in enumerate(("realtime", "offline"))]
        result = chord(header)(second.s())
        assert result.get(timeout=20)[1] in {"inference.batch.returned", "inference.offline.returned"}

    def test_a_retry_keeps_its_tier_and_comes_back_through_the_returned_lane(self, worker_app: InferenceApp) -> None:
        result = task(worker_app, "again").apply_async(tier="offline")
        routing_key, lane = result.get(timeout=20)
        assert routing_key.endswith("inference.offline.returned")
        assert lane == "returned"
        assert worker_app.status(result.id).tier == "offline"

    def test_what_a_task_submits_is_admitted_work(self, worker_app: InferenceApp) -> None:
        child_id = task(worker_app, "parent").delay().get(timeout=20)
        assert worker_app.AsyncResult(child_id).get(timeout=20)[1] == "inference.batch.returned"
