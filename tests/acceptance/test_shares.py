"""The shares of the tiers on real workers: exact while all tiers have a backlog, on every pool and type of queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_tasks import InferenceApp
from tests.support.history import History
from tests.support.rig import POOLS, Rig, task

WEIGHTS = {"realtime": 8, "batch": 2, "offline": 1}
ROUND = sum(WEIGHTS.values())
ROUNDS = 12


@pytest.fixture
def rig(
    amqp_url: str, redis_url: str, namespace: str, history: History, tmp_path: Path, queue_type: str
) -> Iterator[Rig]:
    options = {
        "broker": {"url": amqp_url, "queue_type": queue_type},
        "state": {"url": redis_url},
        "namespace": namespace,
    }
    made = Rig(options, history, tmp_path, is_exact=queue_type != "quorum")
    yield made
    made.close()


def fill(app: InferenceApp, rounds: int, nap_s: float = 0.0) -> None:
    """A backlog of so many rounds in each tier, the lowest submitted first."""
    for tier, weight in reversed(WEIGHTS.items()):
        report = task(app, f"step.{tier}").submit_many([(number, nap_s) for number in range(weight * rounds)])
        assert len(report.accepted) == weight * rounds


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize(
    ("pool", "slots"), [("prefork", 1), ("prefork", 4), ("threads", 1), ("threads", 4), ("solo", 1)]
)
def test_by_count_every_window_of_eleven_starts_is_eight_two_one(rig: Rig, pool: str, slots: int) -> None:
    app = rig.app()
    fill(app, ROUNDS + 6, nap_s=0.005)
    with rig.worker(*POOLS[pool], "--concurrency", str(slots), worker={"share": "count"}):
        rig.history.wait_for("end", count=ROUND * (ROUNDS + 6))
    tiers = rig.history.values("taken", "tier")[: ROUND * ROUNDS]
    for begin in range(len(tiers) - ROUND + 1):
        assert Counter(tiers[begin : begin + ROUND]) == WEIGHTS, begin


def test_by_count_lengths_change_nothing(rig: Rig) -> None:
    app = rig.app()
    for tier, nap_s in (("offline", 0.1), ("batch", 0.015), ("realtime", 0.005)):
        task(app, f"step.{tier}").submit_many([(number, nap_s) for number in range(WEIGHTS[tier] * 18)])
    with rig.worker("--pool", "threads", "--concurrency", "4", worker={"share": "count"}):
        rig.history.wait_for("end", count=ROUND * 18)
    tiers = rig.history.values("taken", "tier")[: ROUND * 12]
    for begin in range(len(tiers) - ROUND + 1):
        assert Counter(tiers[begin : begin + ROUND]) == WEIGHTS, begin


@pytest.mark.serial
def test_by_time_slot_seconds_are_shared_though_the_lengths_differ(rig: Rig) -> None:
    app = rig.app()
    for tier, nap_s, count in (("offline", 0.1, 40), ("batch", 0.02, 200), ("realtime", 0.005, 1000)):
        task(app, f"step.{tier}").submit_many([(number, nap_s) for number in range(count)])
    with rig.worker("--pool", "threads", "--concurrency", "2"):
        rig.history.wait_until(lambda history: len(history.of("freed")) >= 700)
    slot_s: Counter[object] = Counter()
    for entry in rig.history.of("freed")[50:700]:
        slot_s[entry["tier"]] += entry["cost_s"]  # type: ignore[assignment, operator]
    total_s = sum(slot_s.values())
    for tier, weight in WEIGHTS.items():
        assert slot_s[tier] / total_s == pytest.approx(weight / ROUND, abs=0.05), slot_s


def test_the_share_of_an_empty_tier_is_lent_and_comes_back(rig: Rig) -> None:
    app = rig.app()
    task(app, "step.offline").submit_many([(number, 0.01) for number in range(60)])
    with rig.worker(worker={"share": "count"}):
        # Alone, offline has everything.
        rig.history.wait_for("end", count=15)
        task(app, "step.realtime").submit_many([(number, 0.01) for number in range(40)])
        rig.history.wait_for("end", count=100)
    tiers = rig.history.values("taken", "tier")
    began = tiers.index("realtime")
    assert set(tiers[:began]) == {"offline"}
    # Idleness has earned realtime no credit, and cost it none: eight to one from its first start on.
    for begin in range(began, began + 27):
        assert Counter(tiers[begin : begin + 9]) == {"realtime": 8, "offline": 1}, begin


def test_two_workers_share_alike_each_for_itself(rig: Rig) -> None:
    app = rig.app()
    fill(app, 24, nap_s=0.01)
    workers = [rig.worker(name=name, worker={"share": "count"}) for name in ("one", "two")]
    with workers[0], workers[1]:
        rig.history.wait_for("end", count=ROUND * 24)
    takers = {entry.pid for entry in rig.history.of("taken")}
    assert len(takers) == 2
    backlogged = rig.history.of("taken")[: ROUND * 16]
    for pid in takers:
        tiers = [entry["tier"] for entry in backlogged if entry.pid == pid]
        for begin in range(len(tiers) - ROUND + 1):
            assert Counter(tiers[begin : begin + ROUND]) == WEIGHTS, begin


@pytest.fixture
def queue_type() -> str:
    return "quorum"
