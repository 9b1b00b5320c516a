"""Traces with OpenTelemetry (extra ``otel``): one from the submit through the broker to the run, and what that submits.

Call ``trace_tasks()`` in the module that holds the app, so that clients, workers and their processes trace alike. The
context travels in the headers of the message, as W3C ``traceparent`` (or whatever the global propagator writes), and so
through delay queues, promotions, lifts, retries and replays. Three spans for a task, by the semantic conventions for
messaging:

* ``send QUEUE`` (PRODUCER), a child of the span that submits: until the broker has confirmed. One for a batch.
* ``wait QUEUE`` (INTERNAL), a child of it: until the run, from when it came into that queue or, parked, was due.
* ``process QUEUE`` (CONSUMER), a child of ``send`` too: the run; each attempt has one. Current while the task runs.

Not beside ``opentelemetry-instrumentation-celery``, which would make spans of its own for the same messages. A run that
is killed with its process leaves no span; the next attempt says that it is the second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from celery import signals
from opentelemetry import context, propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from inference_tasks.app import inference_of
from inference_tasks.broker.addressing import queue_of
from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.broker.kept import as_kept
from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, Refused
from inference_tasks.broker.publisher import Publisher
from inference_tasks.routes import HEADER
from inference_tasks.worker.intake import ready_at_s

if TYPE_CHECKING:
    from contextvars import Token

__all__ = ["incoming", "stop_tracing", "trace_tasks"]

#: How long a process of the pool may take, at its end, to hand over its last spans.
FLUSH_MS = 2000

_OURS = "inference_tasks"
_TASK, _TIER, _LANE, _ATTEMPT, _WAIT, _OUTCOME = (
    f"{_OURS}.{name}" for name in ("task", "tier", "lane", "attempt", "wait_s", "outcome")
)
_HEADER_NAMES = ((f"{_OURS}.tier_first", "tier_first"), (f"{_OURS}.generation", "gen"), (f"{_OURS}.hop", "hop"))
_RUN = "inference_span"


class _Run(NamedTuple):
    span: Span
    token: Token[context.Context]


def trace_tasks(provider: trace.TracerProvider | None = None, *, has_error_texts: bool = False) -> None:
    """Trace every submit and run of this process and of those that it forks; calling it again replaces what was said.

    Args:
        provider: makes the spans; None for the global one.
        has_error_texts: whether spans of failed runs show message and traceback of the error. They may hold a user's
            input; without, they show its type.
    """
    stop_tracing()
    tracing = _Tracing(provider, has_error_texts)
    Publisher.tracer = tracing.sending
    signals.task_prerun.connect(tracing.started, weak=False, dispatch_uid=_OURS)
    signals.task_failure.connect(tracing.failed, weak=False, dispatch_uid=_OURS)
    signals.task_retry.connect(tracing.parked, weak=False, dispatch_uid=_OURS)
    signals.task_postrun.connect(tracing.ended, weak=False, dispatch_uid=_OURS)
    signals.worker_process_shutdown.connect(tracing.flush, weak=False, dispatch_uid=_OURS)


def stop_tracing() -> None:
    """Trace nothing from now on."""
    Publisher.tracer = None
    for signal in (
        signals.task_prerun,
        signals.task_failure,
        signals.task_retry,
        signals.task_postrun,
        signals.worker_process_shutdown,
    ):
        signal.disconnect(dispatch_uid=_OURS)


@contextmanager
def incoming(headers: Mapping[str, str]) -> Iterator[None]:
    """Go on with the trace that a request names in its headers, unless a span is current already."""
    if Publisher.tracer is None or trace.get_current_span().get_span_context().is_valid:
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


class _Tracing:
    def __init__(self, provider: trace.TracerProvider | None, has_error_texts: bool) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer("inference_tasks", tracer_provider=provider)
        self._has_error_texts = has_error_texts
        self._known: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}

    def sending(self, system: str) -> _Sending:
        return _Sending(self._tracer, system)

    # Celery's signals, in the process or thread that runs the task.

    def started(self, task: Any, task_id: str, **_: object) -> None:
        request = task.request
        headers = request.headers
        ours = headers.get(HEADER) if isinstance(headers, Mapping) else None
        if request.is_eager or not isinstance(ours, Mapping):
            return
        now_ns = time.time_ns()
        info: Mapping[str, object] = request.delivery_info or {}
        key = str(info.get("routing_key") or "")
        queue, known = self._known.get((task.name, key)) or self._know(task, key, ours)
        about = {**known, "messaging.message.id": task_id}
        parent = propagate.extract(headers)
        since_s = ready_at_s(headers)
        ready_ns = now_ns if since_s is None else min(now_ns, int(since_s * 1e9))
        # All at once: a sampler sees them, and adding some later costs more.
        of_run = {
            **about,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.rabbitmq.destination.routing_key": key,
            "messaging.message.conversation_id": request.root_id or task_id,
            "messaging.client.id": str(request.hostname or ""),
            _ATTEMPT: int(getattr(request, "inference_attempt", None) or 1),
            _WAIT: (now_ns - ready_ns) / 1e9,
            **_counts(ours),
        }
        span = self._tracer.start_span(f"process {queue}", parent, SpanKind.CONSUMER, of_run, start_time=now_ns)
        if span.is_recording():
            waited = self._tracer.start_span(f"wait {queue}", parent, SpanKind.INTERNAL, about, start_time=ready_ns)
            waited.end(now_ns)
        setattr(request, _RUN, _Run(span, context.attach(trace.set_span_in_context(span, parent))))

    def _know(self, task: Any, key: str, ours: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
        """Return queue and attributes that all runs of a task out of a queue share; worked out once for each."""
        queue = queue_of(key)
        url = inference_of(task.app).settings.broker.url
        found = task.app.amqp.door.lane_of(key)
        tier, lane = found or (ours.get("tier"), ours.get("lane"))
        known: dict[str, Any] = {
            "messaging.system": "redis" if is_embedded(url) else "rabbitmq",
            "messaging.destination.name": queue,
            _TASK: task.name,
            _TIER: str(tier),
            _LANE: str(lane),
        }
        # Not for delayed messages: there is a routing key for each delay.
        if found and key == queue:
            self._known[task.name, key] = queue, known
        return queue, known

    def failed(self, sender: Any, exception: BaseException, **_: object) -> None:
        run: _Run | None = getattr(sender.request, _RUN, None)
        if run is not None:
            self._note(run.span, exception)

    def parked(self, request: Any, reason: object, **_: object) -> None:
        run: _Run | None = getattr(request, _RUN, None)
        if run is None:
            return
        cause = getattr(reason, "exc", None)
        if isinstance(cause, BaseException):
            self._note(run.span, cause)
        due_at_s = getattr(request, "inference_due_at_s", None)
        run.span.add_event("retry", {} if due_at_s is None else {f"{_OURS}.due_at_s": float(due_at_s)})

    def ended(self, task: Any, state: str | None, **_: object) -> None:
        run: _Run | None = getattr(task.request, _RUN, None)
        if run is None:
            return
        setattr(task.request, _RUN, None)
        run.span.set_attribute(_OUTCOME, str(state or "").lower())
        context.detach(run.token)
        run.span.end()

    def flush(self, **_: object) -> None:
        """A process of the pool ends without running what Python does at an exit."""
        provider: Any = self._provider or trace.get_tracer_provider()
        flush = getattr(provider, "force_flush", None)
        if flush is not None:
            flush(FLUSH_MS)

    def _note(self, span: Span, error: BaseException) -> None:
        _set_error(span, type(error).__qualname__, str(error) if self._has_error_texts else None)
        if self._has_error_texts:
            span.record_exception(error)


class _Sending:
    """See ``inference_tasks.broker.sending.Sending``. The span begins with the first message of a task that is new."""

    def __init__(self, tracer: trace.Tracer, system: str) -> None:
        self._tracer = tracer
        self._system = system
        self._span: Span | None = None
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._span is None:
            return
        if error is not None:
            _set_error(self._span, type(error).__qualname__)
        if self._count > 1:
            self._span.set_attribute("messaging.batch.message_count", self._count)
        self._span.end()

    def marked(self, outgoings: Iterable[Outgoing]) -> Iterator[Outgoing]:
        for outgoing in outgoings:
            # What takes the place of another message brings the context along that this had.
            task = outgoing.task
            yield outgoing if task is None or task.hop or task.generation else self._mark(outgoing)

    def ended(self, outcomes: list[Outcome]) -> list[Outcome]:
        if self._span is None:
            return outcomes
        refused = [one for one in outcomes if not isinstance(one, Accepted)]
        if refused:
            first = refused[0]
            reason = f"{type(first).__name__}: {first.reason}" if isinstance(first, Refused) else type(first).__name__
            _set_error(self._span, reason.lower())
        if self._count > 1 and refused:
            self._span.set_attribute(f"{_OURS}.refused", len(refused))
        joined = [one.task_id for one in outcomes if isinstance(one, Accepted) and one.task_id]
        if joined:
            self._span.set_attribute(f"{_OURS}.joined", joined)
        return outcomes

    def _mark(self, outgoing: Outgoing) -> Outgoing:
        self._count += 1
        if self._span is None:
            self._span = self._begin(outgoing)
        within = trace.set_span_in_context(self._span)
        for one in (outgoing, outgoing.once_free):
            if one is not None:
                propagate.inject(cast("dict[str, object]", one.properties.headers), within)
        task, free = outgoing.task, outgoing.once_free
        if free is None or task is None or not task.message:
            return outgoing
        # What starts it is the copy in Redis, made before there was a context.
        return replace(outgoing, task=task._replace(message=as_kept(free)))

    def _begin(self, outgoing: Outgoing) -> Span:
        headers = outgoing.properties.headers
        queue = queue_of(outgoing.routing_key)
        ours = headers.get(HEADER)
        about: dict[str, Any] = {
            "messaging.system": self._system,
            "messaging.operation.name": "send",
            "messaging.operation.type": "send",
            "messaging.destination.name": queue,
            "messaging.rabbitmq.destination.routing_key": outgoing.routing_key,
            "messaging.message.body.size": len(outgoing.body),
            "messaging.message.id": outgoing.task_id,
            "messaging.message.conversation_id": str(headers.get("root_id") or outgoing.task_id),
            _TASK: str(headers.get("task")),
        }
        if outgoing.task is not None:
            about[_TIER], about[_LANE] = outgoing.task.tier, outgoing.task.lane
        if isinstance(ours, Mapping):
            about |= _counts(ours)
        return self._tracer.start_span(f"send {queue}", None, SpanKind.PRODUCER, about)


def _counts(ours: Mapping[str, object]) -> dict[str, Any]:
    """Return what our header tells of the messages of a task before this one."""
    return {name: value for name, key in _HEADER_NAMES if isinstance(value := ours.get(key), str | int)}


def _set_error(span: Span, kind: str, text: str | None = None) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, text))
