import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_routing.admission import retry_after_s


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
