"""``inference-tasks tiers``: what waits in each tier, who works on it, and the share it got."""

from __future__ import annotations

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_tasks.cli.audit import Audit, audit, audit_view
from inference_tasks.cli.exit import FINDINGS
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import percent
from inference_tasks.observe.tiers import TierReport, report
from inference_tasks.state.switches import Switches

__all__ = ["tiers"]


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
            invocation.screen.watch(
                lambda: report(inference, depths),
                _as_data,
                lambda found: _table(found, unit, inference.store.switches()),
            )
        else:
            found = report(inference, depths)
            invocation.screen.show(_as_data(found), lambda: _table(found, unit, inference.store.switches()))
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


def _as_data(found: list[TierReport]) -> object:
    return [one.as_dict() for one in found]


def _table(found: list[TierReport], unit: str, switches: Switches) -> Group:
    # Narrow enough for a terminal of 80 columns.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    lanes = ("fresh", "returned", "aged")
    table.add_column("tier")
    for heading in (*lanes, "bound", "workers", "slots", "per s", "promised", "share", "origin"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        waiting = [str(one.ready_by_lane[lane]) if lane in one.ready_by_lane else "-" for lane in lanes]
        shares = [percent(one.promised), percent(one.share), percent(one.share_by_origin)]
        row = [*waiting, f"{one.bound}", f"{one.workers}", f"{one.slots}", f"{one.started_per_s:.3g}", *shares]
        table.add_row(one.tier, *row, style="" if one.workers else "yellow")
    what = "slot seconds" if unit == "time" else "starts"
    notes = [f"share: of {what} in the last minute; origin: the same by the tier of the submit; per s: starts"]
    notes += [f"no worker serves {one.tier}, and {one.ready} wait" for one in found if one.ready and not one.workers]
    off = [f"{one.target} is switched off ({one.action}) by {one.by}" for one in switches]
    return Group(table, Text("\n".join(notes), style="dim"), *(Text(one, style="yellow") for one in off))
