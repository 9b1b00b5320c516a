"""The submitting side: tasks go out, their status and results come back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from celery.utils import uuid

from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, Unknown, error_for
from inference_tasks.dependencies import Waits
from inference_tasks.errors import (
    CallerError,
    InferenceError,
    InvalidArgumentsError,
    ResultTimeoutError,
    TaskFailedError,
    TaskNotFoundError,
)
from inference_tasks.handles import BatchSubmission, Call, RefusedCall, TaskHandle, as_call
from inference_tasks.lifting import SHARED
from inference_tasks.routes import Choice, choose, running_tenant
from inference_tasks.sharing import share_keys
from inference_tasks.state.records import Cancellation, ShareKey, State, TaskRecord
from inference_tasks.submission import NO_LINEAGE, Herald, Lineage, MessageTemplate, checked_arguments

if TYPE_CHECKING:
    from celery import Celery

    from inference_tasks.settings import Settings
    from inference_tasks.task import InferenceTask, SubmitOptions

__all__ = ["Client", "Publishing", "Records"]

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

    def result(self, task_id: str) -> object: ...

    def cancel(self, task_id: str, *, terminate: bool, nonce: str) -> Cancellation: ...


class Lifting(Protocol):
    """What the client needs for the inheritance of tiers."""

    def lift(self, task_ids: Sequence[str], tier: str, because: str) -> int: ...


class Client:
    """Submits calls and asks for what became of them; one for each app."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        publisher: Publishing,
        records: Records,
        queue_by_lane: Mapping[tuple[str, str], str],
        *,
        herald: Herald | None,
        lifts: Lifting | None = None,
    ) -> None:
        """Make a client.

        Args:
            queue_by_lane: {(tier, lane): queue}.
            herald: tells listeners and monitors of what was sent; None where nothing is sent.
            lifts: lifts what a task of a higher tier waits for; None where nothing waits.
        """
        self._app = app
        self._herald = herald
        self._settings = settings
        self._publisher = publisher
        self._records = records
        self._queue_by_lane = queue_by_lane
        self._lifts = lifts
        self._waits = Waits(settings, queue_by_lane)
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
        outcome = self._publisher.send(outgoing, self._patience_s(options))
        self._lift([outgoing], [outcome])
        return self._handle(outgoing, outcome)

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
        if self._has_lifts([outgoing], [outcome]):
            await asyncio.to_thread(self._lift, [outgoing], [outcome])
        return self._handle(outgoing, outcome)

    def submit_many(
        self,
        task: InferenceTask[..., R],
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        options: SubmitOptions,
    ) -> BatchSubmission[R]:
        """Submit many calls; see ``Submitter.submit_many``."""
        messages = self._all_outgoing(task, calls, options)
        outcomes = self._publisher.send_many(messages, options.confirm_timeout_s)
        self._lift(messages, outcomes)
        return self._report(messages, outcomes)

    async def submit_many_async(
        self,
        task: InferenceTask[..., R],
        calls: Iterable[Call | tuple[object, ...] | Mapping[str, object]],
        options: SubmitOptions,
    ) -> BatchSubmission[R]:
        """Submit many calls from a coroutine."""
        messages = self._all_outgoing(task, calls, options)
        outcomes = await self._publisher.send_many_async(messages, options.confirm_timeout_s)
        if self._has_lifts(messages, outcomes):
            await asyncio.to_thread(self._lift, messages, outcomes)
        return self._report(messages, outcomes)

    def status(self, task_id: str) -> TaskRecord:
        """Look a task up by its id; see ``TaskHandle.status``."""
        record = self._records.get(task_id)
        if record.state == State.RETRYING and record.due_at_s is not None and record.due_at_s <= time.time():
            # The broker has let it go, and writes nothing down.
            return replace(record, state=State.PENDING)
        return record

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

    def cancel(self, task_id: str, *, terminate: bool = False, nonce: str = "") -> bool:
        """Cancel a task by its id, for all who hold it or for the one submit that ``nonce`` names.

        See ``TaskHandle.cancel``.
        """
        answer = self._records.cancel(task_id, terminate=terminate, nonce=nonce)
        if answer is Cancellation.MISSING:
            raise TaskNotFoundError(task_id)
        return answer is not Cancellation.ENDED

    async def cancel_async(self, task_id: str, *, terminate: bool = False, nonce: str = "") -> bool:
        """Cancel a task from a coroutine."""
        return await asyncio.to_thread(self.cancel, task_id, terminate=terminate, nonce=nonce)

    def _outgoing(
        self,
        task: InferenceTask[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: SubmitOptions,
    ) -> Outgoing:
        checked_arguments(task, args, kwargs)
        template, lineage = self._template(task, options)
        outgoing = template.fill(
            options.task_id or uuid(),
            args,
            kwargs,
            nonce=uuid4().hex,
            timeout_s=options.timeout_s or task.timeout_s,
            lineage=lineage,
            tenant=options.tenant,
            shared=self._shared(task, args, kwargs, options, lineage),
        )
        return self._waits.outgoing(outgoing, options.depends_on) if options.depends_on else outgoing

    def _shared(
        self,
        task: InferenceTask[..., Any],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: SubmitOptions,
        lineage: Lineage,
    ) -> tuple[ShareKey, ...]:
        has_window = task.dedup if options.dedup is None else options.dedup
        # What waits for others is for itself: an equal task need not wait for the same.
        if options.depends_on or (options.idempotency_key is None and not has_window):
            return ()
        tenant = options.tenant or lineage.tenant
        ttl_s = self._settings.state.idempotency_ttl_s
        return share_keys(task, args, kwargs, options, tenant=tenant, idempotency_ttl_s=ttl_s)

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
        if options.idempotency_key is not None:
            raise CallerError("idempotency_key names one submit, not a batch; submit the calls one by one.")
        template, lineage = self._template(task, options)
        timeout_s = options.timeout_s or task.timeout_s
        nonce = uuid4().hex
        messages: list[Outgoing] = []
        for index, item in enumerate(calls):
            call = as_call(item, index, task.name)
            try:
                checked_arguments(task, call.args, call.kwargs)
                shared = self._shared(task, call.args, call.kwargs, options, lineage)
                messages.append(
                    template.fill(
                        call.task_id or uuid(),
                        call.args,
                        call.kwargs,
                        nonce=uuid4().hex if shared else nonce,
                        timeout_s=timeout_s,
                        lineage=lineage,
                        tenant=options.tenant,
                        shared=shared,
                    )
                )
            except InvalidArgumentsError as error:
                raise InvalidArgumentsError(f"Call {index}: {error}", task=task.name) from error
        needs = options.depends_on
        return [self._waits.outgoing(one, needs) for one in messages] if needs else messages

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
        root_id = running.request.root_id or running.request.id
        return template, Lineage(root_id, running.request.id, running_tenant(self._app))

    def _has_lifts(self, messages: list[Outgoing], outcomes: list[Outcome]) -> bool:
        return self._lifts is not None and any(
            isinstance(outcome, Accepted) and (outcome.lift or outgoing.once_free is not None)
            for outgoing, outcome in zip(messages, outcomes, strict=True)
        )

    def _lift(self, messages: list[Outgoing], outcomes: list[Outcome]) -> None:
        """Lift what waits below the tier of those that wait for it, or share it."""
        if self._lifts is None or not self._has_lifts(messages, outcomes):
            return
        lifted: set[tuple[str, ...]] = set()
        for outgoing, outcome in zip(messages, outcomes, strict=True):
            task = outgoing.task
            if task is None or not isinstance(outcome, Accepted):
                continue
            if outcome.lift:
                self._lifts.lift([outcome.task_id], outcome.lift, SHARED)
            elif task.depends_on and task.depends_on not in lifted:
                # The others of a batch wait for the same.
                lifted.add(task.depends_on)
                self._lifts.lift(task.depends_on, task.tier, task.id)

    def _patience_s(self, options: SubmitOptions) -> float:
        return options.confirm_timeout_s or self._settings.broker.confirm_timeout_s

    def _error(self, outcome: Outcome, outgoing: Outgoing) -> InferenceError | None:
        tier = outgoing.task.tier if outgoing.task else ""
        bound = self._settings.tiers[tier].bound if tier else None
        return error_for(outcome, outgoing, tier=tier, bound=bound)

    def _handle(self, outgoing: Outgoing, outcome: Outcome) -> TaskHandle[Any]:
        error = self._error(outcome, outgoing)
        if error is not None:
            raise error
        assert isinstance(outcome, Accepted), "only an accepted message has no error"
        if self._herald is not None and not outcome.task_id:
            self._herald.accepted(outgoing)
        return self._handle_on(outgoing, outcome)

    def _handle_on(self, outgoing: Outgoing, outcome: Accepted) -> TaskHandle[Any]:
        nonce = outgoing.task.nonce if outgoing.task is not None and outgoing.task.shared else ""
        return TaskHandle(outcome.task_id or outgoing.task_id, self, nonce)

    def _report(self, messages: list[Outgoing], outcomes: list[Outcome]) -> BatchSubmission[Any]:
        accepted: list[TaskHandle[Any]] = []
        refused: list[RefusedCall] = []
        unknown: list[RefusedCall] = []
        for index, (outgoing, outcome) in enumerate(zip(messages, outcomes, strict=True)):
            if isinstance(outcome, Accepted):
                if self._herald is not None and not outcome.task_id:
                    self._herald.accepted(outgoing, with_event=False)
                accepted.append(self._handle_on(outgoing, outcome))
                continue
            error = self._error(outcome, outgoing)
            assert error is not None, "only an accepted message has no error"
            (unknown if isinstance(outcome, Unknown) else refused).append(RefusedCall(index, outgoing.task_id, error))
        return BatchSubmission(tuple(accepted), tuple(refused), tuple(unknown))

    def _outcome_of(self, record: TaskRecord) -> object:
        if record.state == State.SUCCESS:
            return self._records.result(record.id)
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
