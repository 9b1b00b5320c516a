"""An app on a real broker and a real Redis: what is submitted lies in its queue, and its status can be asked for."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain
from kombu import Connection

from inference_tasks import Call, InferenceApp, OutcomeUnknownError, QueueFullError, TaskNotFoundError, adopt
from inference_tasks.app import Inference, inference_of
from tests.support.proxy import FaultProxy

BOUND = 3


@pytest.fixture
def app(amqp_url: str, redis_url: str, namespace: str) -> Iterator[InferenceApp]:
    app = InferenceApp(
        "vision",
        broker={"url": amqp_url},
        state={"url": redis_url, "prefix": f"{namespace}:"},
        namespace=namespace,
        tiers={"realtime": {"bound": BOUND, "queue_type": "classic"}},
        set_as_current=False,
    )

    @app.inference(tier="realtime", timeout_s=60.0, max_crashes=2, name="classify")
    def classify(path: str) -> dict[str, str]:
        return {"path": path}

    @app.inference(name="other")
    def other(value: object) -> object:
        return value

    yield app
    inference_of(app).publisher.close()


@pytest.fixture
def classify(app: InferenceApp) -> Any:
    return app.tasks["classify"]


def take(inference: Inference, tier: str, lane: str = "fresh") -> Any:
    """Take one message out of a tier's queue."""
    with Connection(str(inference.settings.broker.url)) as connection:
        channel: Any = connection.default_channel
        message = channel.basic_get(inference.queue_by_lane[tier, lane], no_ack=True)
        return None if message is None else channel.message_to_python(message)


def test_a_submit_lies_in_its_tiers_queue_as_celery_would_have_written_it(app: InferenceApp, classify: Any) -> None:
    task = classify.submit("cat.png")
    message = take(inference_of(app), "realtime")
    assert message is not None
    assert message.headers["id"] == task.id
    assert message.headers["task"] == "classify"
    assert message.headers["argsrepr"] == "('cat.png',)"
    ours = message.headers["inference"]
    assert (ours["tier"], ours["tier_first"], ours["lane"], ours["gen"]) == ("realtime", "realtime", "fresh", 0)
    assert ours["expires_at_s"] - ours["submitted_at_s"] == pytest.approx(60.0)
    assert ours["crash_limit"] == 2
    assert message.properties["delivery_mode"] == 2
    assert message.content_type == "application/json"
    assert json.loads(message.body)[:2] == [["cat.png"], {}]


def test_the_record_is_pending_from_the_submit_on(app: InferenceApp, classify: Any) -> None:
    task = classify.submit("cat.png")
    record = task.status()
    assert (record.id, record.name, record.state) == (task.id, "classify", "pending")
    assert (record.tier, record.lane, record.attempts) == ("realtime", "fresh", 0)
    assert app.status(task.id) == record
    with pytest.raises(TaskNotFoundError):
        app.status("nobody")


def test_a_full_queue_refuses_and_leaves_no_record(app: InferenceApp, classify: Any) -> None:
    for _ in range(BOUND):
        classify.submit("cat.png")
    for submit in (
        lambda: classify.options(task_id="refused").submit("cat.png"),
        lambda: asyncio.run(classify.options(task_id="refused").submit_async("cat.png")),
        lambda: classify.apply_async(("cat.png",), task_id="refused"),
    ):
        with pytest.raises(QueueFullError) as caught:
            submit()
        assert (caught.value.tier, caught.value.limit, caught.value.reason) == ("realtime", BOUND, "full")
        assert caught.value.retry_after_s >= 1
        with pytest.raises(TaskNotFoundError):
            app.status("refused")
    assert classify.options(tier="batch").submit("cat.png").status().tier == "batch"


def test_a_batch_fills_the_queue_and_reports_the_rest(classify: Any) -> None:
    batch = classify.submit_many([Call((f"{index}.png",), task_id=f"task-{index}") for index in range(BOUND + 2)])
    assert [handle.id for handle in batch.accepted] == [f"task-{index}" for index in range(BOUND)]
    assert [(one.index, one.task_id) for one in batch.refused] == [(3, "task-3"), (4, "task-4")]
    assert all(isinstance(one.error, QueueFullError) for one in batch.refused)
    assert not batch.unknown


def test_plain_celery_calls_go_to_the_same_place(app: InferenceApp, classify: Any) -> None:
    for result, tier in (
        (classify.delay("cat.png"), "realtime"),
        (classify.apply_async(("cat.png",), tier="P2"), "offline"),
        (classify.s("cat.png").set(tier="offline").delay(), "offline"),
        (app.tasks["other"].delay(1), "batch"),
        (app.send_task("elsewhere", (1,)), "batch"),
    ):
        assert app.status(result.id).tier == tier
        message = take(inference_of(app), tier)
        assert message is not None
        assert message.headers["id"] == result.id
        assert message.headers["inference"]["tier"] == tier


def test_a_chain_remembers_the_tier_that_it_was_started_with(app: InferenceApp) -> None:
    other = app.tasks["other"]
    chain(other.s(1), other.s()).apply_async(tier="offline")
    message = take(inference_of(app), "offline")
    assert message is not None
    assert message.headers["inference"]["asked"] == "offline"
    assert json.loads(message.body)[2]["chain"]


def test_an_adopted_app_submits_like_one_of_ours(amqp_url: str, redis_url: str, namespace: str) -> None:
    app = Celery("theirs", broker=amqp_url, backend=redis_url, set_as_current=False)

    @app.task(name="add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    inference = adopt(app, namespace=namespace, state={"prefix": f"{namespace}:"})

    @inference.inference(tier="P0", name="double")
    def double(number: int) -> int:
        return 2 * number

    try:
        plain = add.delay(1, 2)
        assert inference.status(plain.id).tier == "batch"
        assert double.submit(4).status().tier == "realtime"
        with pytest.raises(TaskNotFoundError):
            inference.status("nobody")
    finally:
        inference.publisher.close()


def test_monitors_hear_of_a_submit_with_its_tier(app: InferenceApp, classify: Any) -> None:
    heard: list[dict[str, Any]] = []

    def on_sent(event: dict[str, Any]) -> None:
        heard.append(event)
        receiver.should_stop = True

    with app.connection_for_read() as connection:
        receiver: Any = app.events.Receiver(connection, handlers={"task-sent": on_sent})
        receiver.queue(connection.default_channel).declare()
        task = classify.submit("cat.png")
        receiver.capture(timeout=10, wakeup=False)
    assert [(event["uuid"], event["tier"], event["queue"]) for event in heard] == [
        (task.id, "realtime", inference_of(app).queue_by_lane["realtime", "fresh"])
    ]


def test_submitting_an_id_again_is_harmless(app: InferenceApp, classify: Any) -> None:
    first = classify.options(task_id="mine").submit("cat.png")
    record = first.status()
    assert classify.options(task_id="mine").submit("cat.png").status() == record


def test_a_forked_child_submits_on_its_own_connection(app: InferenceApp, classify: Any) -> None:
    classify.options(tier="batch").submit("before.png")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            classify.options(tier="batch", task_id="of-the-child").submit("child.png")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert app.status("of-the-child").state == "pending"
    assert classify.options(tier="batch").submit("after.png").status().state == "pending"


def test_a_silent_broker_makes_a_submit_unknown_at_its_deadline(
    rabbitmq_proxy: FaultProxy, amqp_url: str, redis_url: str, namespace: str
) -> None:
    app = InferenceApp(
        "silent",
        broker=rabbitmq_proxy.url(amqp_url),
        state={"url": redis_url, "prefix": f"{namespace}:"},
        namespace=namespace,
        set_as_current=False,
        # An event's first exchange is declared over the same line, and the next message would wait behind that.
        task_send_sent_event=False,
    )

    @app.inference(name="task")
    def task() -> None: ...

    try:
        task.submit()
        rabbitmq_proxy.black_hole()
        with pytest.raises(OutcomeUnknownError) as caught:
            task.options(confirm_timeout_s=0.5).submit()
        rabbitmq_proxy.resume()
        assert app.status(caught.value.task_id).state == "pending"
    finally:
        inference_of(app).publisher.close()
