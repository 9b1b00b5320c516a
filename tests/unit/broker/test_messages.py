"""Each outcome has its error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference_tasks.broker.messages import (
    Accepted,
    Conflict,
    Outcome,
    Outgoing,
    Properties,
    Refused,
    TooLarge,
    Unavailable,
    Unknown,
    error_for,
)
from inference_tasks.errors import (
    BrokerUnavailableError,
    DeadlineError,
    IdempotencyConflictError,
    MessageTooLargeError,
    OutcomeUnknownError,
    QueueFullError,
    StateUnavailableError,
)
from inference_tasks.state.records import NewTask

OUTGOING = Outgoing(b"", "tiers", "tiers.batch", Properties(headers={"task": "classify"}, correlation_id="id-1"))


def test_what_was_accepted_has_none() -> None:
    assert error_for(Accepted(), OUTGOING) is None
    assert error_for(Accepted(published=False), OUTGOING) is None


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Unavailable("alarm"), BrokerUnavailableError),
        (Unavailable("down", part="state"), StateUnavailableError),
        (Unknown("no answer"), OutcomeUnknownError),
        (TooLarge(20, 10), MessageTooLargeError),
    ],
)
def test_every_other_outcome_has_its_own(outcome: Outcome, kind: type[Exception]) -> None:
    assert type(error_for(outcome, OUTGOING)) is kind


def test_a_refusal_tells_when_one_hundredth_of_the_bound_has_drained() -> None:
    error = error_for(Refused("full", drained_per_s=2.0), OUTGOING, tier="batch", bound=1000)
    assert isinstance(error, QueueFullError)
    assert (error.tier, error.limit, error.reason, error.retry_after_s, error.task_id) == (
        "batch",
        1000,
        "full",
        5,
        "id-1",
    )


def test_a_refusal_without_a_known_rate_says_one_second() -> None:
    error = error_for(Refused(), OUTGOING, tier="batch", bound=1000)
    assert isinstance(error, QueueFullError)
    assert error.retry_after_s == 1


def test_a_deadline_that_cannot_be_met_tells_when_the_work_ahead_is_done() -> None:
    task = NewTask("id-1", "classify", "batch", "batch", "fresh", 0, "n", 5.0, 7.5)
    outgoing = replace(OUTGOING, task=task)
    error = error_for(Refused("deadline", drained_per_s=4.0, ahead=90), outgoing, tier="batch", bound=1000)
    assert isinstance(error, DeadlineError)
    assert (error.tier, error.ahead, error.timeout_s, error.retry_after_s) == ("batch", 90, 2.5, 23)
    assert (error.reason, error.task_id) == ("deadline", "id-1")
    assert "90 tasks waiting" in str(error)


def test_a_key_that_was_used_otherwise_names_its_task() -> None:
    error = error_for(Conflict("id-0"), OUTGOING)
    assert isinstance(error, IdempotencyConflictError)
    assert error.task_id == "id-0"
