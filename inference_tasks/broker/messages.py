"""What is sent to the broker, and what can become of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from inference_routing.admission import RefusalReason, drained_after_s, retry_after_s
from inference_tasks.errors import (
    BrokerUnavailableError,
    DeadlineError,
    DependencyCycleError,
    DependencyFailedError,
    DependencyUnknownError,
    IdempotencyConflictError,
    InferenceError,
    MessageTooLargeError,
    OutcomeUnknownError,
    QueueFullError,
    StateUnavailableError,
    TierPausedError,
)
from inference_tasks.state.records import DEPENDENCY_CYCLE, DEPENDENCY_FAILED, NewTask

__all__ = [
    "PERSISTENT",
    "Accepted",
    "Blocked",
    "Conflict",
    "Declaration",
    "ExchangeDeclaration",
    "Outcome",
    "Outgoing",
    "Properties",
    "QueueDeclaration",
    "Refused",
    "TooLarge",
    "Unavailable",
    "Unknown",
    "error_for",
]

PERSISTENT = 2


@dataclass(frozen=True, slots=True)
class Properties:
    """The AMQP properties a message carries; what is None is left out.

    ``message_id`` is normally left to the publisher: it is how a returned message is found again.
    """

    content_type: str | None = "application/json"
    content_encoding: str | None = "utf-8"
    headers: Mapping[str, object] = field(default_factory=dict)
    delivery_mode: int = PERSISTENT
    priority: int | None = None
    correlation_id: str | None = None
    reply_to: str | None = None
    expiration: str | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class ExchangeDeclaration:
    """An exchange that must exist before the message is published."""

    name: str
    type: str = "direct"
    durable: bool = True
    auto_delete: bool = False
    arguments: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class QueueDeclaration:
    """A queue that must exist, bound by each (exchange, routing key) of ``bindings``, before the message is sent."""

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: tuple[tuple[str, object], ...] = ()
    bindings: tuple[tuple[str, str], ...] = ()


Declaration = ExchangeDeclaration | QueueDeclaration


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One message, complete, before it is sent.

    Attributes:
        mandatory: whether a message that reaches no queue counts as not sent. Always true for tasks; false where
            nobody needs to listen, as with events.
        task: the record that is written before the message is published, None for what is no task.
        declare: what must exist first, declared once per process. The tier queues need no mention.
        once_free: what is sent instead if all that the task depends on has succeeded already.
    """

    body: bytes
    exchange: str
    routing_key: str
    properties: Properties
    mandatory: bool = True
    task: NewTask | None = None
    declare: tuple[Declaration, ...] = ()
    once_free: Outgoing | None = None

    @property
    def task_id(self) -> str:
        """The id of the task, the correlation id where no record is written, or an empty text."""
        if self.task is not None:
            return self.task.id
        return self.properties.correlation_id or ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The broker stored the message; or (``published`` false) nothing was sent.

    Nothing is sent where the task had already ended, or where it is shared and its message is stored.

    Attributes:
        task_id: of the task that this submit has joined; empty where it has its own.
        lift: the tier that this task should be lifted to, being higher than its own; empty for none.
    """

    published: bool = True
    task_id: str = ""
    lift: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was kept, and the record written for this message is gone again.

    Attributes:
        reason: the queue is full, too much of the tier is parked, too much waits before the deadline, or an operator
            has paused the tier.
        drained_per_s: how fast workers empty the tier at present, None when that is not known.
        ahead: how many tasks wait before it, where its deadline is the reason.
    """

    reason: RefusalReason = "full"
    drained_per_s: float | None = None
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Conflict:
    """A key of this submit belongs to a task that was asked for something else; nothing was sent."""

    task_id: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """What the task depends on cannot come; nothing was sent.

    Attributes:
        why: ``DEPENDENCY_UNKNOWN``, ``DEPENDENCY_FAILED`` or ``DEPENDENCY_CYCLE``.
        dependency: id of the task that it needs.
        state: of that task, if it has ended.
    """

    why: str
    dependency: str
    state: str = ""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Body and headers together exceed the limit; nothing was sent."""

    size_bytes: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The message was surely not accepted, by the broker or by the state store (``part``)."""

    reason: str
    part: Literal["broker", "state"] = "broker"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The message was written but no answer came: it may have been stored. Sending the same id again is harmless."""

    reason: str


Outcome = Accepted | Refused | Conflict | Blocked | TooLarge | Unavailable | Unknown


def error_for(
    outcome: Outcome, outgoing: Outgoing, *, tier: str = "", bound: int | None = None
) -> InferenceError | None:
    """Return the error that tells a caller of ``outcome``, or None if the message was accepted.

    Args:
        tier: the tier the message was meant for, for the text of a refusal.
        bound: that tier's bound, from which the time to ask again is worked out.
    """
    match outcome:
        case Accepted():
            return None
        case Refused(reason="paused"):
            return TierPausedError(tier=tier or outgoing.routing_key, task_id=outgoing.task_id)
        case Refused(reason="deadline", drained_per_s=drained_per_s, ahead=ahead):
            return DeadlineError(
                tier=tier or outgoing.routing_key,
                ahead=ahead,
                timeout_s=_timeout_s(outgoing.task),
                retry_after_s=drained_after_s(ahead, drained_per_s),
                task_id=outgoing.task_id,
            )
        case Conflict(task_id=task_id):
            return IdempotencyConflictError(task_id)
        case Blocked():
            return _blocked(outcome, outgoing.task_id)
        case Refused(reason=reason, drained_per_s=drained_per_s):
            return QueueFullError(
                tier=tier or outgoing.routing_key,
                limit=bound,
                reason=reason,
                retry_after_s=retry_after_s(bound, drained_per_s) if bound is not None else 1.0,
                task_id=outgoing.task_id,
            )
        case TooLarge(size_bytes=size_bytes, limit_bytes=limit_bytes):
            task = str(outgoing.properties.headers.get("task") or "")
            return MessageTooLargeError(size_bytes=size_bytes, limit_bytes=limit_bytes, task=task)
        case Unavailable(reason=reason, part="state"):
            return StateUnavailableError(reason)
        case Unavailable(reason=reason):
            return BrokerUnavailableError(reason)
        case Unknown(reason=reason):
            return OutcomeUnknownError(outgoing.task_id, reason)


def _blocked(outcome: Blocked, task_id: str) -> InferenceError:
    need = outcome.dependency
    if outcome.why == DEPENDENCY_CYCLE:
        return DependencyCycleError(
            f"Task {task_id} cannot wait for task {need}: that is itself, or waits for it. Nothing was sent.",
            dependency=need,
        )
    if outcome.why == DEPENDENCY_FAILED:
        return DependencyFailedError(
            f"Task {task_id} was to wait for task {need}, which has ended as {outcome.state}. Nothing was sent.",
            dependency=need,
            state=outcome.state,
        )
    return DependencyUnknownError(
        f"Task {task_id} was to wait for task {need}, which is not known: it was never accepted here, or finished "
        "longer ago than state.finished_ttl_s. Nothing was sent.",
        dependency=need,
    )


def _timeout_s(task: NewTask | None) -> float | None:
    if task is None or task.expires_at_s is None or task.submitted_at_s is None:
        return None
    return task.expires_at_s - task.submitted_at_s
