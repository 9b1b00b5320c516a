"""What every task store does with what operators switch off: on the fake and on Redis."""

from __future__ import annotations

import pytest

from inference_tasks.state.records import PAUSED, Renewal, WorkerBeat
from inference_tasks.state.switches import OPERATOR_LOG_LENGTH, Action, Switches
from tests.support.task_stores import LEASE_S, StoreHarness, message, new, started, submitted


def said(harness: StoreHarness) -> dict[str, str]:
    return {switch.target: switch.action for switch in harness.store.switches()}


def test_a_switch_is_kept_with_who_when_and_why_until_it_is_taken_away(harness: StoreHarness) -> None:
    assert not harness.store.switches()
    assert harness.store.switch("tier:batch", Action.PAUSE, by="ann", because='the "new" model') is None
    (switch,) = harness.store.switches()
    assert (switch.target, switch.name, switch.action, switch.by) == ("tier:batch", "batch", "pause", "ann")
    assert switch.because == 'the "new" model'
    assert switch.at_s == pytest.approx(harness.now_s(), abs=5)
    assert harness.store.switch("tier:batch", Action.DRAIN, by="bob") == switch
    assert said(harness) == {"tier:batch": "drain"}
    before = harness.store.unswitch("tier:batch", by="ann")
    assert before is not None
    assert (before.action, before.by) == ("drain", "bob")
    assert harness.store.unswitch("tier:batch", by="ann") is None
    assert not harness.store.switches()


def test_the_log_tells_what_operators_did_the_newest_first(harness: StoreHarness) -> None:
    harness.store.switch("worker:w1", Action.DRAIN, by="ann", because="new driver")
    harness.store.log_operator("drop", "dead letters", by="bob")
    harness.store.unswitch("worker:w1", by="bob")
    harness.store.unswitch("worker:w1", by="bob")
    lines = harness.store.operator_log()
    assert [(line.by, line.action, line.target, line.because) for line in lines] == [
        ("bob", "resume", "worker:w1", ""),
        ("bob", "drop", "dead letters", ""),
        ("ann", "drain", "worker:w1", "new driver"),
    ]
    assert lines[0].at_s == pytest.approx(harness.now_s(), abs=5)
    assert harness.store.operator_log(1) == lines[:1]
    assert harness.store.operator_log(0) == []


def test_the_log_keeps_the_newest_lines_only(harness: StoreHarness) -> None:
    for number in range(OPERATOR_LOG_LENGTH + 3):
        harness.store.log_operator("drop", str(number), by="ann")
    lines = harness.store.operator_log(2 * OPERATOR_LOG_LENGTH)
    assert (len(lines), lines[-1].target) == (OPERATOR_LOG_LENGTH, "3")


def test_a_worker_learns_of_switches_with_its_renewal(harness: StoreHarness) -> None:
    task, token = started(harness)
    running = [(task.id, token, message(task))]
    assert harness.store.renew(running, "w1", LEASE_S).switches == Switches()
    harness.store.switch("lane:batch.fresh", Action.PAUSE, by="ann", because="a\x1fb\x1ec")
    harness.store.switch("worker:w1", Action.DRAIN, by="ann")
    beat = WorkerBeat("w1", 7, None, "prefork", 2, 0, ("batch",), 1)
    for renewal in (harness.store.renew(running, "w1", LEASE_S), harness.store.renew([], "w1", LEASE_S, beat)):
        assert (renewal.lost, renewal.stopping, renewal.switches) == ([], {}, harness.store.switches())
        drained, paused = renewal.switches.worker("w1"), renewal.switches.stopped("batch", "fresh")
        assert drained is not None
        assert paused is not None
        assert paused.because == "a\x1fb\x1ec"
    harness.lose_all()
    assert harness.store.renew(running, "w1", LEASE_S) == Renewal([], {})


@pytest.mark.parametrize("target", ["tier:batch", "lane:batch.fresh"])
@pytest.mark.parametrize("action", list(Action))
def test_submits_from_outside_are_refused_where_an_operator_wants_none(
    harness: StoreHarness, target: str, action: Action
) -> None:
    harness.store.switch(target, action, by="ann")
    refuses = action != Action.PAUSE
    outside, delayed = new(), new(due_at_s=harness.now_s() + 60)
    by_worker, retried, other = new(worker_published=True, lane="returned"), new(hop=1), new(tier="offline")
    answers = harness.store.submit([outside, delayed, by_worker, retried, other])
    assert [answer.state == PAUSED for answer in answers] == [refuses, refuses, False, False, False]
    assert [answer.created for answer in answers] == [not refuses, not refuses, True, True, True]
    records = harness.store.get_many([outside.id, delayed.id])
    assert [record is None for record in records] == [refuses, refuses]
    harness.store.unswitch(target, by="ann")
    assert harness.store.submit([new(lane="returned")])[0].created
    assert harness.store.submit([new()])[0].state != PAUSED


def test_a_repeated_submit_of_an_accepted_task_is_not_refused(harness: StoreHarness) -> None:
    task = submitted(harness)
    harness.store.switch("tier:batch", Action.REFUSE, by="ann")
    (answer,) = harness.store.submit([task])
    assert (answer.created, answer.state) == (False, "pending")


def test_what_a_switch_means_for_a_lane(harness: StoreHarness) -> None:
    harness.store.switch("tier:batch", Action.REFUSE, by="ann")
    harness.store.switch("lane:offline.returned", Action.PAUSE, by="ann")
    harness.store.switch("tier:realtime", Action.DRAIN, by="ann")
    switches = harness.store.switches()
    stopped = [(tier, lane) for tier in TIERS for lane in LANES if switches.stopped(tier, lane)]
    assert stopped == [("batch", "fresh"), ("batch", "returned"), ("batch", "aged"), ("offline", "returned")]
    assert [tier for tier in TIERS if switches.refusing(tier)] == ["realtime", "batch"]
    assert [switch.action for switch in switches.of("realtime", "aged")] == ["drain"]


TIERS, LANES = ("realtime", "batch", "offline"), ("fresh", "returned", "aged")
