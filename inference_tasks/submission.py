"""Building the message of one submit.

mirrors: ``celery.app.amqp.AMQP.as_task_v2`` of Celery 5.7, to the letter. Calling that for each message costs some four
times as much as filling in the few headers in which one call of a task differs from the next.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from celery import signals
from celery.utils.saferepr import saferepr
from kombu.utils.json import dumps, loads

from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.errors import InvalidArgumentsError
from inference_tasks.routes import HEADER, Choice
from inference_tasks.state.records import NewTask, ShareKey

if TYPE_CHECKING:
    from celery import Celery

    from inference_tasks.task import InferenceTask

__all__ = ["NO_LINEAGE", "Herald", "Lineage", "MessageTemplate", "checked_arguments"]

_EMBED: Mapping[str, None] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
_PLAIN = frozenset({int, float, bool, type(None)})
_NO_KWARGS_REPR = saferepr({})


class Lineage(NamedTuple):
    """The running task that submits, if any: ids of the root and the parent of what it submits, and for whom it is."""

    root_id: str | None = None
    parent_id: str | None = None
    tenant: str | None = None


NO_LINEAGE = Lineage()


def checked_arguments(task: InferenceTask[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Check a call against the task's signature.

    Raises:
        InvalidArgumentsError: it does not fit.
    """
    if not task.typing:
        return
    check: Callable[..., object] = task.__header__  # type: ignore[attr-defined]  # made by Celery's decorator
    try:
        check(*args, **kwargs)
    except TypeError as error:
        raise InvalidArgumentsError(f"The arguments do not fit {task.name}: {error}.", task=task.name) from error


class Herald:
    """Tells of what was accepted as Celery does: the signal ``after_task_publish``, and the event ``task-sent``."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._sends_events = bool(app.conf.task_send_sent_event)
        # Not enabled: it is given a producer with each event.
        self._dispatcher = app.events.Dispatcher(enabled=False)

    def accepted(self, outgoing: Outgoing, *, with_event: bool = True) -> None:
        """Tell of one accepted message.

        Args:
            with_event: whether monitors are told; a batch would double its messages by that.
        """
        headers = outgoing.properties.headers
        if signals.after_task_publish.receivers:
            signals.after_task_publish.send(
                sender=headers["task"],
                body=loads(outgoing.body),
                headers=headers,
                exchange=outgoing.exchange,
                routing_key=outgoing.routing_key,
            )
        if with_event and self._sends_events:
            ours = cast("Mapping[str, object]", headers[HEADER])
            event = {
                "uuid": headers["id"],
                "root_id": headers["root_id"],
                "parent_id": headers["parent_id"],
                "name": headers["task"],
                "args": headers["argsrepr"],
                "kwargs": headers["kwargsrepr"],
                "retries": headers["retries"],
                "eta": headers["eta"],
                "expires": headers["expires"],
                "queue": outgoing.routing_key,
                "exchange": outgoing.exchange,
                "routing_key": outgoing.routing_key,
                "tier": ours["tier"],
            }
            with self._app.producer_or_acquire() as producer:
                self._dispatcher.publish("task-sent", event, producer)


class MessageTemplate:
    """What all submits of one task to one lane have in common. Valid in the process that built it."""

    def __init__(
        self, app: Celery, task: InferenceTask[..., object], choice: Choice, *, exchange: str, queue: str
    ) -> None:
        message = app.amqp.as_task_v2(
            "",
            task.name,
            time_limit=task.time_limit,
            soft_time_limit=task.soft_time_limit,
            ignore_result=task.ignore_result,
            reply_to=app.thread_oid,
        )
        self._pid = os.getpid()
        self._task = task
        self._choice = choice
        self._exchange = exchange
        self._queue = queue
        self._headers: dict[str, Any] = dict(message.headers)
        self._reply_to: str = message.properties["reply_to"]
        self._repr_size: int = app.amqp.argsrepr_maxsize
        self._repr_kwargs_size: int = app.amqp.kwargsrepr_maxsize
        self._repr_levels: int = app.conf.task_repr_maxlevels

    @property
    def is_stale(self) -> bool:
        """Whether it was built before a fork: the process id is part of the headers."""
        return self._pid != os.getpid()

    def fill(
        self,
        task_id: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        *,
        nonce: str,
        timeout_s: float | None,
        lineage: Lineage = NO_LINEAGE,
        tenant: str | None = None,
        shared: tuple[ShareKey, ...] = (),
    ) -> Outgoing:
        """Build the message and the record of one call.

        Raises:
            InvalidArgumentsError: the arguments cannot be written as JSON.
        """
        task, choice = self._task, self._choice
        tenant = tenant or lineage.tenant
        now_s = time.time()
        expires_at_s = None if timeout_s is None else now_s + timeout_s
        headers = self._headers.copy()
        headers["id"] = task_id
        headers["root_id"] = lineage.root_id or task_id
        headers["parent_id"] = lineage.parent_id
        headers["argsrepr"] = _plain_repr(args, self._repr_size) or saferepr(
            args, self._repr_size, maxlevels=self._repr_levels
        )
        headers["kwargsrepr"] = (
            saferepr(kwargs, self._repr_kwargs_size, maxlevels=self._repr_levels) if kwargs else _NO_KWARGS_REPR
        )
        headers[HEADER] = {
            "v": 1,
            "tier": choice.tier,
            "tier_first": choice.tier,
            "asked": choice.asked,
            "lane": choice.lane,
            "gen": 0,
            "hop": 0,
            "submitted_at_s": now_s,
            "expires_at_s": expires_at_s,
            "crash_limit": task.max_crashes,
        }
        if tenant:
            headers[HEADER]["tenant"] = tenant
        body = self._body(args, kwargs)
        if signals.before_task_publish.receivers:
            # Tracing libraries put their headers in here; what they do to anything but the headers is not kept.
            signals.before_task_publish.send(
                sender=task.name,
                body=(args, kwargs, dict(_EMBED)),
                exchange=self._exchange,
                routing_key=self._queue,
                declare=[],
                headers=headers,
                properties={"correlation_id": task_id, "reply_to": self._reply_to},
                retry_policy={},
            )
        return Outgoing(
            body,
            self._exchange,
            self._queue,
            Properties(headers=headers, priority=0, correlation_id=task_id, reply_to=self._reply_to),
            True,
            NewTask(
                task_id,
                task.name,
                choice.tier,
                choice.tier,
                choice.lane,
                0,
                nonce,
                now_s,
                expires_at_s,
                choice.by_worker,
                tenant=tenant or "",
                shared=shared,
            ),
        )

    def _body(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bytes:
        try:
            return dumps((args, kwargs, _EMBED)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentsError(
                f"The arguments of {self._task.name} cannot be written as JSON: {_culprit(args, kwargs) or error}. "
                "Pass plain values, or references to large or binary data.",
                task=self._task.name,
            ) from error


def _plain_repr(args: tuple[object, ...], size: int) -> str | None:
    """Return what ``saferepr`` says of a few plain values, or None where it takes ``saferepr`` to know."""
    parts = []
    for value in args:
        kind = type(value)
        if kind is str and "'" not in cast(str, value):
            parts.append(f"'{value}'")
        elif kind in _PLAIN:
            parts.append(repr(value))
        else:
            return None
    text = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return text if len(text) < size else None


def _culprit(args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
    """Name the first argument that JSON cannot hold."""
    for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items()):
        try:
            dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            return f"{name} ({type(value).__name__}): {error}"
    return None
