"""The parts of Celery's result backend that ours stands on, each by name."""

from __future__ import annotations

import inspect

import pytest
from celery.backends.redis import RedisBackend
from celery.worker import request as worker_request


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_store_result", ["self", "task_id", "result", "state", "traceback", "request", "kwargs"]),
        ("_get_result_meta", ["self", "result", "state", "traceback", "request", "format_date", "encode"]),
        ("get_key_for_task", ["self", "task_id", "key"]),
        ("get_key_for_group", ["self", "group_id", "key"]),
        ("mark_as_done", ["self", "task_id", "result", "request", "store_result", "state"]),
        (
            "mark_as_failure",
            ["self", "task_id", "exc", "traceback", "request", "store_result", "call_errbacks", "state"],
        ),
        ("mark_as_retry", ["self", "task_id", "exc", "traceback", "request", "store_result", "state"]),
        ("mark_as_revoked", ["self", "task_id", "reason", "request", "store_result", "state"]),
        ("on_chord_part_return", ["self", "request", "state", "result", "propagate", "kwargs"]),
        ("encode_result", ["self", "result", "state"]),
        ("exception_safe_to_retry", ["self", "exc"]),
    ],
)
def test_the_backends_methods_take_what_we_pass(name: str, parameters: list[str]) -> None:
    assert list(inspect.signature(getattr(RedisBackend, name)).parameters) == parameters


def test_a_stored_value_has_an_upper_size() -> None:
    assert isinstance(vars(RedisBackend)["_MAX_STR_VALUE_SIZE"], int)


def test_an_expired_task_is_revoked_for_the_reason_expired() -> None:
    assert "'expired'" in inspect.getsource(worker_request.Request.revoked)
