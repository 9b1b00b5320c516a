"""Submits end in handles or in the error that says what to do; looking up and waiting work by id alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from celery import signals

from inference_tasks import (
    BrokerUnavailableError,
    Call,
    CallerError,
    InferenceApp,
    InvalidArgumentsError,
    MessageTooLargeError,
    OutcomeUnknownError,
    QueueFullError,
    ResultTimeoutError,
    StateUnavailableError,
    TaskFailedError,
    TaskHandle,
    TaskNotFoundError,
    TaskRecord,
)
from inference_tasks.app import inference_of
from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, Refused, TooLarge, Unavailable, Unknown
from inference_tasks.client import Client
from inference_tasks.state.records import Cancellation, Claimant, State
from inference_tasks.submission import Herald
from inference_tasks.testing.store import FakeTaskStore


class ScriptedBroker:
    """Answers each message with the next outcome, and writes records as the publisher does."""

    def __init__(self, store: FakeTaskStore, outcomes: Iterable[Outcome] = ()) -> None:
        self.store = store
        self.outcomes = list(outcomes)
        self.sent: list[Outgoing] = []
        self.timeouts_s: list[float | None] = []

    def send(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        self.timeouts_s.append(timeout_s)
        outcome = self.outcomes.pop(0) if self.outcomes else Accepted()
        if isinstance(outcome, Accepted | Unknown):
            self.sent.append(outgoing)
            assert outgoing.task is not None
            self.store.submit([outgoing.task])
        return outcome

    def send_many(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        return [self.send(outgoing, timeout_s) for outgoing in outgoings]

    async def send_async(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        return self.send(outgoing, timeout_s)

    async def send_many_async(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        return self.send_many(outgoings, timeout_s)


class Shelf:
    """Records of a fake store, and results by id."""

    def __init__(self, store: FakeTaskStore) -> None:
        self.store = store
        self.results: dict[str, object] = {}

    def get(self, task_id: str) -> TaskRecord:
        return self.store.get(task_id)

    def result(self, task_id: str) -> object:
        return self.results[task_id]

    def cancel(self, task_id: str, *, terminate: bool, nonce: str) -> Cancellation:
        return self.store.cancel([(task_id, nonce)], terminate=terminate)[0]


@pytest.fixture
def app() -> InferenceApp:
    app = InferenceApp(
        "client-of-a-test", broker="amqp://nowhere", set_as_current=False, task_send_sent_event=False, default_tier="P2"
    )

    @app.inference(tier="realtime", timeout_s=2.0, name="classify")
    def classify(path: str, size: int = 1) -> str:
        return path * size

    @app.inference(name="plain")
    def plain() -> None: ...

    return app


@pytest.fixture
def broker(app: InferenceApp) -> ScriptedBroker:
    broker = ScriptedBroker(FakeTaskStore())
    inference = inference_of(app)
    inference.client = Client(
        app, app.settings, broker, Shelf(broker.store), inference.queue_by_lane, herald=Herald(app)
    )
    return broker


@pytest.fixture
def classify(app: InferenceApp, broker: ScriptedBroker) -> Any:
    return app.tasks["classify"]


def test_a_submit_returns_a_handle_on_a_pending_task(classify: Any, broker: ScriptedBroker) -> None:
    task = classify.submit("cat.png", size=2)
    assert task.status().state == State.PENDING
    assert task.status().tier == "realtime"
    assert broker.sent[0].routing_key == "inference.realtime"
    assert (
        broker.sent[0].body
        == b'[["cat.png"], {"size": 2}, ' + b'{"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
    )


def test_every_submit_has_a_deadline(app: InferenceApp, classify: Any, broker: ScriptedBroker) -> None:
    classify.submit("cat.png")
    classify.options(confirm_timeout_s=0.5).submit("cat.png")
    assert broker.timeouts_s == [app.settings.broker.confirm_timeout_s, 0.5]


def test_the_tier_is_that_of_the_call_else_of_the_task_else_of_the_settings(
    app: InferenceApp, classify: Any, broker: ScriptedBroker
) -> None:
    classify.options(tier="P1").submit("cat.png")
    classify.submit("cat.png")
    app.tasks["plain"].submit()  # type: ignore[attr-defined]
    assert [one.task.tier for one in broker.sent if one.task] == ["batch", "realtime", "offline"]
    headers: Any = [one.properties.headers["inference"] for one in broker.sent]
    assert [one["asked"] for one in headers] == ["batch", None, None]


def test_the_deadline_of_the_caller_is_that_of_the_call_else_of_the_task(classify: Any, broker: ScriptedBroker) -> None:
    classify.submit("cat.png")
    classify.options(timeout_s=9).submit("cat.png")
    times: Any = [one.properties.headers["inference"] for one in broker.sent]
    assert [round(one["expires_at_s"] - one["submitted_at_s"], 3) for one in times] == [2.0, 9.0]


def test_an_id_of_the_callers_is_kept(classify: Any) -> None:
    assert classify.options(task_id="mine").submit("cat.png") == TaskHandle("mine", classify)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Refused("full", drained_per_s=2.0), QueueFullError),
        (TooLarge(10, 5), MessageTooLargeError),
        (Unavailable("refused"), BrokerUnavailableError),
        (Unavailable("away", "state"), StateUnavailableError),
        (Unknown("no answer"), OutcomeUnknownError),
    ],
)
def test_what_is_not_accepted_raises_the_error_that_says_so(
    classify: Any, broker: ScriptedBroker, outcome: Outcome, error: type[Exception]
) -> None:
    broker.outcomes = [outcome, outcome]
    with pytest.raises(error):
        classify.submit("cat.png")
    with pytest.raises(error):
        asyncio.run(classify.submit_async("cat.png"))


def test_a_full_queue_says_tier_limit_reason_and_when_to_come_again(classify: Any, broker: ScriptedBroker) -> None:
    broker.outcomes = [Refused("parked", drained_per_s=2.0)]
    with pytest.raises(QueueFullError) as caught:
        classify.submit("cat.png")
    error = caught.value
    assert (error.tier, error.limit, error.reason, error.retry_after_s) == ("realtime", 1000, "parked", 5)


def test_a_batch_reports_each_call(classify: Any, broker: ScriptedBroker) -> None:
    broker.outcomes = [Accepted(), Refused("full"), Unknown("no answer"), Accepted()]
    calls = [("a.png",), {"path": "b.png"}, Call(("c.png",), {"size": 2}, "mine"), ["d.png"]]
    batch = classify.submit_many(calls, tier="offline")
    assert [handle.status().tier for handle in batch.accepted] == ["offline", "offline"]
    assert [(one.index, type(one.error)) for one in batch.refused] == [(1, QueueFullError)]
    assert [(one.index, one.task_id, type(one.error)) for one in batch.unknown] == [(2, "mine", OutcomeUnknownError)]
    assert not batch.is_complete
    with pytest.raises(QueueFullError):
        batch.raise_for_refused()


def test_a_batch_with_a_call_that_does_not_fit_sends_nothing(classify: Any, broker: ScriptedBroker) -> None:
    for bad, part in (
        (("a", 1, 2), "Call 1: .*do not fit"),
        ((object(),), "Call 1: .*JSON"),
        ("b.png", r"Call 1 .*\('b.png',\)"),
    ):
        with pytest.raises(InvalidArgumentsError, match=part):
            classify.submit_many([("a.png",), bad])
    assert not broker.sent


def test_one_id_cannot_name_a_batch(classify: Any) -> None:
    with pytest.raises(CallerError, match="task_id"):
        classify.options(task_id="mine").submit_many([("a.png",)])


def test_coroutines_submit_and_look_up_too(classify: Any) -> None:
    async def scenario() -> tuple[str, int]:
        task = await classify.submit_async("cat.png")
        batch = await classify.submit_many_async([("a.png",), ("b.png",)])
        return (await task.status_async()).state, len(batch.accepted)

    assert asyncio.run(scenario()) == (State.PENDING, 2)


def test_an_unknown_id_is_not_found_and_never_pending(app: InferenceApp, broker: ScriptedBroker) -> None:
    with pytest.raises(TaskNotFoundError) as caught:
        app.status("nobody")
    assert caught.value.task_id == "nobody"
    with pytest.raises(TaskNotFoundError):
        app.handle("nobody").result(timeout_s=0)


def finish(broker: ScriptedBroker, task_id: str, state: State, error: Any = None) -> None:
    broker.store.finish(task_id, None, None, state, error)


def test_a_result_is_returned_when_the_task_has_ended(app: InferenceApp, classify: Any, broker: ScriptedBroker) -> None:
    task = classify.submit("cat.png")
    shelf: Any = inference_of(app).client._records
    shelf.results[task.id] = {"label": "cat"}
    finish(broker, task.id, State.SUCCESS)
    assert task.result(timeout_s=0) == {"label": "cat"}
    assert asyncio.run(task.result_async(timeout_s=0)) == {"label": "cat"}
    assert app.result(task.id) == {"label": "cat"}


def test_a_failed_task_raises_what_is_known_of_its_error(classify: Any, broker: ScriptedBroker) -> None:
    task = classify.submit("cat.png")
    finish(broker, task.id, State.FAILED, {"type": "ValueError", "message": "no cat"})
    with pytest.raises(TaskFailedError, match="ended as failed: ValueError: no cat") as caught:
        task.result()
    assert (caught.value.state, caught.value.error_type) == ("failed", "ValueError")


def test_waiting_for_a_result_ends_at_its_deadline(classify: Any) -> None:
    task = classify.submit("cat.png")
    for wait in (lambda: task.result(timeout_s=0.01), lambda: asyncio.run(task.result_async(timeout_s=0.01))):
        with pytest.raises(ResultTimeoutError, match=r"still pending after 0\.01 s") as caught:
            wait()
        assert isinstance(caught.value, TimeoutError)


def test_listeners_hear_of_what_was_accepted_and_only_of_that(classify: Any, broker: ScriptedBroker) -> None:
    heard: list[Any] = []

    def listen(sender: str, headers: Any, body: Any, **_: object) -> None:
        heard.append((sender, headers["id"], body[0]))

    signals.after_task_publish.connect(listen)
    try:
        broker.outcomes = [Refused("full"), Accepted(), Accepted()]
        with pytest.raises(QueueFullError):
            classify.submit("cat.png")
        task = classify.submit("cat.png")
        batch = classify.submit_many([("a.png",)])
    finally:
        signals.after_task_publish.disconnect(listen)
    assert heard == [("classify", task.id, ["cat.png"]), ("classify", batch.accepted[0].id, ["a.png"])]


def test_a_parked_retry_shows_as_pending_once_it_is_due(classify: Any, broker: ScriptedBroker) -> None:
    handle = classify.submit("cat.png")
    (claim,) = broker.store.claim([Claimant(handle.id, "classify", "realtime", "fresh")], "w", 30)
    for due_at_s, state in ((time.time() + 60, State.RETRYING), (time.time() - 1, State.PENDING)):
        broker.store.write(handle.id, claim.token, 0, State.RETRYING, None, None, due_at_s=due_at_s)
        assert (handle.status().state, handle.status().due_at_s) == (state, due_at_s)
        (claim,) = broker.store.claim([Claimant(handle.id, "classify", "realtime", "returned", hop=9)], "w", 30)
