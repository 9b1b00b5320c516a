"""`why` tells the truth of a task in each state: on a real broker, Redis, worker, and over HTTP."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from click.testing import CliRunner

from inference_tasks import InferenceApp, TaskNotFoundError
from inference_tasks.app import inference_of
from inference_tasks.cli import main
from inference_tasks.observe.switching import drain, pause, resume
from inference_tasks.observe.why import Why, why
from inference_tasks.state.store import TaskStore
from tests.support.aging import grow_old, sweep
from tests.support.brokers import until
from tests.support.dead_letters import settings
from tests.support.gateway import GatewayProcess
from tests.support.rig import Rig, task
from tests.support.waiting import dependent


def asked(app: InferenceApp, task_id: str) -> Why:
    return why(inference_of(app), task_id)


def wait_reason(app: InferenceApp, task_id: str, reason: str) -> Why:
    until(lambda: asked(app, task_id).reason == reason, f"{reason}, not {asked(app, task_id)}")
    return asked(app, task_id)


def test_a_task_from_its_queue_to_its_end(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    handles = [task(app, "gated.batch").submit(number, str(gate)) for number in range(4)]
    realtime = [task(app, "step.realtime").options(tier="offline").submit(number) for number in (10, 11)]
    found = asked(app, handles[3].id)
    assert (found.reason, found.position, found.queue_waiting) == ("no worker", 4, 4)
    assert found.ahead_by_tier == {"realtime": 0, "batch": 3, "offline": 2}
    assert (found.promotion_to, found.workers) == ("realtime", 0)
    assert "number 4 of 4, but no live worker serves batch." in found.sentence
    with rig.worker(state={"lease_s": 3}):
        rig.wait_started(0)
        running = wait_reason(app, handles[0].id, "running")
        assert running.worker == "worker@localhost"
        assert running.sentence.startswith("It is running for ")
        found = wait_reason(app, handles[3].id, "queued")
        assert (found.position, found.workers, found.slots) == (3, 1, 1)
        gate.open()
        rig.wait_states(app, [one.id for one in (*handles, *realtime)], success=6)
        found = asked(app, handles[3].id)
        assert (found.reason, found.attempts) == ("success", 1)
        assert found.sentence.startswith("It succeeded ")
    with pytest.raises(TaskNotFoundError):
        asked(app, "nobody")


def test_the_expected_start_comes_from_what_the_workers_did_lately(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(state={"lease_s": 3}):
        done = [one.id for one in task(app, "step.batch").submit_many([(n, 0.02) for n in range(30)]).accepted]
        rig.wait_states(app, done, success=30)
        blocker = task(app, "gated.batch").submit(100, str(gate))
        rig.wait_started(100)
        waiting = task(app, "step.batch").submit_many([(n, 0.02) for n in range(200, 220)]).accepted
        until(lambda: asked(app, waiting[-1].id).starts_per_s is not None, "the rate is known")

        def in_order() -> list[Why]:
            return sorted((asked(app, one.id) for one in waiting), key=lambda one: one.position or 0)

        # Those of one batch count as submitted at the same moment; their places are in whatever order. For a moment the
        # worker holds some of them, for the slot that it believes to be free soon.
        until(lambda: [one.position for one in in_order()] == list(range(1, 21)), "all lie in their queue")
        first, *_, last = in_order()
        assert first.expected_start_at_s is not None
        assert last.expected_start_at_s is not None
        rate = cast(float, last.starts_per_s)
        assert last.expected_start_at_s - last.at_s == pytest.approx(19 / rate, rel=0.01)
        assert "it should start in" in last.sentence
        gate.open()
        assert blocker.result(timeout_s=60) is not None


def test_what_operators_have_paused_is_named_until_it_is_resumed(rig: Rig) -> None:
    app = rig.app()
    pause(inference_of(app), "batch", by="ann", because="new model")
    with rig.worker(state={"lease_s": 3}):
        until(lambda: bool(inference_of(app).store.workers()), "the worker is known")
        waiting = task(app, "step.batch").submit(0)
        found = asked(app, waiting.id)
        assert (found.reason, found.promotion_to) == ("paused", None)
        assert "batch was paused" in found.sentence
        assert ": new model." in found.sentence
        drain(inference_of(app), "worker", by="ann")
        until(lambda: inference_of(app).store.workers()[0].state == "draining", "the worker is draining")
        resume(inference_of(app), "batch", by="ann")
        found = wait_reason(app, waiting.id, "workers paused")
        assert found.sentence.endswith("every worker that serves batch is paused or draining.")
        resume(inference_of(app), "worker", by="ann")
        assert wait_reason(app, waiting.id, "success").attempts == 1


def test_what_is_parked_what_it_waits_for_and_where_it_ended(rig: Rig) -> None:
    app = rig.app()
    delayed = task(app, "step.batch").apply_async((0,), countdown=60).id
    found = asked(app, delayed)
    assert found.reason == "delayed"
    assert found.due_at_s == pytest.approx(found.at_s + 60, abs=5)
    assert "it comes into batch in " in found.sentence
    need = task(app, "step.offline").submit(1)
    waits = dependent(app, "step.batch", 2, needs=[need])
    found = asked(app, waits.id)
    assert (found.reason, found.waits_for) == ("dependencies", {need.id: "pending"})
    assert found.sentence == f"It waits for 1 task to succeed first: {need.id} (pending)."
    assert waits.cancel()
    assert asked(app, waits.id).sentence.startswith("It was cancelled ")


def test_a_retry_tells_when_it_is_due_and_a_dead_letter_why_it_died(rig: Rig) -> None:
    app = rig.app()
    with rig.worker(state={"lease_s": 3}):
        later = task(app, "tried.batch").submit(0, ["after 60"])
        found = wait_reason(app, later.id, "retrying")
        assert found.due_at_s is not None
        assert 30 < found.due_at_s - found.at_s <= 62
        assert found.sentence.startswith("It is to be tried again in ")
        assert "attempt 2" in found.sentence
        dead = task(app, "tried.batch").submit(1, ["permanent"])
        found = wait_reason(app, dead.id, "dead")
        assert found.dead_letter is not None
        assert (found.dead_letter["reason"], found.dead_letter["is_replayable"]) == ("permanent error", True)
        assert "lies in the dead letters (permanent error). It can be replayed." in found.sentence


def test_a_promoted_task_is_found_in_its_new_queue(rig: Rig) -> None:
    app = rig.app()
    handle = task(app, "step.offline").submit(0)
    grow_old(app, [handle.id], 1801)
    assert "It has waited long enough to move up to batch." in asked(app, handle.id).sentence
    assert sweep(app).promoted == 1
    found = asked(app, handle.id)
    assert (found.tier, found.tier_first, found.lane, found.position) == ("batch", "offline", "aged", 1)


def test_it_is_one_round_trip_whatever_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    app = rig.app()
    store = inference_of(app).store
    calls: list[str] = []
    real = TaskStore._call

    def counted(self: TaskStore, script: str, *args: Any) -> Any:
        calls.append(script)
        return real(self, script, *args)

    monkeypatch.setattr(TaskStore, "_call", counted)
    for count in (1, 500):
        handles = task(app, "step.offline").submit_many([(n,) for n in range(count)]).accepted
        calls.clear()
        assert asked(app, handles[-1].id).reason == "no worker"
        assert calls == ["scene"]
    assert store is inference_of(app).store


def test_the_command_and_http_say_the_same(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    app = rig.app()
    for name, value in settings(rig).items():
        monkeypatch.setenv(name, value)
    pause(inference_of(app), "batch", by="ann", because="new model", refuse=True)
    resume(inference_of(app), "batch", by="ann")
    handle = task(app, "step.batch").submit(0)
    pause(inference_of(app), "batch", by="ann", because="new model", refuse=True)
    said = CliRunner().invoke(main, ["why", handle.id, "--json"], catch_exceptions=False)
    document = json.loads(said.stdout)
    assert (document["reason"], document["position"], document["switch"]["by"]) == ("paused", 1, "ann")
    assert document["sentence"] in CliRunner().invoke(main, ["why", handle.id]).stdout.replace("\n", " ")
    missing = CliRunner().invoke(main, ["why", "nobody"])
    assert missing.exit_code == 3
    with GatewayProcess.of(rig) as gateway, gateway.client() as http:
        answer = http.get(f"/v1/tasks/{handle.id}/why")
        assert answer.status_code == 200
        body = answer.json()
        assert {name: body[name] for name in ("id", "reason", "position", "tier", "lane")} == {
            "id": handle.id, "reason": "paused", "position": 1, "tier": "batch", "lane": "fresh"
        }  # fmt: skip
        assert body["paused"]["because"] == "new model"
        assert "ann" not in answer.text
        assert "batch was paused" in http.get(f"/v1/tasks/{handle.id}?why=1").json()["why"]
        assert "why" not in http.get(f"/v1/tasks/{handle.id}").json()
        assert http.get(f"/v1/tasks/{handle.id}?why=perhaps").status_code == 422
        assert http.get("/v1/tasks/nobody/why").status_code == 404
        refused = http.post("/v1/tasks/step.batch", json={"args": [1]})
        assert (refused.status_code, refused.json()["reason"]) == (503, "paused")
        assert refused.json()["type"].endswith(":tier-paused")
        assert int(refused.headers["retry-after"]) >= 1
