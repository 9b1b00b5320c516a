"""The application of `faulty_app`, traced: each process appends its spans to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from inference_tasks.observe.tracing import trace_tasks
from tests.support.tier_app import OPTIONS_VARIABLE

SPANS_VARIABLE = "INFERENCE_TEST_SPANS"
DELAY_VARIABLE = "INFERENCE_TEST_SPANS_DELAY_MS"


class FileExporter(SpanExporter):
    """Appends one JSON document a line, so that processes may share the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("a") as file:
            file.write("".join(f"{json.dumps(document(span))}\n" for span in spans))
        return SpanExportResult.SUCCESS


def document(span: ReadableSpan) -> dict[str, Any]:
    """What the tests look at."""
    context = span.get_span_context()
    assert context is not None
    attributes: Mapping[str, Any] = span.attributes or {}
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{context.trace_id:032x}",
        "id": f"{context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "error": span.status.description or "" if not span.status.is_unset else None,
        "events": [event.name for event in span.events],
        "pid": os.getpid(),
        **{name: list(value) if isinstance(value, tuple) else value for name, value in attributes.items()},
    }


if SPANS_VARIABLE in os.environ and OPTIONS_VARIABLE in os.environ:
    from tests.support import faulty_app

    app = faulty_app.app
    provider = TracerProvider()
    # As in production: a batch, handed over by a thread of each process.
    exporter = FileExporter(Path(os.environ[SPANS_VARIABLE]))
    delay_ms = int(os.environ.get(DELAY_VARIABLE, "200"))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
    trace_tasks(provider)
