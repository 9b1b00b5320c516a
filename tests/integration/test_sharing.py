"""Equal submits on a real broker, Redis and workers: one run and one result, whoever is refused or gives up."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from inference_tasks import Call, IdempotencyConflictError, InferenceApp, QueueFullError, TaskFailedError, TaskHandle
from inference_tasks.app import inference_of
from inference_tasks.broker.messages import Accepted, Outgoing, Properties
from inference_tasks.state.records import NewTask, ShareKey
from tests.support.brokers import until
from tests.support.rig import Rig, task

AT_ONCE = 50


def shared(app: InferenceApp, name: str = "gated.batch", **options: Any) -> Any:
    return task(app, name).options(dedup=True, **options)


def at_once(submits: Sequence[Callable[[], TaskHandle[Any]]]) -> list[TaskHandle[Any]]:
    """Call each from a thread of its own, all let go together."""
    barrier = threading.Barrier(len(submits))

    def one(submit: Callable[[], TaskHandle[Any]]) -> TaskHandle[Any]:
        barrier.wait(30)
        return submit()

    with ThreadPoolExecutor(len(submits)) as threads:
        return list(threads.map(one, submits))


def filled(app: InferenceApp) -> int:
    """Fill batch; return how many it took."""
    for number in itertools.count(100):
        try:
            task(app, "step.batch").submit(number)
        except QueueFullError:
            return number - 100
    raise AssertionError("unreachable: the count has no end")


@pytest.mark.parametrize("clients", [1, 2])
def test_equal_submits_at_once_are_one_task_that_runs_once(rig: Rig, clients: int) -> None:
    apps = [rig.app() for _ in range(clients)]
    with rig.worker("--concurrency", "2"):
        for number in range(3):
            gate = rig.gate(f"gate-{number}")
            submits = [partial(shared(app).submit, number, str(gate)) for app in apps]
            handles = at_once([submit for submit in submits for _ in range(AT_ONCE // clients)])
            gate.open()
            assert len(set(handles)) == 1
            assert {handle.result(timeout_s=60) for handle in handles[:5]} == {number}
        rig.wait_waiting(apps[0], 0)
    assert rig.starts() == dict.fromkeys(range(3), 1)


def test_a_result_that_is_reused_answers_whoever_comes_late(rig: Rig) -> None:
    app = rig.app()
    with rig.worker():
        submit = task(app, "reused").submit
        handles = at_once([partial(submit, 0)] * AT_ONCE)
        assert handles[0].result(timeout_s=60) == 0
        assert submit(number=0) == handles[0]
        assert set(handles) == {handles[0]}
        rig.wait_waiting(app, 0)
    assert rig.starts() == {0: 1}


def test_a_batch_and_coroutines_join_too(rig: Rig) -> None:
    app = rig.app()
    done = shared(app, "step.batch").submit_many([(1,), Call((2,)), {"number": 1}, (1, 0.0)])
    assert done.is_complete
    one, two, *same = (handle.id for handle in done.accepted)
    assert same == [one, one]
    assert two != one
    assert asyncio.run(shared(app, "step.batch").submit_async(2)).id == two
    assert task(app, "step.batch").submit(1).id != one
    with rig.worker():
        assert [handle.result(timeout_s=60) for handle in done.accepted] == [1, 2, 1, 1]
        rig.wait_waiting(app, 0)
    assert rig.starts() == {1: 2, 2: 1}


def test_a_refused_submit_leaves_no_key_and_no_record(rig: Rig) -> None:
    app = rig.app(tiers={"batch": {"bound": 2}})
    store = inference_of(app).store
    number = filled(app)
    with pytest.raises(QueueFullError):
        shared(app, "step.batch", task_id="first").submit(3)
    assert store.get_many(["first"]) == [None]
    with rig.worker():
        until(lambda: len(rig.starts()) == number, "the tier is empty")
        handle = shared(app, "step.batch", task_id="second").submit(3)
        assert handle.id == "second"
        assert handle.result(timeout_s=60) == 3


def test_who_joined_is_not_lost_when_the_first_is_refused(rig: Rig) -> None:
    app = rig.app(tiers={"batch": {"bound": 2}})
    number = filled(app)
    # They join the one whose message is on its way. It is refused, and then each that tries in its place.
    with ThreadPoolExecutor(8) as threads:
        refused = [threads.submit(shared(app, "step.batch").submit, 1) for _ in range(8)]
        assert all(isinstance(one.exception(60), QueueFullError) for one in refused)
    accounts = inference_of(app).store.accounts().by_tier["batch"]
    assert (accounts["admitted"], accounts["pending"]) == (number, number)

    # Here the first is refused while a second has joined it, for whom there is room in its own tier.
    store = inference_of(app).store
    key = ShareKey("equal", 60.0)
    first = NewTask("shared", "step.batch", "batch", "batch", "fresh", 0, "first", shared=(key,))
    assert store.submit([first])[0].created
    second = first._replace(id="other", tier="realtime", tier_first="realtime", nonce="second")
    body = b"[[1], {}, {}]"
    properties = Properties(headers={"id": "other", "task": "step.batch", "lang": "py", "root_id": "other"})
    inference = inference_of(app)
    queue = inference.queue_by_lane["realtime", "fresh"]
    outgoing = Outgoing(body, inference.settings.namespace, queue, properties, True, second)
    assert inference.publisher.send(outgoing) == Accepted(task_id="shared", lift="realtime")
    assert store.retract(["shared"], "first") == 0
    with rig.worker():
        rig.wait_started(1)
        until(lambda: store.get("shared").state == "success", "it has run")
    assert store.get_many(["other"]) == [None]


def test_one_of_two_gives_up_and_the_other_has_the_result(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    first, second = (shared(app).submit(0, str(gate)) for _ in range(2))
    assert first == second
    assert first.cancel()
    with rig.worker():
        rig.wait_started(0)
        third = shared(app).submit(0, str(gate))
        assert third.cancel(terminate=True)
        gate.open()
        assert second.result(timeout_s=60) == 0
    assert rig.starts() == {0: 1}


def test_when_all_have_given_up_it_never_runs(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    handles = [shared(app).submit(0, str(gate)) for _ in range(3)]
    assert all(handle.cancel() for handle in handles)
    with pytest.raises(TaskFailedError) as caught:
        handles[0].result(timeout_s=5)
    assert caught.value.state == "cancelled"
    with rig.worker():
        rig.wait_waiting(app, 0)
        again = shared(app).submit(0, str(gate))
        assert again != handles[0]
        rig.wait_started(0)
        gate.open()
        assert again.result(timeout_s=60) == 0
    assert rig.starts() == {0: 1}


def test_a_later_deadline_keeps_the_task_and_a_run_sees_it(rig: Rig) -> None:
    app, gate = rig.app(), rig.gate()
    first = shared(app, "left", timeout_s=1.0).submit(0, str(gate), 60.0)
    assert shared(app, "left", timeout_s=50.0).submit(0, str(gate), 60.0) == first
    expires_at_s = first.status().expires_at_s
    gate.open()
    with rig.worker():
        rig.wait_started(0)
        # It waits until it sees more than a minute left.
        assert shared(app, "left", timeout_s=200.0).submit(0, str(gate), 60.0) == first
        assert 60 < first.result(timeout_s=60) < 200
    assert first.status().expires_at_s > expires_at_s + 100


def test_an_idempotency_key_finds_its_task_again(rig: Rig) -> None:
    app = rig.app()
    step = task(app, "step.batch").options(idempotency_key="order-1")
    with rig.worker():
        first = step.submit(1)
        assert first.result(timeout_s=60) == 1
        assert step.submit(1) == first
        assert step.submit(number=1) == first
        with pytest.raises(IdempotencyConflictError) as caught:
            step.submit(2)
        assert caught.value.task_id == first.id
        other = task(app, "step.batch").options(idempotency_key="order-1", tenant="another").submit(1)
        assert other != first
        assert other.result(timeout_s=60) == 1
    assert rig.starts() == {1: 2}
