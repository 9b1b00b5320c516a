"""What one sees of the demo: the live table, plain lines without a terminal, and the summary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_routing.tier import REALTIME, TIER_NAMES
from inference_tasks.demo.figures import TierFigures
from inference_tasks.demo.run import Look, Outcome
from inference_tasks.demo.schedule import Schedule

__all__ = ["Lines", "as_data", "live_table", "summary"]

FIRST_LINE_S, LINE_EVERY_S = 1.0, 2.0
TYPES_SHOWN = 12


def live_table(look: Look) -> Group:
    """Draw one look, narrow enough for 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tier")
    for heading in ("sent", "waiting", "started", "promised", "due", "got", "wait P50", "wait P99"):
        table.add_column(heading, justify="right", no_wrap=True)
    for tier in TIER_NAMES:
        one = look.tiers[tier]
        waiting = one.waiting if look.depths is None else look.depths[tier]
        entitled = (one.promised, one.share_due) if look.depths is not None else (None, None)
        shares = tuple(map(_percent, (*entitled, one.share)))
        waits = (_seconds(one.wait_p50_s), _seconds(one.wait_p99_s))
        style = "bold" if tier == REALTIME else ""
        table.add_row(tier, f"{one.submitted}", f"{waiting}", f"{one.started}", *shares, *waits, style=style)
    bar = round(20 * look.elapsed_s / look.run_s)
    head = f"{look.side.title}  {'━' * bar}{'─' * (20 - bar)}  {look.elapsed_s:.0f} of {look.run_s:.0f} s"
    return Group(Text(head, style="bold"), table)


class Lines:
    """The same as plain lines, every two seconds."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._next_s = FIRST_LINE_S

    def __call__(self, look: Look) -> None:
        """Tell one look, if it is time for a line."""
        if look.elapsed_s < self._next_s:
            # A new run starts at zero.
            self._next_s = min(self._next_s, look.elapsed_s + LINE_EVERY_S)
            return
        self._next_s = look.elapsed_s + LINE_EVERY_S
        told = "; ".join(_line(tier, look) for tier in TIER_NAMES)
        self._tell(f"{look.side.title} {look.elapsed_s:4.1f} s: {told}")


def _line(tier: str, look: Look) -> str:
    one = look.tiers[tier]
    waiting = one.waiting if look.depths is None else look.depths[tier]
    wait = f"{_seconds(one.wait_p50_s)}/{_seconds(one.wait_p99_s)}"
    # One queue for all knows no shares.
    share = f"got {_percent(one.share)}" + ("" if look.depths is None else f" of {_percent(one.share_due)} due")
    return f"{tier} {one.started} started, {waiting} waiting, {share}, wait P50/P99 {wait}"


def summary(ours: Outcome, fifo: Outcome, schedule: Schedule) -> Group:
    """Draw both sides beside each other, and what to do next."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    table.add_column("")
    for side in (ours, fifo):
        table.add_column(side.side.title, justify="right", no_wrap=True)
    mine, theirs = ours.tiers, fifo.tiers
    for ratio in ("p50", "p99"):
        waits = [_seconds(getattr(side[REALTIME], f"wait_{ratio}_s")) for side in (mine, theirs)]
        table.add_row(f"realtime wait {ratio.upper()}", *waits, style="bold")
    table.add_row("realtime started, of sent", *(_of(side[REALTIME]) for side in (mine, theirs)))
    for tier in TIER_NAMES:
        due = f"share of {tier}, promised {_percent(mine[tier].promised)}, due {_percent(mine[tier].share_due)}"
        table.add_row(due, *(_percent(side[tier].share) for side in (mine, theirs)))
    table.add_row("files classified", *(f"{sum(side.content_types.values())}" for side in (ours, fifo)))
    found = _added(ours, fifo)
    shown = ", ".join(f"{label} {count}" for label, count in list(found.items())[:TYPES_SHOWN])
    per_s = schedule.per_s
    load = ", ".join(f"{tier} {per_s[tier]:.0f}/s" for tier in TIER_NAMES)
    behind = " and ".join(f"{count} {tier}" for tier, count in schedule.backlog.items())
    notes = [
        f"Load, the same on both sides: {load}, behind a backlog of {behind}; the worker manages up to "
        f"{schedule.capacity_per_s:.0f} files/s.",
        "Wait: from the moment a request was due to its start; one that never started counts with its wait so far.",
        "Share: of slot time. Promised: by weight, while all tiers have work. Due: realtime asks for less than that; "
        "batch and offline divide what it leaves by their weights.",
        f"Found {len(found)} kinds of files: {shown}, …",
    ]
    return Group(table, Text(), Text("\n".join(notes), style="dim"), Text(), Text(_NEXT))


_NEXT = """\
Next: inference-tasks demo --broker rabbitmq   the same on a private RabbitMQ
      inference-tasks dev -A vision:app        your app and all it needs
      inference-tasks --help                   everything else"""


def as_data(ours: Outcome, fifo: Outcome, schedule: Schedule) -> dict[str, object]:
    """Return what the summary says, and more, for JSON."""
    return {
        "load": {
            "capacity_per_s": round(schedule.capacity_per_s, 2),
            "backlog": schedule.backlog,
            "per_s": {tier: round(rate, 3) for tier, rate in schedule.per_s.items()},
        },
        **{
            one.side.name: {
                "tiers": {tier: asdict(figures) for tier, figures in one.tiers.items()},
                "files": sum(one.content_types.values()),
                "content_types": one.content_types,
            }
            for one in (ours, fifo)
        },
    }


def _added(*outcomes: Outcome) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in outcomes:
        for label, count in one.content_types.items():
            counts[label] = counts.get(label, 0) + count
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _of(one: TierFigures) -> str:
    return f"{one.started} of {one.submitted}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _seconds(amount_s: float | None) -> str:
    if amount_s is None:
        return "-"
    return f"{amount_s * 1000:.0f} ms" if amount_s < 1 else f"{amount_s:.1f} s"
