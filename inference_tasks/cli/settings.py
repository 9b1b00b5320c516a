"""``inference-tasks settings``: every value and where it came from."""

from __future__ import annotations

import os

import click
from rich.table import Table

from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.settings import find_file, load_settings

__all__ = ["settings"]


@click.group()
def settings() -> None:
    """Look at the settings."""


@settings.command()
@command_options
def show(invocation: Invocation) -> None:
    """List every setting with its value and its origin, secrets masked.

    Later wins: default, settings file (INFERENCE_CONFIG, inference.toml, config/inference.toml), INFERENCE_* variable,
    argument in the app's code. Without -A, what an app says in code is not seen.
    """
    if invocation.has_app:
        found = invocation.inference.settings
    else:
        # Not through an app: the settings can be listed before there is a broker.
        found = load_settings({}, os.environ, find_file(os.environ))
    rows = found.as_rows()

    def table() -> Table:
        view = Table(box=None, pad_edge=False)
        for heading in ("setting", "value", "origin"):
            view.add_column(heading, overflow="fold")
        for row in rows:
            style = "dim" if row.origin == "default" else ""
            value = (
                ", ".join(row.value) if isinstance(row.value, tuple) else "-" if row.value is None else str(row.value)
            )
            view.add_row(row.path, value, row.origin, style=style)
        return view

    invocation.screen.show([{"setting": row.path, "value": row.value, "origin": row.origin} for row in rows], table)
