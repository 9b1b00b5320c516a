"""Celery's results on the record backend: plain Celery, and runs within a claim."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis
from celery import Celery, chain, chord, group
from celery.app.task import Context
from celery.contrib.testing.worker import start_worker
from celery.exceptions import ChordError, TaskRevokedError
from celery.result import AsyncResult

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.backend import RecordBackend
from inference_tasks.state.records import Claimant, NewTask
from inference_tasks.state.store import TaskStore
from tests.support.brokers import PATIENCE_S
from tests.support.proxy import FaultProxy
from tests.support.servers import RedisNode

# One worker in this process for all of them.
pytestmark = pytest.mark.xdist_group("record-backend")

LEASE_S = 30.0
BACKEND_LOG = "inference_tasks.state.backend"


def make_app(redis_url: str, prefix: str) -> Celery:
    app = Celery("results", broker="memory://", set_as_current=False)
    app.conf.update(
        result_backend=f"inference_tasks.state.backend:RecordBackend+{redis_url}",
        result_backend_transport_options={"global_keyprefix": prefix},
        result_backend_base_sleep_between_retries_ms=20,
        result_backend_max_sleep_between_retries_ms=100,
        redis_socket_timeout=1.0,
        redis_socket_connect_timeout=1.0,
    )

    @app.task(shared=False, name="add")
    def add(x: int, y: int) -> int:
        return x + y

    @app.task(shared=False, name="total")
    def total(parts: list[int]) -> int:
        return sum(parts)

    @app.task(shared=False, name="fail")
    def fail(*_: object) -> None:
        raise ValueError("wrong", 7)

    @app.task(shared=False, name="silent", ignore_result=True)
    def silent() -> str:
        return "nobody asks"

    @app.task(shared=False, name="unwritable")
    def unwritable() -> object:
        return object()

    return app


@pytest.fixture(scope="module")
def prefix() -> str:
    return f"results-{uuid.uuid4().hex[:8]}:"


@pytest.fixture(scope="module")
def app(redis_node: RedisNode, prefix: str) -> Iterator[Celery]:
    app = make_app(redis_node.url(), prefix)
    yield app
    app.close()


@pytest.fixture
def store(redis_url: str, prefix: str) -> Iterator[TaskStore]:
    store = TaskStore.from_url(redis_url, prefix)
    yield store
    store.close()


@pytest.fixture(scope="module")
def worker(app: Celery) -> Iterator[None]:
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        yield


def of(app: Celery) -> RecordBackend:
    assert isinstance(app.backend, RecordBackend)
    return app.backend


def claimed(store: TaskStore, **fields: object) -> tuple[str, Context]:
    task_id = uuid.uuid4().hex
    store.submit([NewTask(task_id, "add", "batch", "batch", "fresh", 0, "n")])
    (claim,) = store.claim([Claimant(task_id, "add", "batch", "fresh")], "w1", LEASE_S)
    return task_id, request(task_id, claim.token, **fields)


def request(task_id: str, token: int | None, **fields: object) -> Context:
    within = {} if token is None else {"inference_token": token, "inference_gen": 0}
    return Context({"id": task_id, "task": "add", "delivery_info": {}, **within, **fields})


# Plain Celery on it.


@pytest.mark.usefixtures("worker")
def test_plain_celery_results_work_and_leave_records(app: Celery, store: TaskStore) -> None:
    result = app.tasks["add"].delay(1, 2)
    assert result.get(timeout=PATIENCE_S) == 3
    assert (result.status, result.ready(), result.successful()) == ("SUCCESS", True, True)
    record = store.get(result.id)
    assert (record.state, record.name) == ("success", "add")

    failure = app.tasks["fail"].delay()
    with pytest.raises(ValueError, match="wrong") as raised:
        failure.get(timeout=PATIENCE_S)
    assert raised.value.args == ("wrong", 7)
    assert failure.traceback
    assert store.get(failure.id).error == {"type": "ValueError", "message": "wrong, 7"}


@pytest.mark.usefixtures("worker")
def test_groups_chords_and_chains_work(app: Celery) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    assert group(add.s(i, i) for i in range(4)).apply_async().get(timeout=PATIENCE_S) == [0, 2, 4, 6]
    assert chord([add.s(i, 1) for i in range(4)], total.s()).apply_async().get(timeout=PATIENCE_S) == 10
    assert chain(add.s(1, 2), add.s(4)).apply_async().get(timeout=PATIENCE_S) == 7
    nested = chord(group(add.s(1, 1), chord([add.s(1, 1), add.s(2, 2)], total.s())), total.s())
    assert nested.apply_async().get(timeout=PATIENCE_S) == 8


@pytest.mark.usefixtures("worker")
def test_what_waits_for_a_failed_task_fails_too(app: Celery, store: TaskStore) -> None:
    add, fail, total = app.tasks["add"], app.tasks["fail"], app.tasks["total"]
    last = chain(fail.s(), add.s(1), add.s(2)).apply_async()
    with pytest.raises(ValueError, match="wrong"):
        last.get(timeout=PATIENCE_S)
    middle = last.parent
    assert isinstance(middle, AsyncResult)
    assert store.get(last.id).state == "failed"
    assert store.get(middle.id).state == "failed"
    body = chord([add.s(1, 1), fail.s()], total.s()).apply_async()
    with pytest.raises(ChordError, match="wrong"):
        AsyncResult(body.id, app=app).get(timeout=PATIENCE_S)
    assert store.get(body.id).state == "failed"


@pytest.mark.usefixtures("worker")
def test_a_result_that_is_no_json_fails_its_task(app: Celery, store: TaskStore) -> None:
    result = app.tasks["unwritable"].delay()
    with pytest.raises(Exception, match="not JSON serializable"):
        result.get(timeout=PATIENCE_S)
    assert store.get(result.id).state == "failed"


@pytest.mark.usefixtures("worker")
def test_ignored_results_of_foreign_tasks_leave_nothing(app: Celery, store: TaskStore) -> None:
    ignored = app.tasks["silent"].delay()
    app.tasks["add"].delay(1, 1).get(timeout=PATIENCE_S)  # the one before it is done
    assert store.get_many([ignored.id]) == [None]


def test_forgetting_a_result_keeps_the_record(app: Celery, store: TaskStore) -> None:
    task_id, within = claimed(store)
    of(app).mark_as_done(task_id, 1, request=within)
    result: AsyncResult[int] = AsyncResult(task_id, app=app)
    assert result.get(timeout=PATIENCE_S) == 1
    result.forget()
    assert AsyncResult(task_id, app=app).status == "PENDING"
    assert store.get(task_id).state == "success"


def test_eager_tasks_need_no_redis() -> None:
    app = make_app("redis://127.0.0.1:1/0", "eager:")
    app.conf.task_always_eager = True
    assert app.tasks["add"].delay(1, 2).get() == 3
    assert app.tasks["silent"].delay().get() == "nobody asks"
    assert app.tasks["fail"].delay().state == "FAILURE"


def test_the_backend_survives_pickling(app: Celery, prefix: str) -> None:
    made_again: tuple[object, tuple[type[RecordBackend], tuple[object, ...], dict[str, object]]] = of(app).__reduce__()  # type: ignore[assignment]
    cls, args, kwargs = made_again[1]
    assert cls(*args, **{**kwargs, "app": app}).prefix == prefix  # type: ignore[arg-type]


# Within a claim.


def test_a_run_within_a_claim_is_one_round_trip(app: Celery, store: TaskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    task_id, within = claimed(store)
    sent: list[object] = []
    backend = of(app)
    backend.mark_as_done(claimed(store)[0], 0, request=request("other", None))  # the server knows the script now
    send = redis.Connection.send_command

    def count(connection: redis.Connection, *args: object, **options: object) -> None:
        sent.append(args[0])
        send(connection, *args, **options)

    monkeypatch.setattr(redis.Connection, "send_command", count)
    backend.mark_as_done(task_id, {"label": "cat"}, request=within)
    monkeypatch.undo()
    assert sent == ["EVALSHA"]
    assert store.get(task_id).state == "success"
    assert AsyncResult(task_id, app=app).get(timeout=PATIENCE_S) == {"label": "cat"}


def test_an_ignored_result_still_ends_the_record(app: Celery, store: TaskStore) -> None:
    done, within = claimed(store, ignore_result=True)
    of(app).mark_as_done(done, "unseen", request=within, store_result=False)
    failed, within = claimed(store, ignore_result=True)
    of(app).mark_as_failure(failed, ValueError("no"), request=within, store_result=False)
    assert [record and record.state for record in store.get_many([done, failed])] == ["success", "failed"]
    assert AsyncResult(done, app=app).status == "PENDING"


def test_our_message_on_a_worker_without_claims_still_ends_its_record(app: Celery, store: TaskStore) -> None:
    task_id = uuid.uuid4().hex
    store.submit([NewTask(task_id, "add", "batch", "batch", "fresh", 0, "n")])
    ours = request(task_id, None, ignore_result=True, inference={"v": 1, "tier": "batch"})
    of(app).mark_as_done(task_id, None, request=ours, store_result=False)
    assert store.get(task_id).state == "success"


def test_a_retry_and_a_revocation_reach_the_record(app: Celery, store: TaskStore) -> None:
    retried, within = claimed(store)
    of(app).mark_as_retry(retried, KeyError("later"), request=within)
    assert (store.get(retried).state, store.get(retried).failures) == ("retrying", 1)
    assert AsyncResult(retried, app=app).status == "RETRY"

    for reason, state in (("revoked", "cancelled"), ("expired", "expired")):
        task_id, within = claimed(store)
        of(app).mark_as_revoked(task_id, reason, request=within)
        assert store.get(task_id).state == state
        with pytest.raises(TaskRevokedError):
            AsyncResult(task_id, app=app).get(timeout=PATIENCE_S)


def test_progress_of_a_run_is_seen_and_changes_no_state(app: Celery, store: TaskStore) -> None:
    task_id, within = claimed(store)
    of(app).store_result(task_id, {"done": 3}, "PROGRESS", request=within)
    assert (AsyncResult(task_id, app=app).state, store.get(task_id).state) == ("PROGRESS", "processing")


def test_a_late_run_is_refused_without_an_error_and_starts_nothing(
    app: Celery, store: TaskStore, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    @app.task(shared=False, name="told")
    def tell(*_: object) -> None:
        told.append("errback")

    caplog.set_level(logging.WARNING, BACKEND_LOG)
    before = store.stale_writes()
    task_id, late = claimed(store, errbacks=[tell.s()], chord=None)
    assert store.crashed(task_id, vars(late)["inference_token"], "w1").crashes == 1
    (claim,) = store.claim([Claimant(task_id, "add", "batch", "fresh")], "w2", LEASE_S)
    of(app).mark_as_failure(task_id, ValueError("late"), request=late)
    of(app).mark_as_done(task_id, "late", request=late)
    of(app).mark_as_retry(task_id, ValueError("late"), request=late)
    assert (store.get(task_id).state, told) == ("processing", [])
    assert "a late" in caplog.text
    assert store.stale_writes() == before + 3
    of(app).mark_as_done(task_id, "good", request=request(task_id, claim.token))
    assert AsyncResult(task_id, app=app).get(timeout=PATIENCE_S) == "good"


def test_a_member_of_a_chord_counts_once_and_only_for_the_run_that_holds_it(app: Celery, store: TaskStore) -> None:
    callback = app.tasks["total"].s()
    callback.freeze()
    member, within = claimed(store, chord=callback, group="g1", group_index=0)
    late = request(member, vars(within)["inference_token"] - 1, chord=callback, group="g1", group_index=0)
    of(app).set_chord_size("g1", 2)
    of(app).mark_as_done(member, 10, request=late)
    of(app).mark_as_done(member, 1, request=within)
    of(app).mark_as_done(member, 1, request=within)
    key = of(app).get_key_for_group("g1", ".j")
    assert of(app).client.zcard(key) == 1
    assert b"10" not in of(app).client.zrange(key, 0, -1)[0].split(b"SUCCESS")[1]


def test_an_exception_of_a_foreign_type_comes_back_by_name(app: Celery, store: TaskStore) -> None:
    class CudaError(Exception):
        pass

    task_id, within = claimed(store)
    of(app).mark_as_failure(task_id, CudaError("out of memory"), request=within)
    with pytest.raises(Exception, match="out of memory") as raised:
        AsyncResult(task_id, app=app).get(timeout=PATIENCE_S)
    assert type(raised.value).__name__.endswith("CudaError")


# Redis away.


def test_a_result_within_a_claim_is_written_once_redis_is_back(private_redis: RedisNode, prefix: str) -> None:
    with FaultProxy(private_redis.port) as proxy:
        app = make_app(proxy.url(private_redis.url()), prefix)
        store = TaskStore.from_url(private_redis.url(), prefix)
        task_id, within = claimed(store)
        of(app).client.ping()
        proxy.down()
        with pytest.raises(StateUnavailableError):
            of(app).store_result("foreign", 1, "SUCCESS")
        writing = threading.Thread(target=of(app).mark_as_done, args=(task_id, 5), kwargs={"request": within})
        with logged(logging.getLogger(BACKEND_LOG)) as refused:
            writing.start()
            assert refused.wait(timeout=PATIENCE_S)
        assert writing.is_alive()
        assert store.get(task_id).state == "processing"
        proxy.resume()
        writing.join(timeout=PATIENCE_S)
        assert not writing.is_alive()
        assert store.get(task_id).state == "success"
        store.close()
        app.close()


@contextmanager
def logged(logger: logging.Logger) -> Iterator[threading.Event]:
    """An event that is set by the logger's next message."""
    heard = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: heard.set()  # type: ignore[method-assign]
    level = logger.level
    logger.setLevel(logging.WARNING)  # the worker in this process has silenced the root
    logger.addHandler(handler)
    try:
        yield heard
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
