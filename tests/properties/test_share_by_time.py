"""Slot seconds are divided by weight, whatever the tasks cost and however many slots there are."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_routing.picker import Picker
from inference_routing.policy import Policy, default_policy
from inference_routing.tier import TIER_NAMES, Tier
from tests.properties.worker_simulation import FRESH_QUEUES, simulate

SHARES = {"realtime": 8 / 11, "batch": 2 / 11, "offline": 1 / 11}


@settings(max_examples=25, deadline=None)
@given(st.tuples(*[st.floats(0.002, 0.5)] * 3), st.integers(1, 8), st.integers(0, 2**32))
def test_slot_seconds_converge_to_the_weights_with_unequal_costs(
    costs: tuple[float, float, float], slots: int, seed: int
) -> None:
    random = Random(seed)
    mean_s = dict(zip(TIER_NAMES, costs, strict=True))
    picker = Picker(default_policy(), FRESH_QUEUES)
    # Long enough that the slot seconds in flight, which are what a tier may be off by, are small beside the total.
    until_s = 150 * max(costs)
    run = simulate(
        picker,
        slots=slots,
        until_s=until_s,
        cost_s=lambda tier, _: mean_s[tier] * random.uniform(0.5, 1.5),
        predicted_s=lambda tier, _: mean_s[tier],
    )
    slot_s = run.slot_s(0, until_s)
    for tier, share in SHARES.items():
        assert slot_s[tier] / sum(slot_s.values()) == pytest.approx(share, abs=0.025)
        assert picker.shares()[tier] == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_costs_of_5_15_and_100_ms_give_the_weights_within_a_point(slots: int) -> None:
    cost_s = {"realtime": 0.005, "batch": 0.015, "offline": 0.1}
    run = simulate(Picker(default_policy(), FRESH_QUEUES), slots=slots, until_s=60, cost_s=lambda tier, _: cost_s[tier])
    slot_s = run.slot_s(0, 60)
    for tier, share in SHARES.items():
        assert slot_s[tier] / sum(slot_s.values()) == pytest.approx(share, abs=0.01)


def test_equal_costs_give_8_2_1_in_every_window_of_11() -> None:
    run = simulate(Picker(default_policy(), FRESH_QUEUES), slots=1, until_s=30, cost_s=lambda *_: 0.125)
    order = [tier for tier, _, _ in run.tasks]
    for first in range(len(order) - 10):
        window = order[first : first + 11]
        assert [window.count(tier) for tier in TIER_NAMES] == [8, 2, 1]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(TIER_NAMES), st.integers(1, 8), st.floats(1, 30))
def test_a_tier_that_was_idle_gets_no_credit(idle: str, slots: int, idle_s: float) -> None:
    cost_s = {"realtime": 0.02, "batch": 0.05, "offline": 0.1}
    run = simulate(
        Picker(default_policy(), FRESH_QUEUES),
        slots=slots,
        until_s=idle_s + 6,
        cost_s=lambda tier, _: cost_s[tier],
        is_backlogged=lambda tier, now_s: tier != idle or not 1 <= now_s < 1 + idle_s,
    )
    for to_s in (1.0, 2.0, 4.0):
        slot_s = run.slot_s(1 + idle_s, 1 + idle_s + to_s)
        assert slot_s[idle] <= SHARES[idle] * slots * to_s + 0.1 * (slots + 2)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([("batch",), ("offline",), ("batch", "offline")]), st.floats(0.5, 3), st.floats(10, 60))
def test_a_new_kind_that_runs_60_times_longer_never_takes_all_8_slots(
    changed: tuple[str, ...], from_s: float, factor: float
) -> None:
    run = simulate(
        Picker(default_policy(), FRESH_QUEUES),
        slots=8,
        until_s=12,
        cost_s=lambda tier, now_s: 0.02 * (factor if tier in changed and now_s >= from_s else 1),
        predicted_s=lambda *_: 0.02,
    )
    assert run.most_at_once(("batch", "offline")) <= 5
    starts = [start_s for tier, start_s, _ in run.tasks if tier == "realtime"]
    assert max(later - earlier for earlier, later in pairwise(starts)) <= 0.05


@pytest.mark.parametrize("tier", ["batch", "offline"])
def test_without_any_history_a_long_kind_does_not_take_all_slots(tier: str) -> None:
    run = simulate(
        Picker(default_policy(), FRESH_QUEUES),
        slots=8,
        until_s=40,
        cost_s=lambda name, _: 6.0 if name == tier else 0.1,
        predicted_s=lambda *_: 0.1,
    )
    assert run.most_at_once((tier,)) <= 4


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4))
def test_a_reserve_moves_when_realtime_runs_and_not_how_much(reserve: int) -> None:
    cost_s = {"realtime": 0.02, "batch": 0.3, "offline": 0.4}
    run = simulate(
        Picker(default_policy(), FRESH_QUEUES),
        slots=8,
        reserve=reserve,
        until_s=80,
        cost_s=lambda tier, _: cost_s[tier],
    )
    slot_s = run.slot_s(0, 80)
    for tier, share in SHARES.items():
        assert slot_s[tier] / sum(slot_s.values()) == pytest.approx(share, abs=0.02)
    assert run.most_at_once(("batch", "offline")) <= 8 - reserve


def test_a_floor_is_of_slot_seconds() -> None:
    weights = {"realtime": (100, 0.0), "batch": (2, 0.0), "offline": (1, 0.05)}
    policy = Policy(tuple(Tier(name, weight=weight, bound=1, floor=floor) for name, (weight, floor) in weights.items()))
    cost_s = {"realtime": 0.01, "batch": 0.02, "offline": 0.2}
    run = simulate(Picker(policy, FRESH_QUEUES), slots=4, until_s=100, cost_s=lambda tier, _: cost_s[tier])
    for first in range(0, 80, 10):
        slot_s = run.slot_s(first, first + 20)
        assert slot_s["offline"] >= 0.05 * sum(slot_s.values())
