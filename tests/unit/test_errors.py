"""Errors carry their data, say what to do, and cross processes whole."""

from __future__ import annotations

import pickle

import pytest

import inference_routing.tier
from inference_tasks import errors

EXAMPLES: list[errors.InferenceError] = [
    errors.TaskNotFoundError("id-1"),
    errors.DeadLetterNotFoundError("id-1"),
    errors.DeadLettersBusyError("dead"),
    errors.MessageTooLargeError(size_bytes=10, limit_bytes=5, task="t"),
    errors.InvalidArgumentsError("no", task="t"),
    errors.UnknownOptionError("teir", ["tier", "name"], where="@app.inference"),
    errors.UnknownTaskError("clasify", ["vision.classify"]),
    errors.UnknownTierError("batsch"),
    errors.QueueFullError(tier="batch", limit=5, reason="full", retry_after_s=3, task_id="id-1"),
    errors.TierPausedError(tier="batch", task_id="id-1"),
    errors.BrokerUnavailableError("refused"),
    errors.OutcomeUnknownError("id-1", "no answer"),
    errors.StateUnavailableError("refused"),
    errors.ResultTimeoutError("id-1", timeout_s=1.0, state="pending"),
    errors.TaskFailedError("id-1", state="failed", error_type="ValueError", error_message="no"),
    errors.SettingsError(["a", "b"]),
    errors.TopologyMismatchError(["a"]),
    errors.PoolOptionError("solo", "slots", "it has one"),
    errors.ModelLoadError("m", step="loading", reason="no"),
    errors.BugError("no"),
    errors.TemporaryError("later"),
    errors.RetryAfter(3, "later"),
    errors.PermanentError("never"),
    errors.TaskCancelledError("nobody waits"),
    errors.DeadlineError(tier="batch", ahead=9, timeout_s=2.0, retry_after_s=3.0),
    errors.IdempotencyConflictError("id-1"),
    errors.DependencyUnknownError("no such task", dependency="id-2"),
    errors.DependencyFailedError("it has failed", dependency="id-2", state="failed"),
    errors.DependencyCycleError("itself", dependency="id-2"),
]


def test_there_is_an_example_of_every_error() -> None:
    families = {"InferenceError", "CallerError", "BusyError", "DeploymentError"}
    every = {name for name in errors.__all__ if name.endswith(("Error", "RetryAfter"))} - families
    assert {type(error).__name__ for error in EXAMPLES} == every


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_data(error: errors.InferenceError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_who_may_ask_again_is_told_when(error: errors.InferenceError) -> None:
    assert hasattr(error, "retry_after_s") == isinstance(error, errors.BusyError)


def test_an_unknown_tier_is_also_the_errors_of_the_core() -> None:
    error = errors.UnknownTierError("batsch")
    assert isinstance(error, inference_routing.tier.UnknownTierError)
    assert error.nearest == "batch"


def test_an_unknown_option_names_the_nearest_or_all() -> None:
    assert "Did you mean 'tier'?" in str(errors.UnknownOptionError("teir", ["tier", "name"], where="x"))
    assert "Known options: name, tier." in str(errors.UnknownOptionError("qqq", ["tier", "name"], where="x"))


def test_a_full_queue_says_its_limit_and_when_to_come_again() -> None:
    error = errors.QueueFullError(tier="batch", limit=5, retry_after_s=3)
    assert "limit of 5 waiting tasks" in str(error)
    assert "in 3 s" in str(error)


def test_a_delay_asked_for_is_a_number_of_seconds_that_the_broker_can_keep() -> None:
    assert errors.RetryAfter(2.5).delay_s == 2.5
    assert errors.RetryAfter(-1).delay_s == 0
    for wrong in (float("nan"), 1e12, "3", None, True):
        with pytest.raises(errors.CallerError, match="expected a number of seconds"):
            errors.RetryAfter(wrong)  # type: ignore[arg-type]
