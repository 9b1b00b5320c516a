"""The catalogue of metrics, and what counts those of them that are made of events.

The reference page, the dashboard, the rules and the tests are made from it. Counters and histograms of work begin with
``inference_tasks_``; what is measured of queues, tiers, workers and GPUs has its own first word. No label has values
without end: there are tiers, lanes, names of registered tasks, machines, and words from lists in the code.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from threading import Lock
from typing import Literal, cast

from inference_routing.lane import LANE_NAMES
from inference_routing.tier import TIER_NAMES
from inference_tasks.observe.events import WAIT_BUCKETS_S

__all__ = ["EVENT_METRICS", "RUN_BUCKETS_S", "Family", "Metric", "Recorder"]

RUN_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0, 3600.0),
)
"""Upper bounds of the buckets that runs are counted in, in seconds."""

KNOWN_VALUES: Mapping[str, Sequence[str]] = {
    "tier": TIER_NAMES,
    "tier_first": TIER_NAMES,
    "lane": LANE_NAMES,
    "outcome": ("met", "violated"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as Prometheus knows it; that of a histogram without its endings.
        kind: what it is.
        help: what it says, in one sentence.
        labels: their names, each with a bounded number of values.
        told_by: whose ``--metrics-port`` it comes from.
        event: that it is made of, empty if it is read at each scrape.
        measurement: of the event, that is added up or put into buckets; empty counts the events themselves.
        only: {label of the event: value}; other events do not count.
        buckets: upper bounds, of a histogram.
        begins_at_zero: whether it is there, as 0, for all values of its labels before anything has happened: so that
            the first time is seen as an increase.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    told_by: Literal["worker", "maintenance"] = "worker"
    event: str = ""
    measurement: str = ""
    only: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    begins_at_zero: bool = False


@dataclass(slots=True)
class Family:
    """A metric with what it says now: (ending of the name, {label: value}, number)."""

    metric: Metric
    samples: Sequence[tuple[str, Mapping[str, str], float]]


EVENT_METRICS: tuple[Metric, ...] = (
    Metric(
        "inference_tasks_picks_total",
        "counter",
        "How often a queue was asked for a message, by whether there was one.",
        ("tier", "lane", "outcome"),
        event="queue.asked",
    ),
    Metric(
        "inference_tasks_claims_total",
        "counter",
        "Claims asked for, by verdict: run, or why the task does not run here and now.",
        ("tier", "verdict"),
        event="task.claimed",
    ),
    Metric(
        "inference_tasks_started_total",
        "counter",
        "Tasks handed to the pool, by tier served, tier of the submit and lane.",
        ("tier", "tier_first", "lane"),
        event="task.started",
        begins_at_zero=True,
    ),
    Metric(
        "inference_tasks_wait_seconds",
        "histogram",
        "From submit to first start, by tier of the submit; tasks submitted with a delay are left out.",
        ("tier_first",),
        event="task.started",
        measurement="wait_s",
        buckets=WAIT_BUCKETS_S,
        begins_at_zero=True,
    ),
    Metric(
        "inference_tasks_run_seconds",
        "histogram",
        "From the hand-over to the pool until the slot is free again.",
        ("task", "tier"),
        event="task.ended",
        measurement="slot_s",
        buckets=RUN_BUCKETS_S,
    ),
    Metric(
        "inference_tasks_slot_seconds_total",
        "counter",
        "Time in which slots were in use, by tier served and tier of the submit: what the shares divide.",
        ("tier", "tier_first"),
        event="task.ended",
        measurement="slot_s",
        begins_at_zero=True,
    ),
    Metric(
        "inference_tasks_ended_total",
        "counter",
        "Runs that ended, by outcome: success, failed (for good), retried, crashed, cancelled, ignored, returned.",
        ("task", "tier_first", "outcome"),
        event="task.ended",
    ),
    Metric(
        "inference_tasks_retries_total",
        "counter",
        "Runs that raised and are tried again.",
        ("task", "tier"),
        event="task.ended",
        only={"outcome": "retried"},
    ),
    Metric(
        "inference_tasks_crashes_total",
        "counter",
        "Runs whose process died.",
        ("task", "tier"),
        event="task.ended",
        only={"outcome": "crashed"},
    ),
    Metric(
        "inference_tasks_held_too_long_total",
        "counter",
        "Messages that went back to their queue, having waited in the worker for longer than worker.hold_s.",
        (),
        event="task.returned",
        measurement="count",
        begins_at_zero=True,
    ),
    Metric(
        "inference_tasks_buried_total",
        "counter",
        "Messages that a worker moved to the dead letters, by reason.",
        ("tier", "reason"),
        event="task.buried",
    ),
    Metric(
        "inference_tasks_floor_windows_total",
        "counter",
        "Windows of 100 starts (or of 100 s of slot time) in which a tier had work all the time, by whether it got its "
        "floor: met or violated.",
        ("tier", "outcome"),
        event="floor.held",
        begins_at_zero=True,
    ),
    Metric(
        "inference_client_submitted_total",
        "counter",
        "New tasks that this process has submitted; inference_tasks_admitted counts those of all.",
        ("tier",),
        event="task.submitted",
        begins_at_zero=True,
    ),
    Metric(
        "inference_client_refused_total",
        "counter",
        "New tasks that this process was refused, by reason; inference_tasks_refused_total counts those of all.",
        ("tier", "reason"),
        event="task.refused",
    ),
    Metric(
        "inference_worker_state_up",
        "gauge",
        "1 while the worker reaches Redis, 0 while it takes no work because it does not.",
        (),
        event="state.seen",
        measurement="reachable",
    ),
    Metric(
        "inference_tasks_promoted_total",
        "counter",
        "Tasks moved up one tier because of their age, counted by the maintenance worker that did it.",
        ("tier_from", "tier_to"),
        told_by="maintenance",
        event="task.promoted",
        measurement="count",
    ),
    Metric(
        "inference_tasks_dropped_total",
        "counter",
        "Tasks that ended without a run because their message is gone, by reason: drop-head or gone.",
        ("reason",),
        told_by="maintenance",
        event="task.dropped",
        measurement="count",
    ),
)


class Recorder:
    """Counts events in this process; a receiver to be subscribed to them. Safe to use from any thread.

    Plain numbers in dicts: on the hot path an event costs a microsecond or so, and a scrape pays for the rest.
    """

    def __init__(self, metrics: Iterable[Metric] = EVENT_METRICS) -> None:
        self._lock = Lock()
        self._counts: dict[str, dict[object, float]] = {}
        self._buckets: dict[str, dict[object, list[float]]] = {}
        self._metrics = tuple(metrics)
        self._on: dict[str, list[Callable[[Mapping[str, object]], None]]] = {}
        for metric in self._metrics:
            add = self._bucketing(metric) if metric.kind == "histogram" else self._counting(metric)
            self._on.setdefault(metric.event, []).append(add)

    def __call__(self, name: str, values: Mapping[str, object]) -> None:
        """Take note of an event."""
        with self._lock:
            for add in self._on.get(name, ()):
                add(values)

    def families(self) -> list[Family]:
        """Return all metrics with what they say now; those without anything to say too."""
        with self._lock:
            counts = {name: dict(found) for name, found in self._counts.items()}
            buckets = {name: {key: list(row) for key, row in found.items()} for name, found in self._buckets.items()}
        return [
            _histogram(metric, buckets[metric.name])
            if metric.kind == "histogram"
            else Family(metric, [("", _labels(metric, key), number) for key, number in counts[metric.name].items()])
            for metric in self._metrics
        ]

    def _counting(self, metric: Metric) -> Callable[[Mapping[str, object]], None]:
        counts = self._counts[metric.name] = defaultdict(float, _zeros(metric))
        key_of, measurement, only = _key_of(metric), metric.measurement, tuple(metric.only.items())

        def count(values: Mapping[str, object]) -> None:
            counts[key_of(values)] += 1.0

        def count_some(values: Mapping[str, object]) -> None:
            for label, wanted in only:
                if values[label] != wanted:
                    return
            counts[key_of(values)] += 1.0

        def add(values: Mapping[str, object]) -> None:
            counts[key_of(values)] += cast(float, values[measurement])

        def keep(values: Mapping[str, object]) -> None:
            counts[key_of(values)] = float(cast(float, values[measurement]))

        if metric.kind == "gauge":
            return keep
        return add if measurement else count_some if only else count

    def _bucketing(self, metric: Metric) -> Callable[[Mapping[str, object]], None]:
        key_of, measurement, bounds = _key_of(metric), metric.measurement, metric.buckets
        empty = [0.0] * (len(bounds) + 2)
        rows = self._buckets[metric.name] = {key: empty.copy() for key in _zeros(metric)}

        def add(values: Mapping[str, object]) -> None:
            amount = cast("float | None", values[measurement])
            if amount is None:
                return
            key = key_of(values)
            row = rows.get(key)
            if row is None:
                row = rows[key] = empty.copy()
            row[bisect_left(bounds, amount)] += 1
            row[-1] += amount

        return add


def _key_of(metric: Metric) -> Callable[[Mapping[str, object]], object]:
    return itemgetter(*metric.labels) if metric.labels else lambda values: ()


def _zeros(metric: Metric) -> dict[object, float]:
    if not metric.begins_at_zero:
        return {}
    keys = product(*(KNOWN_VALUES[label] for label in metric.labels))
    return {key[0] if len(key) == 1 else key: 0.0 for key in keys}


def _labels(metric: Metric, key: object) -> dict[str, str]:
    values = key if isinstance(key, tuple) else (key,)
    return {label: str(value) for label, value in zip(metric.labels, values, strict=True)}


def _histogram(metric: Metric, rows: Mapping[object, Sequence[float]]) -> Family:
    samples: list[tuple[str, Mapping[str, str], float]] = []
    for key, row in rows.items():
        labels, total = _labels(metric, key), 0.0
        for bound, number in zip((*metric.buckets, float("inf")), row[:-1], strict=True):
            total += number
            samples.append(("_bucket", {**labels, "le": "+Inf" if bound == float("inf") else f"{bound:g}"}, total))
        samples.append(("_sum", labels, row[-1]))
        samples.append(("_count", labels, total))
    return Family(metric, samples)
