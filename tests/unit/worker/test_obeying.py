"""A worker obeys switches: nothing starts from what is off, the others keep their shares, and nobody gains by it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_tasks.state.switches import ALL_ON, Action, Switch, Switches
from inference_tasks.testing.store import FakeTaskStore
from inference_tasks.worker.obeying import Obedience
from tests.support.dispatcher_bench import KEYS, TIERS, Bench


def switches(**action_by_target: str) -> Switches:
    targets = {target.replace("_", ":", 1): action for target, action in action_by_target.items()}
    return Switches({target: Switch(target, action, "ann", 1.0) for target, action in targets.items()})


def backlogged(slots: int, *, hold_s: float = 0.02) -> tuple[Bench, Obedience]:
    bench = Bench(slots, hold_s=hold_s)
    for tier in TIERS:
        bench.broker.fill(tier, 900)
    bench.settle()
    return bench, Obedience(bench.dispatcher, KEYS, node="w1")


def started(bench: Bench, starts: int, length_s: float) -> list[str]:
    before = len(bench.starts)
    while len(bench.starts) < before + starts:
        bench.run(length_s)
    return bench.starts[before:]


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("length_s", [0.001, 0.5])
@pytest.mark.parametrize(
    ("tier", "window"),
    [
        ("realtime", {"batch": 2, "offline": 1}),
        ("batch", {"realtime": 8, "offline": 1}),
        ("offline", {"realtime": 4, "batch": 1}),
    ],
)
def test_the_others_keep_their_shares_exactly_while_a_tier_is_paused_and_afterwards_nobody_catches_up(
    slots: int, length_s: float, tier: str, window: dict[str, int]
) -> None:
    bench, obedience = backlogged(slots)
    started(bench, 37, length_s)
    obedience.obey(switches(**{f"tier_{tier}": "pause"}))
    bench.settle()
    paused = started(bench, 120, length_s)
    assert tier not in paused
    size = sum(window.values())
    for at in range(slots, len(paused) - size):
        assert Counter(paused[at : at + size]) == window, at
    obedience.obey(ALL_ON)
    bench.settle()
    resumed = started(bench, 160, length_s)
    # What was held at that moment had been picked before; from then on the windows are exact.
    for at in range(33, len(resumed) - 11):
        assert Counter(resumed[at : at + 11]) == {"realtime": 8, "batch": 2, "offline": 1}, at
    # No credit for the time off: even where it re-enters the tier gets no more than a window's share on top.
    assert Counter(resumed[:33])[tier] <= 3 * {"realtime": 8, "batch": 2, "offline": 1}[tier]


def test_what_is_held_of_a_paused_tier_goes_back_and_what_is_on_its_way_too() -> None:
    bench, obedience = backlogged(2)
    started(bench, 100, 0.001)
    bench.dispatcher.pump()  # asks
    assert bench.inside > 0
    obedience.obey(switches(tier_realtime="pause", tier_batch="refuse", tier_offline="pause"))
    bench.settle()
    assert bench.inside == 0
    assert len(bench.store.live) == len(bench.starts)
    assert bench.broker.subscribed == set()
    before = len(bench.starts)
    while bench.running:
        bench.run(0.001)
    for _ in range(20):
        bench.now += 1
        bench.dispatcher.tick()
        bench.settle()
    assert len(bench.starts) == before
    obedience.obey(switches(tier_realtime="pause", tier_batch="drain"))
    bench.settle()
    assert set(started(bench, 30, 0.001)) == {"batch", "offline"}


def test_what_is_pushed_of_a_paused_tier_goes_back() -> None:
    bench = Bench(2)
    obedience = Obedience(bench.dispatcher, KEYS, node="w1")
    bench.settle()
    assert bench.broker.subscribed == set(TIERS)
    obedience.obey(switches(tier_batch="pause"))
    assert bench.broker.subscribed == {"realtime", "offline"}
    bench.broker.fill("batch", 1)
    bench.dispatcher._on_push("batch", bench.broker.queues["batch"].popleft())
    bench.settle()
    assert (bench.starts, bench.broker.queues["batch"][0].returned) == ([], 1)
    obedience.obey(ALL_ON)
    bench.settle()
    assert bench.starts == ["batch"]


@pytest.mark.parametrize(("action", "state"), [("pause", "paused"), ("drain", "draining")])
def test_a_worker_that_is_switched_off_takes_nothing_and_finishes_what_runs(action: str, state: str) -> None:
    bench, obedience = backlogged(2, hold_s=0.0)
    obedience.obey(switches(worker_other="drain"))
    assert obedience.state == "running"
    obedience.obey(switches(worker_w1=action))
    bench.settle()
    assert (obedience.state, len(bench.running)) == (state, 2)
    bench.run(0.5)
    bench.run(0.5)
    assert (len(bench.starts), bench.inside) == (2, 0)
    obedience.obey(ALL_ON)
    bench.settle()
    assert (obedience.state, len(bench.starts)) == ("running", 4)


def test_what_remote_control_took_away_stays_away_when_a_switch_is_taken_back() -> None:
    bench, obedience = backlogged(1)
    obedience.serve("offline", on=False)
    obedience.obey(switches(worker_w1="pause"))
    obedience.serve("batch", on=True)
    obedience.serve("realtime", on=False)
    bench.settle()
    bench.run(0.1)
    assert not bench.running
    obedience.obey(ALL_ON)
    bench.settle()
    assert set(started(bench, 60, 0.001)) == {"batch"}
    obedience.serve("realtime", on=True)
    bench.settle()
    assert set(started(bench, 60, 0.001)) == {"realtime", "batch"}


def test_a_worker_that_starts_knows_what_is_paused_unless_redis_is_away() -> None:
    store = FakeTaskStore()
    store.switch("tier:realtime", Action.PAUSE, by="ann")
    bench = Bench(1)
    bench.broker.fill("realtime", 1)
    obedience = Obedience(bench.dispatcher, KEYS, node="w1")
    obedience.begin(store)  # type: ignore[arg-type]  # the same calls
    bench.settle()
    assert bench.starts == []
    store.is_away = True
    obedience.begin(store)  # type: ignore[arg-type]
    store.is_away = False
    store.forget_everything()
    obedience.begin(store)  # type: ignore[arg-type]
    bench.settle()
    assert bench.starts == ["realtime"]


TARGETS = ("tier:realtime", "tier:batch", "tier:offline", "lane:batch.fresh", "worker:w1")


@settings(max_examples=150, deadline=None)
@given(data=st.data(), slots=st.integers(1, 3), hold_s=st.sampled_from([0.0, 0.02]), reserve=st.integers(0, 1))
def test_however_switches_come_and_go_nothing_paused_starts_and_in_the_end_everything_has_run_once(
    data: st.DataObject, slots: int, hold_s: float, reserve: int
) -> None:
    bench = Bench(slots, hold_s=hold_s, reserve=min(reserve, slots - 1))
    obedience = Obedience(bench.dispatcher, KEYS, node="w1")
    off: set[str] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from(["fill", "switch", "run", "wait"]))
        before = len(bench.starts)
        if step == "fill":
            bench.broker.fill(data.draw(st.sampled_from(TIERS)), data.draw(st.integers(1, 30)))
        elif step == "switch":
            targets = data.draw(st.sets(st.sampled_from(TARGETS)))
            now = Switches({target: Switch(target, "pause", "ann", 1.0) for target in targets})
            obedience.obey(now)
            is_off = now.worker("w1") is not None
            off = {key.tier for key in KEYS if is_off or now.stopped(key.tier, key.lane)}
        elif step == "run" and bench.running:
            for _ in range(data.draw(st.integers(1, 20))):
                if bench.running:
                    bench.run(data.draw(st.sampled_from([0.001, 0.3])))
        elif step == "wait":
            bench.now += data.draw(st.sampled_from([0.03, 0.3, 2.0]))
            bench.dispatcher.tick()
        bench.settle()
        assert not off.intersection(bench.starts[before:]), (step, off)
        assert not off & bench.broker.subscribed
    obedience.obey(ALL_ON)
    for _ in range(600):
        if bench.running:
            bench.run(0.001)
        bench.now += 0.3
        bench.dispatcher.tick()
        bench.settle()
    assert [len(queue) for queue in bench.broker.queues.values()] == [0, 0, 0]
    assert (bench.inside, len(bench.starts)) == (0, bench.broker.out)
