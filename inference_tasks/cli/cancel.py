"""``inference-tasks cancel``: a task that nobody needs any more."""

from __future__ import annotations

import click
from rich.text import Text

from inference_tasks.cli.exit import FINDINGS
from inference_tasks.cli.invocation import Invocation, command_options

__all__ = ["cancel"]


@click.command()
@click.argument("task_id", metavar="ID")
@click.option("--terminate", is_flag=True, help="If it runs, kill its process (prefork pool), not only ask it to stop.")
@command_options
def cancel(invocation: Invocation, *, task_id: str, terminate: bool) -> None:
    """Cancel task ID, whoever waits for it.

    A task that waits or is parked never runs after this. One that runs is asked to stop, and `inference-tasks status`
    tells when it has. Exit code 1 if it had ended before.
    """
    inference = invocation.inference
    is_cancelled = inference.cancel(task_id, terminate=terminate)
    state = inference.status(task_id).state
    document = {"id": task_id, "cancelled": is_cancelled, "state": state}
    invocation.screen.show(document, lambda: Text(_said(task_id, state, is_cancelled)))
    if not is_cancelled:
        click.get_current_context().exit(FINDINGS)


def _said(task_id: str, state: str, is_cancelled: bool) -> str:
    if not is_cancelled:
        return f"{task_id} had ended before, as {state}"
    return f"{task_id} is asked to stop" if state == "processing" else f"{task_id} is {state}"
