"""Shares of the tiers once their floors are met."""

from collections.abc import Mapping
from fractions import Fraction
from typing import Final

MARGIN: Final = Fraction(11, 10)
"""Floors are raised by this factor, so that they hold in a window and not only on average."""


def exact(number: int | float) -> Fraction:
    """Return the decimal number that a person wrote: ``0.05`` is 1/20, not the nearest binary fraction."""
    return Fraction(repr(number))


def effective_shares(weights: Mapping[str, int | float], floors: Mapping[str, float]) -> dict[str, Fraction]:
    """Lift small weights until every floor is met, and take the difference from the others by weight.

    Algorithm: water-filling (as for max-min fairness; Bertsekas and Gallager, Data Networks, 1992, §6.5.2) over floors
    raised by `MARGIN`. The share of a tier is ``max(raised floor, level * weight)`` with the one level that makes the
    sum 1.

    Invariant: with start-time fair queueing, equal costs and at most three backlogged tiers, a tier with floor f gets
    at least ``floor(f * 100)`` of every 100 starts in a row: three tiers put at most 3 starts more into a window than
    the virtual time that it spans, hence at least ``floor(1.1 * f * 97)`` of them are the tier's. Without the margin a
    floor of .05 gives only 4 in the worst window.

    Cost: quadratic in the number of tiers; called when a picker is built, never per pick.

    Not promised: a floor while slots are reserved for another tier, or while the tier has nothing waiting.

    Args:
        weights: ``{tier: weight}``, every weight above 0.
        floors: ``{tier: floor}``, 0 to 1; a tier that is missing has none.

    Returns:
        ``{tier: share}``, in the order of ``weights``; every share above 0, their sum exactly 1.

    Raises:
        ValueError: A weight is not above 0, or the raised floors leave nothing for some tier.
    """
    exact_weights = {name: exact(weight) for name, weight in weights.items()}
    for name, weight in exact_weights.items():
        if weight <= 0:
            raise ValueError(f"expected a weight above 0 for {name}, found {weights[name]}")
    raised = {name: exact(floors.get(name, 0)) * MARGIN for name in weights}
    lifted: set[str] = set()
    while True:
        free = 1 - sum((raised[name] for name in lifted), Fraction(0))
        weight_sum = sum((weight for name, weight in exact_weights.items() if name not in lifted), Fraction(0))
        shares = {
            name: raised[name] if name in lifted else free * weight / weight_sum
            for name, weight in exact_weights.items()
        }
        below = {name for name in weights if shares[name] < raised[name]}
        if not below:
            break
        lifted |= below
        if len(lifted) == len(weights):
            raise ValueError(_too_high(floors))
    if any(share <= 0 for share in shares.values()):
        raise ValueError(_too_high(floors))
    return shares


def _too_high(floors: Mapping[str, float]) -> str:
    found = " + ".join(str(floor) for floor in floors.values() if floor)
    return f"expected floors whose sum, times {float(MARGIN)}, leaves a share for every tier, found {found}; lower them"
