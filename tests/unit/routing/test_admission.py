import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_routing.admission import drained_after_s, most_ahead, retry_after_s


@pytest.mark.parametrize(
    ("bound", "drained_per_s", "expected"),
    [(1_000, None, 1), (1_000, 0.0, 1), (1_000, 200.0, 1), (1_000, 4.0, 3), (100_000, 10.0, 100), (5, 0.01, 5)],
)
def test_a_refused_caller_waits_until_one_percent_of_the_bound_has_drained(
    bound: int, drained_per_s: float | None, expected: int
) -> None:
    assert retry_after_s(bound, drained_per_s) == expected


@given(st.integers(0, 10**9), st.none() | st.floats())
def test_the_wait_is_a_whole_number_of_at_least_one_whatever_was_measured(bound: int, rate: float | None) -> None:
    assert retry_after_s(bound, rate) >= 1


@pytest.mark.parametrize(
    ("timeout_s", "drained_per_s", "expected"),
    [(10.0, None, None), (10.0, 0.0, None), (10.0, 2.0, 20), (0.1, 2.0, 0), (1.0, 2.9, 2), (10.0, float("inf"), None)],
)
def test_no_more_may_wait_ahead_than_drain_within_the_timeout(
    timeout_s: float, drained_per_s: float | None, expected: int | None
) -> None:
    assert most_ahead(timeout_s, drained_per_s) == expected


@given(st.integers(0, 10**9), st.none() | st.floats(0.001, 1e6), st.floats(0.001, 1e6))
def test_who_comes_back_when_told_finds_what_was_ahead_drained(
    ahead: int, rate: float | None, timeout_s: float
) -> None:
    wait_s = drained_after_s(ahead, rate)
    assert wait_s >= 1
    if rate is not None:
        assert wait_s * rate >= ahead * (1 - 1e-9)
        limit = most_ahead(timeout_s, rate)
        assert limit is not None
        assert limit <= timeout_s * rate
