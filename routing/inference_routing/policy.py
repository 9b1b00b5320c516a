"""What is shared out, and by which weights: the one value that worker, broker topology and simulator read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import isfinite
from typing import Final, Literal

from inference_routing.floor import effective_shares, exact
from inference_routing.lane import DEFAULT_LANE_WEIGHTS, LANE_NAMES
from inference_routing.tier import BATCH, OFFLINE, REALTIME, TIER_NAMES, Tier

Share = Literal["time", "count"]

MAX_TIERS: Final = len(TIER_NAMES)
"""Upper limit, on purpose: finer control happens inside a tier, in lanes."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The tiers, what their weights divide, and the weights of the lanes inside a tier.

    Attributes:
        tiers: Highest first; the order breaks ties.
        share: ``"time"`` divides slot seconds, ``"count"`` divides starts.
        lane_weights: ``{lane: weight}``, the same in every tier.
    """

    tiers: tuple[Tier, ...]
    share: Share = "time"
    lane_weights: Mapping[str, int] = field(default_factory=lambda: DEFAULT_LANE_WEIGHTS)

    def tier(self, name: str) -> Tier:
        """Return the tier of that full name.

        Raises:
            KeyError: The policy has no such tier.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def serving(self, names: Collection[str]) -> "Policy":
        """Return this policy for a worker that serves only those tiers: the others' shares are lent to them."""
        return replace(self, tiers=tuple(tier for tier in self.tiers if tier.name in names))

    def effective_shares(self) -> dict[str, Fraction]:
        """Return ``{tier: share}`` with floors met, see `inference_routing.floor.effective_shares`."""
        return effective_shares(
            {tier.name: tier.weight for tier in self.tiers}, {tier.name: tier.floor for tier in self.tiers}
        )

    def check(self, slots: int = 1, reserve: int = 0) -> list[str]:
        """Say everything that is wrong with this policy for a worker of that many slots.

        Args:
            slots: Slots of the worker.
            reserve: How many of them only ``realtime`` may use.

        Returns:
            One sentence per problem: what was expected, what was found; empty when all is well.
        """
        problems = self._problems_of_tiers() + self._problems_of_lanes()
        if not 0 <= reserve <= slots or slots < 1:
            problems.append(f"expected at least 1 slot and a reserve from 0 to that, found {slots} and {reserve}")
        elif not problems:
            problems += self._problems_of_floors(slots, reserve)
        return problems

    def _problems_of_tiers(self) -> list[str]:
        problems: list[str] = []
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) != len(names) or not set(names) <= set(TIER_NAMES):
            problems.append(f"expected 1 to {MAX_TIERS} different tiers out of {', '.join(TIER_NAMES)}, found {names}")
        if self.share not in ("time", "count"):
            problems.append(f"share: expected 'time' or 'count', found {self.share!r}")
        for tier in self.tiers:
            if not (isfinite(tier.weight) and tier.weight > 0):
                problems.append(f"tiers.{tier.name}.weight: expected a number above 0, found {tier.weight}")
            if not 0 <= tier.floor < 1:
                problems.append(f"tiers.{tier.name}.floor: expected 0 or more and below 1, found {tier.floor}")
            if tier.bound < 1:
                problems.append(f"tiers.{tier.name}.bound: expected 1 or more messages, found {tier.bound}")
            if tier.ages_after_s is not None and not tier.ages_after_s > 0:
                problems.append(f"tiers.{tier.name}.ages_after_s: expected seconds above 0, found {tier.ages_after_s}")
            if tier.overflow not in ("reject-publish", "drop-head"):
                problems.append(
                    f"tiers.{tier.name}.overflow: expected 'reject-publish' or 'drop-head', found {tier.overflow!r}"
                )
            elif tier.overflow == "drop-head" and tier.name != OFFLINE:
                # Why: dropping the oldest drops work that was accepted, which only offline evaluation may opt into.
                problems.append(
                    f"tiers.{tier.name}.overflow: expected 'reject-publish', 'drop-head' is for {OFFLINE} only"
                )
        return problems

    def _problems_of_lanes(self) -> list[str]:
        problems: list[str] = []
        if set(self.lane_weights) != set(LANE_NAMES):
            problems.append(f"lane_weights: expected {', '.join(LANE_NAMES)}, found {', '.join(self.lane_weights)}")
        for lane, weight in self.lane_weights.items():
            if not (isfinite(weight) and weight > 0):
                problems.append(f"lane_weights.{lane}: expected a number above 0, found {weight}")
        return problems

    def _problems_of_floors(self, slots: int, reserve: int) -> list[str]:
        problems: list[str] = []
        try:
            self.effective_shares()
        except ValueError as error:
            problems.append(f"tiers.*.floor: {error}")
        others = sum((exact(tier.floor) for tier in self.tiers if tier.name != REALTIME), Fraction(0))
        open_ratio = Fraction(slots - reserve, slots)
        if others > open_ratio:
            # Why: reserved slots never serve these tiers, so the floors must fit into the rest of the worker.
            problems.append(
                f"tiers.*.floor: expected floors of the tiers below {REALTIME} that fit into the {slots - reserve} of"
                f" {slots} slots that are not reserved ({float(open_ratio):.3g}), found {float(others):.3g};"
                " lower the floors or the reserve"
            )
        return problems


def default_policy() -> Policy:
    """Return the tiers as they are without any setting: 8 : 2 : 1 of slot time, offline at least 5 of 100."""
    return Policy(
        tiers=(
            Tier(REALTIME, weight=8, bound=1_000),
            Tier(BATCH, weight=2, bound=100_000, ages_after_s=1800.0),
            Tier(OFFLINE, weight=1, bound=1_000_000, floor=0.05, ages_after_s=1800.0),
        )
    )
