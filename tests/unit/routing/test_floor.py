from fractions import Fraction

import pytest

from inference_routing.floor import effective_shares, exact


def test_without_floors_the_shares_are_the_weights() -> None:
    shares = effective_shares({"realtime": 8, "batch": 2, "offline": 1}, {})
    assert shares == {"realtime": Fraction(8, 11), "batch": Fraction(2, 11), "offline": Fraction(1, 11)}


def test_a_floor_below_the_weight_changes_nothing() -> None:
    weights = {"realtime": 8, "batch": 2, "offline": 1}
    assert effective_shares(weights, {"offline": 0.05}) == effective_shares(weights, {})


def test_a_small_weight_is_lifted_to_its_floor_with_a_margin_at_the_cost_of_the_others_by_weight() -> None:
    shares = effective_shares({"realtime": 100, "batch": 2, "offline": 1}, {"offline": 0.05})
    assert shares["offline"] == Fraction(55, 1000)
    assert shares["realtime"] / shares["batch"] == 50
    assert sum(shares.values()) == 1


def test_lifting_one_tier_can_make_another_need_its_floor_too() -> None:
    shares = effective_shares({"realtime": 89, "batch": 11.5, "offline": 1}, {"batch": 0.1, "offline": 0.3})
    assert shares == {"realtime": Fraction(56, 100), "batch": Fraction(11, 100), "offline": Fraction(33, 100)}


@pytest.mark.parametrize(
    ("weights", "floors"),
    [
        ({"realtime": 1, "batch": 1}, {"realtime": 0.5, "batch": 0.5}),
        ({"realtime": 1, "batch": 1}, {"realtime": 0.95}),
        ({"realtime": 0, "batch": 1}, {}),
        ({"realtime": -1, "batch": 1}, {}),
    ],
)
def test_floors_and_weights_that_leave_a_tier_nothing_are_refused(
    weights: dict[str, float], floors: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="expected"):
        effective_shares(weights, floors)


def test_a_decimal_is_taken_as_it_was_written() -> None:
    assert exact(0.05) == Fraction(1, 20)
    assert exact(1e-7) == Fraction(1, 10_000_000)
