"""What the dispatcher does with messages whose claim says that they must not start."""

from __future__ import annotations

import pytest

from inference_tasks.state.records import Verdict
from tests.support.dispatcher_bench import TIERS, Bench


@pytest.mark.parametrize("verdict", [Verdict.FINISHED, Verdict.CANCELLED, Verdict.EXPIRED, Verdict.SUPERSEDED])
def test_what_need_not_run_is_acknowledged_and_costs_no_share(verdict: Verdict) -> None:
    bench = Bench(1)
    bench.store.verdicts = {f"realtime-{n}": verdict for n in range(1, 201)}
    bench.broker.fill("realtime", 200)
    for tier in TIERS:
        bench.broker.fill(tier, 100)
    bench.settle()
    while bench.broker.queues["realtime"]:
        bench.run(0.5)
    assert bench.starts.count("realtime") == 100
    assert bench.starts.count("batch") <= 26


def test_discards_are_fetched_many_at_a_time() -> None:
    bench = Bench(1)
    bench.store.verdicts = {f"offline-{n}": Verdict.EXPIRED for n in range(1, 301)}
    bench.broker.fill("offline", 301)
    bench.settle()
    assert bench.starts == ["offline"]


def test_a_message_with_a_live_claim_goes_back_after_a_second_not_at_once() -> None:
    bench = Bench(1)
    bench.store.verdicts = {"batch-1": Verdict.HELD}
    bench.broker.fill("batch", 1)
    bench.settle()
    bench.dispatcher.tick()
    assert not bench.broker.queues["batch"]
    bench.now += 1.01
    bench.dispatcher.tick()
    assert [message.returned for message in bench.broker.queues["batch"]] == [1]


def test_where_the_broker_keeps_delays_a_message_with_a_live_claim_is_parked() -> None:
    bench = Bench(1)
    bench.parks = True
    bench.store.verdicts = {"batch-1": Verdict.HELD}
    bench.broker.fill("batch", 2)
    bench.settle()
    bench.now += 5
    bench.dispatcher.tick()
    assert bench.parked == ["batch-1"]
    assert bench.starts == ["batch"]
    assert not bench.broker.queues["batch"]


def test_a_failed_task_whose_message_is_no_dead_letter_is_buried_and_costs_no_share() -> None:
    bench = Bench(1)
    bench.store.verdicts = {"batch-1": Verdict.UNBURIED}
    bench.broker.fill("batch", 2)
    bench.settle()
    assert (bench.unburials, bench.starts) == (["batch-1"], ["batch"])
