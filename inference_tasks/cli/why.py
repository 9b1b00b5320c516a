"""``inference-tasks why``: where a task is, and what it waits for."""

from __future__ import annotations

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import clock_time
from inference_tasks.observe.why import Why, why

__all__ = ["why_command"]


@click.command("why")
@click.argument("task_id", metavar="ID")
@command_options
def why_command(invocation: Invocation, *, task_id: str) -> None:
    """Say why task ID is where it is: its place, who is before it, when it should start, what keeps it.

    The start is an estimate from what the workers did in the last minute. All is read in one round trip to Redis.
    """
    found = why(invocation.inference, task_id)
    invocation.screen.show(found.as_dict(), lambda: _view(found))


def _view(found: Why) -> Group:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("task", f"{found.task}  {found.id}")
    tier = found.tier if found.tier == found.tier_first else f"{found.tier} (submitted as {found.tier_first})"
    table.add_row("tier", f"{tier}, lane {found.lane}")
    table.add_row("state", found.state)
    if found.position is not None:
        table.add_row("position", f"{found.position} of {found.queue_waiting} in {found.queue}")
        table.add_row("before it", ", ".join(f"{tier} {number}" for tier, number in found.ahead_by_tier.items()))
        table.add_row("served by", f"{found.workers} worker(s), {found.slots} slot(s)")
    for name, at_s in (
        ("should start", found.expected_start_at_s),
        ("moves up", found.promotion_at_s),
        ("due", found.due_at_s),
        ("expires", found.expires_at_s),
    ):
        if at_s is not None and found.finished_at_s is None:
            table.add_row(name, clock_time(at_s))
    for need, state in found.waits_for.items():
        table.add_row("waits for", f"{need}  {state or 'unknown'}")
    if found.switch:
        table.add_row("paused by", f"{found.switch['by']}  {found.switch['because']}")
    if found.worker:
        table.add_row("worker", found.worker)
    return Group(Text(found.sentence, style="bold"), Text(), table)
