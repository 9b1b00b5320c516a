"""What cannot start by its deadline is refused at the submit, at the rate at which real workers start tasks."""

from __future__ import annotations

import pytest

from inference_tasks import DeadlineError, InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.rig import Rig, task

NAP_S = 0.2


def known_rate(app: InferenceApp) -> float:
    """Run a few tasks, and wait until the worker's heartbeat tells how fast."""
    done = task(app, "step.batch").submit_many([(number, NAP_S) for number in range(5)]).accepted
    assert [handle.result(timeout_s=60) for handle in done] == list(range(5))
    until(lambda: "batch" in inference_of(app).store.drain_rates(), "the rate is known")
    return inference_of(app).store.drain_rates()["batch"]


def test_a_submit_that_would_start_too_late_is_refused_and_told_when_to_come_back(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    store = inference_of(app).store
    with rig.worker():
        rate_per_s = known_rate(app)
        # What idle slots could do counts: the worker has done nearly nothing so far.
        assert 1 < rate_per_s < 3 / NAP_S
        held = task(app, "gated.batch").submit(100, str(gate))
        rig.wait_started(100)
        waiting = task(app, "step.batch").submit_many([(200 + number,) for number in range(200)]).accepted
        with pytest.raises(DeadlineError) as caught:
            task(app, "step.batch").options(timeout_s=2, task_id="late").submit(501)
        error = caught.value
        assert (error.tier, error.reason, error.ahead, error.task_id) == ("batch", "deadline", 200, "late")
        assert error.timeout_s == pytest.approx(2)
        assert 200 * NAP_S / 4 < error.retry_after_s < 200 * NAP_S * 4
        assert store.get_many(["late"]) == [None]
        # Others are not touched by it: with time enough, in another tier, without a deadline, joined.
        in_time = task(app, "step.batch").options(timeout_s=600).submit(2)
        elsewhere = task(app, "step.realtime").options(timeout_s=60).submit(3)
        without = task(app, "step.batch").options(dedup=True).submit(4)
        assert task(app, "step.batch").options(dedup=True, timeout_s=2).submit(4) == without
        report = task(app, "step.batch").options(timeout_s=2).submit_many([(502,), (503,)])
        assert [type(one.error) for one in report.refused] == [DeadlineError] * 2
        gate.open()
        rig.wait_states(app, [one.id for one in (held, in_time, elsewhere, without, *waiting)], success=204)
    assert not {501, 502, 503} & set(rig.starts())


def test_where_no_rate_is_known_nothing_is_refused(rig: Rig) -> None:
    app = rig.app()
    for number in range(20):
        task(app, "step.batch").options(timeout_s=60).submit(number)
    assert inference_of(app).store.drain_rates() == {}


def test_a_burst_into_an_idle_tier_is_taken_though_its_measured_rate_is_small(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        known_rate(app)
        measured_per_s = inference_of(app).store.rates()["batch"]
        burst = task(app, "step.batch").options(timeout_s=10).submit_many([(number,) for number in range(20)])
        assert burst.is_complete
        assert measured_per_s < 5
        rig.wait_states(app, [one.id for one in burst.accepted], success=20)
