"""The option ``--metrics-port`` of the commands that serve metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from inference_tasks.observe.exposition import Address, parse_address

__all__ = ["metrics_port_option"]


def metrics_port_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option; the command gets an ``Address``, or None."""
    return click.option("--metrics-port", metavar="[HOST:]PORT", callback=_read, help=help)


def _read(context: click.Context, parameter: click.Parameter, text: str | None) -> Address | None:
    if text is None:
        return None
    try:
        return parse_address(text)
    except ValueError as exc:
        raise click.BadParameter(str(exc), context, parameter) from exc
