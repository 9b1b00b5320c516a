"""``inference-tasks doctor``: looks for what is wrong, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.table import Table

from inference_tasks.cli.diagnosis.broker import examine_broker
from inference_tasks.cli.diagnosis.finding import Finding, error, fine
from inference_tasks.cli.diagnosis.host import examine_host, examine_tasks
from inference_tasks.cli.diagnosis.state import examine_state
from inference_tasks.cli.exit import FINDINGS
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.errors import InferenceError

__all__ = ["doctor"]

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@click.command()
@click.option("--strict", is_flag=True, help="Exit code 1 for warnings too.")
@command_options
def doctor(invocation: Invocation, *, strict: bool) -> None:
    """Look for what is wrong with this machine, the broker and Redis.

    Changes nothing. Exit code 1 if there is an error. With -A the app's tasks are looked at too.
    """
    found = list(_examine(invocation))

    def table() -> Table:
        view = Table(box=None, pad_edge=False)
        for heading in ("", "subject", "found", "what to do"):
            view.add_column(heading, overflow="fold")
        for one in found:
            view.add_row(f"[{_STYLES[one.level]}]{one.level}[/]", one.subject, one.found, one.advice)
        return view

    invocation.screen.show([asdict(one) for one in found], table)
    counts = {level: sum(one.level == level for one in found) for level in ("error", "warning")}
    invocation.screen.tell(f"errors: {counts['error']}, warnings: {counts['warning']}")
    if counts["error"] or (strict and counts["warning"]):
        click.get_current_context().exit(FINDINGS)


def _examine(invocation: Invocation) -> Iterator[Finding]:
    yield from examine_host()
    try:
        inference = invocation.inference
        settings = inference.settings
    except InferenceError as problem:
        yield error("settings", str(problem), "inference-tasks settings show")
        return
    chosen = sum(row.origin != "default" for row in settings.as_rows())
    yield fine("settings", f"namespace {settings.namespace}, {chosen} set, the others have their defaults")
    if invocation.has_app:
        yield from examine_tasks(inference)
    yield from examine_broker(inference)
    yield from examine_state(inference)
