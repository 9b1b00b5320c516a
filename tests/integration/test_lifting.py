"""Tasks that inherit the tier of those that wait for them, with real workers and brokers."""

from __future__ import annotations

from typing import Any

import pytest

from inference_tasks.app import inference_of
from tests.support.aging import client_of, ids_in
from tests.support.brokers import until
from tests.support.rig import Rig, task
from tests.support.waiting import dependent, wait_served

CROWD = 2000
NOT_KEPT = "its message is not kept (state.lift_body_bytes)"


def crowd(app: Any, count: int = CROWD) -> list[str]:
    report = task(app, "step.offline").submit_many([(number,) for number in range(count)])
    assert report.is_complete
    return [one.id for one in report.accepted]


def starts(rig: Rig, wanted: int) -> list[Any]:
    """The numbers that have started, up to this one."""
    rig.wait_started(wanted)
    numbers = rig.history.values("start", "number")
    return list(numbers[: numbers.index(wanted) + 1])


def test_a_task_behind_two_thousand_others_runs_first_when_a_realtime_one_waits_for_it(rig: Rig) -> None:
    app = rig.app()
    crowd(app)
    first = task(app, "step.offline").submit(-1)
    second = dependent(app, "step.batch", -2, needs=[first])
    third = dependent(app, "step.realtime", -3, needs=[second])
    record = first.status()
    assert (record.tier, record.lifted_from, record.lifted_by) == ("realtime", "offline", third.id)
    assert second.status().lifted_from == "batch"
    with rig.worker():
        assert third.result(timeout_s=60) == -3
        order = starts(rig, -3)
    assert [number for number in order if number < 0] == [-1, -2, -3]
    # They share what realtime gets, which is most of it.
    assert len(order) < 30
    assert [one.status().attempts for one in (first, second, third)] == [1, 1, 1]
    accounts = inference_of(app).store.accounts()
    assert {tier: counts["success"] for tier, counts in accounts.by_tier.items() if tier != "offline"} == {
        "realtime": 1,
        "batch": 1,
    }


def test_it_runs_once_though_its_message_is_there_twice(rig: Rig) -> None:
    app = rig.app()
    first = task(app, "step.offline").submit(0)
    dependent(app, "step.realtime", 1, needs=[first])
    assert (ids_in(app, "offline"), ids_in(app, "realtime", "returned")) == ([first.id], [first.id])
    with rig.worker():
        rig.wait_started(1)
        wait_served(app)
    assert rig.starts() == {0: 1, 1: 1}


def test_a_lift_ends_when_the_task_that_needs_it_is_cancelled(rig: Rig) -> None:
    app = rig.app()
    ids = crowd(app, 50)
    first = task(app, "step.offline").submit(-1)
    second = dependent(app, "step.realtime", -2, needs=[first])
    assert first.status().tier == "realtime"
    inference = inference_of(app)
    assert inference.lifts.lower() == 0
    assert second.cancel()
    assert inference.lifts.lower() == 1
    record = first.status()
    assert (record.tier, record.lane, record.lifted_from, record.lifted_by, record.hop) == (
        "offline",
        "returned",
        None,
        None,
        2,
    )
    assert inference.lifts.lower() == 0
    with rig.worker():
        rig.wait_states(app, [*ids, first.id], success=51)
        wait_served(app)
    assert set(rig.starts().values()) == {1}
    served = [entry["tier"] for entry in rig.history.of("start") if entry["number"] == -1]
    assert served == ["offline"]
    assert first.status().lane == "returned"


def test_one_that_has_started_is_left_alone(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker():
        first = task(app, "gated.offline").submit(0, str(gate))
        rig.wait_started(0)
        second = dependent(app, "step.realtime", 1, needs=[first])
        record = first.status()
        assert (record.tier, record.lifted_from, record.state) == ("offline", None, "processing")
        gate.open()
        assert second.result(timeout_s=60) == 1
    assert rig.starts() == {0: 1, 1: 1}


@pytest.mark.parametrize("limit", [0, 500])
def test_one_whose_message_is_too_large_waits_in_its_tier_and_says_so(rig: Rig, limit: int) -> None:
    app = rig.app(state={"lift_body_bytes": limit})
    first = task(app, "total").options(tier="offline").submit(list(range(200)))
    second = dependent(app, "step.realtime", 1, needs=[first])
    record = first.status()
    assert (record.tier, record.lifted_from, record.not_lifted) == ("offline", None, NOT_KEPT)
    with client_of(app) as client:
        kept = list(client.scan_iter(f"{inference_of(app).store.prefix}*:message"))
    assert [key.partition("{")[2].partition("}")[0] for key in kept] == [second.id]
    with rig.worker():
        assert second.result(timeout_s=60) == 1


def test_an_equal_submit_of_a_higher_tier_lifts_the_task_that_it_joins(rig: Rig) -> None:
    app = rig.app()
    crowd(app, 300)
    low = task(app, "step.offline").options(dedup=True).submit(-1)
    high = task(app, "step.offline").options(dedup=True, tier="realtime").submit(-1)
    assert high.id == low.id
    record = low.status()
    assert (record.tier, record.lifted_from, record.lifted_by) == ("realtime", "offline", "shared")
    assert high.cancel()
    assert inference_of(app).lifts.lower() == 1
    assert low.status().tier == "offline"
    again = task(app, "step.offline").options(dedup=True, tier="realtime").submit(-1)
    assert low.status().tier == "realtime"
    with rig.worker():
        assert again.result(timeout_s=60) == -1
        assert len(starts(rig, -1)) < 30


def test_those_of_a_batch_that_wait_for_one_lift_it_together(rig: Rig) -> None:
    app = rig.app()
    first = task(app, "step.offline").submit(0)
    report = task(app, "step.realtime").options(depends_on=[first]).submit_many([(1,), (2,)])
    assert report.is_complete
    until(lambda: first.status().tier == "realtime", "it is lifted")
    assert first.status().lifted_by in {one.id for one in report.accepted}
