"""``inference-tasks top``: the whole deployment, live, and the keys that pause, resume and drain."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich.console import Group
from rich.text import Text

from inference_tasks.cli.cockpit import Cockpit, targets_of
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.keyboard import Keyboard
from inference_tasks.cli.screen import Screen, clock_time
from inference_tasks.cli.top_view import view
from inference_tasks.errors import InferenceError
from inference_tasks.observe.top import Looker, Top

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["top"]


@click.command()
@click.option("--once", is_flag=True, help="Look once and end; with --json for scripts.")
@click.option("--every", "every_s", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds.")
@command_options
def top(invocation: Invocation, *, once: bool, every_s: float) -> None:
    """Watch tiers, workers and what they run; pause, resume and drain by keys.

    Per tier: what waits, how long the oldest has, median and 99th percentile of the last minute's waits, the share that
    is promised and the one it got. Per worker: what it runs and for how long, memory and use of its GPU. Arguments and
    results are never shown.

    Keys: arrows or 1 2 3 choose a row, p pauses it, r resumes it, d drains it (each asks first, and is noted in the log
    that `inference-tasks switches` shows), q ends.

    \b
    inference-tasks top
    inference-tasks top --once --json
    """
    inference, screen = invocation.inference, invocation.screen
    depths = inference.depths()
    looker = Looker(inference, depths)
    try:
        if once:
            found = looker.look()
            screen.show(found.as_dict(), lambda: view(found))
        elif screen.is_live:
            _live(inference, looker, screen, every_s)
        else:
            screen.watch(looker.look, Top.as_dict, view, every_s=every_s)
    finally:
        depths.close()


def _live(inference: Inference, looker: Looker, screen: Screen, every_s: float) -> None:
    """Draw, look and obey keys, until one of them ends it. What cannot be reached is said, and asked again."""
    cockpit = Cockpit(inference)
    found: Top | None = None
    next_look_s, goes_on = time.monotonic(), True
    with _ends_in_order(), Keyboard() as keyboard, screen.live(is_full=True) as live:
        while goes_on:
            if time.monotonic() >= next_look_s:
                try:
                    found = looker.look()
                    problem = ""
                except InferenceError as exc:
                    problem = str(exc)
                next_look_s = time.monotonic() + every_s
                if cockpit.chosen not in (known := targets_of(found)):
                    cockpit.chosen, cockpit.question = (known[0] if known else ""), ""
            live.update(_screenful(cockpit, found, problem, live.console.width), refresh=True)
            for key in keyboard.wait(next_look_s - time.monotonic()):
                goes_on = goes_on and cockpit.press(key, found)
                if not cockpit.question:
                    # What a key has done is seen at once.
                    next_look_s = time.monotonic()


def _screenful(cockpit: Cockpit, found: Top | None, problem: str, width: int) -> Group:
    head = Text(f"inference-tasks top  {clock_time(found.fleet.at_s) if found else ''}", style="bold")
    asked = Text(cockpit.footer, style="bold yellow" if cockpit.question else "dim")
    said = Text(problem or cockpit.message, style="red" if problem else "green")
    if found is None:
        return Group(head, asked, said)
    return Group(head, asked, said, view(found, chosen=cockpit.chosen, width=width))


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Have Ctrl-C end it like a key, and SIGTERM leave the terminal as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
