from dataclasses import replace

import pytest

from inference_routing.policy import Policy, default_policy
from inference_routing.tier import BATCH, OFFLINE, REALTIME, Tier


def with_tier(name: str, **changes: object) -> Policy:
    policy = default_policy()
    return replace(
        policy,
        tiers=tuple(replace(tier, **changes) if tier.name == name else tier for tier in policy.tiers),  # type: ignore[arg-type]
    )


def test_the_default_policy_is_sound_for_one_slot_and_for_many() -> None:
    assert default_policy().check() == []
    assert default_policy().check(slots=8, reserve=4) == []


def test_the_default_policy_is_8_2_1_with_a_floor_for_offline() -> None:
    tiers = {tier.name: tier for tier in default_policy().tiers}
    assert [(name, tier.weight, tier.bound, tier.floor, tier.ages_after_s) for name, tier in tiers.items()] == [
        (REALTIME, 8, 1_000, 0, None),
        (BATCH, 2, 100_000, 0, 1800),
        (OFFLINE, 1, 1_000_000, 0.05, 1800),
    ]


def test_floors_must_fit_into_the_slots_that_are_not_reserved() -> None:
    policy = with_tier(OFFLINE, floor=0.3)
    assert policy.check(slots=4, reserve=2) == []
    [problem] = policy.check(slots=4, reserve=3)
    assert "1 of 4 slots" in problem
    assert "0.3" in problem


def test_a_floor_of_realtime_may_use_the_reserve() -> None:
    assert with_tier(REALTIME, floor=0.6).check(slots=4, reserve=3) == []


def test_a_worker_of_reserved_slots_only_cannot_keep_a_floor() -> None:
    assert default_policy().check(slots=2, reserve=2)
    assert default_policy().serving([REALTIME]).check(slots=2, reserve=2) == []


def test_all_problems_are_reported_together() -> None:
    policy = Policy(
        tiers=(
            Tier(REALTIME, weight=0, bound=0, floor=1.5),
            Tier(BATCH, weight=1, bound=1, overflow="drop-head", ages_after_s=0),
        ),
        lane_weights={"fresh": 1},
    )
    problems = policy.check(slots=1, reserve=2)
    for word in ("weight", "bound", "floor", "overflow", "ages_after_s", "lane_weights", "reserve"):
        assert any(word in problem for problem in problems), word


@pytest.mark.parametrize("floor", [0.6, 0.9])
def test_floors_whose_sum_is_too_high_are_a_problem(floor: float) -> None:
    policy = replace(
        default_policy(),
        tiers=(Tier(REALTIME, weight=1, bound=1, floor=floor), Tier(BATCH, weight=1, bound=1, floor=0.5)),
    )
    assert any("sum" in problem for problem in policy.check())


def test_a_worker_that_serves_part_of_the_tiers_divides_among_those() -> None:
    served = default_policy().serving({REALTIME, BATCH})
    assert [str(share) for share in served.effective_shares().values()] == ["4/5", "1/5"]


def test_a_tier_is_found_by_its_name() -> None:
    assert default_policy().tier(BATCH).bound == 100_000
    with pytest.raises(KeyError):
        default_policy().tier("P1")
