from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_routing.aging import (
    Head,
    Line,
    Rise,
    Step,
    decide,
    give_up_after_s,
    has_unlisted,
    may_have_lost,
    rises,
    room,
    shares,
)
from inference_routing.policy import default_policy

WEEK_S = 7 * 86400.0


def step(head: Head, now_s: float = 10_000.0, after_s: float | None = 1800.0) -> Step:
    return decide(head, now_s=now_s, after_s=after_s, give_up_after_s=WEEK_S).step


def test_each_tier_rises_into_the_one_above_it_and_the_highest_into_none() -> None:
    assert rises(default_policy()) == (Rise("batch", "realtime", 1800.0), Rise("offline", "batch", 1800.0))


def test_a_tier_without_an_age_limit_does_not_rise() -> None:
    policy = default_policy()
    realtime, batch, offline = policy.tiers
    policy = replace(policy, tiers=(replace(realtime, ages_after_s=5.0), replace(batch, ages_after_s=None), offline))
    assert rises(policy) == (Rise("offline", "batch", 1800.0),)


def test_the_aged_lane_is_topped_up_and_not_flooded() -> None:
    assert [room(1000, ready) for ready in (0, 999, 1000, 5000)] == [1000, 1, 0, 0]


def test_those_who_have_waited_longest_get_the_places_whichever_their_lane() -> None:
    waiting = {"fresh": [1.0, 4.0, 5.0], "returned": [2.0, 3.0], "aged": []}
    assert shares(waiting, 3) == {"fresh": 1, "returned": 2}
    assert shares(waiting, 100) == {"fresh": 3, "returned": 2}
    assert shares(waiting, 0) == {}


@given(
    st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(0, 1e9)).map(sorted)),
    st.integers(0, 50),
)
def test_nobody_who_is_passed_over_has_waited_longer_than_one_who_moves(
    waiting: dict[str, list[float]], places: int
) -> None:
    taken = shares(waiting, places)
    moving = [since for queue, count in taken.items() for since in waiting[queue][:count]]
    staying = [since for queue, line in waiting.items() for since in line[taken.get(queue, 0) :]]
    assert len(moving) == min(places, sum(map(len, waiting.values())))
    assert max(moving, default=0.0) <= min(staying, default=float("inf"))


def test_age_alone_decides_about_a_message_that_waits() -> None:
    assert step(Head(0, 0, 1.0, 8_200.0, "pending")) is Step.PROMOTE
    assert step(Head(0, 0, 1.0, 8_201.0, "pending")) is Step.STOP
    assert step(Head(0, 0, 1.0, 8_200.0, "retrying")) is Step.PROMOTE
    assert step(Head(0, 0, 1.0, 1.0, "pending"), after_s=None) is Step.STOP


def test_a_message_whose_record_is_lost_speaks_for_itself() -> None:
    assert step(Head(0, 0, 1.0, 1.0)) is Step.PROMOTE
    assert step(Head(0, 0, None, None)) is Step.STOP


def test_a_message_that_a_copy_has_replaced_is_discarded_whatever_its_task_does() -> None:
    for state in ("pending", "processing", "failed", "success"):
        assert step(Head(0, 1, 1.0, 1.0, state, 0, 2)) is Step.DISCARD
        assert step(Head(0, 7, 1.0, 1.0, state, 1, 0)) is Step.DISCARD


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("success", Step.DISCARD),
        ("cancelled", Step.DISCARD),
        ("expired", Step.DISCARD),
        ("dropped", Step.DISCARD),
        ("failed", Step.STOP),
        ("processing", Step.STOP),
        ("waiting", Step.STOP),
    ],
)
def test_a_task_that_does_not_wait_is_not_promoted(state: str, expected: Step) -> None:
    assert step(Head(0, 0, 1.0, 1.0, state)) is expected


def test_a_later_life_than_the_record_knows_of_is_believed() -> None:
    assert step(Head(1, 0, 1.0, 1.0, "failed", 0, 3)) is Step.PROMOTE


def test_what_has_waited_as_long_as_records_live_goes_to_the_dead_letters_in_any_tier() -> None:
    old = Head(0, 0, 1.0, 999_000.0, "pending")
    assert step(old, now_s=1 + WEEK_S) is Step.GIVE_UP
    assert step(old, now_s=1 + WEEK_S, after_s=None) is Step.GIVE_UP
    assert 0.9 * WEEK_S < give_up_after_s(WEEK_S) < WEEK_S


def test_more_messages_than_listed_tasks_mean_a_lost_index_and_fewer_mean_lost_messages() -> None:
    assert [has_unlisted(Line(5, ready, 1.0)) for ready in (4, 5, 6)] == [False, False, True]
    assert [may_have_lost(Line(5, ready, 1.0), now_s=601.0, after_s=600.0) for ready in (4, 5, 6)] == [
        True, False, False
    ]  # fmt: skip
    assert not may_have_lost(Line(5, 4, 2.0), now_s=601.0, after_s=600.0)
    assert not may_have_lost(Line(0, 0, None), now_s=601.0, after_s=600.0)
