"""The whole deployment at one moment: what waits where, who works on it, how long it takes, and the shares it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

from inference_routing.lane import LANE_NAMES, RETURNED
from inference_routing.tier import TIER_NAMES
from inference_tasks.observe.events import WAIT_BUCKETS_S
from inference_tasks.observe.tiers import CountsWaiting, TierReport, tier_reports
from inference_tasks.state.packing import drain_rates
from inference_tasks.state.records import State

if TYPE_CHECKING:
    from inference_tasks.app import Inference
    from inference_tasks.state.records import Accounts, Backlog, WorkerBeat
    from inference_tasks.state.switches import Switches

__all__ = ["Fleet", "TierView", "read", "wait_quantile"]


@dataclass(frozen=True, slots=True)
class TierView(TierReport):
    """One tier at one moment, and its last minute.

    Waits, their quantiles and the failures are of the work that was submitted to the tier, wherever it was served;
    starvation and floor violations are of the tier that serves.

    Attributes:
        oldest_s: how long the task that has waited longest in the tier has been ready; None if none waits.
        wait_p50_s: median of the waits that ended in the last minute, from submit to start; None if none did.
        wait_p99_s: likewise the 99th percentile.
        longest_wait_s: likewise the longest.
        parked: tasks that the broker keeps until they are due.
        waiting_for_dependencies: tasks that wait for other tasks.
        running: tasks of the tier that have a slot.
        dead: tasks that lie in the dead letters.
        starved_s: for how long tasks have waited while none of the tier has started; 0 if none waits.
        failed_ratio: part of the tasks that ended in the last minute that failed; None if none ended.
        expected_wait_s: about how long a task submitted now would wait; None if that is not known.
        paused: whether an operator has stopped the starts of the tier.
        refusing: whether submits are refused because an operator wants it.
        floor_violations: windows of the last minute in which it had work all the time and got less than its floor.
    """

    oldest_s: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None
    longest_wait_s: float | None
    parked: int
    waiting_for_dependencies: int
    running: int
    dead: int
    starved_s: float
    failed_ratio: float | None
    expected_wait_s: float | None
    paused: bool
    refusing: bool
    floor_violations: int

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return {**asdict(self), "ready": self.ready}


@dataclass(frozen=True, slots=True)
class Fleet:
    """All tiers and all live workers.

    Attributes:
        at_s: unix seconds by the Redis server's clock.
        tiers: the highest first.
        workers: by the time of their last heartbeat.
        dead: messages in the dead letters.
        promoted_60s: {tier of the submit: starts of the last minute that another tier served}.
        accounts: what became of all admitted work.
        switches: what operators have switched off.
    """

    at_s: float
    tiers: tuple[TierView, ...]
    workers: tuple[WorkerBeat, ...]
    dead: int
    promoted_60s: dict[str, int]
    accounts: Accounts
    switches: Switches

    def as_dict(self) -> dict[str, object]:
        """All of it, ready for JSON."""
        return {
            "at_s": self.at_s,
            "tiers": [tier.as_dict() for tier in self.tiers],
            "workers": [worker.as_dict() for worker in self.workers],
            "dead": self.dead,
            "promoted_60s": self.promoted_60s,
            "accounts": self.accounts.as_dict(),
            "switches": [switch.as_dict() for switch in self.switches],
        }


def read(inference: Inference, depths: CountsWaiting) -> Fleet:
    """Look at the broker, the workers' heartbeats and the state.

    Costs a few round trips to Redis, and to the broker one for each queue, however much waits.

    Raises:
        BrokerUnavailableError, StateUnavailableError: one of them does not answer.
    """
    store, topology = inference.store, inference.topology
    ready = depths.of(topology)
    beats = store.workers()
    backlogs = store.waiting([queue.name for queue in topology.queues if queue.tier is not None])
    accounts, switches = store.accounts(), store.switches()
    # Ages are differences to moments that Redis wrote, and clocks differ.
    now_s = store.server_time_s()
    reports, rates = tier_reports(inference, ready, beats), drain_rates(beats)
    return Fleet(
        at_s=now_s,
        tiers=tuple(_view(inference, one, beats, rates, backlogs, accounts, switches, now_s) for one in reports),
        workers=tuple(beats),
        dead=ready.get(topology.dead.name, 0),
        promoted_60s={
            tier: sum(row.get(tier, 0) for beat in beats for served, row in beat.starts_60s.items() if served != tier)
            for tier in TIER_NAMES
        },
        accounts=accounts,
        switches=switches,
    )


def _view(
    inference: Inference,
    report: TierReport,
    beats: Sequence[WorkerBeat],
    rates: Mapping[str, float],
    backlogs: Mapping[str, Backlog],
    accounts: Accounts,
    switches: Switches,
    now_s: float,
) -> TierView:
    tier = report.tier
    lanes = {lane: backlogs.get(queue) for (of, lane), queue in inference.queue_by_lane.items() if of == tier}
    since = [one.oldest_ready_at_s for one in lanes.values() if one is not None and one.oldest_ready_at_s is not None]
    oldest_s = max(0.0, now_s - min(since)) if since else None
    returned = lanes.get(RETURNED)
    away = accounts.away.get(tier, 0)
    counts = accounts.by_tier.get(tier, {})
    waits = sum((Counter(beat.waits_60s.get(tier, {})) for beat in beats), Counter[int]())
    longest = [beat.longest_wait_60s[tier] for beat in beats if tier in beat.longest_wait_60s]
    longest_s = max(longest, default=None)
    ended = sum(beat.ended_60s.get(tier, 0) for beat in beats)
    failed = sum(beat.failed_60s.get(tier, 0) for beat in beats)
    last_start_s = max((beat.last_start_at_s.get(tier, 0.0) for beat in beats), default=0.0)
    rate = rates.get(tier)
    return TierView(
        **{field.name: getattr(report, field.name) for field in fields(TierReport)},
        oldest_s=oldest_s,
        wait_p50_s=wait_quantile(waits, 0.5, longest_s),
        wait_p99_s=wait_quantile(waits, 0.99, longest_s),
        longest_wait_s=longest_s,
        parked=max(0, away - (returned.waiting if returned is not None else 0)),
        waiting_for_dependencies=counts.get(State.WAITING, 0),
        running=sum(beat.busy_by_tier.get(tier, 0) for beat in beats),
        dead=counts.get("dead:replayable", 0) + counts.get("dead:unfit", 0),
        starved_s=0.0 if oldest_s is None else max(0.0, min(oldest_s, now_s - last_start_s)),
        failed_ratio=failed / ended if ended else None,
        expected_wait_s=report.ready / rate if rate else (None if report.ready else 0.0),
        paused=all(switches.stopped(tier, lane) is not None for lane in LANE_NAMES),
        refusing=switches.refusing(tier) is not None,
        floor_violations=sum(beat.floor_violations_60s.get(tier, 0) for beat in beats),
    )


def wait_quantile(counts: Mapping[int, int], ratio: float, longest_s: float | None = None) -> float | None:
    """Return the wait that this part of all waits does not exceed, from their counts by place in ``WAIT_BUCKETS_S``.

    Interpolated within a bucket, as Prometheus does it, and never above the longest one; None without waits.
    """
    total = sum(counts.values())
    if not total:
        return None
    rank, below = ratio * total, 0
    for place in sorted(counts):
        if below + counts[place] >= rank:
            low = WAIT_BUCKETS_S[place - 1] if place else 0.0
            high = WAIT_BUCKETS_S[place] if place < len(WAIT_BUCKETS_S) else max(low, longest_s or low)
            found = low + (high - low) * (rank - below) / counts[place]
            return min(found, longest_s) if longest_s is not None else found
        below += counts[place]
    return longest_s
