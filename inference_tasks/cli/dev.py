"""``inference-tasks dev``: broker, worker and monitor of one app in one terminal."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import click

from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded
from inference_tasks.cli.exit import DEPLOYMENT, USAGE
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.observe.flower import CONFIG_FILE
from inference_tasks.settings import masked
from inference_tasks.worker.supervisor import ChildPlan, Supervisor

__all__ = ["PROCESSES", "Stack", "dev"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stack:
    """What the processes are started with.

    Attributes:
        app_name: as ``-A`` has it.
        gpu, slots: for the worker, as its command has them; None for its default.
        flower_port: None for no Flower.
    """

    app_name: str
    inference: Inference
    gpu: str
    slots: int | None
    flower_port: int | None


def _worker(stack: Stack) -> ChildPlan:
    argv = [sys.executable, "-m", "inference_tasks.cli", "worker", "-A", stack.app_name, "--gpu", stack.gpu]
    argv += [] if stack.slots is None else ["--slots", str(stack.slots)]
    return ChildPlan("worker", [*argv, "--supervised-by", str(os.getpid())])


def _maintenance(stack: Stack) -> ChildPlan | None:
    if is_embedded(stack.inference.settings.broker.url):
        return None
    argv = [sys.executable, "-m", "inference_tasks.cli", "maintenance", "-A", stack.app_name]
    return ChildPlan("maintenance", [*argv, "--supervised-by", str(os.getpid())])


def _flower(stack: Stack) -> ChildPlan | None:
    if stack.flower_port is None:
        return None
    options = (f"--conf={CONFIG_FILE}", f"--address={LOOPBACK}", f"--port={stack.flower_port}")
    # Not on the command line, where everybody can read the password.
    management = stack.inference.settings.management_url
    env = {} if management is None else {"FLOWER_BROKER_API": f"{management.rstrip('/')}/api/"}
    return ChildPlan("flower", [sys.executable, "-m", "celery", "-A", stack.app_name, "flower", *options], env)


# The processes in the order of their start; one that the stack has no use for is None.
PROCESSES: Sequence[Callable[[Stack], ChildPlan | None]] = (_worker, _maintenance, _flower)


@click.command()
@click.option("--gpu", default="all", show_default=True, metavar="0|0,1|all|none", help="As for the worker command.")
@click.option("--slots", type=click.IntRange(min=1), help="Tasks at a time for each GPU.  [worker.slots]")
@click.option(
    "--flower-port",
    type=click.IntRange(0, 65535),
    default=5555,
    show_default=True,
    help="Where Flower listens on this machine, if it is installed; 0 for no Flower.",
)
@command_options
def dev(invocation: Invocation, *, gpu: str, slots: int | None, flower_port: int) -> None:
    """Run an app with all that it needs, until Ctrl-C.

    The configured broker, and without one the embedded; a worker on each GPU, or on the CPU; with RabbitMQ, the
    maintenance worker; Flower, if it is installed. What ends by itself is started again. Not for production: there,
    each of them is a service of its own.

    \b
    inference-tasks dev -A vision:app
    """
    inference = invocation.needs_app()
    if invocation.app_name is None:
        raise click.UsageError("This command starts others on the app: call it as inference-tasks dev -A vision:app.")
    with _broker(inference, invocation.screen.tell):
        port = _flower_port(flower_port, invocation.screen.tell)
        stack = Stack(invocation.app_name, inference, gpu, slots, port)
        invocation.screen.tell(
            f"Submit: inference-tasks submit -A {stack.app_name} TASK ARGUMENTS…\n"
            "Look:   inference-tasks tiers --watch\nEnd:    Ctrl-C"
        )
        plans = [plan for make in PROCESSES if (plan := make(stack)) is not None]
        code = Supervisor(plans, final_codes=frozenset({USAGE, DEPLOYMENT})).run()
    click.get_current_context().exit(code)


@contextmanager
def _broker(inference: Inference, tell: Callable[[str], object]) -> Iterator[None]:
    """Say which broker is in use; an embedded one runs for the time of this."""
    settings = inference.settings
    url = cast(str, settings.broker.url)
    if not is_embedded(url):
        tell(f"Broker: {masked(url)} ({settings.origin('broker.url')})")
        tell(f"State:  {masked(cast(str, settings.state.url))}")
        yield
        return
    server = EmbeddedServer.at(url)
    server.start()
    tell(f"Broker: the embedded one in {server.directory}, since no other is configured; for development only.")
    tell("Aging: none, waiting tasks stay in their tier; that needs RabbitMQ.")
    try:
        yield
    finally:
        # Its messages stay in the directory, for the next start.
        server.stop()


def _flower_port(wanted: int, tell: Callable[[str], object]) -> int | None:
    """Return a free port for Flower and say where it will be; None if there is to be none."""
    if not wanted:
        return None
    if importlib.util.find_spec("flower") is None:
        tell('Flower: not installed; pip install "inference-tasks[flower]" adds it.')
        return None
    port = wanted
    with socket.socket() as line:
        # As Flower itself does it: an old connection that lingers is no listener.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            line.bind((LOOPBACK, wanted))
        except OSError:
            line.bind((LOOPBACK, 0))
            port = int(line.getsockname()[1])
    tell(f"Flower: http://{LOOPBACK}:{port}/" + ("" if port == wanted else f" (port {wanted} is taken)"))
    return port
