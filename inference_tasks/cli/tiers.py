"""``inference-tasks tiers``: what waits in each tier, who works on it, and the share it got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_routing.floor import effective_shares
from inference_routing.tier import TIER_NAMES
from inference_routing.topology import Topology
from inference_tasks.app import Inference
from inference_tasks.cli.audit import Audit, audit, audit_view
from inference_tasks.cli.exit import FINDINGS
from inference_tasks.cli.invocation import Invocation, command_options

__all__ = ["TierReport", "report", "tiers"]


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


@click.command()
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@click.option(
    "--audit", "is_audit", is_flag=True, help="Account for every task admitted; exit code 1 if one is missing."
)
@command_options
def tiers(invocation: Invocation, *, watch: bool, is_audit: bool) -> None:
    """Show for each tier what waits, who serves it, and its share.

    The share of the last minute is of slot seconds, or of starts where worker.share is "count". It is measured by the
    tier that served the work, and by the tier the work was submitted to (they differ once work has moved up).
    """
    inference = invocation.inference
    if is_audit:
        _audit(invocation, watch=watch)
        return
    depths = inference.depths()
    unit = inference.settings.worker.share
    try:
        if watch:
            invocation.screen.watch(lambda: report(inference, depths), _as_data, lambda found: _table(found, unit))
        else:
            found = report(inference, depths)
            invocation.screen.show(_as_data(found), lambda: _table(found, unit))
    finally:
        depths.close()


def _audit(invocation: Invocation, *, watch: bool) -> None:
    inference = invocation.inference
    if watch:
        found = invocation.screen.watch(lambda: audit(inference), Audit.as_dict, audit_view)
    else:
        found = audit(inference)
        invocation.screen.show(found.as_dict(), lambda: audit_view(found))
    if not found.is_exact:
        click.get_current_context().exit(FINDINGS)


def report(inference: Inference, depths: CountsWaiting) -> list[TierReport]:
    """Look at the broker and the workers' heartbeats.

    Raises:
        BrokerUnavailableError, StateUnavailableError: one of them does not answer.
    """
    settings = inference.settings
    ready = depths.of(inference.topology)
    beats = inference.store.workers()
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


def _as_data(found: list[TierReport]) -> object:
    return [{**asdict(one), "ready": one.ready} for one in found]


def _table(found: list[TierReport], unit: str) -> Group:
    # Narrow enough for a terminal of 80 columns.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    lanes = ("fresh", "returned", "aged")
    table.add_column("tier")
    for heading in (*lanes, "bound", "workers", "slots", "per s", "promised", "share", "origin"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        waiting = [str(one.ready_by_lane[lane]) if lane in one.ready_by_lane else "-" for lane in lanes]
        shares = [_percent(one.promised), _percent(one.share), _percent(one.share_by_origin)]
        row = [*waiting, f"{one.bound}", f"{one.workers}", f"{one.slots}", f"{one.started_per_s:.3g}", *shares]
        table.add_row(one.tier, *row, style="" if one.workers else "yellow")
    what = "slot seconds" if unit == "time" else "starts"
    notes = [f"share: of {what} in the last minute; origin: the same by the tier of the submit; per s: starts"]
    notes += [f"no worker serves {one.tier}, and {one.ready} wait" for one in found if one.ready and not one.workers]
    return Group(table, Text("\n".join(notes), style="dim"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
