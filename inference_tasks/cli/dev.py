"""``inference-tasks dev``: broker, worker and monitor of one app in one terminal."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import click

from inference_tasks.app import Inference
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded
from inference_tasks.cli.exit import DEPLOYMENT, USAGE
from inference_tasks.cli.invocation import Invocation, command_options
from inference_tasks.settings import masked
from inference_tasks.worker.supervisor import ChildPlan, Supervisor

__all__ = ["PROCESSES", "Stack", "dev"]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Stack:
    """What the processes are started with; a port that is None leaves out what would listen there.

    Attributes:
        app_name: as ``-A`` has it.
        gpu, slots: for the worker, as its command has them; None for its default.
        metrics_ports: of maintenance, which tells of the whole deployment, and of the worker.
    """

    app_name: str
    inference: Inference
    gpu: str
    slots: int | None
    flower_port: int | None = None
    gateway_port: int | None = None
    metrics_ports: tuple[int, int] | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether the broker is the embedded one, which knows no maintenance."""
        return is_embedded(self.inference.settings.broker.url)

    def plan(self, command: str, *arguments: object, metrics: int = 0) -> ChildPlan:
        """Return one of our commands as a process of the stack."""
        argv = [sys.executable, "-m", "inference_tasks.cli", command, "-A", self.app_name, *map(str, arguments)]
        argv += ["--supervised-by", str(os.getpid())]
        if metrics:
            argv += ["--metrics-port", str(metrics)]
        return ChildPlan(command, argv)


def _worker(stack: Stack) -> ChildPlan:
    slots = () if stack.slots is None else ("--slots", stack.slots)
    metrics = stack.metrics_ports[1] if stack.metrics_ports else 0
    return stack.plan("worker", "--gpu", stack.gpu, *slots, metrics=metrics)


def _maintenance(stack: Stack) -> ChildPlan | None:
    metrics = stack.metrics_ports[0] if stack.metrics_ports else 0
    return None if stack.is_embedded else stack.plan("maintenance", metrics=metrics)


def _gateway(stack: Stack) -> ChildPlan | None:
    if stack.gateway_port is None:
        return None
    return stack.plan("gateway", "--host", LOOPBACK, "--port", stack.gateway_port)


def _flower(stack: Stack) -> ChildPlan | None:
    if stack.flower_port is None:
        return None
    # Here a missing management API is no reason to go without the rest of Flower.
    return stack.plan("flower", "--address", LOOPBACK, "--port", stack.flower_port, "--no-broker-tab")


# The processes in the order of their start; one that the stack has no use for is None.
PROCESSES: Sequence[Callable[[Stack], ChildPlan | None]] = (_worker, _maintenance, _gateway, _flower)


@click.command()
@click.option("--gpu", default="all", show_default=True, metavar="0|0,1|all|none", help="As for the worker command.")
@click.option("--slots", type=click.IntRange(min=1), help="Tasks at a time for each GPU.  [worker.slots]")
@click.option("--full", is_flag=True, help="The gateway too, and metrics of worker and maintenance for Prometheus.")
@click.option(
    "--flower-port",
    type=click.IntRange(0, 65535),
    default=5555,
    show_default=True,
    help="Where Flower listens on this machine, if it is installed; 0 for no Flower.",
)
@click.option(
    "--gateway-port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="With --full: where the gateway listens on this machine.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65534),
    default=9100,
    show_default=True,
    help="With --full: where maintenance tells metrics on this machine; the worker takes the next port.",
)
@command_options
def dev(
    invocation: Invocation,
    *,
    gpu: str,
    slots: int | None,
    full: bool,
    flower_port: int,
    gateway_port: int,
    metrics_port: int,
) -> None:
    """Run an app with all that it needs, until Ctrl-C.

    The configured broker, and without one the embedded; a worker on each GPU, or on the CPU; with RabbitMQ, the
    maintenance worker; Flower, if it is installed. With --full, by the same commands, what docker-compose.yml runs
    except for the servers of others: the gateway too, and metrics. What ends by itself is started again. Not for
    production: there, each of them is a service of its own.

    \b
    inference-tasks dev -A vision:app
    inference-tasks dev --full -A vision:app
    """
    inference = invocation.needs_app()
    if invocation.app_name is None:
        raise click.UsageError("This command starts others on the app: call it as inference-tasks dev -A vision:app.")
    tell = invocation.screen.tell
    with _broker(inference, tell):
        stack = Stack(invocation.app_name, inference, gpu, slots, _flower_port(flower_port, tell))
        if full:
            stack = _full(stack, gateway_port, metrics_port, tell)
        tell(
            f"Submit: inference-tasks submit -A {stack.app_name} TASK ARGUMENTS…\n"
            "Look:   inference-tasks tiers --watch\nEnd:    Ctrl-C"
        )
        plans = [plan for make in PROCESSES if (plan := make(stack)) is not None]
        code = Supervisor(plans, final_codes=frozenset({USAGE, DEPLOYMENT})).run()
    click.get_current_context().exit(code)


def _full(stack: Stack, gateway_port: int, metrics_port: int, tell: Callable[[str], object]) -> Stack:
    """Add what ``--full`` adds."""
    gateway = None
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        tell('Gateway: not installed; pip install "inference-tasks[gateway]" adds it.')
    else:
        gateway = _free_port("Gateway", gateway_port, tell)
    of_all = metrics_port if stack.is_embedded else _free_port("Metrics of all", metrics_port, tell, "metrics")
    of_worker = _free_port("Metrics of the worker", metrics_port + 1, tell, "metrics")
    return replace(stack, gateway_port=gateway, metrics_ports=(of_all, of_worker))


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
    return _free_port("Flower", wanted, tell)


def _free_port(name: str, wanted: int, tell: Callable[[str], object], path: str = "") -> int:
    """Return a port that nobody has, the wanted one if it can be, and say what will be there."""
    port = wanted
    with socket.socket() as line:
        # As the servers themselves do it: an old connection that lingers is no listener.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            line.bind((LOOPBACK, wanted))
        except OSError:
            line.bind((LOOPBACK, 0))
            port = int(line.getsockname()[1])
    tell(f"{name}: http://{LOOPBACK}:{port}/{path}" + ("" if port == wanted else f" (port {wanted} is taken)"))
    return port
