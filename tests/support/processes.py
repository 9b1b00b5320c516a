"""Processes that a test starts, watches by their log, sends signals to and always takes down again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_POLL_S = 0.02


class ProcessEndedError(AssertionError):
    """The process ended before it said what the test waits for."""


class LoggedProcess:
    """One program whose output goes to a file that outlives it.

    It runs in a session of its own, so that `close()` can end what it left behind. Standard output and error share the
    file; a second `start()` appends, and `wait_for()` reads only what the present run has written.
    """

    keeps_descriptors = False
    """Whether it inherits the descriptors that are marked as inheritable."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        directory: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.log_file = log
        self._env = dict(os.environ if env is None else env)
        self._directory = directory
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._run_starts_at = 0

    def start(self) -> None:
        """Start the program once more; an earlier run must have ended."""
        assert not self.is_running, f"{self.argv[0]} runs already"
        self._sweep()
        with self.log_file.open("ab") as log:
            self._run_starts_at = log.tell()
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._directory,
                user=self._user,
                group=self._user,
                extra_groups=None if self._user is None else [],
                start_new_session=True,
                close_fds=not self.keeps_descriptors,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.argv[0]} was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last run; negative for a signal, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def log(self) -> str:
        """What the present run has written so far."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(self._run_starts_at)
            return log.read().decode(errors="replace")

    def wait_for(self, *texts: str, timeout_s: float = 60.0, count: int = 1) -> str:
        """Return the log once one of the texts stands in it, `count` times.

        Raises:
            ProcessEndedError: The program ended first.
            TimeoutError: It did not say so in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self.is_running  # asked before the log is read: the last words of an ended program count
            log = self.log
            if any(log.count(text) >= count for text in texts):
                return log
            if ended:
                raise ProcessEndedError(f"{self.argv[0]} ended with {self.exit_code}, waiting for {texts}:\n{log}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.argv[0]} did not say one of {texts} within {timeout_s} s:\n{log}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the program and return its exit status."""
        assert self._process is not None, f"{self.argv[0]} was never started"
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.argv[0]} still runs after {timeout_s} s:\n{self.log}") from None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program alone, not to its children."""
        assert self._process is not None, f"{self.argv[0]} was never started"
        self._process.send_signal(number)

    def pause(self) -> None:
        """Freeze the program and return once its last thread stands: connections stay open and nobody answers.

        The signal alone promises nothing yet: while the thread that takes it waits for a processor, the others go on.
        """
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen program go on."""
        self.send(signal.SIGCONT)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """Ask the program to end (SIGTERM) and return its exit status."""
        self.send(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """End the program at once (SIGKILL); its children notice by themselves or not at all."""
        self.send(signal.SIGKILL)
        self.wait()

    def children(self) -> list[psutil.Process]:
        """The processes below this one, grandchildren included."""
        return psutil.Process(self.pid).children(recursive=True) if self.is_running else []

    def close(self, timeout_s: float = 10.0) -> None:
        """End the program, gently first, and whatever is left of its session."""
        if self.is_running:
            self.resume()
            try:
                self.terminate(timeout_s)
            except TimeoutError:
                self.kill()
        self._sweep()

    def _sweep(self) -> None:
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WorkerProcess(LoggedProcess):
    """A worker started as a user starts it, ready once it consumes."""

    READY = " ready."

    @classmethod
    def celery(
        cls,
        app: str,
        *options: str,
        directory: Path,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> Self:
        """A worker by `celery -A app worker`; `app` is a module in `directory` or on the import path."""
        node = ("-n", f"{name}@localhost", "--loglevel", "INFO", "--without-mingle", "--without-gossip")
        argv = (sys.executable, "-m", "celery", "-A", app, "worker", *node, *options)
        return cls(argv, log=directory / f"{name}.log", env=environment(directory, env), directory=directory)

    @classmethod
    def command(
        cls,
        *arguments: str,
        directory: Path,
        env: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> Self:
        """A worker by `inference-tasks worker …`, with the arguments as they are."""
        program = Path(sys.executable).with_name("inference-tasks")
        head = (str(program),) if program.exists() else (sys.executable, "-m", "inference_tasks.cli")
        argv = (*head, "worker", *arguments)
        return cls(argv, log=directory / f"{name}.log", env=environment(directory, env), directory=directory)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the worker says that it is ready."""
        self.wait_for(self.READY, timeout_s=timeout_s)

    def restart(self, timeout_s: float = 60.0) -> int:
        """End the worker as a deployment does, start it again and return the exit status of the first run."""
        code = self.terminate(timeout_s)
        self.start()
        self.wait_ready(timeout_s)
        return code

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self


def environment(directory: Path, extra: Mapping[str, str] | None) -> dict[str, str]:
    """The test's own environment, with the directory and everything this interpreter can import on the path."""
    path = [str(directory), *(entry for entry in sys.path if entry)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", **(extra or {})}


def program(name: str, *folders: str) -> str | None:
    """Path of an installed program; system folders are searched even if the caller's PATH lacks them."""
    places = [*folders, *os.environ.get("PATH", "").split(os.pathsep), "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return shutil.which(name, path=os.pathsep.join(places))
