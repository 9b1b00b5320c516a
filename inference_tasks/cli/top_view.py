"""The screen of ``inference-tasks top``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inference_tasks.cli.screen import clock_time, percent, seconds
from inference_tasks.state.switches import tier_target, worker_target
from inference_tasks.worker.gpu import Gpu, tokens

if TYPE_CHECKING:
    from inference_tasks.observe.fleet import Fleet, TierView
    from inference_tasks.observe.top import Top
    from inference_tasks.state.records import WorkerBeat

__all__ = ["span", "view"]

GIB = 2**30
CHOSEN = "reverse"
WIDE = 110
TASKS_SHOWN = 8


def view(top: Top, *, chosen: str = "", width: int = WIDE) -> Group:
    """Draw one look; of each worker the tasks that have run longest."""
    fleet = top.fleet
    parts: list[RenderableType] = [_tiers(fleet, chosen, is_wide=width >= WIDE), Text()]
    if fleet.workers:
        parts.append(_workers(fleet, chosen))
    else:
        parts.append(Text("no worker runs", style="yellow"))
    parts += [Text(), *_lately(top)]
    return Group(*parts)


def span(amount_s: float | None) -> str:
    """Return a duration for people, from milliseconds to days; a dash for none."""
    if amount_s is None or amount_s < 120:
        return seconds(amount_s)
    for size_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if amount_s >= 2 * size_s:
            return f"{amount_s / size_s:.1f} {unit}"
    return seconds(amount_s)


def _tiers(fleet: Fleet, chosen: str, *, is_wide: bool) -> Table:
    table = _table()
    table.add_column("tier", no_wrap=True)
    headings = ["waiting", "bound", "oldest", "P50", "P99", "promised", "share"]
    headings += ["origin", "per s", "running", "parked", "dead"] if is_wide else []
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for tier in fleet.tiers:
        waits = (span(tier.oldest_s), span(tier.wait_p50_s), span(tier.wait_p99_s))
        row = [f"{tier.ready}", f"{tier.bound}", *waits, percent(tier.promised), percent(tier.share)]
        if is_wide:
            row += [percent(tier.share_by_origin), f"{tier.started_per_s:.3g}"]
            row += [f"{number}" for number in (tier.running, tier.parked, tier.dead)]
        style = CHOSEN if tier_target(tier.tier) == chosen else ("" if tier.workers else "yellow")
        table.add_row(tier.tier, *row, ", ".join(_remarks(tier)), style=style)
    return table


def _remarks(tier: TierView) -> Iterator[str]:
    if tier.paused:
        yield "paused"
    if tier.refusing:
        yield "refuses"
    elif tier.ready_by_lane.get("fresh", 0) >= tier.bound:
        yield "full"
    if tier.floor_violations:
        yield "below its floor"
    if tier.ready and not tier.workers:
        yield "no worker"


def _workers(fleet: Fleet, chosen: str) -> Table:
    table = _table()
    for heading in ("worker", "state", "slots"):
        table.add_column(heading, no_wrap=True)
    table.add_column("GPU", no_wrap=True)
    for heading in ("memory", "use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for beat in fleet.workers:
        label = ",".join(Gpu(token).label for token in tokens(beat.gpu or "")) or "-"
        row = (
            beat.node,
            beat.state,
            f"{beat.busy} of {beat.slots}",
            label,
            _memory(beat),
            percent(beat.gpu_utilization),
        )
        table.add_row(*row, style=CHOSEN if worker_target(beat.node) == chosen else "")
        for one in beat.running[:TASKS_SHOWN]:
            moved = "" if one.tier == one.tier_first else f" (from {one.tier_first})"
            table.add_row(f"  {one.task}", f"{one.tier}{moved}", span(max(0.0, fleet.at_s - one.since_s)), style="dim")
        if len(beat.running) > TASKS_SHOWN:
            table.add_row(f"  and {len(beat.running) - TASKS_SHOWN} more", style="dim")
    return table


def _lately(top: Top) -> Iterator[RenderableType]:
    fleet = top.fleet
    promoted = ", ".join(f"{number} of {tier}" for tier, number in fleet.promoted_60s.items() if number) or "none"
    yield Text(f"promoted starts in the last minute: {promoted}", style="dim")
    yield _refused(top)
    yield Text(f"dead letters: {fleet.dead}", style="bold red" if fleet.dead else "dim")
    for letter in top.dead_letters if fleet.dead else ():
        yield Text(
            f"  {clock_time(letter.dead_at_s)}  {letter.tier_first}  {letter.task}  {letter.reason}", style="dim"
        )
    if top.operator_log:
        yield Text("operators did lately", style="dim")
    for line in top.operator_log:
        yield Text(f"  {clock_time(line.at_s)}  {line.by}  {line.action} {line.target}  {line.because}", style="dim")


def _refused(top: Top) -> Text:
    """Say what was refused lately; at a first look, all since the counts began."""
    accounts, counts = top.fleet.accounts, top.refused_lately
    when = "lately" if counts is not None else f"since {clock_time(accounts.since_s)}"
    shown = accounts.refused if counts is None else counts
    said = [f"{number} of {tier} ({reason})" for tier, row in shown.items() for reason, number in row.items()]
    return Text(f"refused {when}: {', '.join(said) or 'none'}", style="yellow" if said else "dim")


def _memory(beat: WorkerBeat) -> str:
    if beat.gpu_memory_used_bytes is None or beat.gpu_memory_total_bytes is None:
        return "-"
    return f"{beat.gpu_memory_used_bytes / GIB:.1f} of {beat.gpu_memory_total_bytes / GIB:.1f} GiB"


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
