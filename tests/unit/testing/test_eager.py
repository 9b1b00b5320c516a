"""In Celery's eager mode a submit runs in place, and what a caller sees of it is as in production."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inference_tasks import (
    CallerError,
    DependencyFailedError,
    DependencyUnknownError,
    InferenceApp,
    InvalidArgumentsError,
    TaskFailedError,
)


@pytest.fixture
def app() -> InferenceApp:
    # No broker: none is needed where nothing is sent.
    return InferenceApp("eager-of-a-test", set_as_current=False, task_always_eager=True)


@pytest.fixture
def double(app: InferenceApp) -> Any:
    runs: list[object] = []

    @app.inference(tier="realtime")
    def double(value: Any) -> Any:
        runs.append(value)
        if value is None:
            raise ValueError("nothing to double")
        return object() if value == "unfit" else value * 2

    double.runs = runs  # type: ignore[attr-defined]
    return double


def test_a_submit_has_its_result_at_once(double: Any) -> None:
    task = double.submit(4)
    assert task.result(timeout_s=0) == 8
    record = task.status()
    assert (record.state, record.tier, record.attempts) == ("success", "realtime", 1)


def test_arguments_pass_through_json(double: Any) -> None:
    assert double.submit((1, 2)).result() == [1, 2, 1, 2]
    with pytest.raises(InvalidArgumentsError):
        double.submit(object())


def test_a_task_that_raises_has_failed(double: Any) -> None:
    task = double.submit(None)
    with pytest.raises(TaskFailedError, match="ValueError: nothing to double"):
        task.result()
    assert task.status().failures == 1


def test_a_result_that_is_no_json_is_a_failure_here_too(double: Any) -> None:
    with pytest.raises(TaskFailedError, match="object"):
        double.submit("unfit").result()


def test_errors_propagate_if_celery_is_told_so(app: InferenceApp, double: Any) -> None:
    app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="nothing to double"):
        double.options(task_id="mine").submit(None)
    assert app.status("mine").state == "failed"


def test_an_id_that_has_ended_does_not_run_again(double: Any) -> None:
    for _ in range(2):
        assert double.options(task_id="mine").submit(4).result() == 8
    assert double.runs == [4]


def test_batches_and_coroutines_run_in_place_too(double: Any) -> None:
    batch = double.submit_many([(1,), (2,)], tier="offline")
    assert [handle.result() for handle in batch.accepted] == [2, 4]
    assert batch.accepted[0].status().tier == "offline"

    async def scenario() -> object:
        task = await double.submit_async(5)
        return await task.result_async(timeout_s=0)

    assert asyncio.run(scenario()) == 10


def test_plain_celery_calls_run_in_place_as_ever(double: Any) -> None:
    assert double.delay(3).get() == 6


def test_what_depends_on_others_runs_once_they_have_succeeded(app: InferenceApp, double: Any) -> None:
    first = double.submit(1)
    assert double.options(depends_on=[first]).submit(2).result(timeout_s=0) == 4
    failed = double.submit(None)
    with pytest.raises(DependencyFailedError):
        double.options(depends_on=[first, failed]).submit(3)
    with pytest.raises(DependencyUnknownError):
        double.options(depends_on=["nobody"]).submit(3)
    later: list[Any] = []

    @app.inference(tier="batch", bind=True)
    def outer(self: Any) -> str:
        later.append(double.options(depends_on=[self.request.id]).submit(5))
        return str(later[0].status().state)

    assert outer.submit().result(timeout_s=0) == "waiting"
    assert later[0].result(timeout_s=0) == 10
    assert double.runs == [1, 2, None, 5]


@pytest.mark.parametrize("wrong", ["an-id", [7], [""], ["a\x1fb"], [f"{n}" for n in range(1001)]])
def test_what_is_no_list_of_tasks_is_refused(double: Any, wrong: Any) -> None:
    with pytest.raises(CallerError, match="depends_on"):
        double.options(depends_on=wrong)
