"""What each tier is doing: what waits, who serves it, and the share it got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from inference_routing.floor import effective_shares
from inference_routing.tier import TIER_NAMES
from inference_routing.topology import Topology
from inference_tasks.app import Inference
from inference_tasks.state.records import WorkerBeat

__all__ = ["CountsWaiting", "TierReport", "report", "tier_reports"]


class CountsWaiting(Protocol):
    """What is needed of the broker."""

    def of(self, topology: Topology, /) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier at one moment.

    Attributes:
        ready_by_lane: {lane: messages waiting}; a lane whose queue does not exist yet is left out.
        bound: how many fresh ones may wait.
        workers: live workers that serve the tier.
        slots: their slots, those reserved for realtime left out where they are not this tier's.
        promised: share while all tiers have work, 0 to 1.
        share: what it got in the last minute of what all tiers got, by the tier it was served as; None if nothing ran.
        share_by_origin: the same, by the tier it was submitted to.
        started_per_s: starts per second, summed over the workers.
    """

    tier: str
    ready_by_lane: dict[str, int]
    bound: int
    workers: int
    slots: int
    promised: float
    share: float | None
    share_by_origin: float | None
    started_per_s: float

    @property
    def ready(self) -> int:
        """All that wait."""
        return sum(self.ready_by_lane.values())

    def as_dict(self) -> dict[str, object]:
        """All fields by name, ready for JSON."""
        return {**asdict(self), "ready": self.ready}


def report(inference: Inference, depths: CountsWaiting) -> list[TierReport]:
    """Look at the broker and the workers' heartbeats.

    Raises:
        BrokerUnavailableError, StateUnavailableError: one of them does not answer.
    """
    return tier_reports(inference, depths.of(inference.topology), inference.store.workers())


def tier_reports(inference: Inference, ready: Mapping[str, int], beats: Sequence[WorkerBeat]) -> list[TierReport]:
    """Return what {queue: messages waiting} and the heartbeats say of each tier, the highest first."""
    settings = inference.settings
    named = dict(settings.tiers.items())
    promised = effective_shares(
        {name: one.weight for name, one in named.items()}, {name: one.floor for name, one in named.items()}
    )
    amounts = [beat.slot_s_60s if settings.worker.share == "time" else beat.starts_60s for beat in beats]
    served, origin = _summed(amounts)
    return [
        TierReport(
            tier=tier,
            ready_by_lane={
                lane: ready[queue]
                for (of_tier, lane), queue in inference.queue_by_lane.items()
                if of_tier == tier and queue in ready
            },
            bound=named[tier].bound,
            workers=sum(tier in beat.tiers for beat in beats),
            slots=sum(
                beat.slots - (0 if tier == TIER_NAMES[0] else beat.reserve) for beat in beats if tier in beat.tiers
            ),
            promised=float(promised[tier]),
            share=_share(served, tier),
            share_by_origin=_share(origin, tier),
            started_per_s=round(sum(beat.started_per_s.get(tier, 0.0) for beat in beats), 3),
        )
        for tier in TIER_NAMES
    ]


def _summed(
    amounts: Iterable[Mapping[str, Mapping[str, float]]],
) -> tuple[dict[str, float], dict[str, float]]:
    """Sum {served tier: {first tier: amount}} of all workers, by the one and by the other."""
    served: dict[str, float] = {}
    origin: dict[str, float] = {}
    for one in amounts:
        for tier, row in one.items():
            for first, amount in row.items():
                served[tier] = served.get(tier, 0.0) + amount
                origin[first] = origin.get(first, 0.0) + amount
    return served, origin


def _share(amount_by_tier: Mapping[str, float], tier: str) -> float | None:
    total = sum(amount_by_tier.values())
    return amount_by_tier.get(tier, 0.0) / total if total else None
