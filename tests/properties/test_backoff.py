"""Delays before a retry: never early, at most a quarter longer than said, growing up to the cap."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_routing.backoff import Backoff

seconds = st.floats(0, 1e6)
chances = st.floats(0, 1)
retries = st.integers(1, 10**6)
backoffs = st.builds(Backoff, base_s=seconds, factor=st.floats(1, 1e3), cap_s=seconds, jitter=st.booleans())
lists = st.builds(Backoff.listed, st.lists(seconds, min_size=1, max_size=8), jitter=st.booleans())


@given(backoffs | lists, retries, chances)
def test_chance_only_lengthens_and_by_a_quarter_at_most(backoff: Backoff, retry: int, chance: float) -> None:
    nominal_s = backoff.nominal_s(retry)
    assert nominal_s <= backoff.delay_s(retry, chance) <= nominal_s * 1.25


@given(backoffs, retries, st.integers(0, 10**6))
def test_a_later_retry_waits_no_shorter_and_never_beyond_the_cap(backoff: Backoff, retry: int, more: int) -> None:
    assert backoff.nominal_s(retry) <= backoff.nominal_s(retry + more) <= backoff.cap_s


@given(lists, retries)
def test_a_list_is_taken_in_order_and_its_last_repeats(backoff: Backoff, retry: int) -> None:
    steps = backoff.steps_s
    assert backoff.nominal_s(retry) == (steps[retry - 1] if retry <= len(steps) else steps[-1])


@given(backoffs | lists, retries, chances)
def test_without_jitter_chance_changes_nothing(backoff: Backoff, retry: int, chance: float) -> None:
    assert backoff.with_jitter(False).delay_s(retry, chance) == backoff.nominal_s(retry)


def test_the_default_doubles_from_one_second_up_to_five_minutes() -> None:
    assert [Backoff().nominal_s(retry) for retry in range(1, 12)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


@pytest.mark.parametrize(
    "wrong", [{"base_s": -1}, {"base_s": float("nan")}, {"cap_s": float("inf")}, {"factor": 0.5}, {"base_s": "1"}]
)
def test_a_value_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Backoff(**wrong)


@pytest.mark.parametrize("steps", [(), (1, -1), (1, "x"), (True,)])
def test_a_list_that_cannot_be_meant_is_refused(steps: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        Backoff.listed(steps)
