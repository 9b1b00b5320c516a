"""A RabbitMQ node for the time of one demo: its own directory, loopback only, nothing of it is kept."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from inference_tasks.demo.programs import Program, find_program
from inference_tasks.errors import DeploymentError

__all__ = ["free_ports", "rabbitmq_node"]

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 90.0
# Where Debian has the scripts themselves; those on the PATH refuse every user but root and rabbitmq.
_DEBIAN = "/usr/lib/rabbitmq/bin"


@contextmanager
def rabbitmq_node() -> Iterator[str]:
    """Run a node and yield its AMQP address; user and password are guest.

    Raises:
        DeploymentError: RabbitMQ is not installed, or does not start.
    """
    server, mapper = find_program("rabbitmq-server", _DEBIAN), find_program("epmd")
    if server is None or mapper is None:
        raise DeploymentError(
            "RabbitMQ is not installed: apt-get install rabbitmq-server as root, or run the demo without "
            "--broker rabbitmq."
        )
    # The server must not run as root; then it runs as the user that its package has made.
    user = "rabbitmq" if os.geteuid() == 0 and _exists("rabbitmq") else None
    # Not below the demo's directory, which only its owner may enter.
    directory = Path(tempfile.mkdtemp(prefix="inference-demo-rabbitmq-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        port, distribution_port, mapper_port = free_ports(3)
        environment = _configure(directory, port, distribution_port, mapper_port, user)
        # A port mapper of its own: the one that a node starts for itself would stay behind.
        names = Program(
            [mapper, "-port", str(mapper_port), "-address", LOOPBACK],
            log=directory / "epmd.log",
            environment=environment,
            user=user,
        )
        stack.callback(names.kill)
        node = Program([server], log=directory / "node.log", environment=environment, user=user)
        # Nothing of it is kept, so nothing needs an orderly end.
        stack.callback(node.kill)
        node.wait_for("completed with", START_TIMEOUT_S)
        yield f"amqp://guest:guest@{LOOPBACK}:{port}//"


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _configure(
    directory: Path, port: int, distribution_port: int, mapper_port: int, user: str | None
) -> dict[str, str]:
    """Write the node's files and return its environment."""
    (directory / "rabbitmq.conf").write_text("disk_free_limit.absolute = 50MB\nraft.wal_max_size_bytes = 67108864\n")
    (directory / "advanced.config").write_text("[].\n")
    (directory / "enabled_plugins").write_text("[].\n")
    (directory / "env.conf").write_text("")
    (directory / "data").mkdir()
    if user is not None:
        for path in (directory, *directory.iterdir()):
            shutil.chown(path, user, user)
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(directory),  # the node's own Erlang cookie lies there
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "ERL_EPMD_PORT": str(mapper_port),
        "RABBITMQ_NODENAME": f"inference-demo-{uuid.uuid4().hex[:12]}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution_port),
        "RABBITMQ_MNESIA_BASE": f"{directory}/data",
        "RABBITMQ_LOG_BASE": f"{directory}/log",
        "RABBITMQ_CONF_ENV_FILE": f"{directory}/env.conf",
        "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.conf",
        "RABBITMQ_ADVANCED_CONFIG_FILE": f"{directory}/advanced.config",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/enabled_plugins",
        # The start script then becomes the server instead of standing between it and our signals.
        "RUNNING_UNDER_SYSTEMD": "true",
    }


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True
