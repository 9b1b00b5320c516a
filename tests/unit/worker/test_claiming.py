"""Claims: what a worker may start, and what it may take back after an answer was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey
from inference_routing.picker import Picker
from inference_routing.policy import default_policy
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.records import Claim, Claimant, Verdict
from inference_tasks.worker.claiming import Claiming
from inference_tasks.worker.demand import Demand
from inference_tasks.worker.slots import Slots
from tests.support.dispatcher_bench import Broker, Message

KEYS = [QueueKey(tier, "fresh", tier) for tier in ("realtime", "batch", "offline")]


class Store:
    """A store that holds one claim, in the name of `holder`; `away` for the calls named in it."""

    def __init__(self) -> None:
        self.holder: str | None = None
        self.away: set[str] = set()
        self.released: list[tuple[str, int]] = []

    def claim(self, claimants: Sequence[Claimant], worker: str, lease_s: float) -> list[Claim]:
        held_before = self.holder
        self.holder = self.holder or worker
        if "claim" in self.away:
            raise StateUnavailableError("no answer")
        verdict = Verdict.HELD if held_before else Verdict.RUN
        return [Claim(verdict, 5, 1, None, one.tier, None, self.holder) for one in claimants]

    def release(self, claims: Sequence[tuple[str, int]]) -> int:
        if "release" in self.away:
            raise StateUnavailableError("no answer")
        self.released += claims
        self.holder = None
        return len(claims)


class Ends:
    """Messages that meet a claim wait in the worker."""

    def met_claim(self, *_: object) -> bool:
        return False

    def too_early(self, *_: object) -> bool:
        return False


class Bench:
    def __init__(self) -> None:
        self.store, self.broker, self.now = Store(), Broker(), 100.0
        costs = CostModel()
        self.picker = Picker(default_policy(), KEYS, costs)
        demand = Demand(cast(Any, self.broker), self.picker, Slots(lambda: 1), KEYS, hold_s=0, clock=lambda: self.now)
        self.claiming = Claiming(
            cast(Any, self.store),
            picker=self.picker,
            costs=costs,
            demand=demand,
            tasks={"noop"},
            ends=cast(Any, Ends()),
            worker="w1",
            lease_s=30,
            run_unclaimed=False,
            is_inside=lambda task_id: False,
            adopt=lambda intake, token, message: False,
        )

    def admit(self) -> list[Any]:
        pick = self.picker.pick(self.now, KEYS[1:2])
        assert pick is not None
        return self.claiming.admit([(cast(Any, Message("a", "batch")), pick)], self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_free_task_may_start_with_its_token(bench: Bench) -> None:
    (held,) = bench.admit()
    assert (held.token, held.attempts) == (5, 1)


@pytest.mark.parametrize("holder", ["w1", "w2"])
def test_a_claim_of_another_process_is_left_alone_whatever_its_name(bench: Bench, holder: str) -> None:
    bench.store.holder = holder
    assert bench.admit() == []
    assert bench.store.released == []


def test_a_claim_whose_answer_was_lost_is_taken_back(bench: Bench) -> None:
    bench.store.away = {"claim"}
    with pytest.raises(StateUnavailableError):
        bench.admit()
    bench.store.away = set()
    assert bench.admit() == []
    assert bench.store.released == [("a", 5)]
    assert len(bench.admit()) == 1


def test_a_release_that_was_not_answered_is_made_up_for(bench: Bench) -> None:
    (held,) = bench.admit()
    bench.store.away = {"release"}
    bench.claiming.give_back([held])
    bench.store.away = set()
    assert bench.admit() == []
    assert bench.store.released == [("a", 5)]
