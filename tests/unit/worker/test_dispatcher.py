"""The dispatcher in memory: late binding, shares, looks, returns."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest

from inference_routing.policy import default_policy
from inference_tasks.worker.demand import MISSING_S
from inference_tasks.worker.dispatcher import ANSWER_S
from inference_tasks.worker.floors import FloorWatch
from tests.support.dispatcher_bench import TIERS, Bench, Message, backlogged


@pytest.mark.parametrize("slots", [1, 4, 8])
@pytest.mark.parametrize("hold_s", [0.0, 0.02])
@pytest.mark.parametrize("length_s", [0.001, 0.5])
def test_backlogged_tiers_start_8_2_1_in_every_window_of_11(slots: int, hold_s: float, length_s: float) -> None:
    bench = backlogged(Bench(slots, hold_s=hold_s))
    while len(bench.starts) < 220:
        bench.run(length_s)
    for at in range(len(bench.starts) - 11):
        assert Counter(bench.starts[at : at + 11]) == {"realtime": 8, "batch": 2, "offline": 1}, at


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("share", ["count", "time"])
def test_the_floor_is_met_in_every_window_that_is_watched(slots: int, share: Literal["time", "count"]) -> None:
    told: Counter[bool] = Counter()

    def tell(tier: str, /, *, is_met: bool) -> None:
        told[is_met] += tier == "offline"

    floors = {tier.name: float(tier.floor) for tier in default_policy().tiers}
    bench = Bench(slots, hold_s=0.02, share=share, floors=FloorWatch(floors, by_time=share == "time", tell=tell))
    for tier in TIERS:
        bench.broker.fill(tier, 3000)
    bench.settle()
    for number in range(2000):
        bench.run(0.2 if number % 7 else 1.0)
    assert told[False] == 0
    assert told[True] >= 2


@pytest.mark.parametrize("slots", [1, 4])
def test_no_message_waits_inside_the_worker_while_tasks_are_long(slots: int) -> None:
    bench = backlogged(Bench(slots, hold_s=0.02))
    for _ in range(40):
        bench.run(0.5)
        bench.now += 0.021
        bench.dispatcher.tick()
        assert bench.inside == 0
        assert len(bench.dispatcher.slots) == slots


def test_short_tasks_find_the_next_ones_at_hand() -> None:
    bench = backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    assert 5 <= bench.inside <= 64


def test_what_has_waited_longer_than_hold_goes_back_with_its_claim() -> None:
    bench = backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    held = bench.inside
    assert held > 0
    bench.now += 0.03
    bench.dispatcher.tick()
    assert bench.inside == 0
    assert len(bench.store.live) == len(bench.starts)
    assert sum(message.returned for queue in bench.broker.queues.values() for message in queue) >= held


@pytest.mark.parametrize(("stalled_s", "starts"), [(0.022, True), (0.05, False)])
def test_what_is_found_late_beside_a_free_slot_starts_if_it_is_late_by_less_than_a_task(
    stalled_s: float, starts: bool
) -> None:
    bench = backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.005)
    first = bench.dispatcher.claimed()[len(bench.dispatcher.slots)][0].id
    bench.now += stalled_s  # the loop was held up
    bench.dispatcher.free(bench.running.popleft(), bench.now)
    bench.dispatcher.pump()
    assert (first in {ticket.intake.id for ticket in bench.dispatcher.slots}) == starts
    if not starts:
        assert bench.inside == 0


def test_an_empty_queue_is_looked_at_and_nothing_is_taken_from_it_before_its_turn() -> None:
    bench = Bench(1)
    bench.broker.fill("batch", 30)
    bench.settle()
    bench.run(0.2)  # fresh queues are believed to hold something until they were asked once
    bench.broker.asks.clear()
    for _ in range(5):
        bench.run(0.2)
    assert bench.broker.asks == ["batch"] * 5
    assert bench.broker.looks.count("realtime") >= 5
    bench.broker.fill("realtime", 20)
    before = len(bench.starts)
    for _ in range(10):
        bench.run(0.2)
    assert bench.starts[before] == "realtime"
    assert Counter(bench.starts[before:]) == {"realtime": 8, "batch": 2}


def test_a_look_answered_by_the_end_of_its_channel_is_not_repeated_at_once() -> None:
    bench = Bench(1)
    bench.broker.fill("batch", 3)
    bench.settle()
    bench.now += 1.0
    bench.dispatcher.free(bench.running.popleft(), bench.now)
    bench.dispatcher.pump()
    assert "realtime" in bench.broker.looked
    bench.dispatcher.queue_lost("realtime")
    bench.broker.step()
    bench.broker.looks.clear()
    bench.settle()
    bench.run(MISSING_S / 2)
    assert "realtime" not in bench.broker.looks


def test_an_idle_worker_is_pushed_to_and_says_no_once_its_slots_are_full() -> None:
    bench = Bench(2)
    bench.settle()
    assert bench.broker.subscribed == set(TIERS)
    bench.now += 1
    bench.broker.fill("batch", 1)
    bench.settle()
    assert bench.starts == ["batch"]
    assert bench.broker.subscribed == set(TIERS)
    bench.now += 1
    bench.broker.fill("offline", 1)
    bench.settle()
    assert bench.starts == ["batch", "offline"]
    assert bench.broker.subscribed == set()


def test_a_push_that_comes_after_the_last_slot_was_taken_goes_back() -> None:
    bench = Bench(1)
    bench.settle()
    bench.now += 1
    bench.broker.fill("batch", 1)
    bench.settle()
    late: Any = Message("late", "offline")
    bench.dispatcher._on_push("offline", late)
    bench.settle()
    assert late.returned == 1
    assert bench.starts == ["batch"]


def test_lower_tiers_never_take_a_reserved_slot() -> None:
    bench = Bench(4, reserve=1)
    bench.broker.fill("batch", 50)
    bench.broker.fill("offline", 50)
    bench.settle()
    assert len(bench.dispatcher.slots) == 3
    assert bench.broker.subscribed == {"realtime"}
    bench.now += 1
    bench.broker.fill("realtime", 3)
    bench.settle()
    assert bench.starts.count("realtime") == 1
    for _ in range(8):
        bench.run(0.5)
        assert sum(not ticket.reserved for ticket in bench.dispatcher.slots) <= 3


def test_without_state_everything_goes_back_and_nothing_starts_until_it_is_there() -> None:
    bench = Bench(2)
    bench.store.away = True
    bench.broker.fill("batch", 5)
    bench.settle()
    assert bench.starts == []
    assert len(bench.broker.queues["batch"]) == 5
    assert not bench.broker.subscribed
    bench.store.away = False
    bench.dispatcher.state_lost = False
    bench.settle()
    assert bench.starts == ["batch", "batch"]


def test_an_unknown_task_is_buried_and_the_slot_goes_on() -> None:
    bench = Bench(1)
    bench.broker.fill("batch", 1, name="nobody knows")
    bench.broker.fill("batch", 1)
    bench.settle()
    assert [unfit.reason for unfit in bench.buried] == ["unknown task"]
    assert bench.starts == ["batch"]


def test_a_broker_that_does_not_answer_ends_the_connection() -> None:
    bench = Bench(1)
    bench.dispatcher.pump()
    bench.now += ANSWER_S + 1
    with pytest.raises(TimeoutError):
        bench.dispatcher.tick()


def test_close_returns_what_is_held_and_takes_nothing_new() -> None:
    bench = backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    bench.dispatcher.close()
    bench.broker.step()
    assert bench.inside == 0
    before = len(bench.starts)
    bench.run(0.001)
    assert len(bench.starts) == before


def test_a_lost_connection_keeps_what_runs_and_forgets_the_rest() -> None:
    bench = backlogged(Bench(2, hold_s=0.02))
    for _ in range(100):
        bench.run(0.001)
    bench.dispatcher.connection_lost()
    assert len(bench.dispatcher.slots) == 2
    assert {ticket.intake.id for ticket in bench.dispatcher.slots} <= set(bench.store.live)
    bench.broker.asked.clear()
    bench.dispatcher.attach(bench.broker)
    before = len(bench.starts)
    bench.run(0.001)
    assert len(bench.starts) > before


def test_a_missing_queue_is_left_alone_for_a_while() -> None:
    bench = Bench(1)
    bench.settle()
    bench.broker.subscribed.discard("batch")  # its channel is gone
    bench.dispatcher.queue_lost("batch")
    bench.settle()
    assert bench.broker.subscribed == {"realtime", "offline"}
    bench.now += MISSING_S + 0.1
    bench.dispatcher.tick()
    assert bench.broker.subscribed == set(TIERS)
