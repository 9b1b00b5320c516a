"""``inference-tasks status`` and ``result``: what became of a task."""

from __future__ import annotations

import json
import time

import click
from rich.table import Table
from rich.text import Text

from inference_tasks.cli.exit import TASK_FAILED
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import clock_time, seconds
from inference_tasks.lifting import SHARED
from inference_tasks.state.records import State, TaskRecord

__all__ = ["result", "result_view", "status"]

_STYLES = {
    State.SUCCESS: "green",
    State.FAILED: "red",
    State.EXPIRED: "yellow",
    State.CANCELLED: "yellow",
    State.DROPPED: "yellow",
    State.PROCESSING: "cyan",
    State.RETRYING: "magenta",
    State.WAITING: "blue",
}


@click.command()
@click.argument("task_id", metavar="ID")
@click.option(
    "--watch", is_flag=True, help="Look again every second until the task has ended; exit code 6 if it fails."
)
@command_options
def status(invocation: Invocation, *, task_id: str, watch: bool) -> None:
    """Show where task ID stands."""
    inference = invocation.inference
    if not watch:
        record = inference.status(task_id)
        invocation.screen.show(record.as_dict(), lambda: record_view(record))
        return
    record = invocation.screen.watch(
        lambda: inference.status(task_id),
        TaskRecord.as_dict,
        record_view,
        until=lambda record: record.is_finished,
    )
    if record.state != State.SUCCESS:
        click.get_current_context().exit(TASK_FAILED)


@click.command()
@click.argument("task_id", metavar="ID")
@click.option("--timeout", type=float, metavar="SECONDS", help="Longest wait, 0 to only look; then exit code 124.")
@command_options
def result(invocation: Invocation, *, task_id: str, timeout: float | None) -> None:
    """Wait for the result of task ID and print it as JSON."""
    value = invocation.inference.result(task_id, timeout_s=timeout)
    invocation.screen.show({"id": task_id, "result": value}, lambda: result_view(value))


def result_view(value: object) -> Text:
    """Return a result as people read it: JSON, for it came as JSON."""
    return Text(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def record_view(record: TaskRecord) -> Table:
    """Return a record as a table of two columns."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    tier = record.tier if record.tier == record.tier_first else f"{record.tier} (submitted as {record.tier_first})"
    table.add_row("task", f"{record.name}  {record.id}")
    table.add_row("state", Text(record.state, style=_STYLES.get(State(record.state), "")))
    table.add_row("tier", f"{tier}, lane {record.lane}")
    table.add_row("attempts", f"{record.attempts}  (failures {record.failures}, crashes {record.crashes})")
    if record.cancel_asked and not record.is_finished:
        how = "to stop" if record.cancel_asked == "stop" else "to be terminated"
        table.add_row("cancelling", f"asked {how}")
    if record.worker:
        table.add_row("worker", record.worker)
    if record.due_at_s and record.state in (State.RETRYING, State.PENDING):
        left_s = record.due_at_s - time.time()
        when = f"in {seconds(left_s)}" if left_s > 0 else "now"
        table.add_row("due", f"{clock_time(record.due_at_s)}  ({when})")
    for need in record.waits_for:
        table.add_row("waits for", need)
    if record.lifted_from:
        for_whom = (
            "a submit that shares it" if record.lifted_by == SHARED else f"task {record.lifted_by}, which needs it"
        )
        table.add_row("lifted", f"from {record.lifted_from}, for {for_whom}")
    if record.not_lifted:
        table.add_row("not lifted", record.not_lifted)
    table.add_row("submitted", clock_time(record.submitted_at_s))
    table.add_row("started", clock_time(record.started_at_s))
    table.add_row("finished", clock_time(record.finished_at_s))
    if record.expires_at_s:
        table.add_row("expires", clock_time(record.expires_at_s))
    if record.error:
        # Of a task that goes on, it is that of the run before.
        name = "error" if record.is_finished else "last error"
        table.add_row(name, Text(f"{record.error['type']}: {record.error['message']}", style="red"))
    if record.dead:
        table.add_row("dead letter", record.dead)
    return table
