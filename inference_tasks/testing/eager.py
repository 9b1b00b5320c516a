"""Celery's eager mode (``task_always_eager``) for ``submit``: tasks run in place, their records are kept in memory.

What a caller can see stays as it is in production: arguments and results pass through JSON, every submit has a record
with its tier, a failed task raises from ``result()``, an id that was submitted before does not run again. Queues are
never full, and nothing waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kombu.exceptions import EncodeError
from kombu.utils.json import dumps, loads

from inference_tasks.broker.answers import settled_by
from inference_tasks.broker.messages import Accepted, Outcome, Outgoing
from inference_tasks.errors import TaskCancelledError
from inference_tasks.state.records import (
    Cancellation,
    Claimant,
    Freed,
    State,
    TaskError,
    TaskRecord,
    Verdict,
)
from inference_tasks.testing.store import FakeTaskStore

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["EagerRunner"]

LEASE_S = 86_400.0


class EagerRunner:
    """Stands in for publisher, worker and state store at once."""

    def __init__(self, celery_app: Celery, store: FakeTaskStore | None = None) -> None:
        self._celery_app = celery_app
        self.store = store or FakeTaskStore()
        self._lock = threading.RLock()
        self._waiting: dict[str, Outgoing] = {}
        self.store.on_freed = self._freed

    def send(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        """Run the task of one message and record how it ended.

        Raises:
            Exception: what the task raised, if ``task_eager_propagates`` is on.
        """
        new = outgoing.task
        assert new is not None, "only tasks are submitted"
        with self._lock:
            self.store.now_s = time.time()
            answer = self.store.submit([new])[0]
            outcome = settled_by(answer._replace(is_unsure=False), None)
            if outcome is not None:
                return outcome
            if answer.state == State.WAITING:
                # For the task that submits it, or for one further up; all others have ended.
                self._waiting[new.id] = outgoing
                return Accepted()
        return self._start(outgoing)

    def _start(self, outgoing: Outgoing) -> Outcome:
        new = outgoing.task
        assert new is not None, "only tasks are submitted"
        with self._lock:
            claimant = Claimant(
                new.id, new.name, new.tier, new.lane, new.generation, new.submitted_at_s, new.expires_at_s
            )
            claim = self.store.claim([claimant], "eager", LEASE_S)[0]
        if claim.verdict == Verdict.RUN:
            self._run(outgoing, claim.token)
        return Accepted()

    def send_many(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        """Run the tasks of many messages, one after the other."""
        return [self.send(outgoing) for outgoing in outgoings]

    async def send_async(self, outgoing: Outgoing, timeout_s: float | None = None) -> Outcome:
        """Run the task of one message. The event loop waits meanwhile: in eager mode nothing happens elsewhere."""
        return self.send(outgoing)

    async def send_many_async(self, outgoings: Iterable[Outgoing], timeout_s: float | None = None) -> list[Outcome]:
        """Run the tasks of many messages; see ``send_async``."""
        return self.send_many(outgoings)

    def get(self, task_id: str) -> TaskRecord:
        """Look a task up."""
        return self.store.get(task_id)

    def result(self, task_id: str) -> object:
        """Return the result of a task that succeeded."""
        return loads(self.store.results[task_id])

    def cancel(self, task_id: str, *, terminate: bool, nonce: str) -> Cancellation:
        """Cancel a task; there is none that has not ended."""
        return self.store.cancel([(task_id, nonce)], terminate=terminate)[0]

    def _freed(self, freed: Sequence[Freed]) -> None:
        for one in freed:
            if one.id in self._waiting:
                self._start(self._waiting.pop(one.id))

    def _run(self, outgoing: Outgoing, token: int) -> None:
        new = outgoing.task
        assert new is not None, "only tasks are submitted"
        args, kwargs, _ = loads(outgoing.body)
        task: Any = self._celery_app.tasks[new.name]
        error: TaskError | None = None
        meta: str | None = None
        state = State.SUCCESS
        try:
            done = task.apply(args, kwargs, task_id=new.id, headers=dict(outgoing.properties.headers))
            if done.failed() and isinstance(done.result, TaskCancelledError):
                state = State.CANCELLED
            elif done.failed():
                state, error = State.FAILED, _error(done.result)
            else:
                meta = dumps(done.result)
        except (TypeError, ValueError, EncodeError) as exc:
            state, error = State.FAILED, _error(exc)
            if self._celery_app.conf.task_eager_propagates:
                raise
        except TaskCancelledError:
            state = State.CANCELLED
            raise
        except Exception as exc:
            state, error = State.FAILED, _error(exc)
            raise
        finally:
            with self._lock:
                self.store.now_s = time.time()
                self.store.finish(new.id, token, new.generation, state, error, meta)


def _error(exc: BaseException) -> TaskError:
    return {"type": type(exc).__name__, "message": str(exc)}
