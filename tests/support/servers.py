"""Private RabbitMQ and Redis nodes: own directory, own loopback ports, stopped by their process id.

Nothing here touches a server that it did not start. The port mapper of Erlang (epmd) is shared by every node of a
machine, so it is left running.
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import quote

import pytest

from tests.support.processes import LoggedProcess, program

LOOPBACK = "127.0.0.1"
_DEBIAN_RABBITMQ = "/usr/lib/rabbitmq/bin"  # the real scripts; those on the PATH refuse all users but root and rabbitmq


ProgramT = TypeVar("ProgramT")


class MissingServerError(RuntimeError):
    """The program of a server is not installed here."""

    def __init__(self, name: str, remedy: str | None = None) -> None:
        super().__init__(f"{name} is not installed: {remedy or f'apt-get install {name}'}")
        self.name = name


def installed(make: Callable[[], ProgramT]) -> ProgramT:
    """Make a node, a browser, what a program says; where it is missing, skip at a desk and fail in CI."""
    try:
        return make()
    except MissingServerError as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Node(ABC):
    """A server process with a directory and ports that stay the same over restarts."""

    READY: tuple[str, ...]
    START_TIMEOUT_S: float
    process: LoggedProcess

    def __init__(self, kind: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"inference-test-{kind}-"))

    @abstractmethod
    def url(self) -> str:
        """Address that a client connects to."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.process.log

    def start(self) -> None:
        """Start the server on its directory and ports, and wait until it serves."""
        self.process.start()
        self.process.wait_for(*self.READY, timeout_s=self.START_TIMEOUT_S)

    def stop(self) -> None:
        """Shut the server down in order."""
        self.process.terminate(timeout_s=60.0)

    def kill(self) -> None:
        """End the server at once, as a power cut does."""
        self.process.kill()

    def restart(self, *, kill: bool = False) -> None:
        """End the server, in order or at once, and start it on the same directory and ports."""
        if self.process.is_running:
            if kill:
                self.kill()
            else:
                self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze the server: connections stay open and nobody answers."""
        self.process.pause()

    def resume(self) -> None:
        """Let the frozen server go on."""
        self.process.resume()

    def close(self) -> None:
        """End the server at once, since nothing of it is kept, and remove its directory."""
        if self.process.is_running:
            self.process.kill()
        self.process.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Installation:
    """A RabbitMQ on this machine.

    Attributes:
        owner: Whom the directory of a node belongs to, None for whoever runs the test.
        user: Whom its programs are started as, None as before.
    """

    owner: str | int | None
    user: str | None

    @classmethod
    def of_the_machine(cls) -> Installation:
        """The one that is installed as a package."""
        if program("rabbitmq-server", _DEBIAN_RABBITMQ) is None:
            raise MissingServerError("rabbitmq-server")
        # The server must not run as root: Debian's own user for it owns the node then, else whoever runs the test.
        user = "rabbitmq" if os.geteuid() == 0 and _has_user("rabbitmq") else None
        return cls(owner=user, user=user)

    def command(self, name: str, directory: Path) -> list[str]:
        """How one of its programs is started, for the node in ``directory``."""
        return [program(name, _DEBIAN_RABBITMQ) or name]


class RabbitMQNode(Node):
    """One RabbitMQ broker with its management and prometheus plugins.

    `settings` are further lines of rabbitmq.conf, such as `{"consumer_timeout": "60000"}`. User and password are guest.

    RabbitMQ 3.10 notes a new quorum queue in its directory of them (names.dets) some time after the declaration was
    answered: a node killed within the same second comes back with a queue that answers no get. So let a quorum queue be
    older than two seconds before `kill()`.
    """

    READY = ("Starting broker... completed", "completed with")
    START_TIMEOUT_S = 180.0

    def __init__(self, settings: Mapping[str, str] | None = None, *, installation: Installation | None = None) -> None:
        installation = installation or Installation.of_the_machine()
        super().__init__("rabbitmq")
        self._ctl = installation.command("rabbitmqctl", self.directory)
        self.name = f"inference-test-{uuid.uuid4().hex[:12]}@localhost"
        self.port, self.management_port, self.prometheus_port, distribution_port = free_ports(4)
        self._user, self._owner = installation.user, installation.owner
        self._env = self._write_configuration(distribution_port, settings or {})
        self.process = LoggedProcess(
            installation.command("rabbitmq-server", self.directory),
            log=self.directory / "output",
            env=self._env,
            directory=self.directory,
            user=self._user,
        )

    def _write_configuration(self, distribution_port: int, settings: Mapping[str, str]) -> dict[str, str]:
        options = {
            "management.tcp.ip": LOOPBACK,
            "management.tcp.port": str(self.management_port),
            "prometheus.tcp.ip": LOOPBACK,
            "prometheus.tcp.port": str(self.prometheus_port),
            "disk_free_limit.absolute": "50MB",
            "raft.wal_max_size_bytes": str(64 * 2**20),
            **settings,
        }
        lines = "".join(f"{key} = {value}\n" for key, value in options.items())
        (self.directory / "rabbitmq.conf").write_text(lines)
        (self.directory / "advanced.config").write_text("[].\n")
        (self.directory / "enabled_plugins").write_text("[rabbitmq_management,rabbitmq_prometheus].\n")
        (self.directory / "env.conf").write_text("")
        (self.directory / "data").mkdir()
        if self._owner is not None:
            for path in [self.directory, *self.directory.iterdir()]:
                shutil.chown(path, self._owner)
        at = str(self.directory)
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "LANG": "C.UTF-8",
            "HOME": at,  # the node's own Erlang cookie lies there
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "RABBITMQ_NODENAME": self.name,
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_MNESIA_BASE": f"{at}/data",
            "RABBITMQ_LOG_BASE": f"{at}/log",
            "RABBITMQ_CONF_ENV_FILE": f"{at}/env.conf",
            "RABBITMQ_CONFIG_FILE": f"{at}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{at}/advanced.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{at}/enabled_plugins",
            # The start script then becomes the server instead of standing between it and our signals.
            "RUNNING_UNDER_SYSTEMD": "true",
        }

    def url(self, vhost: str = "/") -> str:
        """AMQP address of a virtual host."""
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/{quote(vhost, safe='')}"

    @property
    def management_url(self) -> str:
        """Address of the management API."""
        return f"http://guest:guest@{LOOPBACK}:{self.management_port}"

    def kill(self) -> None:
        """End the server at once; the classic queues it has confirmed are there again afterwards.

        Its table of durable queues reaches the file up to two seconds after the declaration was answered, so that a
        queue, and whatever was confirmed into it, is gone if the server dies meanwhile. The table is written first.
        """
        self.evaluate("mnesia:sync_log()")
        super().kill()

    def create_vhost(self, name: str) -> str:
        """Create a virtual host that guest may use, and return its AMQP address."""
        self.api("PUT", f"/api/vhosts/{quote(name, safe='')}", {})
        rights = {"configure": ".*", "write": ".*", "read": ".*"}
        self.api("PUT", f"/api/permissions/{quote(name, safe='')}/guest", rights)
        return self.url(name)

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host with all that is in it; its connections are closed."""
        self.api("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    def api(self, method: str, path: str, body: object = None) -> object:
        """One call of the management API; returns the decoded answer, None if it is empty."""
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.management_port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": "Basic " + base64.b64encode(b"guest:guest").decode(),
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{method} {path}: {error.code} {error.read().decode()}") from error
        return json.loads(text) if text else None

    def ctl(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Run `rabbitmqctl` on this node and return what it printed."""
        done = subprocess.run(
            [*self._ctl, "--quiet", "-n", self.name, *arguments],
            env=self._env,
            cwd=self.directory,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def evaluate(self, expression: str) -> str:
        """Evaluate an Erlang expression on the node and return the value as Erlang writes it.

        `rabbitmqctl` starts a virtual machine for that, which takes seconds; Erlang's own client in C takes none.
        """
        client = program("erl_call")
        cookie = self.directory / ".erlang.cookie"
        if client is None:
            return self.ctl("eval", f"{expression}.").strip()
        done = subprocess.run(
            [client, "-sname", self.name, "-c", cookie.read_text(), "-e"],
            env=self._env,
            input=f"{expression}.\n",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if done.returncode or not done.stdout.startswith("{ok, "):
            raise RuntimeError(f"{expression}: {done.stdout}{done.stderr}")
        return done.stdout.removeprefix("{ok, ").removesuffix("}")

    def connections(self, vhost: str) -> int:
        """How many client connections a virtual host has."""
        vhosts = "rabbit_networking:connection_info_all([vhost])"
        return int(self.evaluate(f'length([found || [{{vhost, <<"{vhost}">>}}] <- {vhosts}])'))

    def close_all_connections(self, reason: str = "closed by a test") -> None:
        """Close every client connection of every virtual host from the broker's side."""
        each = "rabbit_networking:connections()"
        self.evaluate(f'[rabbit_networking:close_connection(One, "{reason}") || One <- {each}]')


class RedisNode(Node):
    """One Redis server without persistence, unless `appendonly`; further options as `redis-server` takes them."""

    READY = ("Ready to accept connections",)
    START_TIMEOUT_S = 60.0

    def __init__(self, *options: str, appendonly: bool = False) -> None:
        server = program("redis-server") or program("valkey-server")
        if server is None:
            raise MissingServerError("redis-server")
        super().__init__("redis")
        (self.port,) = free_ports(1)
        base = ("--bind", LOOPBACK, "--port", str(self.port), "--dir", str(self.directory), "--daemonize", "no")
        durability = ("--save", "", "--appendonly", "yes" if appendonly else "no", "--appendfsync", "always")
        self.process = LoggedProcess(
            [server, *base, *durability, *options], log=self.directory / "output", directory=self.directory
        )

    def url(self, database: int = 0) -> str:
        """Address of one database."""
        return f"redis://{LOOPBACK}:{self.port}/{database}"


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
