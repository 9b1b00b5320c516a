"""Celery's result backend, writing the task's record and the result document in one step.

Used as ``result_backend = "inference_tasks.state.backend:RecordBackend+redis://…"``. Reading, waiting, groups and
chords are Celery's own; only where keys lie and how a result is written differs. The key prefix is Celery's
``global_keyprefix`` in ``result_backend_transport_options``; there ``unfinished_ttl_s`` and ``finished_ttl_s`` set the
lifetimes of records, and ``namespace`` names the queues.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from celery import Celery, states
from celery.app.task import Context
from celery.backends.redis import RedisBackend
from celery.exceptions import BackendStoreError, TaskRevokedError, TimeLimitExceeded
from celery.utils.time import get_exponential_backoff_interval
from kombu.utils.encoding import bytes_to_str, ensure_bytes
from redis import exceptions

from inference_tasks.errors import StateUnavailableError
from inference_tasks.state import keys
from inference_tasks.state.calling import DEFAULT_NAMESPACE
from inference_tasks.state.held import held
from inference_tasks.state.records import Finish, Freed, State, TaskError
from inference_tasks.state.store import FINISHED_TTL_S, UNFINISHED_TTL_S, TaskStore

__all__ = ["RecordBackend"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_STATE_BY_CELERY_STATE: dict[str, State] = {
    states.SUCCESS: State.SUCCESS,
    states.FAILURE: State.FAILED,
    states.RETRY: State.RETRYING,
    states.REVOKED: State.CANCELLED,
}
"""What a write of Celery's means for the record; any other state (STARTED, a user's own) is progress of a run."""

_EXPIRED_REASON = "expired"  # mirrors celery.worker.request.Request.revoked: an expired task is revoked for this reason


class RecordBackend(RedisBackend):
    """Result backend that keeps records and results together.

    A write within a claim carries its token and generation, which the worker puts into the request
    (``inference_token``, ``inference_gen``; ``inference_due_at_s`` is put there by a retry); it is repeated until Redis
    takes it, because the message may be acked only after it. A write of a claim that is over is refused, logged and
    counted, and starts no chord and no errback. Writes without a token (eager tasks, other workers, chains that fail)
    work as in Celery, except that they change neither an end state nor a task that a live claim holds.

    Results are JSON, whatever ``result_serializer`` says.
    """

    # What Celery's backend has and its published types do not know.
    expires: int | None
    failure_expires: int | None
    max_retries: float
    base_sleep_between_retries_ms: int
    max_sleep_between_retries_ms: int
    _MAX_STR_VALUE_SIZE: int
    _get_result_meta: Callable[..., dict[str, object]]

    def __init__(
        self, app: Celery, *, on_freed: Callable[[Sequence[Freed]], None] | None = None, **kwargs: Any
    ) -> None:
        """Make a backend; ``on_freed`` is told of tasks that a success has freed, see ``Depending``."""
        super().__init__(app=app, **{**kwargs, "serializer": "json", "accept": ["json"]})
        options: Mapping[str, object] = app.conf.get("result_backend_transport_options") or {}
        prefix = str(options.get("global_keyprefix") or keys.DEFAULT_PREFIX)
        # mirrors BaseKeyValueStoreBackend._add_global_keyprefix, so that both write the same prefix the same way
        self.prefix = prefix if prefix[-1] in ":_-." else f"{prefix}_"
        self._store = TaskStore(
            held(self.client),
            self.prefix,
            unfinished_ttl_s=float(str(options.get("unfinished_ttl_s") or UNFINISHED_TTL_S)),
            finished_ttl_s=float(str(options.get("finished_ttl_s") or FINISHED_TTL_S)),
            namespace=str(options.get("namespace") or DEFAULT_NAMESPACE),
        )
        self._store.on_freed = on_freed
        self._written = threading.local()
        self._timed_out: deque[str] = deque(maxlen=64)

    # Where things lie.

    def get_key_for_task(self, task_id: str, key: str = "") -> bytes:  # type: ignore[override]
        """Return the key, and channel, of a task's result document."""
        if not task_id:
            raise ValueError(f"task_id must not be empty, got {task_id!r}")
        return ensure_bytes(keys.result(self.prefix, bytes_to_str(task_id)) + key)

    def get_key_for_group(self, group_id: str, key: str = "") -> bytes:  # type: ignore[override]
        """Return the key of a group, or of a part of its chord's bookkeeping."""
        if not group_id:
            raise ValueError(f"group_id must not be empty, got {group_id!r}")
        return ensure_bytes(keys.group(self.prefix, bytes_to_str(group_id), bytes_to_str(key)))

    # Writing.

    def _store_result(
        self,
        task_id: str,
        result: object,
        state: str,
        traceback: str | None = None,
        request: Context | None = None,
        **kwargs: object,
    ) -> object:
        # not super(): it reads the document first to keep a SUCCESS from being overwritten; the script refuses that.
        if getattr(self._written, "task_id", None) != task_id:
            self._write(task_id, result, state, traceback, request, with_result=True)
        return result

    def mark_as_done(
        self,
        task_id: str,
        result: object,
        request: Context | None = None,
        store_result: bool = True,
        state: str = states.SUCCESS,
    ) -> None:
        """Record the success of a run, with its result unless that is ignored, and count it for its chord."""
        with_result = store_result and not (request is not None and request.ignore_result)
        if self._ended(task_id, self.encode_result(result, state), state, None, request, with_result):
            # The result lies there already: all that is left for Celery is the chord.
            super().mark_as_done(task_id, result, request=request, store_result=False, state=state)

    def mark_as_failure(
        self,
        task_id: str,
        exc: Exception,
        traceback: str | None = None,
        request: Context | None = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = states.FAILURE,
    ) -> None:
        """Record the failure of a run, then fail what waits for it: chord, chain, errbacks."""
        if isinstance(exc, TimeLimitExceeded) and self._is_told_again(task_id):
            return
        if not self._ended(task_id, self.encode_result(exc, state), state, traceback, request, store_result):
            return
        # Celery stores this result once more on its way to the chain's; store_result must stay true for those.
        self._written.task_id = task_id
        try:
            super().mark_as_failure(
                task_id,
                exc,
                traceback=traceback,
                request=request,
                store_result=store_result,
                call_errbacks=call_errbacks,
                state=state,
            )
        finally:
            self._written.task_id = None

    def _is_told_again(self, task_id: str) -> bool:
        """Celery tells of a hard time limit twice, by the job's error and by its time-out; errbacks shall hear once."""
        if task_id in self._timed_out:
            self._timed_out.remove(task_id)
            return True
        self._timed_out.append(task_id)
        return False

    def mark_as_retry(
        self,
        task_id: str,
        exc: Exception,
        traceback: str | None = None,
        request: Context | None = None,
        store_result: bool = True,
        state: str = states.RETRY,
    ) -> None:
        """Record that the run failed and the task will be tried again."""
        self._ended(task_id, self.encode_result(exc, state), state, traceback, request, store_result)

    def mark_as_revoked(
        self,
        task_id: str,
        reason: str = "",
        request: Context | None = None,
        store_result: bool = True,
        state: str = states.REVOKED,
    ) -> None:
        """Record that the task was cancelled, or that it expired before it could start."""
        result = self.encode_result(TaskRevokedError(reason), state)
        record_state = State.EXPIRED if reason == _EXPIRED_REASON else State.CANCELLED
        if self._ended(task_id, result, state, None, request, store_result, record_state):
            super().mark_as_revoked(task_id, reason, request=request, store_result=False, state=state)

    def on_chord_part_return(self, request: Any, state: str, result: Any, *args: Any, **kwargs: Any) -> None:
        """Count a finished member of a chord; repeated until Redis takes it, as the result was."""
        # Celery's own script counts a member once however often it is told.
        count = super().on_chord_part_return
        self._until_taken(_is_run(request), lambda: count(request, state, result, *args, **kwargs))

    def _ended(
        self,
        task_id: str,
        result: object,
        state: str,
        traceback: str | None,
        request: Context | None,
        with_result: bool,
        record_state: State | None = None,
    ) -> bool:
        """Write, and return whether what follows the end of a run may go on."""
        token = _token(request)
        if not with_result and token is None and (request is None or not hasattr(request, "inference")):
            return True  # nothing is kept of it: eager, or a task that is not ours and whose result is ignored
        outcome = self._write(task_id, result, state, traceback, request, with_result, record_state)
        return outcome not in (Finish.STALE, Finish.HELD)

    def _write(
        self,
        task_id: str,
        result: object,
        state: str,
        traceback: str | None,
        request: Context | None,
        with_result: bool,
        record_state: State | None = None,
    ) -> Finish:
        meta: bytes | str | None = None
        if with_result:
            document = self._get_result_meta(result=result, state=state, traceback=traceback, request=request)
            document["task_id"] = bytes_to_str(task_id)
            meta = self.encode(document)
            if len(meta) > self._MAX_STR_VALUE_SIZE:
                raise BackendStoreError(
                    f"The result of task {task_id} has {len(meta)} bytes; Redis takes no such value"
                )
        token = _token(request)
        header = getattr(request, "inference", None)
        expires_s = self.failure_expires if state == states.FAILURE else self.expires

        def write() -> Finish:
            return self._store.write(
                bytes_to_str(task_id),
                token,
                getattr(request, "inference_gen", None) if token is not None else None,
                record_state or _STATE_BY_CELERY_STATE.get(state),
                _error(result) if state in self.EXCEPTION_STATES else None,
                meta,
                expires_s or 0,
                name=str(getattr(request, "task", None) or ""),
                tier=str(header.get("tier") or "") if isinstance(header, Mapping) else "",
                may_create=with_result,
                due_at_s=getattr(request, "inference_due_at_s", None) if state == states.RETRY else None,
            )

        outcome = self._until_taken(_is_run(request), write)
        if outcome in (Finish.STALE, Finish.HELD):
            logger.warning(
                "Task %s: a late %s was not written (%s): another claim decides about it", task_id, state, outcome
            )
        return outcome

    def _until_taken(self, is_run: bool, call: Callable[[], T]) -> T:
        """Make a call again until Redis takes it, within a worker's run; otherwise Celery's own settings decide."""
        for failures in itertools.count(1):
            try:
                return call()
            except (StateUnavailableError, exceptions.ConnectionError, exceptions.TimeoutError) as error:
                if not is_run or failures > self.max_retries:
                    raise
                pause_s = (
                    get_exponential_backoff_interval(
                        self.base_sleep_between_retries_ms, failures, self.max_sleep_between_retries_ms, True
                    )
                    / 1000
                )
                logger.warning("Redis does not take a result: %s. Trying again in %.1f s", error, pause_s)
                time.sleep(pause_s)
        raise AssertionError("unreachable: the loop has no end")

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Whether Celery may repeat an operation that failed so, where its settings ask for it."""
        return isinstance(exc, StateUnavailableError) or bool(super().exception_safe_to_retry(exc))


def _is_run(request: Context | None) -> bool:
    """Whether a worker of ours handed this run over; without Redis it may have done so without a token."""
    return getattr(request, "inference_gen", None) is not None


def _token(request: Context | None) -> int | None:
    token = getattr(request, "inference_token", None)
    return None if token is None else int(token)


def _error(result: object) -> TaskError | None:
    """Read Celery's JSON form of an exception."""
    if not isinstance(result, Mapping):
        return None
    said = result.get("exc_message", "")
    message = ", ".join(str(part) for part in said) if isinstance(said, list | tuple) else str(said)
    return {"type": str(result.get("exc_type", "")), "message": message}
