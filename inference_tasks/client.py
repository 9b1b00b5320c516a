"""The submitting side: tasks go out, their status and results come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

from celery.utils import uuid

from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, Unknown, error_for
from inference_tasks.errors import (
    CallerError,
    InferenceError,
    InvalidArgumentsError,
    ResultTimeoutError,
    TaskFailedError,
)
from inference_tasks.routes import Choice, choose
from inference_tasks.state.records import State, TaskRecord
from inference_tasks.submission import NO_LINEAGE, Lineage, MessageTemplate, checked_arguments

if TYPE_CHECKING:
    from celery import Celery

    from inference_tasks.settings import Settings
    from inference_tasks.task import InferenceTask, SubmitOptions

__all__ = ["BatchSubmission", "Call", "Client", "RefusedCall", "TaskHandle"]

R = TypeVar("R", covariant=True)

POLL_FIRST_S = 0.005
POLL_LONGEST_S = 0.25
POLL_SHARE = 0.1


class Publishing(Protocol):
    """What the client needs of the publisher."""

    def send(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome: ...

    def send_many(self, outgoing: list[Outgoing], timeout_s: float | None = None) -> list[Outcome]: ...

    async def send_async(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome: ...

    async def send_many_async(self, outgoing: list[Outgoing], timeout_s: float | None = None) -> list[Outcome]: ...


class Records(Protocol):
    """What the client needs of the state store."""

    def get(self, task_id: str) -> TaskRecord: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a batch: its arguments, and its id if the caller chooses it."""

    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    task_id: str | None = None


class TaskHandle(Generic[R]):
    """One submitted task. Holds its id only, so it can be made again from the id at any time (``app.handle(id)``)."""

    __slots__ = ("_client", "id")

    def __init__(self, task_id: str, client: Client) -> None:
        self.id = task_id
        self._client = client

    def __repr__(self) -> str:
        return f"TaskHandle({self.id!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TaskHandle) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def status(self) -> TaskRecord:
        """Look the task up: one round trip to Redis, whatever the length of the queues.

        Raises:
            TaskNotFoundError: its record has reached the end of its life.
            StateUnavailableError: Redis did not answer.
        """
        return self._client.status(self.id)

    async def status_async(self) -> TaskRecord:
        """Look the task up from a coroutine; see ``status``."""
        return await self._client.status_async(self.id)

    def result(self, *, timeout_s: float | None = None) -> R:
        """Wait until the task has ended and return its result.

        Args:
            timeout_s: longest wait; None waits as long as it takes, 0 only looks.

        Raises:
            TaskFailedError: it ended without a result.
            ResultTimeoutError: it has not ended yet.
            TaskNotFoundError: its record has reached the end of its life.
        """
        return cast(R, self._client.result(self.id, timeout_s=timeout_s))

    async def result_async(self, *, timeout_s: float | None = None) -> R:
        """Wait for the result in a coroutine; see ``result``."""
        return cast(R, await self._client.result_async(self.id, timeout_s=timeout_s))


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call of a batch that was not, or perhaps not, accepted: where it stood, its id, and why."""

    index: int
    task_id: str
    error: InferenceError


@dataclass(frozen=True, slots=True)
class BatchSubmission(Generic[R]):
    """What became of the calls of one ``submit_many``.

    Attributes:
        accepted: one handle for each accepted call, in the order of the calls.
        refused: calls that were surely not accepted.
        unknown: calls of which that is not known; submitting the same ids again is harmless.
    """

    accepted: tuple[TaskHandle[R], ...]
    refused: tuple[RefusedCall, ...] = ()
    unknown: tuple[RefusedCall, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every call was accepted."""
        return not self.refused and not self.unknown

    def raise_for_refused(self) -> None:
        """Raise the error of the first call that was not accepted, if there is one."""
        for one in (*self.refused, *self.unknown):
            raise one.error


class Client:
    """Submits calls and asks for what became of them; one for each app."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        publisher: Publishing,
        records: Records,
        queue_by_lane: Mapping[tuple[str, str], str],
    ) -> None:
        self._app = app
        self._settings = settings
        self._publisher = publisher
        self._records = records
        self._queue_by_lane = queue_by_lane
        self._templates: dict[tuple[str, Choice], MessageTemplate] = {}

    def submit(
        self,
        task: InferenceTask[..., R],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: SubmitOptions,
    ) -> TaskHandle[R]:
        """Submit one call; see ``InferenceTask.submit``."""
        outgoing = self._outgoing(task, args, kwargs, options)
        self._raise_unless_accepted(self._publisher.send(outgoing, self._patience_s(options)), outgoing)
        return TaskHandle(outgoing.task_id, self)

    async def submit_async(
        self,
        task: InferenceTask[..., R],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: SubmitOptions,
    ) -> TaskHandle[R]:
        """Submit one call from a coroutine."""
        outgoing = self._outgoing(task, args, kwargs, options)
        outcome = await self._publisher.send_async(outgoing, self._patience_s(options))
        self._raise_unless_accepted(outcome, outgoing)
        return TaskHandle(outgoing.task_id, self)

    def submit_many(
        self,
        task: InferenceTask[..., R],
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        options: SubmitOptions,
    ) -> BatchSubmission[R]:
        """Submit many calls; see ``Submitter.submit_many``."""
        messages = self._all_outgoing(task, calls, options)
        return self._report(messages, self._publisher.send_many(messages, self._patience_s(options)))

    async def submit_many_async(
        self,
        task: InferenceTask[..., R],
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        options: SubmitOptions,
    ) -> BatchSubmission[R]:
        """Submit many calls from a coroutine."""
        messages = self._all_outgoing(task, calls, options)
        return self._report(messages, await self._publisher.send_many_async(messages, self._patience_s(options)))

    def status(self, task_id: str) -> TaskRecord:
        """Look a task up by its id; see ``TaskHandle.status``."""
        return self._records.get(task_id)

    async def status_async(self, task_id: str) -> TaskRecord:
        """Look a task up from a coroutine."""
        return await asyncio.to_thread(self.status, task_id)

    def result(self, task_id: str, *, timeout_s: float | None = None) -> object:
        """Wait for a task's result by its id; see ``TaskHandle.result``."""
        wait = _Wait(task_id, timeout_s)
        while not (record := self.status(task_id)).is_finished:
            time.sleep(wait.next_pause_s(record))
        return self._outcome_of(record)

    async def result_async(self, task_id: str, *, timeout_s: float | None = None) -> object:
        """Wait for a task's result in a coroutine."""
        wait = _Wait(task_id, timeout_s)
        while not (record := await self.status_async(task_id)).is_finished:  # noqa: ASYNC110  # the event is in Redis
            await asyncio.sleep(wait.next_pause_s(record))
        return await asyncio.to_thread(self._outcome_of, record)

    def _outgoing(
        self,
        task: InferenceTask[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: SubmitOptions,
    ) -> Outgoing:
        checked_arguments(task, args, kwargs)
        template, lineage = self._template(task, options)
        return template.fill(
            options.task_id or uuid(),
            args,
            kwargs,
            nonce=uuid4().hex,
            timeout_s=options.timeout_s or task.timeout_s,
            lineage=lineage,
        )

    def _all_outgoing(
        self,
        task: InferenceTask[..., Any],
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        options: SubmitOptions,
    ) -> list[Outgoing]:
        if options.task_id is not None:
            raise CallerError(
                "task_id names one task, not a batch; give each its own with Call(args, kwargs, task_id)."
            )
        template, lineage = self._template(task, options)
        timeout_s = options.timeout_s or task.timeout_s
        nonce = uuid4().hex
        messages: list[Outgoing] = []
        for index, item in enumerate(calls):
            call = _as_call(item, index, task.name)
            try:
                checked_arguments(task, call.args, call.kwargs)
                messages.append(
                    template.fill(
                        call.task_id or uuid(),
                        call.args,
                        call.kwargs,
                        nonce=nonce,
                        timeout_s=timeout_s,
                        lineage=lineage,
                    )
                )
            except InvalidArgumentsError as error:
                raise InvalidArgumentsError(f"Call {index}: {error}", task=task.name) from error
        return messages

    def _template(self, task: InferenceTask[..., Any], options: SubmitOptions) -> tuple[MessageTemplate, Lineage]:
        choice = choose(self._app, options.tier, task.tier, self._settings.default_tier)
        template = self._templates.get((task.name, choice))
        if template is None or template.is_stale:
            template = MessageTemplate(
                self._app,
                task,
                choice,
                exchange=self._settings.namespace,
                queue=self._queue_by_lane[choice.tier, choice.lane],
            )
            self._templates[task.name, choice] = template
        running = self._app.current_worker_task
        if running is None:
            return template, NO_LINEAGE
        return template, Lineage(running.request.root_id or running.request.id, running.request.id)

    def _patience_s(self, options: SubmitOptions) -> float:
        return options.confirm_timeout_s or self._settings.broker.confirm_timeout_s

    def _error(self, outcome: Outcome, outgoing: Outgoing) -> InferenceError | None:
        tier = outgoing.task.tier if outgoing.task else ""
        bound = self._settings.tiers[tier].bound if tier else None
        return error_for(outcome, outgoing, tier=tier, bound=bound)

    def _raise_unless_accepted(self, outcome: Outcome, outgoing: Outgoing) -> None:
        error = self._error(outcome, outgoing)
        if error is not None:
            raise error

    def _report(self, messages: list[Outgoing], outcomes: list[Outcome]) -> BatchSubmission[Any]:
        accepted: list[TaskHandle[Any]] = []
        refused: list[RefusedCall] = []
        unknown: list[RefusedCall] = []
        for index, (outgoing, outcome) in enumerate(zip(messages, outcomes, strict=True)):
            if isinstance(outcome, Accepted):
                accepted.append(TaskHandle(outgoing.task_id, self))
                continue
            error = self._error(outcome, outgoing)
            assert error is not None, "only an accepted message has no error"
            (unknown if isinstance(outcome, Unknown) else refused).append(RefusedCall(index, outgoing.task_id, error))
        return BatchSubmission(tuple(accepted), tuple(refused), tuple(unknown))

    def _outcome_of(self, record: TaskRecord) -> object:
        if record.state == State.SUCCESS:
            meta = self._app.backend.get_task_meta(record.id)
            return meta.get("result")
        error = record.error
        raise TaskFailedError(
            record.id,
            state=record.state,
            error_type=error["type"] if error else "",
            error_message=error["message"] if error else "",
        )


class _Wait:
    """Pauses between looks: short at first, then a tenth of the time already waited, so that a look costs little."""

    def __init__(self, task_id: str, timeout_s: float | None) -> None:
        self._task_id = task_id
        self._timeout_s = timeout_s
        self._started_at_s = time.monotonic()

    def next_pause_s(self, record: TaskRecord) -> float:
        waited_s = time.monotonic() - self._started_at_s
        pause_s = min(max(POLL_FIRST_S, waited_s * POLL_SHARE), POLL_LONGEST_S)
        if self._timeout_s is None:
            return pause_s
        left_s = self._timeout_s - waited_s
        if left_s <= 0:
            raise ResultTimeoutError(self._task_id, timeout_s=self._timeout_s, state=record.state)
        return min(pause_s, left_s)


def _as_call(item: Call | tuple[object, ...] | Mapping[str, object], index: int, task: str) -> Call:
    if isinstance(item, Call):
        return item
    if isinstance(item, tuple | list):
        return Call(tuple(item))
    if isinstance(item, Mapping):
        return Call(kwargs=item)
    # A bare string is the likely slip, and iterating over its letters the silent failure.
    raise InvalidArgumentsError(
        f"Call {index} of {task}: expected a tuple of arguments such as ({item!r},), a mapping of keyword arguments or "
        f"a Call, found {type(item).__name__}.",
        task=task,
    )
