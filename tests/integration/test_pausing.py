"""What operators switch off: workers do not start it, submits are refused, nothing rises; resuming undoes it."""

from __future__ import annotations

import time
from typing import cast

import pytest

from inference_tasks import InferenceApp, TaskNotFoundError, TierPausedError
from inference_tasks.app import inference_of
from inference_tasks.observe.switching import drain, pause, resume
from inference_tasks.state.records import WorkerBeat
from tests.support.aging import client_of, grow_old, sweep
from tests.support.brokers import depth, until
from tests.support.rig import POOLS, Rig, task

#: A worker renews every two seconds; the rest is for a slow machine.
SEEN_WITHIN_S = 6.0


def beat(app: InferenceApp, node: str) -> WorkerBeat | None:
    return next((one for one in inference_of(app).store.workers() if one.node == node), None)


def wait_state(app: InferenceApp, node: str, state: str) -> None:
    def told() -> bool:
        found = beat(app, node)
        return found is not None and found.state == state

    until(told, f"{node} is {state}")


def starts_of(rig: Rig, tier: str) -> list[float]:
    return [entry.at_s for entry in rig.history.of("start") if entry["tier"] == tier]


@pytest.mark.parametrize(("pool", "queue_type"), [("prefork", "quorum"), ("threads", "classic")])
def test_a_paused_tier_starts_nothing_within_seconds_while_the_others_go_on_until_it_is_resumed(
    rig: Rig, pool: str
) -> None:
    app = rig.app()
    batch = [one.id for one in task(app, "step.batch").submit_many([(n, 0.02) for n in range(200)]).accepted]
    other = [one.id for one in task(app, "step.realtime").submit_many([(n, 0.02) for n in range(1000, 1300)]).accepted]
    with rig.worker(*POOLS[pool], "--concurrency", "2", "--loglevel", "INFO") as worker:
        until(lambda: len(starts_of(rig, "batch")) >= 5, "batch tasks start")
        paused_at_s = time.time()
        switch = pause(inference_of(app), "P1", by="ann", because="new model")
        assert (switch.target, switch.action) == ("tier:batch", "pause")
        worker.wait_for("tier:batch: pause by ann: new model")
        rig.wait_states(app, other, success=300)
        started = starts_of(rig, "batch")
        assert started[-1] - paused_at_s < SEEN_WITHIN_S
        # What had been fetched of it is back in its queue, unstarted and unharmed.
        until(lambda: depth(app, "batch", "fresh") == 200 - len(started), "what was held is back")
        assert len(starts_of(rig, "batch")) == len(started)
        assert task(app, "step.batch").submit(900).status().state == "pending"
        resume(inference_of(app), "batch", by="ann")
        rig.wait_states(app, batch, success=200)
    assert all(count == 1 for count in rig.starts().values())


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_that_starts_takes_nothing_from_a_paused_lane(rig: Rig, pool: str) -> None:
    app = rig.app()
    pause(inference_of(app), "batch.fresh", by="ann")
    kept, runs = task(app, "step.batch").submit(0), task(app, "step.offline").submit(1)
    with rig.worker(*POOLS[pool]):
        assert runs.result(timeout_s=60) == 1
        assert kept.status().state == "pending"
        resume(inference_of(app), "batch.fresh", by="ann")
        assert kept.result(timeout_s=60) == 0


def test_a_drained_worker_finishes_what_runs_and_takes_nothing_new(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(name="one"):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        assert drain(inference_of(app), "one", by="ann", because="new driver").target == "worker:one@localhost"
        wait_state(app, "one@localhost", "draining")
        behind = [task(app, "step.batch").submit(number).id for number in range(1, 6)]
        gate.open()
        assert running.result(timeout_s=60) == 0
        until(lambda: cast(WorkerBeat, beat(app, "one@localhost")).busy == 0, "the worker is idle")
        assert rig.states(app, behind) == {"pending": 5}
        with rig.worker(name="two"):
            rig.wait_states(app, behind, success=5)
            records = inference_of(app).store.get_many(behind)
            assert {record.worker for record in records if record} == {"two@localhost"}
        last = task(app, "step.batch").submit(6)
        resume(inference_of(app), "worker:one@localhost", by="ann")
        assert last.result(timeout_s=60) == 6
    lines = inference_of(app).store.operator_log()
    assert [(line.action, line.target, line.by, line.because) for line in lines] == [
        ("resume", "worker:one@localhost", "ann", ""),
        ("drain", "worker:one@localhost", "ann", "new driver"),
    ]


def test_a_loss_of_redis_ends_every_pause(rig: Rig) -> None:
    app = rig.app()
    pause(inference_of(app), "batch", by="ann")
    with rig.worker():
        waiting = task(app, "step.batch").submit(0)
        assert task(app, "step.offline").submit(1).result(timeout_s=60) == 1
        assert rig.starts() == {1: 1}
        with client_of(app) as client:
            lost = list(client.scan_iter(f"{inference_of(app).store.prefix}*", count=1000))
            assert client.delete(*lost)
        rig.wait_started(0)
        until(lambda: waiting.status().state == "success", "the task ends")


@pytest.mark.parametrize("by_drain", [False, True])
def test_what_refuses_is_told_at_once_and_keeps_nothing(rig: Rig, by_drain: bool) -> None:
    app = rig.app()
    before = task(app, "step.batch").submit(0)
    if by_drain:
        drain(inference_of(app), "batch", by="ann")
    else:
        pause(inference_of(app), "batch", by="ann", refuse=True)
    with pytest.raises(TierPausedError, match="paused or drained") as refused:
        task(app, "step.batch").submit(1)
    assert (refused.value.tier, refused.value.reason) == ("batch", "paused")
    with pytest.raises(TaskNotFoundError):
        app.status(refused.value.task_id)
    with pytest.raises(TierPausedError):
        task(app, "step.batch").delay(2)
    with pytest.raises(TierPausedError):
        task(app, "step.batch").apply_async((2,), countdown=30)
    report = task(app, "step.batch").submit_many([(3,), (4,)])
    assert [(len(report.accepted), type(one.error)) for one in report.refused] == [(0, TierPausedError)] * 2
    assert task(app, "step.offline").submit(5).status().state == "pending"
    with rig.worker():
        assert app.status(before.id).state == "pending" if not by_drain else before.result(timeout_s=60) == 0
        resume(inference_of(app), "batch", by="ann")
        assert task(app, "step.batch").submit(6).result(timeout_s=60) == 6


@pytest.mark.parametrize("target", ["offline", "offline.fresh", "batch", "batch.aged"])
def test_nothing_is_promoted_out_of_what_is_paused_nor_into_it(rig: Rig, target: str) -> None:
    app = rig.app()
    ids = [one.id for one in task(app, "step.offline").submit_many([(n,) for n in range(3)]).accepted]
    grow_old(app, ids, 1801)
    pause(inference_of(app), target, by="ann")
    assert sweep(app).promoted == 0
    assert depth(app, "offline", "fresh") == 3
    resume(inference_of(app), target, by="ann")
    assert sweep(app).promoted == 3


def test_a_drained_tier_still_promotes_what_waits_in_it(rig: Rig) -> None:
    app = rig.app()
    (one,) = task(app, "step.offline").submit_many([(0,)]).accepted
    grow_old(app, [one.id], 1801)
    drain(inference_of(app), "offline", by="ann")
    assert sweep(app).promoted == 1
