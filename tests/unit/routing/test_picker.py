from dataclasses import replace

import pytest

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey, reserved_queues
from inference_routing.picker import ALONE, LEAST_SERVED, ClosedPickError, Pick, Picker
from inference_routing.policy import default_policy
from tests.properties.worker_simulation import FRESH_QUEUES, QUEUES, counting_policy

REALTIME, BATCH, OFFLINE = FRESH_QUEUES


def picked(picker: Picker, among: tuple[QueueKey, ...] = FRESH_QUEUES, now_s: float = 0.0) -> Pick:
    pick = picker.pick(now_s, among)
    assert pick is not None
    return pick


def test_a_pick_says_queue_reason_and_number() -> None:
    picker = Picker(default_policy(), QUEUES)
    first, second = picked(picker), picked(picker, (BATCH,))
    assert (first.id, first.key, first.reason) == (1, REALTIME, LEAST_SERVED)
    assert (second.id, second.key, second.reason) == (2, BATCH, ALONE)
    assert "fetching" in repr(first)
    picker.started(first, 0.0)
    assert "running" in repr(first)
    picker.finished(first, 1.0)
    assert "closed" in repr(first)


def test_nothing_offered_gives_no_pick() -> None:
    assert Picker(default_policy(), QUEUES).pick(0.0, ()) is None


@pytest.mark.parametrize("share", ["time", "count"])
def test_a_pick_is_settled_once(share: str) -> None:
    picker = Picker(default_policy() if share == "time" else counting_policy(), QUEUES)
    for settle in (picker.refund, picker.found_empty, lambda pick: picker.finished(pick, 1.0)):
        pick = picked(picker)
        settle(pick)
        for again in (picker.refund, picker.found_empty, lambda pick: picker.finished(pick, 1.0)):
            with pytest.raises(ClosedPickError, match="closed"):
                again(pick)
        with pytest.raises(ClosedPickError):
            picker.started(pick, 0.0)
        with pytest.raises(ClosedPickError):
            picker.predicted(pick, 1.0)


def test_queues_that_the_picker_does_not_know_are_refused() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    stranger = QueueKey("batch", "returned", "test.batch.returned")
    with pytest.raises(ValueError, match=r"test\.batch\.returned"):
        picker.pick(0.0, (REALTIME, stranger))
    with pytest.raises(ValueError, match=r"test\.batch\.returned"):
        picker.mark_ready(stranger)


@pytest.mark.parametrize(
    "queues",
    [(), (REALTIME, REALTIME), (QueueKey("urgent", "fresh", "q"),), (QueueKey("batch", "slow", "q"),)],
)
def test_a_picker_needs_different_queues_of_known_tiers_and_lanes(queues: tuple[QueueKey, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Picker(default_policy(), queues)


def test_a_queue_found_empty_is_idle_until_it_is_marked_or_offered() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    pick = picked(picker)
    assert picker.is_ready(REALTIME)
    picker.found_empty(pick)
    assert not picker.is_ready(REALTIME)
    assert picked(picker, (BATCH, OFFLINE)).key == BATCH
    picker.mark_ready(REALTIME)
    assert picker.is_ready(REALTIME)
    picker.mark_empty(REALTIME)
    assert picked(picker).key == REALTIME
    assert picker.is_ready(REALTIME)


def test_a_queue_left_out_stays_backlogged_and_is_paid_later() -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    for _ in range(11):
        picker.finished(picked(picker), 1.0)
    for _ in range(16):
        picker.finished(picked(picker, (REALTIME,)), 1.0)
    assert [picked(picker).key.tier for _ in range(6)].count("realtime") == 0


def test_a_reserved_slot_is_never_given_aged_or_lower_work() -> None:
    picker = Picker(default_policy(), QUEUES)
    reserved = reserved_queues(QUEUES)
    lanes = {picked(picker, reserved).key.lane for _ in range(20)}
    assert lanes == {"fresh", "returned"}


def test_an_unknown_kind_is_charged_the_mean_of_its_tier_and_then_its_prediction() -> None:
    costs = CostModel()
    costs.observe("embed", "realtime", 3.0)
    costs.observe("embed", "batch", 1.0)
    picker = Picker(default_policy(), FRESH_QUEUES, costs)
    realtime, batch = picked(picker, (REALTIME,)), picked(picker, (BATCH,))
    assert picker.shares()["realtime"] == pytest.approx(0.75)
    picker.predicted(realtime, 1.0)
    assert picker.shares()["realtime"] == pytest.approx(0.5)
    picker.predicted(batch, 0.0)
    assert picker.shares()["realtime"] == pytest.approx(1.0, abs=1e-5)


def test_without_a_cost_model_the_tiers_mean_is_learnt_from_what_finished() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    picker.finished(picked(picker, (REALTIME,)), 9.0)
    picked(picker, (REALTIME,))
    picked(picker, (BATCH,))
    assert picker.shares()["batch"] == pytest.approx(0.1 / 18.1)


def test_a_running_task_is_charged_the_greater_of_predicted_and_elapsed_at_every_pick() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    realtime, batch = picked(picker, (REALTIME,)), picked(picker, (BATCH,))
    for pick in (realtime, batch):
        picker.predicted(pick, 10.0)
        picker.started(pick, 100.0)
    picker.refund(picked(picker, (OFFLINE,), now_s=105.0))
    assert picker.shares()["realtime"] == pytest.approx(0.5)
    picker.finished(batch, 2.0)
    picker.refund(picked(picker, (OFFLINE,), now_s=138.0))
    assert picker.shares() == pytest.approx({"realtime": 0.95, "batch": 0.05, "offline": 0.0})
    picker.finished(realtime, 38.0)
    assert picker.shares()["realtime"] == pytest.approx(0.95)


def test_a_prediction_after_the_start_changes_nothing() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    pick, other = picked(picker, (REALTIME,)), picked(picker, (BATCH,))
    picker.started(pick, 0.0)
    picker.started(pick, 50.0)
    picker.predicted(pick, 500.0)
    assert picker.shares()["realtime"] == pytest.approx(0.5)
    picker.refund(other)


def test_under_count_costs_change_nothing() -> None:
    picker = Picker(counting_policy(), FRESH_QUEUES)
    for cost_s in (0.0, 1000.0):
        pick = picked(picker, (REALTIME,))
        picker.predicted(pick, cost_s)
        picker.started(pick, 0.0)
        picker.finished(pick, cost_s)
        picked(picker, (BATCH,), now_s=1e6)
    assert picker.shares() == {"realtime": 0.5, "batch": 0.5, "offline": 0.0}


def test_tasks_that_measure_no_time_do_not_keep_the_turn() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    tiers = []
    for _ in range(11_000):
        pick = picked(picker)
        picker.predicted(pick, 0.0)
        picker.finished(pick, 0.0)
        tiers.append(pick.key.tier)
    assert set(tiers) == {"realtime", "batch", "offline"}


def test_nothing_charged_gives_shares_of_zero() -> None:
    picker = Picker(default_policy(), FRESH_QUEUES)
    assert picker.shares() == {"realtime": 0.0, "batch": 0.0, "offline": 0.0}


def test_a_worker_of_one_tier_has_only_that_share() -> None:
    picker = Picker(default_policy(), reserved_queues(QUEUES))
    picker.finished(picked(picker, reserved_queues(QUEUES)), 1.0)
    assert picker.shares() == {"realtime": 1.0}


def test_lists_that_change_between_picks_are_read_each_time() -> None:
    picker = Picker(replace(default_policy(), share="count"), FRESH_QUEUES)
    among = [REALTIME, BATCH]
    assert picker.pick(0.0, among) is not None
    among.remove(REALTIME)
    pick = picker.pick(0.0, among)
    assert pick is not None
    assert pick.key == BATCH
