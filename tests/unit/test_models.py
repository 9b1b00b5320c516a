"""A model is loaded once per process, warmed up, and never shared across a fork."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery

from inference_tasks import CallerError, InferenceApp, ModelLoadError, adopt
from inference_tasks.models import load_all


@pytest.fixture
def app() -> InferenceApp:
    return InferenceApp("models-of-a-test", broker="amqp://nowhere", set_as_current=False)


def test_a_model_is_loaded_at_its_first_use_and_only_once(app: InferenceApp) -> None:
    loads: list[int] = []

    @app.model
    def net() -> list[int]:
        loads.append(1)
        return loads

    assert not net.is_loaded
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: net(), range(32)))
    assert all(one is loads for one in found)
    assert loads == [1]


def test_two_threads_wait_for_one_load(app: InferenceApp) -> None:
    may_end = threading.Event()
    loads: list[int] = []

    @app.model
    def net() -> object:
        loads.append(1)
        assert may_end.wait(10)
        return object()

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(net), threads.submit(net)
        may_end.set()
        assert first.result(10) is second.result(10)
    assert loads == [1]


def test_warmups_run_in_order_right_after_loading(app: InferenceApp) -> None:
    seen: list[str] = []

    @app.model(name="resnet")
    def load() -> str:
        seen.append("load")
        return "session"

    @load.warmup
    def _(session: str) -> None:
        seen.append(f"first {session}")

    @load.warmup
    def second(session: str) -> None:
        seen.append(f"second {session}")

    load_all(app)
    load_all(app)
    assert seen == ["load", "first session", "second session"]
    assert load.name == "resnet"


@pytest.mark.parametrize("name", ["models-of-a-test", None])
def test_an_app_loads_no_models_of_another_app_that_has_its_name(name: str | None) -> None:
    mine, other = (InferenceApp(name, broker="amqp://nowhere", set_as_current=False) for _ in range(2))
    loads: list[str] = []

    @mine.model
    def net() -> str:
        loads.append("mine")
        return "mine"

    @other.model(name="net")
    def _() -> str:
        loads.append("another's")
        return "another's"

    load_all(mine)
    assert loads == ["mine"]


@pytest.mark.parametrize("is_adopted", [False, True])
def test_an_app_that_celery_rebuilt_in_a_new_process_loads_the_models_that_its_module_declared(
    is_adopted: bool, namespace: str
) -> None:
    app = (
        Celery(namespace, broker="amqp://nowhere", set_as_current=False)
        if is_adopted
        else InferenceApp(namespace, broker="amqp://nowhere", set_as_current=False)
    )
    loads: list[str] = []

    @adopt(app).model
    def net() -> str:
        loads.append("net")
        return "net"

    load_all(pickle.loads(pickle.dumps(app)))
    assert loads == ["net"]


def test_a_failure_names_the_model_and_the_step_and_the_next_call_tries_again(app: InferenceApp) -> None:
    answers = [OSError("no weights"), None]

    @app.model
    def net() -> str:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return "session"

    with pytest.raises(ModelLoadError, match=r"Model 'net' failed while loading: OSError: no weights") as caught:
        load_all(app)
    assert isinstance(caught.value.__cause__, OSError)
    assert net() == "session"


def test_a_failed_warm_up_leaves_the_model_unloaded(app: InferenceApp) -> None:
    @app.model
    def net() -> str:
        return "session"

    @net.warmup
    def _(session: str) -> None:
        raise RuntimeError(session)

    with pytest.raises(ModelLoadError, match="warming up"):
        net()
    assert not net.is_loaded


def test_two_models_cannot_have_one_name(app: InferenceApp) -> None:
    @app.model
    def net() -> int:
        return 1

    with pytest.raises(CallerError, match="'net'"):
        app.model(name="net")(lambda: 2)


def test_a_forked_child_loads_its_own(app: InferenceApp) -> None:
    @app.model
    def net() -> int:
        return os.getpid()

    assert net() == os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"own" if not net.is_loaded and net() == os.getpid() else b"the parent's")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as answer:
        assert answer.read() == "own"
    assert net.is_loaded
