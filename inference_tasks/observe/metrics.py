"""The catalogue of metrics, and what counts those of them that are made of events.

The reference page, the dashboard, the rules and the tests are made from it. Counters and histograms of work begin with
``inference_tasks_``; what is measured of queues, tiers, workers and GPUs has its own first word. No label has values
without end: there are tiers, lanes, names of registered tasks, machines, and words from lists in the code.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from operator import itemgetter
from threading import Lock
from typing import Literal, TypeAlias, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from inference_routing.lane import LANE_NAMES
from inference_routing.tier import TIER_NAMES
from inference_tasks.observe.events import EVENTS, WAIT_BUCKETS_S, Event

__all__ = ["EVENT_METRICS", "RUN_BUCKETS_S", "Family", "Metric", "Recorder"]

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
"""A metric with what it says now."""

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

    def family(self, numbers: Iterable[tuple[Sequence[str], float]]) -> Family:
        """Return the metric, no histogram, with what it says: (values of its labels, number)."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        for values, number in numbers:
            family.add_metric(values, number)
        return family


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


class _Cells:
    """What has been counted of one event: {values of its labels: [events, sum, numbers of its buckets]}.

    By all labels of the event, so that an event costs one look-up however many metrics are made of it.
    """

    def __init__(self, event: Event, metrics: Sequence[Metric]) -> None:
        measurements = {metric.measurement for metric in metrics if metric.measurement}
        buckets = {metric.buckets for metric in metrics if metric.buckets}
        if len(measurements) > 1 or len(buckets) > 1:
            raise ValueError(f"expected metrics of one measurement of {event.name}, found {sorted(measurements)}")
        self.labels = event.labels
        self.cells: dict[object, list[float]] = {}
        self.add = self._adding(
            next(iter(measurements), ""),
            next(iter(buckets), ()),
            is_kept=any(metric.kind == "gauge" for metric in metrics),
        )

    def _adding(
        self, measurement: str, bounds: tuple[float, ...], *, is_kept: bool
    ) -> Callable[[Mapping[str, object]], None]:
        key_of: Callable[[Mapping[str, object]], object]
        key_of = itemgetter(*self.labels) if self.labels else lambda values: ()
        cells, empty = self.cells, [0.0] * (2 + (len(bounds) + 1 if bounds else 0))

        def add(values: Mapping[str, object]) -> None:
            key = key_of(values)
            cell = cells.get(key)
            if cell is None:
                cell = cells[key] = empty.copy()
            cell[0] += 1.0
            if measurement:
                amount = cast("float | None", values[measurement])
                if amount is not None:
                    cell[1] = float(amount) if is_kept else cell[1] + amount
                    if bounds:
                        cell[2 + bisect_left(bounds, amount)] += 1.0

        return add

    def copied(self) -> list[tuple[dict[str, object], list[float]]]:
        """Return the cells with their labels."""
        return [
            (
                dict(zip(self.labels, key if isinstance(key, tuple) else (key,), strict=True)),
                list(cell),
            )
            for key, cell in self.cells.items()
        ]


class Recorder:
    """Counts events in this process; a receiver to be subscribed to them. Safe to use from any thread.

    Plain numbers in dicts: on the hot path an event costs about a microsecond, however many metrics are made of it, and
    a scrape pays for the rest. The client library's own counters take a lock and a look-up for each of them.
    """

    def __init__(self, metrics: Iterable[Metric] = EVENT_METRICS) -> None:
        self._lock = Lock()
        self._metrics = tuple(metrics)
        made_of: dict[str, list[Metric]] = {}
        for metric in self._metrics:
            made_of.setdefault(metric.event, []).append(metric)
        self._cells = {event.name: _Cells(event, made_of[event.name]) for event in EVENTS if event.name in made_of}
        self._add = {name: cells.add for name, cells in self._cells.items()}

    def __call__(self, name: str, values: Mapping[str, object]) -> None:
        """Take note of an event."""
        add = self._add.get(name)
        if add is not None:
            with self._lock:
                add(values)

    def collect(self) -> list[Family]:
        """Return all metrics with what they say now; those without anything to say too."""
        with self._lock:
            copied = {name: cells.copied() for name, cells in self._cells.items()}
        return [_family(metric, copied[metric.event]) for metric in self._metrics]


def _family(metric: Metric, cells: Iterable[tuple[Mapping[str, object], Sequence[float]]]) -> Family:
    """Return one metric of what has been counted of its event."""
    size = len(metric.buckets) + 3 if metric.buckets else 2
    rows = {key: [0.0] * size for key in _zero_keys(metric)}
    for labels, cell in cells:
        if any(labels[label] != wanted for label, wanted in metric.only.items()):
            continue
        row = rows.setdefault(tuple(str(labels[label]) for label in metric.labels), [0.0] * size)
        for place, number in enumerate(cell[:size]):
            row[place] += number
    if metric.kind == "histogram":
        return _histogram(metric, rows)
    index = 1 if metric.measurement else 0
    return metric.family((key, row[index]) for key, row in rows.items())


def _zero_keys(metric: Metric) -> Iterable[tuple[str, ...]]:
    return product(*(KNOWN_VALUES[label] for label in metric.labels)) if metric.begins_at_zero else ()


def _histogram(metric: Metric, rows: Mapping[tuple[str, ...], Sequence[float]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
    for key, row in rows.items():
        family.add_metric(key, list(zip(bounds, accumulate(row[2:]), strict=True)), row[1])
    return family
