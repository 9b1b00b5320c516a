"""The part of the catalogue of metrics that is read from the whole deployment, by the one exporter of the fleet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from inference_routing.tier import TIER_NAMES
from inference_tasks.observe.metrics import Metric

if TYPE_CHECKING:
    from inference_tasks.observe.fleet import Fleet, TierView
    from inference_tasks.settings import Settings
    from inference_tasks.state.records import WorkerBeat

__all__ = ["FLEET_METRICS", "FleetMetric", "Reading"]

REFUSALS = ("full", "late", "parked", "paused")

Values: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the exporter has seen. ``deepest``: {tier: most messages in ``fresh`` at once in the last minute}."""

    fleet: Fleet
    settings: Settings
    deepest: Mapping[str, int]
    stale_writes: int


def _nothing(reading: Reading) -> Values:
    return ()


@dataclass(frozen=True, slots=True)
class FleetMetric(Metric):
    """A metric that is read: {values of its labels: number}, as pairs."""

    read: Callable[[Reading], Values] = _nothing


def _by_tier(value: Callable[[TierView], float | None]) -> Callable[[Reading], Values]:
    """Return a reader of one number for each tier; None is left out."""

    def read(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
        for tier in reading.fleet.tiers:
            number = value(tier)
            if number is not None:
                yield (tier.tier,), float(number)

    return read


def _by_worker(value: Callable[[WorkerBeat], float | None]) -> Callable[[Reading], Values]:
    """Return a reader of one number for each live worker; of two starts of the same one, the later is told."""

    def read(reading: Reading) -> Values:
        found: dict[tuple[str, ...], float] = {}
        for beat in sorted(reading.fleet.workers, key=lambda beat: beat.started_at_s):
            number = value(beat)
            if number is not None:
                found[(worker_label(beat.node),)] = float(number)
        return found.items()

    return read


def worker_label(node: str) -> str:
    """Return a worker's name without what differs from start to start, or each start would be a new series."""
    return re.sub(r"-[0-9a-f]{6}@", "@", node)


def _messages(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for tier in reading.fleet.tiers:
        for lane, ready in tier.ready_by_lane.items():
            yield (tier.tier, lane), ready
        yield (tier.tier, "running"), tier.running
        yield (tier.tier, "parked"), tier.parked
        yield (tier.tier, "dependent"), tier.waiting_for_dependencies
        yield (tier.tier, "dead"), tier.dead


def _shares(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for tier in reading.fleet.tiers:
        for by, share in (("served", tier.share), ("origin", tier.share_by_origin)):
            if share is not None:
                yield (tier.tier, by), share


def _waits(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for tier in reading.fleet.tiers:
        waits = (("0.5", tier.wait_p50_s), ("0.99", tier.wait_p99_s), ("1", tier.longest_wait_s))
        for quantile, wait_s in waits:
            if wait_s is not None:
                yield (tier.tier, quantile), wait_s


def _accounted(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    for tier in TIER_NAMES:
        for state, number in reading.fleet.accounts.by_tier.get(tier, {}).items():
            if state != "admitted" and ":" not in state:
                yield (tier, state), number


def _refused(reading: Reading) -> Iterator[tuple[tuple[str, ...], float]]:
    # All are there before the first time, or that would not be seen as an increase.
    for tier in reading.fleet.tiers:
        found = reading.fleet.accounts.refused.get(tier.tier, {})
        for reason in sorted({*REFUSALS, *found}):
            yield (tier.tier, reason), found.get(reason, 0)


def _fleet(
    name: str, help: str, read: Callable[[Reading], Values], labels: tuple[str, ...] = ("tier",), kind: str = "gauge"
) -> FleetMetric:
    return FleetMetric(
        name, "counter" if kind == "counter" else "gauge", help, labels, told_by="maintenance", read=read
    )


FLEET_METRICS: tuple[FleetMetric, ...] = (
    _fleet(
        "inference_queue_messages",
        "Tasks of a tier by where they are: ready in the lane fresh, returned or aged; running; parked until they are "
        "due; dependent on other tasks; dead.",
        _messages,
        ("tier", "place"),
    ),
    _fleet("inference_queue_bound", "How many fresh tasks may wait.", _by_tier(lambda tier: tier.bound)),
    _fleet(
        "inference_queue_deepest",
        "The most tasks that waited in the lane fresh at a time in the last minute, looked at every two seconds.",
        lambda reading: (((tier,), depth) for tier, depth in reading.deepest.items()),
    ),
    _fleet(
        "inference_queue_oldest_seconds",
        "How long the task that has waited longest has been ready; 0 if none waits.",
        _by_tier(lambda tier: tier.oldest_s or 0.0),
    ),
    _fleet(
        "inference_queue_expected_wait_seconds",
        "About how long a task submitted now would wait; missing while nobody works on what waits.",
        _by_tier(lambda tier: tier.expected_wait_s),
    ),
    _fleet("inference_dead_letters", "Messages in the dead letters.", lambda r: [((), r.fleet.dead)], ()),
    _fleet(
        "inference_tier_weight",
        "The weight of the tier in the settings.",
        lambda reading: (((name,), float(tier.weight)) for name, tier in reading.settings.tiers.items()),
    ),
    _fleet(
        "inference_tier_floor_ratio",
        "The floor of the tier in the settings, 0 to 1.",
        lambda reading: (((name,), float(tier.floor)) for name, tier in reading.settings.tiers.items()),
    ),
    _fleet(
        "inference_tier_share_promised_ratio",
        "The share of the tier while all tiers have work, 0 to 1.",
        _by_tier(lambda tier: tier.promised),
    ),
    _fleet(
        "inference_tier_share_ratio",
        "The share that the tier got in the last minute, of slot seconds or of starts as worker.share has it, by the "
        "tier that served the work or by the tier of its submit (origin); missing while nothing runs.",
        _shares,
        ("tier", "by"),
    ),
    _fleet(
        "inference_tier_started_per_second",
        "Starts of the last minute, by tier served.",
        _by_tier(lambda tier: tier.started_per_s),
    ),
    _fleet(
        "inference_tier_wait_seconds",
        "Waits of the last minute from submit to first start, by tier of the submit: median, 99th percentile, longest.",
        _waits,
        ("tier", "quantile"),
    ),
    _fleet(
        "inference_tier_starved_seconds",
        "For how long tasks have waited in the tier without a start of any of it; 0 if none waits.",
        _by_tier(lambda tier: tier.starved_s),
    ),
    _fleet(
        "inference_tier_failed_ratio",
        "Part of the tasks that ended in the last minute that failed for good; missing while none ends.",
        _by_tier(lambda tier: tier.failed_ratio),
    ),
    _fleet(
        "inference_tier_floor_violations",
        "Windows of the last minute in which the tier had work all the time and got less than its floor, all workers.",
        _by_tier(lambda tier: tier.floor_violations),
    ),
    _fleet(
        "inference_tier_promoted_starts",
        "Starts of the last minute of tasks of the tier that another tier served.",
        lambda reading: (((tier,), n) for tier, n in reading.fleet.promoted_60s.items()),
    ),
    _fleet(
        "inference_tier_paused",
        "1 while an operator has stopped the starts of the tier.",
        _by_tier(lambda tier: float(tier.paused)),
    ),
    _fleet(
        "inference_tier_refusing",
        "1 while submits to the tier are refused because an operator wants it.",
        _by_tier(lambda tier: float(tier.refusing)),
    ),
    _fleet("inference_tier_workers", "Live workers that serve the tier.", _by_tier(lambda tier: tier.workers)),
    _fleet("inference_tier_slots", "Their slots that the tier may use.", _by_tier(lambda tier: tier.slots)),
    _fleet(
        "inference_tasks_admitted",
        "Tasks admitted since the count began, by tier of the submit. No counter: what is taken back is subtracted.",
        lambda r: (((tier,), r.fleet.accounts.by_tier.get(tier, {}).get("admitted", 0)) for tier in TIER_NAMES),
    ),
    _fleet(
        "inference_tasks_accounted",
        "The same tasks by the state they are in now; the sum over the states is inference_tasks_admitted.",
        _accounted,
        ("tier", "state"),
    ),
    _fleet(
        "inference_tasks_refused_total",
        "Submits that were refused, by tier of the submit and reason: full, parked, paused or late.",
        _refused,
        ("tier", "reason"),
        "counter",
    ),
    _fleet(
        "inference_tasks_stale_writes_total",
        "Late writes that were refused because another claim had the task by then.",
        lambda reading: [((), reading.stale_writes)],
        (),
        "counter",
    ),
    _fleet("inference_worker_slots", "Slots of the worker.", _by_worker(lambda beat: beat.slots), ("worker",)),
    _fleet("inference_worker_busy_slots", "Slots in use.", _by_worker(lambda beat: beat.busy), ("worker",)),
    _fleet(
        "inference_worker_last_heartbeat_timestamp_seconds",
        "When the worker was last seen, by the clock of Redis.",
        _by_worker(lambda beat: beat.seen_at_s),
        ("worker",),
    ),
    _fleet(
        "inference_worker_running",
        "1 while the worker takes work, 0 while it is paused or drained.",
        _by_worker(lambda beat: float(beat.state == "running")),
        ("worker",),
    ),
    _fleet(
        "inference_gpu_memory_used_bytes",
        "Memory in use on the worker's GPU, by all processes.",
        _by_worker(lambda beat: beat.gpu_memory_used_bytes),
        ("worker",),
    ),
    _fleet(
        "inference_gpu_memory_total_bytes",
        "Memory of the worker's GPU.",
        _by_worker(lambda beat: beat.gpu_memory_total_bytes),
        ("worker",),
    ),
    _fleet(
        "inference_gpu_utilization_ratio",
        "How busy the worker's GPU is, 0 to 1.",
        _by_worker(lambda beat: beat.gpu_utilization),
        ("worker",),
    ),
)
