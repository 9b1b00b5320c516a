"""The decorator makes tasks of functions, and refuses what it does not know."""

from __future__ import annotations

from typing import Any, assert_type

import pytest

from inference_tasks import CallerError, InferenceApp, InferenceTask, TaskHandle, UnknownOptionError, UnknownTierError


def _what_a_type_checker_must_see(app: InferenceApp) -> None:
    """Is never run: the type checker keeps these lines true."""

    @app.inference(tier="realtime", timeout_s=2.0)
    def classify(path: str, *, size: int = 1) -> dict[str, int]:
        return {path: size}

    @app.inference
    def bare(path: str) -> float:
        return float(path)

    @app.inference(bind=True)
    def bound(self: InferenceTask[..., object], path: str) -> str:
        return self.name + path

    @app.model
    def load() -> list[int]:
        return [1]

    assert_type(classify("cat.png", size=2), dict[str, int])
    assert_type(classify.submit("cat.png"), TaskHandle[dict[str, int]])
    assert_type(classify.submit("cat.png").result(), dict[str, int])
    assert_type(classify.options(tier="offline").submit("cat.png").result(), dict[str, int])
    assert_type(bare.submit("1").result(), float)
    assert_type(bound.submit("x").result(), str)
    assert_type(load(), list[int])
    classify.submit(1)  # type: ignore[arg-type]
    classify.submit("cat.png", colour=1)  # type: ignore[call-arg]
    app.inference(teir="x")  # type: ignore[call-overload]


@pytest.fixture
def app() -> InferenceApp:
    return InferenceApp("tasks-of-a-test", broker="amqp://nowhere", set_as_current=False)


def test_a_task_is_called_like_its_function(app: InferenceApp) -> None:
    @app.inference(tier="P0", timeout_s=2.0)
    def double(number: int, *, times: int = 2) -> int:
        """Double a number."""
        return number * times

    assert double(4) == 8
    assert double(4, times=3) == 12
    assert isinstance(double, InferenceTask)
    assert double.tier == "realtime"
    assert double.timeout_s == 2.0
    assert double.__doc__ == "Double a number."


def test_the_bare_decorator_leaves_the_tier_to_the_settings(app: InferenceApp) -> None:
    @app.inference
    def double(number: int) -> int:
        return 2 * number

    assert double(4) == 8
    assert double.tier is None


def test_a_bound_task_gets_itself_first(app: InferenceApp) -> None:
    @app.inference(bind=True, name="named")
    def own_name(self: InferenceTask[..., object], suffix: str) -> str:
        return str(self.name) + suffix

    assert own_name("!") == "named!"


def test_options_have_the_names_of_this_package_and_reach_celery_under_its_own(app: InferenceApp) -> None:
    @app.inference(time_limit_s=10, soft_time_limit_s=5, max_attempts=4, max_crashes=2, ignore_result=True)
    def task() -> None: ...

    assert (task.time_limit, task.soft_time_limit, task.max_retries) == (10, 5, 3)
    assert task.max_crashes == 2
    assert task.ignore_result is True


@pytest.mark.parametrize(
    ("option", "near"), [("teir", "tier"), ("timeout", "timeout_s"), ("time_limit", "time_limit_s"), ("nmae", "name")]
)
def test_an_unknown_option_is_refused_at_decoration_with_the_nearest(app: InferenceApp, option: str, near: str) -> None:
    decorator: Any = app.inference
    with pytest.raises(UnknownOptionError, match=f"Did you mean '{near}'") as caught:
        decorator(**{option: 1})
    assert caught.value.nearest == near
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"time_limit_s": -1},
        {"max_attempts": 0},
        {"max_crashes": 1.5},
        {"time_limit_s": 1, "soft_time_limit_s": 2},
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_at_decoration(app: InferenceApp, options: dict[str, Any]) -> None:
    with pytest.raises(CallerError):
        app.inference(**options)


def test_an_unknown_tier_is_refused_at_decoration_and_at_the_call(app: InferenceApp) -> None:
    with pytest.raises(UnknownTierError, match="realtime"):
        app.inference(tier="realtme")

    @app.inference
    def task() -> None: ...

    with pytest.raises(UnknownTierError):
        task.options(tier="P7")


def test_an_unknown_submit_option_is_refused_with_the_nearest(app: InferenceApp) -> None:
    @app.inference
    def task() -> None: ...

    options: Any = task.options
    with pytest.raises(UnknownOptionError, match="Did you mean 'task_id'"):
        options(taskid="x")


def test_nothing_is_configured_by_decorating(app: InferenceApp) -> None:
    @app.inference(tier="batch")
    def task() -> None: ...

    assert not app.configured  # type: ignore[attr-defined]
