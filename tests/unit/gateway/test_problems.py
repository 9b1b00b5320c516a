"""One table from error to status; a problem tells what a client can use and nothing of the deployment."""

from __future__ import annotations

import json

import pytest
from fastapi import Request

from inference_tasks import errors
from inference_tasks.gateway.problems import ProblemError, problem_of, problem_response

REQUEST = Request({"type": "http", "method": "GET", "path": "/v1/tasks/x", "headers": [], "query_string": b""})

STATUS_BY_ERROR = [
    (errors.QueueFullError(tier="batch", limit=5, reason="parked", retry_after_s=2.2), 429),
    (errors.DeadlineError(tier="batch", ahead=100, timeout_s=2.0, retry_after_s=7.5), 429),
    (errors.TierPausedError(tier="batch"), 503),
    (errors.BrokerUnavailableError("refused"), 503),
    (errors.StateUnavailableError("refused"), 503),
    (errors.OutcomeUnknownError("id-1", "no answer"), 503),
    (errors.ResultTimeoutError("id-1", timeout_s=1.0, state="pending"), 503),
    (errors.TaskNotFoundError("id-1"), 404),
    (errors.UnknownTaskError("clasify", ["vision.classify"]), 404),
    (errors.MessageTooLargeError(size_bytes=10, limit_bytes=5), 413),
    (errors.InvalidArgumentsError("no", task="t"), 422),
    (errors.UnknownTierError("batsch"), 422),
    (errors.CallerError("no"), 422),
    (errors.DeploymentError("the password hunter2 is wrong"), 500),
    (errors.BugError("no"), 500),
]


@pytest.mark.parametrize(("error", "status"), STATUS_BY_ERROR, ids=lambda one: type(one).__name__)
def test_every_family_of_errors_has_its_status(error: errors.InferenceError, status: int) -> None:
    problem = problem_of(error)
    answer = problem_response(problem, REQUEST)
    body = json.loads(bytes(answer.body))
    assert answer.status_code == body["status"] == status
    assert answer.media_type == "application/problem+json"
    assert body["instance"] == "/v1/tasks/x"
    if status in (429, 503):
        assert int(answer.headers["retry-after"]) >= body["retry_after_s"]


def test_a_full_tier_tells_all_that_it_knows() -> None:
    said = problem_of(STATUS_BY_ERROR[0][0]).extensions
    assert said == {"tier": "batch", "limit": 5, "reason": "parked", "retry_after_s": 2.2}


def test_a_wait_is_a_whole_number_of_seconds_rounded_up() -> None:
    answer = problem_response(problem_of(STATUS_BY_ERROR[0][0]), REQUEST)
    assert answer.headers["retry-after"] == "3"


def test_what_is_wrong_with_the_deployment_is_not_for_clients(caplog: pytest.LogCaptureFixture) -> None:
    problem = problem_of(errors.DeploymentError("the password hunter2 is wrong"))
    assert "hunter2" not in problem.detail
    assert "hunter2" in caplog.text


def test_every_error_that_a_submit_can_raise_is_in_the_table() -> None:
    families = (errors.CallerError, errors.BusyError, errors.DeploymentError)
    for name in errors.__all__:
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, families):
            made = kind.__new__(kind)
            made.__dict__.update(retry_after_s=1.0)
            assert isinstance(problem_of(made), ProblemError)
