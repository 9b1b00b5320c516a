"""Which letters an operator's words mean."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_tasks.dead_letters.filter import Filter, duration_s
from inference_tasks.errors import CallerError, UnknownTierError
from inference_tasks.state.records import DeadLetter

NOW_S = 1_000_000.0

LETTER = DeadLetter(
    id="a-1",
    task="vision.classify",
    tier="batch",
    tier_first="offline",
    lane="returned",
    reason="attempts exhausted",
    detail="",
    error={"type": "ValueError", "message": "no"},
    attempts=5,
    failures=5,
    crashes=0,
    generation=0,
    submitted_at_s=NOW_S - 8000,
    dead_at_s=NOW_S - 7200,
    is_replayable=True,
    message_id="m",
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5h", 5400), ("1d12h", 129_600), ("1h 30m", 5400)]
)
def test_a_duration_has_a_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2 hours", "1h,5m", "1e3s"])
def test_what_is_no_duration_is_told_with_an_example(text: str) -> None:
    with pytest.raises(CallerError, match="such as 90s, 15m, 2h"):
        duration_s(text)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(),
        Filter.of(task="vision.*"),
        Filter.of(task="vision.classify", tier="P1", reason="attempts*"),
        Filter.of(older_than="2h"),
        Filter.of(older_than="1h", younger_than="3h"),
        Filter.of(ids=["b", "a-1"]),
    ],
)
def test_a_letter_is_meant_if_all_conditions_hold(wanted: Filter) -> None:
    assert wanted.matches(LETTER, NOW_S)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter.of(task="classify"),
        Filter.of(task="Vision.*"),
        Filter.of(task="vision.*", reason="crash*"),
        # Of the tier it was served in, not of the one it was submitted to.
        Filter.of(tier="offline"),
        Filter.of(older_than="3h"),
        Filter.of(younger_than="1h"),
        Filter.of(ids=["a"]),
    ],
)
def test_one_condition_that_does_not_hold_is_enough(wanted: Filter) -> None:
    assert not wanted.matches(LETTER, NOW_S)


def test_a_letter_without_a_time_counts_as_old() -> None:
    timeless = replace(LETTER, dead_at_s=0.0)
    assert Filter.of(older_than="365d").matches(timeless, NOW_S)
    assert not Filter.of(younger_than="365d").matches(timeless, NOW_S)


def test_only_a_filter_without_conditions_is_open() -> None:
    assert Filter.of().is_open
    assert not Filter.of(tier="batch").is_open
    assert not Filter.of(ids=["a"]).is_open


def test_a_tier_that_does_not_exist_is_told_with_the_nearest() -> None:
    with pytest.raises(UnknownTierError, match="realtime"):
        Filter.of(tier="realtme")
