"""The thread that renews claims: in one call, again after a failure, and it tells whether the state can be reached."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import pytest

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.records import Claimant, Renewal, WorkerBeat
from inference_tasks.state.switches import ALL_ON, Switch, Switches
from inference_tasks.worker.leases import Leases

CLAIMS = [("a", 7, Claimant("a", "t", "batch", "fresh")), ("b", 8, Claimant("b", "t", "batch", "fresh"))]
BEAT = WorkerBeat("w", 1, None, "solo", 1, 0, ("batch",), 1)


class Store:
    """Answers each renewal with the next of `answers`, then with an empty list; `reached` is one permit per call."""

    def __init__(self) -> None:
        self.answers: deque[list[str] | Renewal | Exception] = deque()
        self.calls: list[tuple[object, ...]] = []
        self.reached = threading.Semaphore(0)

    def renew(
        self,
        running: Sequence[tuple[str, int, Claimant]],
        worker: str,
        lease_s: float,
        heartbeat: WorkerBeat | None = None,
    ) -> Renewal:
        self.calls.append((list(running), worker, lease_s, heartbeat))
        answer = self.answers.popleft() if self.answers else Renewal([], {})
        try:
            if isinstance(answer, Exception):
                raise answer
            return answer if isinstance(answer, Renewal) else Renewal(answer, {})
        finally:
            self.reached.release()

    def wait(self, calls: int) -> None:
        for _ in range(calls):
            assert self.reached.acquire(timeout=10)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def seen() -> list[bool]:
    return []


@pytest.fixture
def asked() -> list[Mapping[str, bool]]:
    return []


@pytest.fixture
def leases(store: Store, seen: list[bool], asked: list[Mapping[str, bool]]) -> Iterator[Leases]:
    made = Leases(
        store,
        worker="w",
        lease_s=30,
        claimed=lambda: CLAIMS,
        beat=lambda: BEAT,
        on_state=seen.append,
        on_stopping=asked.append,
        interval_s=0.01,
    )
    yield made
    made.stop()
    if made.ident is not None:
        made.join(10)
        assert not made.is_alive()


def test_all_claims_and_the_heartbeat_go_out_in_one_call(leases: Leases, store: Store) -> None:
    leases.start()
    store.wait(2)
    assert store.calls[0] == (CLAIMS, "w", 30, BEAT)


def test_it_tells_when_the_state_is_away_and_when_it_is_back(leases: Leases, store: Store, seen: list[bool]) -> None:
    store.answers.extend([[], StateUnavailableError("gone"), StateUnavailableError("gone"), []])
    leases.start()
    store.wait(6)
    assert seen[:4] == [True, False, False, True]


def test_an_error_that_nobody_thought_of_ends_no_renewal(
    leases: Leases, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.answers.append(ZeroDivisionError("surprise"))
    leases.start()
    store.wait(3)
    assert "renewing claims failed" in caplog.text


def test_a_claim_that_another_holds_is_told_once_it_is_sure(
    leases: Leases, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.answers.extend([["a"], [], ["b"], ["b"]])
    with caplog.at_level(logging.WARNING):
        leases.start()
        store.wait(6)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["another worker holds b now; results from here are refused"]


def test_it_tells_which_tasks_are_asked_to_stop(leases: Leases, store: Store, asked: list[Mapping[str, bool]]) -> None:
    store.answers.extend([Renewal(["b"], {"a": False}), [], Renewal([], {"a": True})])
    leases.start()
    store.wait(5)
    assert asked == [{"a": False}, {"a": True}]


def test_hurry_renews_at_once_and_stop_ends_the_wait(store: Store) -> None:
    slow = Leases(
        store,
        worker="w",
        lease_s=3600,
        claimed=list,
        beat=lambda: BEAT,
        on_state=lambda _: None,
        on_stopping=lambda _: None,
        interval_s=3600,
    )
    slow.start()
    store.wait(1)
    slow.hurry()
    store.wait(1)
    slow.stop()
    slow.join(10)
    assert not slow.is_alive()


@pytest.mark.parametrize(("lease_s", "interval_s"), [(1.5, 0.5), (3.0, 1.0), (30.0, 2.0)])
def test_a_lease_is_renewed_three_times_within_it_and_the_heartbeat_every_two_seconds(
    store: Store, lease_s: float, interval_s: float
) -> None:
    made = Leases(
        store,
        worker="w",
        lease_s=lease_s,
        claimed=list,
        beat=lambda: BEAT,
        on_state=lambda _: None,
        on_stopping=lambda _: None,
    )
    assert made._interval_s == pytest.approx(interval_s)


def test_switches_are_told_when_they_change_and_forgotten_when_nobody_could_take_them_back(store: Store) -> None:
    told: list[Switches] = []
    forgotten = threading.Event()

    def tell(switches: Switches) -> None:
        told.append(switches)
        if len(told) > 1:
            forgotten.set()

    paused = Switches({"tier:batch": Switch("tier:batch", "pause", "me", 1.0)})
    store.answers.extend([Renewal([], {}, paused), Renewal([], {}, paused)])
    store.answers.extend(StateUnavailableError("away") for _ in range(1000))
    leases = Leases(
        store,
        worker="w",
        lease_s=0.2,
        claimed=lambda: CLAIMS,
        beat=lambda: BEAT,
        on_state=lambda reachable: None,
        on_stopping=lambda stopping: None,
        on_switches=tell,
        interval_s=0.01,
    )
    leases.start()
    try:
        assert forgotten.wait(10)
    finally:
        leases.stop()
        leases.join(10)
    assert told == [paused, ALL_ON]
