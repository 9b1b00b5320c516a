"""``inference-tasks pause``, ``resume``, ``drain``, ``switches``: what operators take out of service, and give back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from inference_tasks.app import Inference
from inference_tasks.cli.exit import TIMED_OUT
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import clock_time
from inference_tasks.observe import switching
from inference_tasks.state.switches import OperatorLine, Switch

__all__ = ["drain", "pause", "resume", "switches"]

_WAIT_EVERY_S = 0.5

_FORMS = "TARGET is a tier (batch, P1), a lane (batch.returned), or a worker by its node name (or worker:NODE)."


def _signed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that the operator log asks for."""
    command = click.option("--by", metavar="NAME", help="Who wants it; without it, user@host.")(command)
    return click.option(
        "--because", default="", metavar="TEXT", help="Why; shown to those who ask why their task waits."
    )(command)


@click.command(help=f"Stop starts of TARGET; what runs goes on, what is submitted waits.\n\n{_FORMS}")
@click.argument("target")
@click.option("--refuse", is_flag=True, help="Refuse submits from outside too (HTTP 503, reason paused).")
@_signed
@command_options
def pause(invocation: Invocation, *, target: str, refuse: bool, because: str, by: str | None) -> None:
    """Stop starts of TARGET."""
    switch = switching.pause(invocation.inference, target, by=by, because=because, refuse=refuse)
    invocation.screen.show(switch.as_dict(), lambda: _said(switch))


@click.command(help=f"Undo pause or drain of TARGET.\n\n{_FORMS}")
@click.argument("target")
@_signed
@command_options
def resume(invocation: Invocation, *, target: str, because: str, by: str | None) -> None:
    """Undo pause or drain."""
    before = switching.resume(invocation.inference, target, by=by, because=because)
    document = {"target": target, "resumed": before is not None, "was": before and before.as_dict()}
    said = f"{before.target} is resumed" if before else f"{target} was neither paused nor drained"
    invocation.screen.show(document, lambda: Text(said))


@click.command(
    help="Let TARGET finish what it has and take nothing new.\n\nA tier or lane refuses submits from outside while "
    "what waits in it runs. A worker finishes what runs and stays idle until it is stopped or resumed, also if it is "
    f"started anew under its name.\n\n{_FORMS}"
)
@click.argument("target")
@click.option("--wait", is_flag=True, help="Return when it has finished.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Longest wait; then exit code 124.")
@_signed
@command_options
def drain(
    invocation: Invocation, *, target: str, wait: bool, timeout: float | None, because: str, by: str | None
) -> None:
    """Let TARGET finish what it has."""
    inference = invocation.inference
    switch = switching.drain(inference, target, by=by, because=because)
    is_drained = _wait(inference, switch, timeout) if wait else switching.is_drained(inference, switch)
    document = {**switch.as_dict(), "is_drained": is_drained}
    invocation.screen.show(document, lambda: _said(switch, ", and has finished" if is_drained else ""))
    if wait and not is_drained:
        click.get_current_context().exit(TIMED_OUT)


@click.command()
@click.option("--log", "lines", type=click.IntRange(0), default=10, show_default=True, help="Lines of the log to show.")
@command_options
def switches(invocation: Invocation, *, lines: int) -> None:
    """Show what is paused or drained, and what operators did lately."""
    store = invocation.inference.store
    now, log = store.switches(), store.operator_log(lines)
    document = {"switches": [one.as_dict() for one in now], "log": [one.as_dict() for one in log]}
    invocation.screen.show(document, lambda: _view(list(now), log))


def _wait(inference: Inference, switch: Switch, timeout_s: float | None) -> bool:
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not switching.is_drained(inference, switch):
        if end_s is not None and time.monotonic() >= end_s:
            return False
        time.sleep(_WAIT_EVERY_S)
    return True


def _said(switch: Switch, end: str = "") -> Text:
    what = {
        "pause": "is paused: nothing of it starts",
        "refuse": "is paused: nothing of it starts, and submits are refused",
        "drain": "is drained: it takes nothing new",
    }
    if switch.target.startswith("worker:"):
        what["pause"] = "is paused: it takes nothing new"
    return Text(f"{switch.target} {what[switch.action]}{end}")


def _view(now: list[Switch], log: list[OperatorLine]) -> Group:
    def table(rows: list[Switch] | list[OperatorLine]) -> Table:
        made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("when", "what", "target", "by", "because"):
            made.add_column(heading)
        for one in rows:
            made.add_row(clock_time(one.at_s), str(one.action), one.target, one.by, one.because)
        return made

    if not now and not log:
        return Group(Text("nothing is paused or drained"))
    head = Text("off now" if now else "nothing is paused or drained", style="bold")
    parts: list[Text | Table] = [head, table(now)] if now else [head]
    if log:
        parts += [Text(), Text("operators did lately", style="bold"), table(log)]
    return Group(*parts)
