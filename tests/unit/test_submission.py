"""The quick way to build a message ends in the message that Celery would build."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import signals
from hypothesis import given
from hypothesis import strategies as st
from kombu.serialization import dumps

from inference_tasks import InferenceApp, InvalidArgumentsError
from inference_tasks.routes import Choice
from inference_tasks.submission import Lineage, MessageTemplate, checked_arguments

APP = InferenceApp("submission-of-a-test", broker="amqp://nowhere", set_as_current=False)


@APP.inference(time_limit_s=9, soft_time_limit_s=8, max_crashes=2)
def classify(path: str, size: int = 1) -> str:
    return path * size


def a_template(tier: str = "batch", *, by_worker: bool = False) -> MessageTemplate:
    choice = Choice(tier, None, by_worker)
    task: Any = APP.tasks[classify.name]
    return MessageTemplate(APP, task, choice, exchange="inference", queue=f"inference.{tier}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=3).map(tuple), st.dictionaries(st.text(max_size=5), JSON, max_size=2))
def test_body_headers_and_properties_are_those_of_as_task_v2(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    message = APP.amqp.as_task_v2(
        "id-1",
        classify.name,
        args,
        kwargs,
        time_limit=9,
        soft_time_limit=8,
        ignore_result=classify.ignore_result,
        reply_to=APP.thread_oid,
        parent_id="parent",
        root_id="root",
    )
    outgoing = a_template().fill("id-1", args, kwargs, nonce="n", timeout_s=None, lineage=Lineage("root", "parent"))
    headers = dict(outgoing.properties.headers)
    headers.pop("inference")
    assert headers == message.headers
    content_type, content_encoding, body = dumps(message.body, serializer="json")
    assert outgoing.body == body.encode()
    assert (outgoing.properties.content_type, outgoing.properties.content_encoding) == (content_type, content_encoding)
    assert outgoing.properties.correlation_id == message.properties["correlation_id"]
    assert outgoing.properties.reply_to == message.properties["reply_to"]


def test_our_header_and_the_record_agree() -> None:
    before_s = time.time()
    outgoing = a_template("realtime").fill("id-1", ("a",), {}, nonce="n", timeout_s=2.0)
    ours: Any = outgoing.properties.headers["inference"]
    assert ours == {
        "v": 1,
        "tier": "realtime",
        "tier_first": "realtime",
        "asked": None,
        "lane": "fresh",
        "gen": 0,
        "hop": 0,
        "submitted_at_s": ours["submitted_at_s"],
        "expires_at_s": ours["submitted_at_s"] + 2.0,
        "crash_limit": 2,
    }
    assert before_s <= ours["submitted_at_s"] <= time.time()
    task = outgoing.task
    assert task is not None
    assert (task.id, task.name, task.tier, task.lane, task.nonce) == ("id-1", classify.name, "realtime", "fresh", "n")
    assert (task.submitted_at_s, task.expires_at_s) == (ours["submitted_at_s"], ours["expires_at_s"])
    assert outgoing.mandatory
    assert (outgoing.exchange, outgoing.routing_key) == ("inference", "inference.realtime")


def test_one_submit_does_not_change_the_next() -> None:
    template = a_template()
    first = template.fill("id-1", ("a",), {}, nonce="n", timeout_s=None)
    second = template.fill("id-2", ("b",), {"size": 2}, nonce="n", timeout_s=None)
    assert first.properties.headers["id"] == "id-1"
    assert first.properties.headers["root_id"] == "id-1"
    assert second.properties.headers["kwargsrepr"] == "{'size': 2}"
    assert first.properties.headers["kwargsrepr"] == "{}"


def test_what_a_running_task_submits_is_admitted_work() -> None:
    outgoing = a_template(by_worker=True).fill("id-1", (), {}, nonce="n", timeout_s=None)
    assert outgoing.task is not None
    assert outgoing.task.worker_published
    assert outgoing.task.lane == "returned"


@pytest.mark.parametrize(
    ("args", "kwargs", "part"),
    [
        (("a", object()), {}, r"argument 1 \(object\)"),
        ((), {"path": {1, 2}}, r"path \(set\)"),
    ],
)
def test_arguments_that_json_cannot_hold_are_refused_by_name(
    args: tuple[object, ...], kwargs: dict[str, object], part: str
) -> None:
    with pytest.raises(InvalidArgumentsError, match=part):
        a_template().fill("id-1", args, kwargs, nonce="n", timeout_s=None)


def test_an_argument_that_holds_itself_is_refused() -> None:
    ring: list[object] = []
    ring.append(ring)
    with pytest.raises(InvalidArgumentsError, match="argument 0"):
        a_template().fill("id-1", (ring,), {}, nonce="n", timeout_s=None)


def test_arguments_are_checked_against_the_signature() -> None:
    task: Any = APP.tasks[classify.name]
    checked_arguments(task, ("a",), {"size": 2})
    for args, kwargs in (((), {}), (("a", 1, 2), {}), (("a",), {"colour": 1})):
        with pytest.raises(InvalidArgumentsError, match="do not fit"):
            checked_arguments(task, args, kwargs)


def test_headers_that_a_tracing_library_adds_before_the_publish_are_sent() -> None:
    def trace(headers: dict[str, object], **_: object) -> None:
        headers["traceparent"] = "00-1"

    signals.before_task_publish.connect(trace)
    try:
        outgoing = a_template().fill("id-1", ("a",), {}, nonce="n", timeout_s=None)
    finally:
        signals.before_task_publish.disconnect(trace)
    assert outgoing.properties.headers["traceparent"] == "00-1"
