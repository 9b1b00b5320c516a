"""Which submits are equal: arguments in their written form, whatever way they are passed."""

from __future__ import annotations

from typing import Any

import pytest

from inference_tasks import CallerError, InferenceApp, InvalidArgumentsError, UnknownOptionError
from inference_tasks.sharing import share_keys
from inference_tasks.state.records import ShareKey
from inference_tasks.task import SubmitOptions

SHARED = SubmitOptions(dedup=True)


@pytest.fixture
def app() -> InferenceApp:
    return InferenceApp("sharing-of-a-test", broker="amqp://nowhere", set_as_current=False)


@pytest.fixture
def classify(app: InferenceApp) -> Any:
    @app.inference(name="classify")
    def classify(path: Any, size: Any = 1, **more: Any) -> None: ...

    return classify


def keys(
    task: Any, *args: object, options: SubmitOptions = SHARED, tenant: str | None = None, **kwargs: object
) -> tuple[ShareKey, ...]:
    return share_keys(task, args, kwargs, options, tenant=tenant, idempotency_ttl_s=100.0)


def test_by_default_each_submit_is_a_task_of_its_own(classify: Any) -> None:
    assert keys(classify, "cat", options=SubmitOptions()) == ()
    (key,) = keys(classify, "cat")
    assert (key.window_s, key.reuse_s, key.print) == (60.0, 0.0, "")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(("cat",), {}), (("cat", 1), {}), ((), {"path": "cat"}), ((), {"size": 1, "path": "cat"})],
)
def test_by_position_by_name_and_by_default_are_the_same(
    classify: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert keys(classify, *args, **kwargs) == keys(classify, "cat")


def test_the_order_of_names_says_nothing_and_that_of_lists_does(classify: Any) -> None:
    assert keys(classify, {"a": 1, "b": [1, 2]}) == keys(classify, {"b": (1, 2), "a": 1})
    assert keys(classify, {"a": 1, "b": [1, 2]}) != keys(classify, {"a": 1, "b": [2, 1]})
    assert keys(classify, 1, x=1, y=2) == keys(classify, 1, y=2, x=1)


def test_what_is_not_the_same_is_told_apart(app: InferenceApp, classify: Any) -> None:
    @app.inference(name="other")
    def other(path: Any, size: Any = 1) -> None: ...

    found = [
        keys(classify, "cat"),
        keys(classify, "dog"),
        keys(classify, "cat", 2),
        keys(classify, "cat", "1"),
        keys(classify, "cat", tenant="acme"),
        keys(classify, "cat", None),
        keys(other, "cat"),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, object(), {1: "a", "b": 2}])
def test_what_has_not_one_written_form_is_refused(classify: Any, value: object) -> None:
    with pytest.raises(InvalidArgumentsError, match="cannot be compared with those of other submits"):
        keys(classify, value)
    assert keys(classify, value, options=SubmitOptions()) == ()


def test_only_the_named_arguments_count(app: InferenceApp) -> None:
    @app.inference(name="named", dedup="window", dedup_window_s=5, dedup_key=("path",), reuse_result_s=3)
    def named(path: str, trace: object = None) -> None: ...

    default = SubmitOptions()
    (key,) = keys(named, "cat", "t1", options=default)
    assert keys(named, path="cat", trace=float("nan"), options=default) == (key,)
    assert (key.window_s, key.reuse_s) == (5, 3)
    assert keys(named, "dog", options=default) != (key,)
    assert keys(named, "cat", options=SubmitOptions(dedup=False)) == ()


def test_a_function_says_what_counts(app: InferenceApp) -> None:
    @app.inference(name="made", dedup="window", dedup_key=lambda path, **_: path.lower())
    def made(path: str, trace: object = None) -> None: ...

    @app.inference(name="wrong", bind=True, dedup="window", dedup_key=lambda number: number)
    def wrong(self: Any, number: int) -> None: ...

    default = SubmitOptions()
    assert keys(made, "Cat", trace=1, options=default) == keys(made, "cat", options=default)
    with pytest.raises(InvalidArgumentsError, match="dedup_key: expected a text, found int"):
        keys(wrong, 1, options=default)


def test_an_idempotency_key_is_one_for_the_tenant_whatever_the_arguments(classify: Any) -> None:
    options = SubmitOptions(idempotency_key="order-1")
    (one,), (two,) = keys(classify, "cat", options=options), keys(classify, "dog", options=options)
    assert (one.digest, one.window_s, one.reuse_s) == (two.digest, 100.0, 100.0)
    assert one.print != two.print
    assert keys(classify, path="cat", options=options) == (one,)
    assert keys(classify, "cat", options=options, tenant="acme")[0].digest != one.digest
    assert len(keys(classify, "cat", options=SubmitOptions(idempotency_key="order-1", dedup=True))) == 2


def test_slips_are_found_where_the_task_is_declared(app: InferenceApp) -> None:
    with pytest.raises(CallerError, match="dedup: expected"):
        app.inference(dedup=True)  # type: ignore[call-overload]
    with pytest.raises(CallerError, match="dedup_key: expected names"):
        app.inference(dedup="window", dedup_key="path")
    with pytest.raises(CallerError, match="dedup_window_s"):
        app.inference(dedup="window", dedup_window_s=0)
    with pytest.raises(UnknownOptionError, match="Did you mean 'path'"):

        @app.inference(dedup="window", dedup_key=("pth",))
        def classify(path: str) -> None: ...

    with pytest.raises(CallerError, match="idempotency_key"):
        SubmitOptions(idempotency_key="").checked()
