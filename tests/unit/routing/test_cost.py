import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_routing.cost import COLD_START_S, CostModel, MovingMean


def test_nothing_measured_costs_a_tenth_of_a_second() -> None:
    assert CostModel().predict_s("classify", "realtime") == COLD_START_S == 0.1


def test_a_new_kind_costs_what_its_tier_costs() -> None:
    costs = CostModel()
    costs.observe("embed", "batch", 2.0)
    costs.observe("embed", "batch", 4.0)
    assert costs.predict_s("classify", "batch") == pytest.approx(3.0)
    assert costs.predict_s("classify", "realtime") == COLD_START_S


def test_one_measurement_ends_the_cold_start() -> None:
    costs = CostModel()
    costs.observe("classify", "realtime", 0.004)
    costs.observe("detect", "realtime", 0.4)
    assert costs.predict_s("classify", "realtime") == pytest.approx(0.004)


def test_the_same_kind_has_its_own_mean_in_each_tier() -> None:
    costs = CostModel()
    costs.observe("classify", "realtime", 0.01)
    costs.observe("classify", "offline", 1.0)
    assert costs.predict_s("classify", "realtime") == pytest.approx(0.01)


def test_the_mean_follows_a_kind_that_became_slower() -> None:
    costs = CostModel()
    for _ in range(50):
        costs.observe("classify", "realtime", 0.01)
    for _ in range(20):
        costs.observe("classify", "realtime", 1.0)
    assert costs.predict_s("classify", "realtime") > 0.98


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_the_mean_lies_between_the_least_and_the_greatest_value(values: list[float]) -> None:
    mean = MovingMean()
    for value in values:
        mean.add(value)
    assert min(values) - 1e-6 <= mean.value <= max(values) + 1e-6
