"""A tier with as much work parked as its bound takes nothing new; what was admitted goes on."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.errors import QueueFullError, TaskNotFoundError
from tests.support.processes import WorkerProcess
from tests.support.servers import RabbitMQNode

PROGRAM = """
from inference_tasks import InferenceApp

app = InferenceApp("vision", tiers={"batch": {"bound": 1}}, worker={"pool": "solo"})

@app.inference(tier="realtime", name="first")
def first(value):
    return value

@app.inference(tier="batch", name="second")
def second(value):
    return value

@app.inference(tier="batch", name="again", bind=True, max_attempts=2)
def again(self):
    if not self.request.retries:
        raise self.retry(countdown=1)
    return "done"
"""


@pytest.fixture
def app(
    tmp_path: Path, amqp_url: str, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InferenceApp]:
    (tmp_path / "vision.py").write_text(PROGRAM)
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
    inference_of(app).publisher.close()


def test_a_tier_with_as_much_work_parked_as_its_bound_refuses_what_is_new_and_finishes_what_it_admitted(
    app: InferenceApp, rabbitmq: RabbitMQNode, vhost: str
) -> None:
    tasks: Any = app.tasks
    first, second, again = tasks["first"], tasks["second"], tasks["again"]
    store = inference_of(app).store

    assert again.delay().get(timeout=30) == "done"  # parked and back, so that nothing is away any more
    assert store.accounts().away == {}
    parked = second.apply_async(("later",), countdown=3600)
    assert store.accounts().away == {"batch": 1}
    assert app.status(parked.id).due_at_s == pytest.approx(store.server_time_s() + 3600, abs=30)

    for submit in (
        lambda: second.apply_async(("new",), task_id="refused"),
        lambda: second.apply_async(("new",), task_id="refused", countdown=60),
        lambda: second.options(task_id="refused").submit("new"),
    ):
        with pytest.raises(QueueFullError) as caught:
            submit()
        assert (caught.value.tier, caught.value.limit, caught.value.reason) == ("batch", 1, "parked")
        assert caught.value.retry_after_s > 0
        with pytest.raises(TaskNotFoundError):
            app.status("refused")
    batch = second.submit_many([("new",), ("new",)])
    assert [refusal.error.reason for refusal in batch.refused] == ["parked", "parked"]

    # Another tier is not concerned, and a step that a worker publishes is admitted work.
    assert first.delay("fast").get(timeout=30) == "fast"
    assert chain(first.s("through"), second.s()).apply_async().get(timeout=30) == "through"
    counts = store.accounts().by_tier
    assert {name: number for name, number in counts["batch"].items() if number} == {
        "admitted": 3,
        "pending": 1,
        "success": 2,
    }
    assert (counts["realtime"]["admitted"], counts["realtime"]["success"]) == (2, 2)

    # Once the parked task is no more, there is room again.
    assert store.finish(parked.id, None, None, "cancelled")
    assert second.delay("new").get(timeout=30) == "new"
