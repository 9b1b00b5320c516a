"""What the dashboard shows, row by row: the questions, and the queries that answer them.

The first row answers whether the service levels are met; each further row one question about why they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inference_tasks.observe.rules import REALTIME_P99_S

__all__ = ["COLORS", "ROWS", "Panel", "Row", "Target"]

#: The colours of the tiers, the same in all panels.
COLORS = {"realtime": "red", "batch": "blue", "offline": "green"}


@dataclass(frozen=True, slots=True)
class Target:
    """One query and the name of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: the question that it answers.
        about: what it shows.
        targets: its queries.
        unit: Grafana's name of it.
        kind: a number now, or a line over time.
        limit: above which it is red.
        is_stacked: whether the lines add up.
        top: of the axis; None leaves it to Grafana.
    """

    title: str
    about: str
    targets: Sequence[Target]
    unit: str = "short"
    kind: Literal["stat", "timeseries"] = "timeseries"
    limit: float | None = None
    is_stacked: bool = False
    top: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels side by side under a heading."""

    title: str
    panels: Sequence[Panel] = field(default_factory=tuple)


def _by_tier(expr: str, legend: str = "{{tier}}") -> tuple[Target, ...]:
    return (Target(expr, legend),)


ROWS: tuple[Row, ...] = (
    Row(
        "Are the service levels met?",
        (
            Panel(
                "Realtime P99 wait",
                "From submit to start, of the last five minutes.",
                (Target('inference:tier_wait_seconds:p99_5m{tier_first="realtime"}', "P99"),),
                "s",
                "stat",
                REALTIME_P99_S,
            ),
            Panel(
                "Longest starvation, last hour",
                "For how long a tier had work and no start.",
                _by_tier("inference:tier_starved_seconds:max1h"),
                "s",
                "stat",
                300,
            ),
            Panel(
                "Floors violated, last hour",
                "Windows in which a tier had work all the time and got less than its floor.",
                _by_tier('sum by (tier) (increase(inference_tasks_floor_windows_total{outcome="violated"}[1h]))'),
                "short",
                "stat",
                1,
            ),
            Panel(
                "Deepest against the bound",
                "Of the last minute; at 100 % submits are refused.",
                _by_tier("inference:queue_fill:ratio"),
                "percentunit",
                "stat",
                0.95,
            ),
            Panel(
                "Failed",
                "Part of the tasks that ended, of the last five minutes.",
                _by_tier("inference:tier_failed:ratio_rate5m", "{{tier_first}}"),
                "percentunit",
                "stat",
                0.05,
            ),
            Panel(
                "Dead letters",
                "Messages that somebody should look at.",
                (Target("max(inference_dead_letters)", "dead"),),
                "short",
                "stat",
                1,
            ),
        ),
    ),
    Row(
        "Waits",
        (
            Panel(
                "P99 wait",
                "From submit to first start, by tier of the submit.",
                _by_tier("inference:tier_wait_seconds:p99_5m", "{{tier_first}}"),
                "s",
            ),
            Panel(
                "Median wait",
                "From submit to first start, by tier of the submit.",
                _by_tier("inference:tier_wait_seconds:p50_5m", "{{tier_first}}"),
                "s",
            ),
            Panel(
                "Longest wait of the last minute",
                "By tier of the submit; each task counts, not 99 of 100.",
                _by_tier('max by (tier) (inference_tier_wait_seconds{quantile="1"})'),
                "s",
            ),
        ),
    ),
    Row(
        "Does each tier get its share?",
        (
            Panel(
                "Share by tier served, and promised",
                "Of the slot seconds. Promised while all tiers have work; what one does not use is lent to the others.",
                (
                    Target("inference:tier_share:ratio_rate5m", "{{tier}}"),
                    Target("max by (tier) (inference_tier_share_promised_ratio)", "{{tier}} promised"),
                ),
                "percentunit",
                top=1,
            ),
            Panel(
                "Share by tier of the submit",
                "Work that has moved up counts where it came from.",
                _by_tier("inference:tier_share_origin:ratio_rate5m", "{{tier_first}}"),
                "percentunit",
                is_stacked=True,
                top=1,
            ),
            Panel(
                "Starts per second",
                "By tier served.",
                _by_tier("inference:tier_started:rate5m"),
                "ops",
                is_stacked=True,
            ),
            Panel(
                "Starved",
                "For how long a tier has had work and no start.",
                _by_tier("max by (tier) (inference_tier_starved_seconds)"),
                "s",
                limit=300,
            ),
        ),
    ),
    Row(
        "What waits?",
        (
            *(
                Panel(
                    f"{tier}: where its tasks are",
                    "Ready by lane, running, parked, dependent on others.",
                    _by_tier(
                        f'max by (place) (inference_queue_messages{{tier="{tier}",place!="dead"}})',
                        "{{place}}",
                    ),
                    is_stacked=True,
                )
                for tier in COLORS
            ),
            Panel(
                "Age of the oldest",
                "How long the task that has waited longest has been ready in its tier; batch and offline move up.",
                _by_tier("max by (tier) (inference_queue_oldest_seconds)"),
                "s",
            ),
        ),
    ),
    Row(
        "What is refused, and what is expected?",
        (
            Panel(
                "Deepest in the last minute",
                "Of the lane fresh, and the bound.",
                (
                    Target("max by (tier) (inference_queue_deepest)", "{{tier}}"),
                    Target("max by (tier) (inference_queue_bound)", "{{tier}} bound"),
                ),
            ),
            Panel(
                "Refused",
                "Submits that were not accepted, per second, by reason.",
                _by_tier(
                    "max by (tier, reason) (rate(inference_tasks_refused_total[5m])) > 0",
                    "{{tier}} {{reason}}",
                ),
                "ops",
            ),
            Panel(
                "Expected wait of a new task",
                "What waits, divided by how fast the workers start it.",
                _by_tier("max by (tier) (inference_queue_expected_wait_seconds)"),
                "s",
            ),
            Panel(
                "Paused or refusing",
                "What operators have switched off.",
                (
                    Target("max by (tier) (inference_tier_paused)", "{{tier}} paused"),
                    Target("max by (tier) (inference_tier_refusing)", "{{tier}} refusing"),
                ),
                top=1,
            ),
        ),
    ),
    Row(
        "Workers and GPUs",
        (
            Panel(
                "Workers",
                "Live ones, by tier that they serve.",
                _by_tier("max by (tier) (inference_tier_workers)"),
            ),
            Panel(
                "Slots in use",
                "By worker.",
                _by_tier(
                    "max by (worker) (inference_worker_busy_slots) / max by (worker) (inference_worker_slots)",
                    "{{worker}}",
                ),
                "percentunit",
                top=1,
            ),
            Panel(
                "GPU use",
                "By worker.",
                _by_tier("max by (worker) (inference_gpu_utilization_ratio)", "{{worker}}"),
                "percentunit",
                top=1,
            ),
            Panel(
                "GPU memory",
                "In use, by worker.",
                _by_tier(
                    "max by (worker) (inference_gpu_memory_used_bytes)"
                    " / max by (worker) (inference_gpu_memory_total_bytes)",
                    "{{worker}}",
                ),
                "percentunit",
                top=1,
            ),
        ),
    ),
    Row(
        "Runs, retries and dead letters",
        (
            Panel(
                "P99 run",
                "From the hand-over to the pool until the slot is free again, by task.",
                _by_tier(
                    "histogram_quantile(0.99, sum by (task, le) (rate(inference_tasks_run_seconds_bucket[5m])))",
                    "{{task}}",
                ),
                "s",
            ),
            Panel(
                "Runs that ended, by outcome",
                "Per second.",
                _by_tier("sum by (outcome) (rate(inference_tasks_ended_total[5m]))", "{{outcome}}"),
                "ops",
            ),
            Panel(
                "Retries and crashes",
                "Per second, by task.",
                (
                    Target("sum by (task) (rate(inference_tasks_retries_total[5m]))", "{{task}} retried"),
                    Target("sum by (task) (rate(inference_tasks_crashes_total[5m]))", "{{task}} crashed"),
                ),
                "ops",
            ),
            Panel(
                "Dead letters by reason",
                "Moved there by workers, per minute.",
                _by_tier("60 * sum by (reason) (rate(inference_tasks_buried_total[5m]))", "{{reason}}"),
            ),
        ),
    ),
    Row(
        "Moving up, and the state",
        (
            Panel(
                "Promoted",
                "Tasks moved up because of their age, per minute.",
                _by_tier(
                    "60 * sum by (tier_from, tier_to) (rate(inference_tasks_promoted_total[5m]))",
                    "{{tier_from}} → {{tier_to}}",
                ),
            ),
            Panel(
                "Dropped",
                "Tasks that ended without a run because their message is gone, per minute.",
                _by_tier("60 * sum by (reason) (rate(inference_tasks_dropped_total[5m]))", "{{reason}}"),
            ),
            Panel(
                "Claims that did not run",
                "Per second, by verdict.",
                _by_tier('sum by (verdict) (rate(inference_tasks_claims_total{verdict!="run"}[5m]))', "{{verdict}}"),
                "ops",
            ),
            Panel(
                "Servers and late writes",
                "1 while the server can be read; writes that were refused because the claim was lost.",
                (
                    Target("min by (server) (inference_exporter_up)", "{{server}} up"),
                    Target("max(increase(inference_tasks_stale_writes_total[5m]))", "late writes refused"),
                ),
            ),
        ),
    ),
)
