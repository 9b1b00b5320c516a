"""``inference-tasks probe``: a task that does nothing, through each tier and back."""

from __future__ import annotations

import click
from rich.table import Table
from rich.text import Text

from inference_routing.tier import TIER_NAMES
from inference_tasks.cli.exit import TIMED_OUT, exit_code
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import seconds
from inference_tasks.errors import ResultTimeoutError
from inference_tasks.observe.probe import TIMEOUT_S, Passage, probe
from inference_tasks.routes import full_tier_name

__all__ = ["probe_command"]


@click.command("probe")
@click.option("--tier", "tiers", multiple=True, metavar="TIER", help="Only this tier; may be given several times.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Longest wait, for all of them together.",
)
@command_options
def probe_command(invocation: Invocation, *, tiers: tuple[str, ...], timeout: float) -> None:
    """Send a task that does nothing through each tier and report how long it waited.

    Every worker of the app knows the task. If it comes back, the whole road is open: submit, broker, worker, claim,
    result. Exit code 0 if all came back, else that of the first that did not: 4 refused, 5 broker or state store away,
    6 failed, 124 not back in time.
    """
    chosen = [full_tier_name(tier) for tier in tiers] or list(TIER_NAMES)
    found = probe(invocation.inference, list(dict.fromkeys(chosen)), timeout_s=timeout)
    invocation.screen.show([one.as_dict() for one in found], lambda: _table(found))
    bad = next((one for one in found if not one.is_ok), None)
    if bad is not None and bad.error is not None:
        is_late = bad.outcome == "timeout" or isinstance(bad.error, ResultTimeoutError)
        click.get_current_context().exit(TIMED_OUT if is_late else exit_code(bad.error))


def _table(found: list[Passage]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("tier", "outcome", "waited", "in all", "worker or reason"):
        table.add_column(heading)
    for one in found:
        said = one.worker if one.is_ok else one.reason
        style = "green" if one.is_ok else "red"
        outcome = Text(one.outcome, style=style)
        table.add_row(one.tier, outcome, seconds(one.wait_s), seconds(one.total_s), Text(said or ""))
    return table
