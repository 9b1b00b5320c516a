"""Starts are divided exactly, in every window."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_routing.lane import QueueKey
from inference_routing.picker import Pick, Picker
from inference_routing.policy import Policy
from inference_routing.tier import TIER_NAMES, Tier
from tests.properties.worker_simulation import FRESH_QUEUES, QUEUES, counting_policy, start_order

WEIGHTS = {"realtime": 8, "batch": 2, "offline": 1}
ACTIONS = st.lists(st.tuples(st.sampled_from(["pick", "empty", "refund", "start", "finish"]), st.integers(0, 30)))


def scramble(picker: Picker, actions: Sequence[tuple[str, int]]) -> list[Pick]:
    """Drive the picker into some state that a worker could reach; return the picks that are still open."""
    open_picks: list[Pick] = []
    for now, (action, choice) in enumerate(actions):
        if action == "pick":
            among = [key for place, key in enumerate(QUEUES) if choice >> (place % 5) & 1] or list(QUEUES)
            pick = picker.pick(float(now), among)
            assert pick is not None
            open_picks.append(pick)
        elif open_picks:
            pick = open_picks[choice % len(open_picks)]
            if action == "start":
                picker.started(pick, float(now))
                continue
            open_picks.remove(pick)
            match action:
                case "empty":
                    picker.found_empty(pick)
                case "refund":
                    picker.refund(pick)
                case "finish":
                    picker.finished(pick, choice / 10)
    return open_picks


def settle(picker: Picker) -> None:
    """Start until what tiers and lanes were owed is paid: picks from part of the queues leave some ahead of others."""
    start_order(picker, 2000, QUEUES)


def windows(order: Sequence[str], length: int) -> list[Counter[str]]:
    return [Counter(order[first : first + length]) for first in range(len(order) - length + 1)]


@given(ACTIONS)
def test_every_window_of_11_starts_holds_8_2_1_whatever_happened_before(actions: list[tuple[str, int]]) -> None:
    picker = Picker(counting_policy(), QUEUES)
    scramble(picker, actions)
    settle(picker)
    order = [key.tier for key in start_order(picker, 60, QUEUES)]
    assert all(window == WEIGHTS for window in windows(order, 11))


@given(st.lists(st.integers(0, 15), min_size=60, max_size=60), st.integers(1, 16))
def test_every_window_of_11_holds_8_2_1_with_several_picks_open(choices: list[int], most_open: int) -> None:
    picker = Picker(counting_policy(), QUEUES)
    open_picks: list[Pick] = []
    order = []
    for now, choice in enumerate(choices):
        pick = picker.pick(float(now), QUEUES)
        assert pick is not None
        order.append(pick.key.tier)
        open_picks.append(pick)
        if choice % 3:
            picker.predicted(open_picks[choice % len(open_picks)], choice)
            picker.started(open_picks[choice % len(open_picks)], now)
        while len(open_picks) >= most_open:
            picker.finished(open_picks.pop(choice % len(open_picks)), float(choice))
    assert all(window == WEIGHTS for window in windows(order, 11))


@given(st.lists(st.sampled_from(["start", "start", "start", "refund", "empty"]), min_size=120, max_size=120))
def test_every_window_of_11_holds_8_2_1_between_picks_that_came_to_nothing(fates: list[str]) -> None:
    picker = Picker(counting_policy(), QUEUES)
    empty_lanes: set[QueueKey] = set()
    order = []
    for fate in fates:
        among = tuple(key for key in QUEUES if key not in empty_lanes)
        pick = picker.pick(0.0, among)
        assert pick is not None
        if fate == "start":
            picker.finished(pick, 1.0)
            order.append(pick.key.tier)
            empty_lanes.clear()
        elif fate == "empty" and pick.key.lane != "fresh":
            picker.found_empty(pick)
            empty_lanes.add(pick.key)
        else:
            picker.refund(pick)
    assert all(window == WEIGHTS for window in windows(order, 11))


@given(st.lists(st.sampled_from(["start", "start", "refund"]), min_size=80, max_size=80), st.integers(2, 8))
def test_refunds_that_come_late_shift_a_window_by_no_more_than_they_were_late(fates: list[str], depth: int) -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    asked: list[Pick] = []
    started: list[tuple[int, str]] = []
    for fate in [*fates, *["start"] * depth]:
        while len(asked) < depth:
            pick = picker.pick(0.0, FRESH_QUEUES)
            assert pick is not None
            asked.append(pick)
        pick = asked.pop(0)
        if fate == "start":
            picker.finished(pick, 1.0)
            started.append((pick.id, pick.key.tier))
        else:
            picker.refund(pick)
    order = [tier for _, tier in sorted(started)]
    for window in windows(order, 11):
        for tier in TIER_NAMES:
            assert abs(window[tier] - WEIGHTS[tier]) <= 2 * (depth - 1)


@given(st.integers(1, 10_000))
def test_charged_shares_are_the_weights_after_every_11_starts(rounds: int) -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    start_order(picker, 11 * (rounds % 40 + 1))
    assert picker.shares() == {"realtime": 8 / 11, "batch": 2 / 11, "offline": 1 / 11}


def tiers(weights: tuple[float, float, float], floors: tuple[float, float, float]) -> tuple[Tier, ...]:
    return tuple(
        Tier(name, weight=weight, bound=10, floor=floor)
        for name, weight, floor in zip(TIER_NAMES, weights, floors, strict=True)
    )


def test_a_floor_of_5_percent_gives_offline_5_of_every_100_starts_beside_100_to_2() -> None:
    picker = Picker(Policy(tiers((100, 2, 1), (0, 0, 0.05)), share="count"), FRESH_QUEUES)
    order = [key.tier for key in start_order(picker, 3000)]
    assert min(window["offline"] for window in windows(order, 100)) >= 5
    assert min(window["realtime"] for window in windows(order, 100)) >= 90


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 200)] * 3),
    st.tuples(*[st.integers(0, 30)] * 3),
    st.sampled_from(TIER_NAMES),
    st.integers(0, 50),
)
def test_floors_hold_in_every_window_of_100(
    weights: tuple[int, int, int], percents: tuple[int, int, int], idle: str, starts_meanwhile: int
) -> None:
    floors = tuple(percent / 100 for percent in percents)
    assert len(floors) == 3
    picker = Picker(Policy(tiers(weights, floors), share="count"), QUEUES)
    start_order(picker, 10, QUEUES)
    for key in QUEUES:
        if key.tier == idle:
            picker.mark_empty(key)
    start_order(picker, starts_meanwhile, [key for key in QUEUES if key.tier != idle])
    order = [key.tier for key in start_order(picker, 400, QUEUES)]
    for window in windows(order, 100):
        assert all(window[tier] >= percent for tier, percent in zip(TIER_NAMES, percents, strict=True))


@given(ACTIONS)
def test_lanes_of_a_tier_share_4_4_1(actions: list[tuple[str, int]]) -> None:
    picker = Picker(counting_policy(), QUEUES)
    scramble(picker, actions)
    settle(picker)
    order = [key.lane for key in start_order(picker, 400, QUEUES) if key.tier == "realtime"]
    assert all(window == {"fresh": 4, "returned": 4, "aged": 1} for window in windows(order, 9))


def test_the_share_of_an_empty_lane_is_lent_to_the_others() -> None:
    picker = Picker(counting_policy(), QUEUES)
    start_order(picker, 50, QUEUES)
    served = tuple(key for key in QUEUES if key.lane != "returned")
    for key in QUEUES:
        if key.lane == "returned":
            picker.mark_empty(key)
    order = start_order(picker, 300, served)
    lanes = [key.lane for key in order if key.tier == "realtime"]
    assert all(window == {"fresh": 4, "aged": 1} for window in windows(lanes, 5))
    assert all(window == WEIGHTS for window in windows([key.tier for key in order], 11))


def test_the_share_of_an_empty_tier_is_lent_to_the_others() -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    order = start_order(picker, 60, [key for key in FRESH_QUEUES if key.tier != "batch"])
    assert all(window == {"realtime": 8, "offline": 1} for window in windows([key.tier for key in order], 9))


@given(st.integers(1, 500), st.sampled_from(TIER_NAMES))
def test_a_tier_that_was_idle_gets_no_credit(starts_meanwhile: int, idle: str) -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    start_order(picker, 7)
    picker.mark_empty(next(key for key in FRESH_QUEUES if key.tier == idle))
    start_order(picker, starts_meanwhile, [key for key in FRESH_QUEUES if key.tier != idle])
    order = [key.tier for key in start_order(picker, 40)]
    # It goes first in a tie, which may put one start of its into a window that held its share already.
    assert order[:11].count(idle) <= WEIGHTS[idle] + 1
    assert all(window == WEIGHTS for window in windows(order[order.index(idle) + 1 :], 11))


@given(st.integers(0, 63))
def test_queues_of_one_lane_take_turns(starts: int) -> None:
    tenants = [QueueKey("realtime", "fresh", f"tenant.{number}") for number in range(64)]
    picker = Picker(counting_policy(), [*QUEUES, *tenants])
    start_order(picker, starts, tenants)
    order = start_order(picker, 256, tenants)
    assert all(set(window.values()) == {1} for window in windows([key.name for key in order], 64))
