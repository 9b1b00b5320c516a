"""Replaying dead letters: each task runs exactly once more, whatever ends the replay."""

from __future__ import annotations

import signal
import time
from typing import Any, cast

import pytest
import redis

from inference_tasks.app import inference_of
from inference_tasks.dead_letters.filter import Filter
from inference_tasks.dead_letters.index import depth, listed, refresh
from inference_tasks.dead_letters.revival import replay
from tests.support.brokers import Broker, depths, until
from tests.support.dead_letters import command, ids_in_queue, perish, process, run, worker_without_the_tasks
from tests.support.rig import Rig, task

both = pytest.mark.parametrize("queue_type", ["quorum", "classic"])


@both
def test_a_replay_takes_what_is_meant_and_leaves_the_rest_in_its_order(rig: Rig) -> None:
    app = rig.app()
    ids = perish(rig, app, range(200))
    order = ids_in_queue(app)
    meant = ids[3::9]
    tally = run(replay(inference_of(app), Filter.of(ids=meant), rate_per_s=1000))
    assert (tally.done, tally.is_complete) == (len(meant), True)
    assert ids_in_queue(app) == [one for one in order if one not in meant]
    with rig.worker():
        rig.wait_states(app, meant, success=len(meant))
    assert rig.starts() == dict.fromkeys(range(3, 200, 9), 1)


@both
def test_a_replay_goes_through_a_full_tier(rig: Rig) -> None:
    full: dict[str, Any] = {"tiers": {"batch": {"bound": 20}}}
    app = rig.app(**full)
    inference = inference_of(app)
    with Broker.worker(rig, name="old", **full):
        handles = [task(app, "add").submit(number, 1) for number in range(10)]
        until(lambda: depth(inference) == 10, "all are dead")
    # Not as a burst: that may exceed the bound of a quorum queue.
    until(lambda: bool(task(app, "add").submit_many([(99, 1)]).refused), "the tier is full")
    waiting = depths(app)[inference.topology.queue("batch").name]
    assert waiting >= 20
    assert run(replay(inference, Filter(), rate_per_s=1000)).done == 10
    assert depths(app)[inference.topology.queue("batch", "returned").name] == 10
    with rig.worker(**full):
        rig.wait_states(app, [handle.id for handle in handles], success=10)


def test_a_deadline_of_the_past_does_not_end_a_replayed_task(rig: Rig) -> None:
    app = rig.app()
    with worker_without_the_tasks(rig):
        handle = task(app, "add").options(timeout_s=3.0).submit(1, 1)
        until(lambda: depth(inference_of(app)) == 1, "it is dead")
    deadline = inference_of(app).store.get(handle.id).expires_at_s
    assert deadline is not None
    run(replay(inference_of(app), Filter()))
    server = redis.Redis.from_url(cast(str, inference_of(app).settings.state.url))
    until(lambda: cast(Any, server.time())[0] > deadline, "its deadline is over")
    server.close()
    with rig.worker():
        assert handle.result(timeout_s=60) == 2


def test_a_task_that_fails_again_during_the_replay_is_not_replayed_again_by_it(rig: Rig) -> None:
    app = rig.app()
    ids = perish(rig, app, range(40))
    with worker_without_the_tasks(rig):
        # Each comes back at once, behind the others.
        tally = run(replay(inference_of(app), Filter(), rate_per_s=40))
        assert tally.done == 40
        until(lambda: depth(inference_of(app)) == 40, "all are dead again")
    refresh(inference_of(app))
    assert {letter.generation for letter in listed(inference_of(app))} == {1}
    assert sorted(ids_in_queue(app)) == sorted(ids)


def test_the_rate_is_kept(rig: Rig) -> None:
    app = rig.app()
    perish(rig, app, range(60))
    started = time.monotonic()
    assert run(replay(inference_of(app), Filter(), rate_per_s=30)).done == 60
    assert 1.6 < time.monotonic() - started < 4


@both
def test_a_replay_of_500_that_is_killed_in_the_middle_and_run_again_runs_each_once_more(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    ids = perish(rig, app, range(500))
    killed = process(rig, "dead", "replay", "--yes", "--rate", "150")
    returned = inference.topology.queue("batch", "returned").name
    for reached in (100, 230):
        with killed:
            until(lambda reached=reached: depths(app)[returned] >= reached, "it is under way")  # type: ignore[misc]
            killed.send(signal.SIGKILL)
            killed.wait()
    assert 0 < depths(app)[returned] < 500
    answer = command(rig, "dead", "replay", "--yes", "--rate", "2000")
    assert answer["is_complete"]
    assert [(line.action, line.target) for line in inference.store.operator_log()] == [
        ("replay", f"{answer['done']} dead letters")
    ]
    assert depth(inference) == 0
    assert inference.store.dead_count() == 0
    assert {record.generation for record in inference.store.get_many(ids) if record} == {1}
    with rig.worker("--pool", "threads", "--concurrency", "4"):
        rig.wait_states(app, ids, timeout_s=60, success=500)
        # A copy that meets its task while that runs is parked for a second or more: it must come round once more.
        until(lambda: command(rig, "tiers", "--audit")["moving"] == 0, "the copies of the killed runs are gone")
    assert rig.starts() == dict.fromkeys(range(500), 1)
    found = command(rig, "tiers", "--audit")
    assert found["is_exact"]
    assert found["tiers"]["batch"]["success"] == found["tiers"]["batch"]["admitted"] == 500


def test_ctrl_c_ends_a_replay_with_everything_in_its_place(rig: Rig) -> None:
    app = rig.app()
    inference = inference_of(app)
    perish(rig, app, range(100))
    ids = ids_in_queue(app)
    stopped = process(rig, "dead", "replay", "--yes", "--rate", "20")
    returned = inference.topology.queue("batch", "returned").name
    with stopped:
        until(lambda: depths(app)[returned] >= 10, "it is under way")
        stopped.send(signal.SIGINT)
        assert stopped.wait(15) == 130
    assert "Stopped" in stopped.log
    assert "Traceback" not in stopped.log
    gone = depths(app)[returned]
    assert ids_in_queue(app) == ids[gone:]
    assert inference.store.dead_count() == 100 - gone
    assert [record.state for record in inference.store.get_many(ids[:gone]) if record] == ["pending"] * gone
