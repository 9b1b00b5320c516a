"""Windows in which a tier had work all the time, and whether it got its floor in them."""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from inference_tasks.worker.floors import FloorWatch

FLOORS = {"realtime": 0.0, "batch": 0.0, "offline": 0.05}


class Told:
    def __init__(self) -> None:
        self.met = self.violated = 0

    def __call__(self, tier: str, *, is_met: bool) -> None:
        assert tier == "offline"
        self.met += is_met
        self.violated += not is_met


@pytest.fixture
def told() -> Told:
    return Told()


def start(watch: FloorWatch, *tiers: str, backlogged: str = "realtime batch offline", has_lower: bool = True) -> None:
    for tier in tiers:
        watch.started(tier, has_work=backlogged.split().__contains__, has_lower=has_lower)


def test_each_hundred_starts_are_a_window(told: Told) -> None:
    watch = FloorWatch(FLOORS, by_time=False, tell=told)
    start(watch, *islice(cycle([*["realtime"] * 19, "offline"]), 200))
    assert (told.met, told.violated) == (2, 0)
    start(watch, *["realtime"] * 96, *["offline"] * 4)
    assert (told.met, told.violated) == (2, 1)
    start(watch, *["realtime"] * 99)
    assert told.violated == 1


def test_a_window_in_which_there_was_no_work_says_nothing(told: Told) -> None:
    watch = FloorWatch(FLOORS, by_time=False, tell=told)
    for _ in range(5):
        start(watch, *["realtime"] * 99)
        start(watch, "realtime", backlogged="realtime")
        start(watch, *["batch"] * 99)
        watch.interrupted("offline")
    assert (told.met, told.violated) == (0, 0)


def test_a_start_that_only_a_reserved_slot_could_make_takes_nothing_from_a_lower_tier(told: Told) -> None:
    watch = FloorWatch(FLOORS, by_time=False, tell=told)
    start(watch, *["realtime"] * 500, has_lower=False)
    assert (told.met, told.violated) == (0, 0)


def test_under_time_a_floor_is_of_slot_seconds(told: Told) -> None:
    watch = FloorWatch(FLOORS, by_time=True, tell=told)
    for _ in range(2000):
        watch.ended("offline", 0.01, 2)
        watch.ended("realtime", 0.1, 2)
    assert (told.met, told.violated) == (2, 0)
    for _ in range(1100):
        watch.ended("offline", 0.002, 2)
        watch.ended("realtime", 0.1, 2)
    assert (told.met, told.violated) == (2, 1)


def test_under_time_what_is_running_makes_no_violation(told: Told) -> None:
    watch = FloorWatch(FLOORS, by_time=True, tell=told)
    for _ in range(200):
        watch.ended("batch", 30.0, 4)
    assert (told.met, told.violated) == (0, 0)
    for _ in range(200):
        watch.ended("batch", 30.0, 4)
    assert (told.met, told.violated) == (0, 1)


def test_a_tier_without_a_floor_is_not_watched(told: Told) -> None:
    watch = FloorWatch({"realtime": 0.0, "batch": 0.0}, by_time=False, tell=told)
    start(watch, *["realtime"] * 500)
    watch.ended("realtime", 1000.0, 1)
    assert (told.met, told.violated) == (0, 0)
