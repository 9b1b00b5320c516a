"""Where a command's answer goes: a table for people, JSON for programs, both on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

import click
from rich.console import Console, RenderableType
from rich.live import Live

__all__ = ["Screen", "clock_time", "seconds"]

T = TypeVar("T")

PIPE_WIDTH = 160


class Screen:
    """Shows answers and tells messages.

    Attributes:
        as_json: whether answers are JSON.
    """

    def __init__(self, *, as_json: bool, has_color: bool = True) -> None:
        self.as_json = as_json
        # Into a pipe, lines should not be broken at 80 characters.
        width = None if sys.stdout.isatty() else PIPE_WIDTH
        self._console = Console(no_color=not has_color, width=width, highlight=False)

    def show(self, answer: object, render: Callable[[], RenderableType]) -> None:
        """Print the answer: ``answer`` itself as JSON, or what ``render`` makes of it."""
        if self.as_json:
            click.echo(json.dumps(answer, ensure_ascii=False, default=str, indent=None))
        else:
            self._console.print(render())

    def watch(
        self,
        look: Callable[[], T],
        answer: Callable[[T], object],
        render: Callable[[T], RenderableType],
        *,
        until: Callable[[T], bool] = lambda _: False,
        every_s: float = 1.0,
    ) -> T:
        """Look again and again and show what is found; in JSON, one line for each look.

        Returns:
            What was found last, once ``until`` is true of it.
        """
        if not self.is_live:
            while True:
                found = look()
                self.show(answer(found), lambda found=found: render(found))  # type: ignore[misc]
                sys.stdout.flush()
                if until(found):
                    return found
                time.sleep(every_s)
        found = look()
        with Live(render(found), console=self._console, auto_refresh=False) as live:
            while not until(found):
                time.sleep(every_s)
                found = look()
                live.update(render(found), refresh=True)
        return found

    @property
    def is_live(self) -> bool:
        """Whether what is shown may be drawn over: people look at it on a terminal."""
        return self._console.is_terminal and not self.as_json

    def live(self, *, is_full: bool = False) -> Live:
        """Return a place on the terminal that is drawn over whenever it is updated; or all of it, until its end."""
        return Live(console=self._console, auto_refresh=False, screen=is_full)

    @staticmethod
    def tell(message: str) -> None:
        """Say something beside the answer."""
        click.echo(message, err=True)


def clock_time(at_s: float | None) -> str:
    """Return a moment for people, in local time; a dash for none."""
    return datetime.fromtimestamp(at_s, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S") if at_s else "-"


def percent(share: float | None) -> str:
    """Return a share of 0 to 1 for people; a dash for none."""
    return "-" if share is None else f"{share:.1%}"


def seconds(amount_s: float | None) -> str:
    """Return a duration for people; a dash for none."""
    if amount_s is None:
        return "-"
    return f"{amount_s * 1000:.0f} ms" if amount_s < 1 else f"{amount_s:.1f} s"
