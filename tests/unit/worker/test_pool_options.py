"""Options that a pool would ignore in silence are refused."""

from __future__ import annotations

import pytest

from inference_tasks import InferenceApp
from inference_tasks.errors import PoolOptionError
from inference_tasks.worker.pool_options import PoolRequest, check_pool, refuse_pool


@pytest.fixture
def app() -> InferenceApp:
    return InferenceApp("vision", broker="memory://", set_as_current=False)


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_pools_that_replace_sockets_are_refused(pool: str) -> None:
    with pytest.raises(PoolOptionError, match="Use threads"):
        refuse_pool(pool)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_plain_options_are_fine(app: InferenceApp, pool: str) -> None:
    check_pool(PoolRequest(pool, 4, uses_gpu=True), app)


def test_solo_has_one_slot(app: InferenceApp) -> None:
    check_pool(PoolRequest("solo", 1), app)
    with pytest.raises(PoolOptionError, match="--slots 2"):
        check_pool(PoolRequest("solo", 2), app)


def test_the_number_of_slots_is_fixed(app: InferenceApp) -> None:
    with pytest.raises(PoolOptionError, match="--autoscale"):
        check_pool(PoolRequest("prefork", 1, autoscale="4,1"), app)


@pytest.mark.parametrize(
    "key", ["worker_max_tasks_per_child", "worker_max_memory_per_child", "task_time_limit", "task_soft_time_limit"]
)
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_what_only_processes_can_keep_is_refused_without_them(app: InferenceApp, pool: str, key: str) -> None:
    app.conf[key] = 5
    check_pool(PoolRequest("prefork", 1), app)
    with pytest.raises(PoolOptionError, match=key):
        check_pool(PoolRequest(pool, 1), app)


@pytest.mark.parametrize("option", ["time_limit_s", "soft_time_limit_s"])
def test_a_task_with_a_time_limit_needs_processes(app: InferenceApp, option: str) -> None:
    def slow() -> None: ...

    if option == "time_limit_s":
        app.inference(name="slow", time_limit_s=5.0)(slow)
    else:
        app.inference(name="slow", soft_time_limit_s=5.0)(slow)
    check_pool(PoolRequest("prefork", 1), app)
    with pytest.raises(PoolOptionError, match=rf"{option} = 5 of task slow"):
        check_pool(PoolRequest("threads", 1), app)


def test_cuda_that_is_initialised_already_is_refused_with_processes_only(app: InferenceApp) -> None:
    check_pool(PoolRequest("threads", 1, uses_gpu=True, has_cuda=True), app)
    check_pool(PoolRequest("prefork", 1, uses_gpu=False, has_cuda=True), app)
    with pytest.raises(PoolOptionError, match="initialised CUDA"):
        check_pool(PoolRequest("prefork", 1, uses_gpu=True, has_cuda=True), app)


def test_a_fork_is_refused_with_a_gpu(app: InferenceApp) -> None:
    app.conf.worker_pool_start_method = "fork"
    with pytest.raises(PoolOptionError, match="does not survive a fork"):
        check_pool(PoolRequest("prefork", 1, uses_gpu=True), app)
