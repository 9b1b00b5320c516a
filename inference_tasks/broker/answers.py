"""What the state store's answer to a submit means for its message."""

from __future__ import annotations

from inference_tasks.broker.messages import Accepted, Blocked, Conflict, Outcome, Outgoing, Refused, Unavailable
from inference_tasks.observe.events import emit
from inference_tasks.state.records import CONFLICT, END_STATES, LATE, PAUSED, SubmitAnswer

__all__ = ["settled_by", "tell"]


def settled_by(answer: SubmitAnswer, drained_per_s: float | None) -> Outcome | None:
    """Return what has become of a submit whose message need not, or must not, be sent; None for all others.

    Args:
        drained_per_s: how fast workers empty its tier, for a refusal; None if that is not known.
    """
    if answer.dependency:
        return Blocked(answer.state, answer.dependency, answer.dependency_state)
    if answer.state == LATE:
        return Refused("deadline", drained_per_s, answer.ahead)
    if answer.state == PAUSED:
        return Refused("paused")
    if answer.state == CONFLICT:
        return Conflict(answer.shares)
    if answer.state in END_STATES or (answer.shares and not answer.is_unsure):
        return Accepted(published=False, task_id=answer.shares, lift=answer.lift)
    return None


def tell(outgoing: Outgoing, outcome: Outcome) -> None:
    """Tell the event of a new task that was accepted or not; copies of known tasks are none."""
    task = outgoing.task
    if task is None or task.hop or task.generation:
        return
    if isinstance(outcome, Accepted):
        emit("task.submitted", tier=task.tier)
    else:
        emit("task.refused", tier=task.tier, reason=_why(outcome))


def _why(outcome: Outcome) -> str:
    if isinstance(outcome, Refused):
        return outcome.reason
    if isinstance(outcome, Unavailable):
        return outcome.part
    return type(outcome).__name__.lower()
