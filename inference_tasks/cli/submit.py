"""``inference-tasks submit``: one call from the shell."""

from __future__ import annotations

import json
from typing import Any

import click

from inference_tasks.catalogue import find_task
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.status import result_view
from inference_tasks.errors import UnknownTaskError

__all__ = ["submit"]


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1)
@click.option("--tier", help="realtime, batch or offline (P0, P1, P2). By default the task's own.")
@click.option("--kwargs", metavar="JSON", help="Arguments by name, such as '{\"size\": 3}'.")
@click.option("--id", "task_id", help="The task's id, instead of a new one; submitting it twice is harmless.")
@click.option("--timeout-s", type=float, help="Not started later than this many seconds from now.")
@click.option("--wait", is_flag=True, help="Wait for the result and print it.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Longest --wait; then exit code 124.")
@command_options
def submit(
    invocation: Invocation,
    *,
    task: str,
    args: tuple[str, ...],
    tier: str | None,
    kwargs: str | None,
    task_id: str | None,
    timeout_s: float | None,
    wait: bool,
    timeout: float | None,
) -> None:
    """Submit one call of TASK and print its id.

    TASK is the task's full name, or its end (classify for vision.classify). Each of ARGS is read as JSON if it is
    JSON, else it is text.

    \b
    inference-tasks submit -A vision:app classify cat.png --wait
    inference-tasks submit -A vision:app resize 3 '{"fit": true}' --tier offline
    """
    inference = invocation.needs_app()
    try:
        chosen = find_task(inference.celery_app, task)
    except UnknownTaskError as error:
        raise click.UsageError(str(error)) from error
    options = chosen.options(tier=tier, task_id=task_id, timeout_s=timeout_s)
    named = _named(kwargs)
    try:
        handle = options.submit(*(_argument(text) for text in args), **named)
    finally:
        # Else its thread is still at work when the interpreter ends, and says so. In eager mode there is none.
        if "publisher" in vars(inference):
            inference.publisher.close()
    if not wait:
        invocation.screen.show({"id": handle.id, "task": chosen.name}, lambda: handle.id)
        return
    invocation.screen.tell(f"Submitted {handle.id}")
    value = handle.result(timeout_s=timeout)
    invocation.screen.show({"id": handle.id, "task": chosen.name, "result": value}, lambda: result_view(value))


def _argument(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _named(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        named = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"expected JSON, found {text!r} ({error}).", param_hint="--kwargs") from error
    if not isinstance(named, dict):
        raise click.BadParameter(f'expected an object, such as {{"size": 3}}, found {text!r}.', param_hint="--kwargs")
    return named
