"""Recording and alert rules for Prometheus; ``config/prometheus/rules.yml`` is generated from them.

Several maintenance workers may tell the same of the fleet, so what they tell is taken by ``max`` and never summed; what
each worker counts of its own work is summed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

__all__ = ["ALERTS", "RECORDINGS", "Alert", "Recording", "rules_document"]

#: The service-level objective of realtime: the wait that 99 of 100 tasks do not exceed, in seconds.
REALTIME_P99_S = 0.2

HEAD = """\
# Recording and alert rules for Prometheus. Generated from inference_tasks/observe/rules.py; a test keeps it in step.
# Thresholds are those of the default tiers: with other bounds, ages or objectives, copy an alert and change its number.
"""


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that is computed once for all who look at it."""

    record: str
    expr: str
    help: str


@dataclass(frozen=True, slots=True)
class Alert:
    """What somebody must be told.

    Attributes:
        lasts: how long it must have been so first.
        severity: ``critical``: somebody waits for an answer that does not come; ``warning``: a promise is at risk;
            ``info``: somebody should know.
        summary: what is the matter, with the labels of the series.
        action: what to look at first.
    """

    name: str
    expr: str
    lasts: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    action: str


RECORDINGS: tuple[Recording, ...] = (
    Recording(
        "inference:tier_started:rate5m",
        "sum by (tier) (rate(inference_tasks_started_total[5m]))",
        "Starts per second, by tier served.",
    ),
    Recording(
        "inference:tier_share:ratio_rate5m",
        "sum by (tier) (rate(inference_tasks_slot_seconds_total[5m]))"
        " / on () group_left () (sum(rate(inference_tasks_slot_seconds_total[5m])) > 0)",
        "Share of the slot seconds, by tier served.",
    ),
    Recording(
        "inference:tier_share_origin:ratio_rate5m",
        "sum by (tier_first) (rate(inference_tasks_slot_seconds_total[5m]))"
        " / on () group_left () (sum(rate(inference_tasks_slot_seconds_total[5m])) > 0)",
        "Share of the slot seconds, by tier of the submit.",
    ),
    Recording(
        "inference:tier_wait_seconds:p50_5m",
        "histogram_quantile(0.5, sum by (tier_first, le) (rate(inference_tasks_wait_seconds_bucket[5m])))",
        "Median of the waits, by tier of the submit.",
    ),
    Recording(
        "inference:tier_wait_seconds:p99_5m",
        "histogram_quantile(0.99, sum by (tier_first, le) (rate(inference_tasks_wait_seconds_bucket[5m])))",
        "99th percentile of the waits, by tier of the submit.",
    ),
    Recording(
        "inference:tier_failed:ratio_rate5m",
        '(sum by (tier_first) (rate(inference_tasks_ended_total{outcome="failed"}[5m]))'
        ' or 0 * sum by (tier_first) (rate(inference_tasks_ended_total{outcome="success"}[5m])))'
        ' / (sum by (tier_first) (rate(inference_tasks_ended_total{outcome=~"success|failed"}[5m])) > 0)',
        "Part of the tasks that ended that failed for good, by tier of the submit.",
    ),
    Recording(
        "inference:queue_ready:messages",
        'sum by (tier) (max by (tier, place) (inference_queue_messages{place=~"fresh|returned|aged"}))',
        "Tasks that could start now.",
    ),
    Recording(
        "inference:queue_fill:ratio",
        "max by (tier) (inference_queue_deepest) / max by (tier) (inference_queue_bound)",
        "The deepest depth of the last minute against the bound.",
    ),
    Recording(
        "inference:tier_starved_seconds:max1h",
        "max by (tier) (max_over_time(inference_tier_starved_seconds[1h]))",
        "The longest starvation of the last hour.",
    ),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "InferenceNoWorker",
        "max by (tier) (inference_tier_workers) == 0 and on (tier) inference:queue_ready:messages > 0",
        "2m",
        "critical",
        "Tasks wait in {{ $labels.tier }} and no worker serves it.",
        "Start a worker for the tier; inference-tasks tiers shows who serves what.",
    ),
    Alert(
        "InferenceTierStarves",
        "max by (tier) (inference_tier_starved_seconds) > 300"
        " unless on (tier) max by (tier) (inference_tier_paused) == 1",
        "1m",
        "critical",
        "Tasks have waited in {{ $labels.tier }} for {{ $value | humanizeDuration }} without a start.",
        "inference-tasks why TASK_ID of one of them; then the workers: paused, drained, or all slots in long tasks.",
    ),
    Alert(
        "InferenceStateAway",
        "inference_worker_state_up == 0",
        "1m",
        "critical",
        "The worker {{ $labels.instance }} does not reach Redis and takes no work.",
        "Look at Redis and the network between the two.",
    ),
    Alert(
        "InferenceFleetUnseen",
        "min by (server) (inference_exporter_up) == 0 or absent(inference_exporter_up)",
        "5m",
        "critical",
        "Nothing is known of the fleet: {{ with $labels.server }}no answer from {{ . }}{{ else }}no maintenance worker "
        "tells of it{{ end }}.",
        "Start inference-tasks maintenance with --metrics-port, or bring the server back; aging stands still too.",
    ),
    Alert(
        "InferenceRealtimeSlow",
        f'inference:tier_wait_seconds:p99_5m{{tier_first="realtime"}} > {REALTIME_P99_S}',
        "5m",
        "warning",
        "1 of 100 realtime tasks waits longer than {{ $value | humanizeDuration }}.",
        "More slots, or a reserve for realtime if the lower tiers run long tasks (worker.reserve).",
    ),
    Alert(
        "InferenceTierFull",
        'max by (tier) (inference_queue_messages{place="fresh"})'
        " / on (tier) max by (tier) (inference_queue_bound) > 0.95",
        "5m",
        "warning",
        "{{ $labels.tier }} is {{ $value | humanizePercentage }} full; submits are or will be refused.",
        "Add workers, slow the clients down, or raise tiers.{{ $labels.tier }}.bound.",
    ),
    Alert(
        "InferenceAgingBehind",
        'max by (tier) (inference_queue_oldest_seconds{tier=~"batch|offline"}) > 5400',
        "10m",
        "warning",
        "The oldest task of {{ $labels.tier }} has waited {{ $value | humanizeDuration }}; it should have moved up.",
        "Is a maintenance worker running, does beat send its schedule (inference-tasks doctor)? "
        "Is the tier above paused?",
    ),
    Alert(
        "InferenceFloorViolated",
        "max by (tier) (inference_tier_floor_violations) > 0",
        "5m",
        "warning",
        "{{ $labels.tier }} had work all the time and got less than its floor.",
        "A mistake of the scheduler, or messages that a worker cannot take: the worker's log, and inference-tasks "
        "tiers.",
    ),
    Alert(
        "InferenceShareOff",
        'abs(max by (tier) (inference_tier_share_ratio{by="served"})'
        " - on (tier) max by (tier) (inference_tier_share_promised_ratio))"
        " > on (tier) 0.2 * max by (tier) (inference_tier_share_promised_ratio)"
        " and on () min(min_over_time(inference:queue_ready:messages[10m])) > 0",
        "10m",
        "warning",
        "All tiers have work, and the share of {{ $labels.tier }} is off by {{ $value | humanizePercentage }}.",
        "Shares are promised for workers that serve all tiers: inference-tasks tiers, and workers with --tiers or "
        "--reserve.",
    ),
    Alert(
        "InferenceFailures",
        "inference:tier_failed:ratio_rate5m > 0.05",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the tasks submitted to {{ $labels.tier_first }} fail.",
        "inference-tasks dead list shows which, and why.",
    ),
    Alert(
        "InferenceDeadLettersGrow",
        "max(delta(inference_dead_letters[30m])) > 10",
        "5m",
        "warning",
        "{{ $value | humanize }} more dead letters than half an hour ago.",
        "inference-tasks dead list shows why; replay them when the cause is gone.",
    ),
    Alert(
        "InferenceCrashes",
        "sum by (task) (increase(inference_tasks_crashes_total[10m])) > 3",
        "1m",
        "warning",
        "Runs of {{ $labels.task }} take their process down.",
        "Memory of GPU and host first; the process loads its models anew each time.",
    ),
    Alert(
        "InferenceWorkersLost",
        "max by (tier) (inference_tier_workers) < on (tier) max by (tier) (max_over_time(inference_tier_workers[1h]))",
        "10m",
        "info",
        "Fewer workers serve {{ $labels.tier }} than within the last hour: {{ $value }}.",
        "On purpose (somebody, or an autoscaler), or has one died? Its log, and inference-tasks top.",
    ),
    Alert(
        "InferenceStaleWrites",
        "max(increase(inference_tasks_stale_writes_total[15m])) > 0",
        "1m",
        "info",
        "Late results were refused: workers lost claims that they thought they held.",
        "Pauses of a worker longer than state.lease_s, or Redis that was away.",
    ),
    Alert(
        "InferencePaused",
        "max by (tier) (inference_tier_paused) == 1",
        "1h",
        "info",
        "{{ $labels.tier }} has been paused for an hour.",
        "inference-tasks switches tells by whom and why.",
    ),
)


def rules_document() -> str:
    """Return ``config/prometheus/rules.yml``."""
    lines = [HEAD, "groups:", "  - name: inference-recordings", "    rules:"]
    for one in RECORDINGS:
        lines += [f"      # {one.help}", f"      - record: {one.record}", f"        expr: {_quoted(one.expr)}"]
    lines += ["  - name: inference-alerts", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {_quoted(alert.expr)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {_quoted(alert.summary)}",
            f"          description: {_quoted(alert.action)}",
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a YAML string: the quoted ones of JSON are such."""
    return json.dumps(text, ensure_ascii=False)
