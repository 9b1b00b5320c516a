"""A run that is taken over: whoever comes late changes nothing, and nothing follows from its end."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.processes import WorkerProcess
from tests.support.rig import POOLS, Rig, task

LEASE_S = 2.0


def everybody(worker: WorkerProcess) -> list[psutil.Process]:
    return [psutil.Process(worker.pid), *worker.children()]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_of_a_worker_frozen_for_longer_than_its_lease_neither_result_nor_follow_ups_count(rig: Rig, pool: str) -> None:
    app, gate = rig.app(), rig.gate()
    options: dict[str, Any] = {"state": {"lease_s": LEASE_S}, "broker": {"heartbeat_s": 2}}
    head = task(app, "gated.batch").s(3, str(gate)).set(link=task(app, "add").s(100))
    with rig.worker(*POOLS[pool], name="frozen", **options) as frozen:
        chain = (head | task(app, "add").s(200)).apply_async()
        first = chain.parent.id
        rig.wait_started(3)
        with rig.worker(name="other", **options):
            stopped = everybody(frozen)
            for process in stopped:
                process.suspend()
            rig.wait_states(app, [first], processing=1)
            rig.history.wait_for("start", count=2)
            gate.open()
            assert chain.get(timeout=60) == 203
            rig.wait_states(app, [first], success=1)
            for process in stopped:
                process.resume()
            rig.history.wait_for("end", count=2)
            store = inference_of(app).store
            until(lambda: store.stale_writes() >= 1, "the late result was refused")
            assert task(app, "step.batch").submit(9).result(timeout_s=60) == 9
            assert frozen.terminate() == 0
            until(lambda: rig.waiting(app) == 0, "nothing waits")
    record = app.status(first)
    assert (record.state, record.worker, record.attempts, record.crashes) == ("success", "other@localhost", 2, 1)
    starts = rig.history.of("start")
    assert len([one for one in starts if one["tier"] == "batch" and one["number"] == 3]) == 2
    assert len([one for one in starts if one["tier"] == ""]) == 2, "both follow-ups run once"
    counts = inference_of(app).store.accounts().by_tier["batch"]
    assert (counts["admitted"], counts["success"]) == (4, 4)
