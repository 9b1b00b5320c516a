"""Every error a user of this package can meet, grouped by who has to act.

``CallerError``: the caller must change what it asked for. ``BusyError``: the caller may ask again after
``retry_after_s``. ``DeploymentError``: somebody must change a server, a setting or an installation. ``BugError``:
a mistake in this package. ``TaskFailedError`` stands beside the families: the request was served, the task failed.
``TemporaryError``, ``RetryAfter``, ``PermanentError`` and ``TaskCancelledError`` are for tasks to raise.

The data is in the attributes; the message says what was expected, what was found and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from inference_routing.tier import UnknownTierError as CoreUnknownTierError

__all__ = [
    "LONGEST_DELAY_S",
    "BrokerUnavailableError",
    "BugError",
    "BusyError",
    "CallerError",
    "DeadLetterNotFoundError",
    "DeadLettersBusyError",
    "DeadlineError",
    "DependencyCycleError",
    "DependencyFailedError",
    "DependencyUnknownError",
    "DeploymentError",
    "IdempotencyConflictError",
    "InferenceError",
    "InvalidArgumentsError",
    "MessageTooLargeError",
    "ModelLoadError",
    "OutcomeUnknownError",
    "PermanentError",
    "PoolOptionError",
    "QueueFullError",
    "ResultTimeoutError",
    "RetryAfter",
    "SettingsError",
    "StateUnavailableError",
    "TaskCancelledError",
    "TaskFailedError",
    "TaskNotFoundError",
    "TemporaryError",
    "TierPausedError",
    "TopologyMismatchError",
    "UnknownOptionError",
    "UnknownTaskError",
    "UnknownTierError",
    "kept_delay_s",
    "nearest",
]

#: After how long it is worth asking again whether an operator has resumed a tier.
PAUSED_RETRY_S = 15.0

#: What the 28 levels of the broker's delay queues can hold.
LONGEST_DELAY_S = 2**28 - 1


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like ``name``, or None when nothing is near enough to be meant."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def kept_delay_s(what: str, delay_s: object) -> float:
    """Return a delay that the broker can keep, in seconds; one below zero has passed already.

    Raises:
        CallerError: it is no number, or too long; ``what`` says of what it is the delay.
    """
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not delay_s <= LONGEST_DELAY_S:
        raise CallerError(f"{what}: expected a number of seconds up to {LONGEST_DELAY_S}, found {delay_s!r:.80}.")
    return max(0.0, float(delay_s))


def _rebuild(cls: type[InferenceError], message: str, data: dict[str, object]) -> InferenceError:
    error = cls.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(data)
    return error


class InferenceError(Exception):
    """Root of all errors of this package.

    They survive pickling with all their attributes, so they can cross from a pool process to its parent.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own rule calls cls(*args), which keyword-only constructors refuse.
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class CallerError(InferenceError):
    """The caller must change its request; repeating it unchanged cannot succeed."""


class BusyError(InferenceError):
    """The request was right; it may be repeated after ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeploymentError(InferenceError):
    """Somebody must change the deployment: a setting, a server, a right or an installed package."""


class BugError(InferenceError):
    """A mistake in this package; please report it with the message."""


# The caller must change something.


class TaskNotFoundError(CallerError, LookupError):
    """No task of this id is known: it was never submitted, or its record has reached the end of its life."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"No task {task_id!r}: it was never accepted here, or it finished longer ago than state.finished_ttl_s. "
            "Check the id, and that the submitting side uses the same state.url and state.prefix."
        )
        self.task_id = task_id


class DeadLetterNotFoundError(CallerError, LookupError):
    """There is no dead letter of this id: its task has not failed, or was replayed or dropped since."""

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"No dead letter {task_id!r}: its task has not failed, or was replayed or dropped since. "
            f"`inference-tasks status {task_id}` tells of the task, `inference-tasks dead list` shows what is there."
        )
        self.task_id = task_id


class MessageTooLargeError(CallerError, ValueError):
    """The encoded message is larger than ``broker.max_body_bytes``; nothing was sent."""

    def __init__(self, *, size_bytes: int, limit_bytes: int, task: str = "") -> None:
        of_task = f" of task {task}" if task else ""
        super().__init__(
            f"The message{of_task} has {size_bytes} bytes; at most {limit_bytes} are allowed (broker.max_body_bytes). "
            "Pass large inputs by reference, for example as a path or a key of an object store."
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        self.task = task


class InvalidArgumentsError(CallerError, TypeError):
    """The arguments do not fit the task's signature, or cannot be written as JSON; nothing was sent."""

    def __init__(self, message: str, *, task: str) -> None:
        super().__init__(message)
        self.task = task


class IdempotencyConflictError(CallerError, ValueError):
    """The idempotency key was used before, for another task or other arguments; nothing was sent.

    Attributes:
        task_id: the task that was submitted under this key.
    """

    def __init__(self, task_id: str) -> None:
        super().__init__(
            f"This idempotency key belongs to task {task_id}, which was asked for something else. Use a new key for "
            "each new request, and the same key only to repeat one."
        )
        self.task_id = task_id


class DependencyUnknownError(CallerError, LookupError):
    """A task that this one was to wait for (``dependency``) is not known; nothing was sent."""

    def __init__(self, message: str, *, dependency: str = "") -> None:
        # The message comes first in these three: Celery makes errors again from that alone.
        super().__init__(message)
        self.dependency = dependency


class DependencyFailedError(CallerError):
    """A task that this one was to wait for has ended without success, so this one can never run.

    Attributes:
        dependency: id of that task.
        state: its end state: ``failed``, ``cancelled``, ``expired`` or ``dropped``.
    """

    def __init__(self, message: str, *, dependency: str = "", state: str = "") -> None:
        super().__init__(message)
        self.dependency = dependency
        self.state = state


class DependencyCycleError(CallerError, ValueError):
    """A task that this one was to wait for (``dependency``) waits for this one itself; nothing was sent."""

    def __init__(self, message: str, *, dependency: str = "") -> None:
        super().__init__(message)
        self.dependency = dependency


class UnknownOptionError(CallerError, TypeError):
    """An option that does not exist, with the nearest one that does."""

    def __init__(self, option: str, known: Iterable[str], *, where: str) -> None:
        names = sorted(known)
        guess = nearest(option, names)
        hint = f"Did you mean {guess!r}?" if guess else f"Known options: {', '.join(names)}."
        super().__init__(f"{where} has no option {option!r}. {hint}")
        self.option = option
        self.nearest = guess


class UnknownTaskError(CallerError, LookupError):
    """The app has no task of this name, or several whose names end with it.

    Attributes:
        name: what was asked for.
        nearest: the name most like it, None if none is near.
    """

    def __init__(self, name: str, known: Iterable[str], matching: Iterable[str] = ()) -> None:
        several, names = sorted(matching), sorted(known)
        guess = nearest(name, [*names, *(one.rpartition(".")[2] for one in names)])
        if several:
            super().__init__(f"Several tasks end with {name!r}: {', '.join(several)}. Name one in full.")
        else:
            hint = f"Did you mean {guess!r}?" if guess else f"It has: {', '.join(names) or 'none'}."
            super().__init__(f"The app has no task {name!r}. {hint}")
        self.name = name
        self.nearest = guess


class UnknownTierError(CallerError, CoreUnknownTierError):
    """A tier name that does not exist (``name``), with the nearest one that does (``nearest``)."""

    def __init__(self, name: str) -> None:
        CoreUnknownTierError.__init__(self, name)


# The caller may ask again.


class QueueFullError(BusyError):
    """The tier's queue is full, so the task was not accepted; nothing of it is kept.

    Attributes:
        tier: the tier that refused.
        limit: the tier's bound, in waiting messages.
        reason: ``"full"`` (the broker refused) or ``"parked"`` (waiting retries already fill the bound).
        retry_after_s: when to ask again.
        task_id: the id of the refused task, free to be used again.
    """

    def __init__(
        self, *, tier: str, limit: int | None, reason: str = "full", retry_after_s: float = 1.0, task_id: str = ""
    ) -> None:
        held = "waiting tasks" if reason != "parked" else "parked and returned tasks"
        bound = f"its limit of {limit} {held}" if limit is not None else "its limit"
        super().__init__(
            f"Tier {tier} is at {bound} and accepted nothing. Submit again in {retry_after_s:g} s, "
            f"or raise tiers.{tier}.bound.",
            retry_after_s=retry_after_s,
        )
        self.tier = tier
        self.limit = limit
        self.reason = reason
        self.task_id = task_id


class TierPausedError(QueueFullError):
    """An operator refuses the tier's submits for now (``pause --refuse``, or ``drain``); nothing was kept.

    Attributes:
        tier: the tier that refused.
        reason: always ``"paused"``.
        retry_after_s: when to ask again; nobody knows when the operator will resume the tier.
        task_id: the id of the refused task, free to be used again.
    """

    def __init__(
        self,
        *,
        tier: str,
        limit: int | None = None,
        reason: str = "paused",
        retry_after_s: float = PAUSED_RETRY_S,
        task_id: str = "",
    ) -> None:
        super().__init__(tier=tier, limit=limit, reason=reason, retry_after_s=retry_after_s, task_id=task_id)
        self.args = (
            f"Tier {tier} accepts nothing: an operator has paused or drained it. Submit again in {retry_after_s:g} s, "
            "or to another tier.",
        )


class DeadlineError(BusyError):
    """So much waits in the tier that the task could not start in time; it was not accepted, nothing of it is kept.

    Attributes:
        tier: the tier that refused.
        ahead: how many tasks wait there.
        timeout_s: within which it would have had to start.
        reason: always ``"deadline"``.
        retry_after_s: in what time the workers have started those, at the rate at which they start tasks now.
        task_id: the id of the refused task, free to be used again.
    """

    def __init__(
        self, *, tier: str, ahead: int, timeout_s: float | None, retry_after_s: float = 1.0, task_id: str = ""
    ) -> None:
        within = f"within {timeout_s:g} s" if timeout_s is not None else "in time"
        super().__init__(
            f"Tier {tier} has {ahead} tasks waiting, too many for this one to start {within}; nothing was accepted. "
            f"They take the workers {retry_after_s:g} s; submit again then, or with a longer timeout_s.",
            retry_after_s=retry_after_s,
        )
        self.tier = tier
        self.ahead = ahead
        self.timeout_s = timeout_s
        self.reason = "deadline"
        self.task_id = task_id


class BrokerUnavailableError(BusyError):
    """The broker could not be reached or is blocked; the task was surely not accepted."""

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"The broker took nothing: {reason}. Nothing was sent; submit again in {retry_after_s:g} s. "
            "If it lasts, check broker.url and the broker's alarms.",
            retry_after_s=retry_after_s,
        )
        self.reason = reason


class OutcomeUnknownError(BusyError):
    """The message was sent but no answer came in time: it may or may not be stored.

    Submitting again with the same ``task_id`` is harmless: a task runs once however often its id is submitted.
    """

    def __init__(self, task_id: str, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"It is unknown whether task {task_id} was accepted: {reason}. Submitting it again with the same task_id "
            "is harmless; its status tells whether it runs.",
            retry_after_s=retry_after_s,
        )
        self.task_id = task_id
        self.reason = reason


class StateUnavailableError(BusyError):
    """Redis, which keeps the state of tasks, could not be reached or refused the call."""

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            f"The state store did not answer: {reason}. Ask again in {retry_after_s:g} s; if it lasts, check state.url "
            "and Redis.",
            retry_after_s=retry_after_s,
        )
        self.reason = reason


class ResultTimeoutError(BusyError, TimeoutError):
    """The task had not ended when the caller's patience did; it goes on and its result can be asked for later."""

    def __init__(self, task_id: str, *, timeout_s: float, state: str) -> None:
        super().__init__(
            f"Task {task_id} is still {state} after {timeout_s:g} s. It goes on; ask for its result again, or wait "
            "longer (timeout_s).",
            retry_after_s=1.0,
        )
        self.task_id = task_id
        self.timeout_s = timeout_s
        self.state = state


class TaskFailedError(InferenceError):
    """The task ended without a result.

    Attributes:
        task_id: which task.
        state: its end state: ``failed``, ``expired``, ``cancelled`` or ``dropped``.
        error_type: class name of what it raised, empty when it never ran.
        error_message: what it said.
    """

    def __init__(self, task_id: str, *, state: str, error_type: str = "", error_message: str = "") -> None:
        why = f": {error_type}: {error_message}" if error_type else (f": {error_message}" if error_message else "")
        super().__init__(f"Task {task_id} ended as {state}{why}")
        self.task_id = task_id
        self.state = state
        self.error_type = error_type
        self.error_message = error_message


# For tasks to raise.


class TemporaryError(InferenceError):
    """The task failed for a reason that may pass: it is tried again, later each time, until ``max_attempts``."""


class RetryAfter(TemporaryError):  # noqa: N818  # reads as what it asks for: raise RetryAfter(30)
    """The task shall be tried again after this many seconds, not after those of its own back-off.

    Attributes:
        delay_s: how long to wait; below zero counts as zero.
    """

    def __init__(self, seconds: float, reason: str = "") -> None:
        """Ask for a delay.

        Raises:
            CallerError: it is no number, or longer than the broker can keep a message.
        """
        self.delay_s = kept_delay_s("RetryAfter", seconds)
        super().__init__(reason or f"to be tried again in {self.delay_s:g} s")


class PermanentError(InferenceError):
    """The task failed and would fail again: it is not retried, whatever its ``retry_on`` says."""


class TaskCancelledError(InferenceError):
    """The task shall end as cancelled: it has seen that it was asked to stop, or finds that nobody needs it."""


class DeadLettersBusyError(BusyError):
    """Another process reads the dead letters; two at a time would hide them from each other."""

    def __init__(self, name: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(
            f"Another process reads the dead letters and holds {name!r}: a replay, a drop or the maintenance worker. "
            f"Nothing was changed; try again in {retry_after_s:g} s, or end that process.",
            retry_after_s=retry_after_s,
        )
        self.name = name


# Somebody must change the deployment.


class SettingsError(DeploymentError, ValueError):
    """One or more settings are wrong; ``problems`` lists all of them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "A setting is wrong" if count == 1 else f"{count} settings are wrong"
        super().__init__(f"{head}:\n" + "\n".join(f"  - {problem}" for problem in self.problems))


class TopologyMismatchError(DeploymentError):
    """Queues exist in the broker with other arguments than the settings ask for; ``differences`` lists them."""

    def __init__(self, differences: Iterable[str]) -> None:
        self.differences = list(differences)
        super().__init__(
            "The broker's queues differ from the settings:\n"
            + "\n".join(f"  - {difference}" for difference in self.differences)
            + "\nThey are used as they are; `inference-tasks topology apply` changes them without losing a message."
        )


class PoolOptionError(DeploymentError, ValueError):
    """An option that the chosen worker pool would ignore or cannot keep."""

    def __init__(self, pool: str, option: str, why: str) -> None:
        super().__init__(f"Pool {pool!r} cannot keep {option}: {why}")
        self.pool = pool
        self.option = option


class ModelLoadError(DeploymentError):
    """A model of the app could not be loaded or warmed up."""

    def __init__(self, model: str, *, step: str, reason: str) -> None:
        super().__init__(
            f"Model {model!r} failed while {step}: {reason}. The process gets no slot before its models are ready."
        )
        self.model = model
        self.step = step
        self.reason = reason
