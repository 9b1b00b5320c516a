"""What the routes do their work with: submit, look up, wait, all in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from celery.utils import uuid

from inference_routing.tier import REALTIME
from inference_tasks.app import Inference
from inference_tasks.catalogue import find_task
from inference_tasks.errors import InferenceError, OutcomeUnknownError, StateUnavailableError, TaskNotFoundError
from inference_tasks.gateway.access import Access, tenant_for
from inference_tasks.gateway.arguments import Signature
from inference_tasks.gateway.documents import SubmitBody
from inference_tasks.gateway.in_flight import InFlight
from inference_tasks.gateway.keys import ApiKey
from inference_tasks.gateway.metrics import Metrics
from inference_tasks.gateway.problems import ProblemError, problem_of
from inference_tasks.gateway.readiness import Readiness
from inference_tasks.gateway.recent import Recent
from inference_tasks.gateway.waiting import Waiters, Watch
from inference_tasks.handles import TaskHandle
from inference_tasks.observe.why import Why, explain, surroundings_of
from inference_tasks.routes import choose
from inference_tasks.state.aio import AsyncTaskStore, async_store
from inference_tasks.state.records import State, TaskRecord
from inference_tasks.task import InferenceTask, SubmitOptions

__all__ = ["Gateway", "Submitted"]

T = TypeVar("T")

# After Redis did not answer a look at a record; the task goes on meanwhile.
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of one submit.

    Attributes:
        tier, state: as far as they are known.
        record: of a task that has ended: its end was waited for and came, or the submit joined one that had ended.
    """

    id: str
    task: str
    tier: str
    state: str
    record: TaskRecord | None


class Gateway:
    """One app behind HTTP; belongs to one event loop from ``start`` to ``stop``.

    Attributes:
        is_ending: whether the process is about to end; nobody waits any more then.
    """

    def __init__(self, inference: Inference, access: Access) -> None:
        """Make a gateway; nothing is connected yet.

        Raises:
            SettingsError: the app's settings are wrong.
        """
        settings = inference.settings
        self.inference = inference
        self.access = access
        self.settings = settings.gateway
        self.is_ending = False
        url = cast(str, settings.state.url)
        self.store: AsyncTaskStore = async_store(
            url, settings.state.prefix, socket_timeout_s=settings.state.socket_timeout_s
        )
        self.waiters = Waiters(url, self.store, timeout_s=settings.state.socket_timeout_s)
        self.readiness = Readiness(inference, self.store, self.waiters)
        self.recent = Recent(self.store)
        self.batches = self.store.batches()
        announcements = self.waiters.announcements
        self.metrics = Metrics(
            waiting=self.waiters.__len__,
            is_subscribed=lambda: announcements.is_up,
            gaps=lambda: announcements.gaps,
        )
        self._in_flight = InFlight(self.store)
        self._signature_by_task: dict[str, Signature] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Be connected to Redis, within the loop that is running, and have the queues declared meanwhile."""
        self.is_ending = False
        self.waiters.start()
        prepares = asyncio.create_task(self.readiness.missing())
        try:
            yield
        finally:
            self.end_waits()
            prepares.cancel()
            await self.waiters.stop()
            await self.store.aclose()
            await self.readiness.close()

    def end_waits(self) -> None:
        """Answer everybody who waits now: the process is about to end."""
        self.is_ending = True
        self.waiters.wake_all()

    def task(self, name: str) -> tuple[InferenceTask[..., Any], Signature]:
        """Return a task by its name, or its end, and what it takes.

        Raises:
            UnknownTaskError: there is none.
        """
        task = find_task(self.inference.celery_app, name)
        signature = self._signature_by_task.get(task.name)
        if signature is None:
            signature = self._signature_by_task[task.name] = Signature(task)
        return task, signature

    async def submit(
        self,
        key: ApiKey,
        name: str,
        body: SubmitBody,
        *,
        wait_s: float = 0.0,
        gone: asyncio.Future[None] | None = None,
        idempotency_key: str | None = None,
    ) -> Submitted:
        """Submit one call, and wait for its end if ``wait_s`` says so; it is accepted when this returns.

        Args:
            gone: done when the client has left. The wait is over then, and a realtime task is given up: nobody else
                knows its id, unless an idempotency key was given to find it by.

        Raises:
            InferenceError, ProblemError: it was not, or perhaps not, accepted.
        """
        task, signature = self.task(name)
        default = self.inference.settings.default_tier
        choice = choose(self.inference.celery_app, body.chosen_tier(), task.tier, default)
        if choice.tier not in key.tiers:
            said = {"tier": choice.tier}
            raise ProblemError(403, "tier-not-allowed", "This key may not use the tier", extensions=said)
        tenant = tenant_for(key, body.tenant)
        signature.check(body.args, body.kwargs)
        options: dict[str, Any] = {
            "tier": choice.asked,
            "timeout_s": body.timeout_s,
            "tenant": tenant,
            **body.further_options(),
        }
        if idempotency_key is not None:
            options["idempotency_key"] = idempotency_key
        try:
            handle, record = await self._accepted(key, task, body, options, wait_s, gone)
        except (InferenceError, ProblemError) as error:
            problem = error if isinstance(error, ProblemError) else problem_of(error)
            self.metrics.refused(choice.tier, problem)
            raise problem from error
        self.metrics.submitted(choice.tier)
        self.recent.add(handle.id)
        is_finished = record is not None and record.is_finished
        is_left = gone is not None and gone.done() and not is_finished
        if is_left and choice.tier == REALTIME and idempotency_key is None:
            # Too late, or Redis away: then it runs, as it would have if the client had not asked to wait.
            with suppress(InferenceError):
                await handle.cancel_async()
        if record is None:
            return Submitted(handle.id, task.name, choice.tier, State.PENDING, None)
        return Submitted(handle.id, task.name, record.tier, record.state, record if is_finished else None)

    async def entered(
        self, key: ApiKey, items: Sequence[tuple[T, str]]
    ) -> tuple[list[T], list[tuple[T, ProblemError]]]:
        """Count tasks among those that a key has under way; return the items of those, and of those without room."""
        if key.in_flight_max is None:
            return [item for item, _ in items], []
        entered, refused = list[T](), list[tuple[T, ProblemError]]()
        for item, task_id in items:
            try:
                await self._in_flight.enter(key, task_id)
                entered.append(item)
            except ProblemError as problem:
                refused.append((item, problem))
            except InferenceError as error:
                refused.append((item, problem_of(error)))
        return entered, refused

    async def left(self, key: ApiKey, task_ids: Sequence[str]) -> None:
        """Count tasks no longer: they were not accepted."""
        for task_id in task_ids if key.in_flight_max is not None else ():
            with suppress(InferenceError):
                await self._in_flight.leave(key, task_id)

    async def look_up(self, key: ApiKey, task_id: str) -> TaskRecord:
        """Return the record of a task that this key may see.

        Raises:
            TaskNotFoundError: there is none, or it is another tenant's: nobody can tell which.
            StateUnavailableError: Redis is away.
        """
        record = (await self.store.get_many([task_id]))[0]
        if record is None or not key.may_see(record.tenant):
            raise TaskNotFoundError(task_id)
        if record.state == State.RETRYING and record.due_at_s is not None and record.due_at_s <= time.time():
            # The broker has let it go, and writes nothing down.
            return replace(record, state=State.PENDING)
        return record

    async def why(self, key: ApiKey, task_id: str) -> Why:
        """Explain where a task is that this key may see; raises as ``look_up``."""
        around = surroundings_of(self.inference)
        scene = await self.store.scene(task_id, around.queues)
        if scene is None or not key.may_see(scene.record.tenant):
            raise TaskNotFoundError(task_id)
        return explain(scene, around)

    async def cancel(self, key: ApiKey, task_id: str, *, terminate: bool) -> TaskRecord:
        """Cancel a task, whoever waits for it, and return its record.

        Raises:
            TaskNotFoundError: as ``look_up``.
            ProblemError: 409, it had ended before.
        """
        await self.look_up(key, task_id)
        is_cancelled = await self.inference.client.cancel_async(task_id, terminate=terminate)
        record = await self.look_up(key, task_id)
        if not is_cancelled:
            said = {"state": record.state}
            raise ProblemError(409, "ended", "The task has ended", f"It is {record.state}.", extensions=said)
        return record

    async def document(self, record: TaskRecord) -> str | None:
        """Return the result document of a task that has succeeded; None for others."""
        return await self.store.document(record.id) if record.state == State.SUCCESS else None

    async def _accepted(
        self,
        key: ApiKey,
        task: InferenceTask[..., Any],
        body: SubmitBody,
        options: dict[str, Any],
        wait_s: float,
        gone: asyncio.Future[None] | None,
    ) -> tuple[TaskHandle[Any], TaskRecord | None]:
        task_id = uuid()
        chosen = SubmitOptions(task_id=task_id, **options).checked()
        until_s = time.monotonic() + wait_s
        if wait_s <= 0:
            handle = await self._send(key, task, body, chosen, task_id)
            if handle.id == task_id:
                return handle, None
        else:
            # Watched before it is sent, so that its end cannot be missed.
            async with self.waiters.watch(task_id, is_looking=task.ignore_result) as watch:
                handle = await self._send(key, task, body, chosen, task_id)
                if handle.id == task_id:
                    return handle, await self._end_of(task_id, watch, until_s, gone)
        # It has joined another one, which may have ended long ago, and counts already.
        with suppress(InferenceError):
            await self._in_flight.leave(key, task_id)
            async with self.waiters.watch(handle.id, is_looking=True) as watch:
                watch.wake()
                if wait_s > 0 and (record := await self._end_of(handle.id, watch, until_s, gone)):
                    return handle, record
            return handle, (await self.store.get_many([handle.id]))[0]
        return handle, None

    async def _send(
        self, key: ApiKey, task: InferenceTask[..., Any], body: SubmitBody, chosen: SubmitOptions, task_id: str
    ) -> TaskHandle[Any]:
        await self._in_flight.enter(key, task_id)
        try:
            return await self.inference.client.submit_async(task, tuple(body.args), body.kwargs, chosen)
        except OutcomeUnknownError:
            # It may run, so it counts.
            raise
        except InferenceError:
            with suppress(InferenceError):
                await self._in_flight.leave(key, task_id)
            raise

    async def _end_of(
        self, task_id: str, watch: Watch, until_s: float, gone: asyncio.Future[None] | None
    ) -> TaskRecord | None:
        """Wait for the end of a task and return its record; None if it has not ended in time, or the client is gone.

        It has been accepted: that Redis is away, or loses its record, does not undo that.
        """
        if gone is not None:
            gone.add_done_callback(lambda _: watch.wake())
        while not self.is_ending:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                break
            is_woken = await watch.woken(left_s)
            try:
                record = (await self.store.get_many([task_id]))[0]
            except StateUnavailableError:
                await watch.woken(min(_LOOK_AGAIN_S, max(0.0, until_s - time.monotonic())))
                watch.wake()
                continue
            if record is not None and record.is_finished:
                return record
            if not is_woken or (gone is not None and gone.done()):
                break
        return None
