"""``inference-tasks demo``: real files through a real model, beside the same load in one FIFO queue."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import click

from inference_routing.floor import effective_shares
from inference_tasks.app import Inference
from inference_tasks.cli.exit import INTERRUPTED
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.cli.screen import Screen
from inference_tasks.demo.classifier import check_installed
from inference_tasks.demo.files import find_files, roots
from inference_tasks.demo.run import Look, Outcome, Runner
from inference_tasks.demo.schedule import Schedule
from inference_tasks.demo.servers import forget, servers
from inference_tasks.demo.view import Lines, as_data, live_table, summary
from inference_tasks.errors import InferenceError

__all__ = ["demo"]

FILES = 2000
LONGEST_PLACE = 60
_ADDRESSES = ("INFERENCE_BROKER__URL", "INFERENCE_STATE__URL")


@click.command()
@click.option(
    "--broker",
    type=click.Choice(["embedded", "rabbitmq"]),
    help="rabbitmq: a node of the demo's own, if RabbitMQ is installed. By default the configured broker, and without "
    "one the embedded.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=2, max=600),
    default=16.0,
    show_default=True,
    help="How long each of the two sides runs.",
)
@click.option("--slots", type=click.IntRange(min=1), default=1, show_default=True, help="Tasks at a time.")
@command_options
def demo(invocation: Invocation, *, broker: str | None, seconds: float, slots: int) -> None:
    """Classify files of this machine in three tiers, then in one FIFO queue.

    One worker on the CPU gets more batch and offline work than it can do, while realtime requests arrive at a steady
    rate. The summary shows how long those waited with the tiers, and with one queue under the same load. Ends by
    itself within a minute; whatever it has started or written is gone then. It brings its own app: -A is not used.
    """
    screen = invocation.screen
    check_installed()
    started_s = time.monotonic()
    try:
        with _interruptible(), ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inference-demo-", dir=_place())))
            found = stack.enter_context(servers(broker, directory / "servers", os.environ))
            screen.tell(f"Broker: {found.description}.")
            namespace = f"demo-{secrets.token_hex(4)}"
            named = {"INFERENCE_NAMESPACE": namespace, "INFERENCE_STATE__PREFIX": f"{namespace}:"}
            os.environ |= named
            # Addresses of servers that are not the demo's own may hold passwords.
            own = {} if found.kind == "configured" else {name: os.environ[name] for name in _ADDRESSES}
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**own, **named}.items())
            screen.tell(f"To watch it from another terminal: {variables} inference-tasks top")
            ours, fifo, schedule = _compare(screen, stack, directory, found.kind == "configured", seconds, slots)
    except KeyboardInterrupt:
        screen.tell("Interrupted; everything that the demo had started is ended.")
        click.get_current_context().exit(INTERRUPTED)
    took_s = time.monotonic() - started_s
    about = {"broker": found.kind, "seconds": seconds, "slots": slots, "took_s": round(took_s, 1)}
    screen.show({**about, **as_data(ours, fifo, schedule)}, lambda: summary(ours, fifo, schedule))


def _compare(
    screen: Screen, stack: ExitStack, directory: Path, is_borrowed: bool, run_s: float, slots: int
) -> tuple[Outcome, Outcome, Schedule]:
    """Run both sides, one after the other, and return what each made of the schedule."""
    # Only now: these modules read the settings, of which the broker is a part.
    from inference_tasks.demo.fifo import queue_name
    from inference_tasks.demo.sides import Fifo, Tiers

    tiers = Tiers()
    inference = tiers.inference
    inference.declare_topology()
    if is_borrowed:
        stack.callback(_forget, screen, inference, queue_name(inference.settings))
    stack.callback(tiers.close)
    named = dict(inference.settings.tiers.items())
    shares = effective_shares(
        {name: one.weight for name, one in named.items()}, {name: one.floor for name, one in named.items()}
    )
    files = find_files(FILES)
    screen.tell(f"Files: {len(files)} from {', '.join(map(str, roots()))}.")
    runner = Runner(directory, files, {tier: float(share) for tier, share in shares.items()}, slots)
    show = stack.enter_context(_showing(screen))
    screen.tell("Starting a worker with its model, and measuring what it can do.")
    with runner.worker(tiers) as (program, recording):
        schedule = Schedule(runner.capacity_per_s(tiers, program, recording), run_s)
        ours = runner.run(tiers, program, recording, schedule, show)
    fifo = Fifo()
    stack.callback(fifo.close)
    screen.tell("The same load through one FIFO queue, with stock Celery.")
    with runner.worker(fifo) as (program, recording):
        theirs = runner.run(fifo, program, recording, schedule, show)
    return ours, theirs, schedule


def _place() -> str:
    """Return the folder for temporary files, or a system's usual one if a socket's path would become too long in it."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= LONGEST_PLACE else "/tmp"


def _forget(screen: Screen, inference: Inference, fifo: str) -> None:
    try:
        forget(inference, fifo)
    except InferenceError as error:
        screen.tell(f"Queues and keys whose names contain {inference.settings.namespace} could not be removed: {error}")


@contextmanager
def _showing(screen: Screen) -> Iterator[Callable[[Look], object]]:
    """Yield what shows a look: a live table, or lines where there is no terminal for one."""
    if not screen.is_live:
        yield Lines(screen.tell)
        return
    with screen.live() as live:
        yield lambda look: live.update(live_table(look), refresh=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn the first signal to end into an exception, and let none disturb the cleaning up after it."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for one in watched:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    before = {number: signal.signal(number, interrupt) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
