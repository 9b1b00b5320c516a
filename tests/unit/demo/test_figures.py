"""What the demo reckons from the records of its workers."""

from __future__ import annotations

import pytest

from inference_tasks.demo.figures import Figures, due_shares, quantile
from inference_tasks.demo.recording import Run, Slot
from inference_tasks.demo.schedule import Schedule

PROMISED = {"realtime": 8 / 11, "batch": 2 / 11, "offline": 1 / 11}


def test_all_get_what_is_promised_while_all_want_more() -> None:
    assert due_shares(PROMISED, dict.fromkeys(PROMISED, 2.0)) == pytest.approx(PROMISED)


def test_what_one_leaves_is_divided_by_weight() -> None:
    due = due_shares(PROMISED, {"realtime": 0.4, "batch": 2.0, "offline": 2.0})
    assert due == pytest.approx({"realtime": 0.4, "batch": 0.4, "offline": 0.2})


def test_nobody_is_due_more_than_it_wants() -> None:
    wanted = {"realtime": 0.1, "batch": 0.2, "offline": 0.3}
    assert due_shares(PROMISED, wanted) == pytest.approx(wanted)


def test_a_call_that_never_started_counts_with_its_wait_so_far() -> None:
    figures = Figures(PROMISED)
    figures.submitted([1, 2, 3], "realtime", 100.0)
    figures.refused([3])
    figures.add([Run(1, "realtime", 101.0, 101.5, "png"), Run(9, "batch", 101.5, 102.0, "txt")])
    found = figures.tiers(110.0)["realtime"]
    assert (found.submitted, found.refused, found.started, found.waiting) == (3, 1, 1, 1)
    assert (found.wait_p50_s, found.wait_p99_s) == (1.0, 10.0)
    assert figures.content_types == {"png": 1}


def test_shares_are_of_slot_time_where_the_worker_measured_it() -> None:
    figures = Figures(PROMISED)
    figures.submitted([1], "realtime", 0.0)
    figures.add([Run(1, "realtime", 0.0, 9.0, "png"), Slot("realtime", 1.0), Slot("batch", 3.0)])
    assert figures.tiers(10.0)["batch"].share == 0.75


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, 2.0), (0.99, 4.0), (0.0, 1.0)])
def test_a_quantile_is_one_of_the_values(ratio: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], ratio) == expected
    assert quantile([], ratio) is None


def test_the_schedule_asks_for_more_than_the_worker_can_do_but_not_for_realtime() -> None:
    schedule = Schedule(capacity_per_s=100.0, run_s=10.0)
    arrivals = schedule.arrivals()
    assert arrivals == sorted(arrivals, key=lambda one: one.offset_s)
    assert all(one.offset_s < 10.0 for one in arrivals)
    sent = {tier: sum(one.calls for one in arrivals if one.tier == tier) for tier in PROMISED}
    assert sent["realtime"] == pytest.approx(200, abs=1)
    assert sum(sent.values()) > 1000
    assert sent["batch"] + sent["offline"] > 800
