"""The reference page of events and metrics, ``docs/metrics.md``, generated from the catalogues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from inference_tasks.observe.events import EVENTS, WAIT_BUCKETS_S
from inference_tasks.observe.exporter import catalogue
from inference_tasks.observe.metrics import RUN_BUCKETS_S, Metric
from inference_tasks.observe.rules import ALERTS, RECORDINGS

__all__ = ["reference_document"]

HEAD = """\
# Metrics

Generated from the catalogues in `inference_tasks/observe`; a test keeps this page in step.

```console
inference-tasks worker -A vision:app --metrics-port 9101          each worker, of its own work
inference-tasks maintenance -A vision:app --metrics-port 9100     one for the deployment, of all of it
```

`inference-tasks metrics rules` and `inference-tasks metrics dashboard` print rules and dashboard.

Both workers answer `/metrics` in Prometheus' text format and `/healthz`, on the loopback address unless told otherwise
(`--metrics-port 0.0.0.0:9101`). With several GPUs the first worker takes the port, each further one the next. What
happens in a pool's processes is told by the worker's main process. The gateway has its own `/metrics`.

What the maintenance worker tells is read every two seconds, so a scrape waits for no server. If there are several,
take the `max` of what they tell, never the sum. The embedded broker has no maintenance worker, hence no metrics of the
fleet.

No label has values without end: tiers, lanes, names of registered tasks, machines, and words from lists in the code.
There is no id, tenant, argument or result in any of it.
"""


def reference_document() -> str:
    """Return the page."""
    metrics = catalogue()
    worker = [metric for metric in metrics if metric.told_by == "worker"]
    fleet = [metric for metric in metrics if metric.told_by == "maintenance"]
    parts = [
        HEAD,
        "## Of each worker\n",
        *_table(worker),
        f"Buckets of waits, in seconds: {_numbers(WAIT_BUCKETS_S)}.",
        f"Buckets of runs, in seconds: {_numbers(RUN_BUCKETS_S)}.\n",
        "## Of the whole deployment\n",
        *_table(fleet),
        "\n## Recorded\n",
        "By the rules in [`config/prometheus/rules.yml`](../config/prometheus/rules.yml).\n",
        "| series | is |",
        "|---|---|",
        *(f"| `{one.record}` | {one.help} |" for one in RECORDINGS),
        "\n## Alerts\n",
        "| alert | after | severity | says | look at |",
        "|---|---|---|---|---|",
        *(
            f"| `{alert.name}` | {alert.lasts} | {alert.severity} | {_cell(alert.summary)} | {_cell(alert.action)} |"
            for alert in ALERTS
        ),
        "\n## Events\n",
        "What the metrics are made of. Anything in the same process may listen to them too:\n",
        "```python",
        "from inference_tasks.observe.events import subscribe",
        "",
        "subscribe(lambda name, values: print(name, dict(values)))",
        "```\n",
        "| event | when | measurements | labels |",
        "|---|---|---|---|",
        *(
            f"| `{event.name}` | {_cell(event.when)} "
            f"| {', '.join(f'`{name}` ({unit})' for name, unit in event.measurements.items())} "
            f"| {', '.join(f'`{label}`' for label in event.labels)} |"
            for event in EVENTS
        ),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)) + "\n"


def _table(metrics: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | says |"
    yield "|---|---|---|---|"
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {_cell(metric.help)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _numbers(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
