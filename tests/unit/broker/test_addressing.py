"""Where a task message goes, decided from what was asked and what came before."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from inference_tasks.broker.addressing import TierDoor, TierRequest, address, delay_address, first_headers, is_delayed
from inference_tasks.broker.publisher import Publisher
from inference_tasks.errors import LONGEST_DELAY_S, CallerError, UnknownTierError

QUEUES = {
    (tier, lane): f"n.{tier}" if lane == "fresh" else f"n.{tier}.{lane}"
    for tier in ("realtime", "batch", "offline")
    for lane in ("fresh", "returned", "aged")
}
DOOR = TierDoor(
    publisher=Publisher("amqp://localhost//"),
    exchange="n",
    queue_by_lane=QUEUES,
    bounds={"batch": 10},
    delay_prefix="n",
)
APP = Celery("addressing")
HEADERS = {"id": "id-1", "task": "classify"}
PRIOR = {
    "v": 1,
    "tier": "offline",
    "tier_first": "batch",
    "asked": "offline",
    "lane": "fresh",
    "gen": 2,
    "submitted_at_s": 100.0,
    "expires_at_s": 900.0,
    "crash_limit": 7,
}


def test_a_first_submit_goes_to_the_fresh_lane_it_was_routed_to() -> None:
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS, TierRequest(timeout_s=5, crash_limit=4))
    assert (found.exchange, found.routing_key, found.tier) == ("n", "n.batch", "batch")
    assert found.header["expires_at_s"] == pytest.approx(time.time() + 5, abs=1)
    assert found.header["crash_limit"] == 4
    assert found.header["asked"] is None
    assert (found.task.id, found.task.name, found.task.lane, found.task.worker_published) == (
        "id-1",
        "classify",
        "fresh",
        False,
    )


def test_the_tier_asked_for_at_the_call_comes_first_and_is_remembered() -> None:
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"inference": PRIOR}, TierRequest(tier="P0"))
    assert (found.tier, found.header["asked"]) == ("realtime", "realtime")


def test_an_unknown_tier_is_named() -> None:
    with pytest.raises(UnknownTierError):
        address(APP, DOOR, ("batch", "fresh"), HEADERS, TierRequest(tier="bacth"))


def test_what_is_published_again_keeps_all_that_its_first_message_said_and_returns() -> None:
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"inference": PRIOR}, TierRequest(timeout_s=5))
    assert found.header == PRIOR | {"lane": "returned", "hop": 1}
    assert found.routing_key == "n.offline.returned"
    assert (found.task.generation, found.task.tier_first, found.task.hop) == (2, "batch", 1)


def test_each_message_of_a_task_has_a_hop_more_than_the_one_before() -> None:
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS, TierRequest())
    for hop in range(4):
        assert (found.header["hop"], found.task.hop) == (hop, hop)
        found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"inference": found.header}, TierRequest())


def test_what_takes_the_place_of_the_running_task_has_its_own_tier_in_the_same_life() -> None:
    running = SimpleNamespace(request=SimpleNamespace(id="id-1", headers={"inference": PRIOR}, is_eager=False))
    app = cast(Any, SimpleNamespace(current_worker_task=running))
    found = address(app, DOOR, ("realtime", "returned"), HEADERS, TierRequest(tier="realtime", timeout_s=5))
    assert (found.tier, found.header["gen"], found.header["hop"], found.header["expires_at_s"]) == (
        "realtime",
        2,
        1,
        900,
    )


def test_a_copy_carries_nothing_that_one_delivery_wrote() -> None:
    kept = {"id": "1", "inference": {}, "x-of-the-user": 1}
    deaths = {"x-death": [], "x-first-death-queue": "q", "x-last-death-reason": "expired", "x-delivery-count": 3}
    assert first_headers(kept | deaths | {"inference_token": 5, "inference_gen": 0}) == kept


def test_promoted_work_that_comes_back_stays_among_the_promoted() -> None:
    prior = PRIOR | {"lane": "aged"}
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"inference": prior}, TierRequest())
    assert found.routing_key == "n.offline.aged"


def test_a_worker_process_publishes_admitted_work() -> None:
    found = address(APP, DOOR, ("realtime", "fresh"), HEADERS, TierRequest(by_worker=True))
    assert found.routing_key == "n.realtime.returned"
    assert found.task.worker_published


@given(st.floats(0.001, 100_000))
def test_a_delay_is_whole_seconds_rounded_up(wait_s: float) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=wait_s)
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"eta": eta.isoformat()}, TierRequest())
    bits = found.routing_key.split(".")[:28]
    delay_s = int("".join(bits), 2)
    assert wait_s - 1 < delay_s <= wait_s + 1
    assert found.header["lane"] == "returned"
    assert DOOR.lane_of(found.routing_key) == ("batch", "returned")
    assert is_delayed(found.routing_key)
    assert found.task.due_at_s == pytest.approx(time.time() + delay_s, abs=5)


def test_a_moment_that_is_past_is_no_delay() -> None:
    found = address(APP, DOOR, ("batch", "fresh"), HEADERS | {"eta": "2020-01-01T00:00:00+00:00"}, TierRequest())
    assert found.routing_key == "n.batch"


@given(st.integers(1, LONGEST_DELAY_S))
def test_a_delay_enters_at_its_highest_bit(delay_s: int) -> None:
    exchange, key = delay_address("n", "n.batch.returned", delay_s)
    assert exchange == f"n_celery_delayed_{delay_s.bit_length() - 1}"
    assert int("".join(key.split(".")[:28]), 2) == delay_s
    assert key.split(".", 28)[28] == "n.batch.returned"


def test_a_delay_of_more_than_eight_years_is_refused() -> None:
    with pytest.raises(CallerError):
        delay_address("n", "n.batch.returned", LONGEST_DELAY_S + 1)


def test_other_routing_keys_lead_to_no_tier() -> None:
    assert DOOR.lane_of("mine") is None
    assert DOOR.lane_of("n.batch") == ("batch", "fresh")
