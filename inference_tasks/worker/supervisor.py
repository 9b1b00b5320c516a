"""One worker process for each GPU, kept alive and drained together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import cast

__all__ = ["Backoff", "ChildPlan", "Supervisor", "die_with"]

PR_SET_PDEATHSIG = 1
LONGEST_LINE_BYTES = 64 * 1024
COLD_GRACE_S = 10.0
DRAINING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process to keep running: its name in the output, its command, and what to change in the environment."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Backoff:
    """Pauses before restarts: doubled each time, and short again once a process has run for ``healthy_s``."""

    first_s: float = 1.0
    most_s: float = 60.0
    healthy_s: float = 60.0
    _next_s: float = 0.0

    def pause_s(self, lived_s: float) -> float:
        """Return the pause before the next start of a process that ran for so long."""
        pause_s = self.first_s if lived_s >= self.healthy_s or not self._next_s else self._next_s
        self._next_s = min(pause_s * 2, self.most_s)
        return pause_s


class _Child:
    """One plan and its present process."""

    def __init__(self, plan: ChildPlan, backoff: Backoff) -> None:
        self.plan = plan
        self.backoff = backoff
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at_s = 0.0
        self.start_at_s: float | None = 0.0
        self.was_healthy = False
        self.is_silent = False
        self._partial = b""

    def start(self, now_s: float) -> None:
        self.started_at_s, self.start_at_s, self.is_silent = now_s, None, False
        self.process = subprocess.Popen(
            self.plan.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self.plan.env},
            # A Ctrl-C on the terminal reaches the supervisor alone, which then drains; and the whole family of a
            # worker can be ended by its group.
            start_new_session=True,
        )
        os.set_blocking(self.output, False)

    @property
    def output(self) -> int:
        assert self.process is not None, "only asked of a started child"
        assert self.process.stdout is not None, "a pipe, from its start on"
        return self.process.stdout.fileno()

    def close(self) -> None:
        """Forget the process, which has ended."""
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def read(self) -> tuple[list[bytes], bool]:
        """Return the complete lines that the child has written, and whether there will be no more."""
        lines: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.output, 65536):
                *complete, self._partial = (self._partial + chunk).split(b"\n")
                lines += complete
                if len(self._partial) > LONGEST_LINE_BYTES:
                    lines.append(self.last_line())
            return lines, True
        return lines, False

    def last_line(self) -> bytes:
        rest, self._partial = self._partial, b""
        return rest

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill_family(self) -> None:
        """End the process and all that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def exit_code(self) -> int | None:
        """Return the exit code once the process has ended (negative for a signal), and end what it left behind."""
        if self.process is None:
            return None
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        # Not after wait(): then the number could belong to somebody else's group.
        self.kill_family()
        return self.process.wait()


class Supervisor:
    """Keeps processes running until it is told to stop.

    A process that ends by itself is started again after a pause (``Backoff``). The first SIGTERM, SIGINT or SIGHUP
    sends SIGTERM to all: a worker takes nothing new and ends with its last task, however long that takes, unless
    ``kill_after_s`` says otherwise. A second one is cold: SIGQUIT, and SIGKILL for what is left ten seconds later.
    """

    def __init__(
        self,
        plans: Sequence[ChildPlan],
        *,
        kill_after_s: float | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        final_codes: frozenset[int] = frozenset(),
        write: Callable[[bytes], object] | None = None,
    ) -> None:
        """Prepare; nothing is started before ``run``.

        Args:
            kill_after_s: longest drain; None waits as long as tasks run.
            backoff: makes the backoff of each process.
            final_codes: exit codes that no restart cures, such as a wrong setting. A process that ends with one before
                it has ever been healthy ends the others too; later it is restarted like any other.
            write: takes each line of output, prefix included; standard output by default.
        """
        self._children = [_Child(plan, backoff()) for plan in plans]
        self._kill_after_s = kill_after_s
        self._final_codes = final_codes
        self._write = write or _write_to_stdout
        self._selector = selectors.DefaultSelector()
        self._signals_seen = 0
        self._kill_at_s: float | None = None
        self._exit_code = 0

    @property
    def is_draining(self) -> bool:
        """Whether it has been told to stop."""
        return self._signals_seen > 0

    def run(self) -> int:
        """Start the processes and return when all have ended: 0 if they drained, else the code of one that did not."""
        with self._signals() as wake, self._selector:
            self._selector.register(wake, selectors.EVENT_READ)
            try:
                while self._is_needed():
                    self._start_due()
                    for key, _ in self._selector.select(self._patience_s()):
                        if key.fileobj is wake:
                            for number in wake.recv(256):
                                self._signalled(number)
                        else:
                            self._forward(cast(_Child, key.data))
                    self._reap()
                    self._kill_overdue()
            finally:
                for child in self._children:
                    child.kill_family()
        return self._exit_code

    def _is_needed(self) -> bool:
        return any(child.process is not None or child.start_at_s is not None for child in self._children)

    def _patience_s(self) -> float | None:
        due = [child.start_at_s for child in self._children if child.start_at_s is not None]
        if self._kill_at_s is not None:
            due.append(self._kill_at_s)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _start_due(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if child.start_at_s is not None and child.start_at_s <= now_s:
                child.start(now_s)
                self._selector.register(child.output, selectors.EVENT_READ, child)
                self._say(f"{child.plan.name} started (pid {child.process.pid if child.process else 0})")

    def _forward(self, child: _Child) -> None:
        if child.is_silent:
            return
        lines, child.is_silent = child.read()
        for line in lines:
            self._write(f"[{child.plan.name}] ".encode() + line + b"\n")
        if child.is_silent:
            # An output that has ended is always ready to be read.
            self._selector.unregister(child.output)

    def _reap(self) -> None:
        for child in self._children:
            code = child.exit_code()
            if code is None:
                continue
            self._forward(child)
            if rest := child.last_line():
                self._write(f"[{child.plan.name}] ".encode() + rest + b"\n")
            if not child.is_silent:
                self._selector.unregister(child.output)
            child.close()
            self._ended(child, code)

    def _ended(self, child: _Child, code: int) -> None:
        lived_s = time.monotonic() - child.started_at_s
        child.was_healthy = child.was_healthy or lived_s >= child.backoff.healthy_s
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        if self.is_draining:
            self._say(f"{child.plan.name} ended ({how})")
            # SIGTERM ends a process that has not come so far as to drain: it held nothing.
            if code not in (0, -signal.SIGTERM):
                self._exit_code = self._exit_code or (code if code > 0 else 128 - code)
        elif code in self._final_codes and not child.was_healthy:
            self._say(f"{child.plan.name} ended ({how}); a restart would end the same way, so all are stopped")
            self._exit_code = code
            self._drain()
        else:
            pause_s = child.backoff.pause_s(lived_s)
            child.start_at_s = time.monotonic() + pause_s
            self._say(f"{child.plan.name} ended after {lived_s:.1f} s ({how}); it starts again in {pause_s:g} s")

    def _signalled(self, number: int) -> None:
        if number not in DRAINING_SIGNALS:
            return
        if not self.is_draining:
            self._drain()
            return
        self._say("cold stop: running tasks are given up and go back to their queues")
        for child in self._children:
            child.signal(signal.SIGQUIT)
        self._kill_at_s = time.monotonic() + COLD_GRACE_S

    def _drain(self) -> None:
        self._signals_seen += 1
        limit = "as long as they take" if self._kill_after_s is None else f"at most {self._kill_after_s:g} s"
        self._say(f"draining: nothing new is taken, running tasks end ({limit}); once more to give them up")
        for child in self._children:
            child.start_at_s = None
            child.signal(signal.SIGTERM)
        if self._kill_after_s is not None:
            self._kill_at_s = time.monotonic() + self._kill_after_s

    def _kill_overdue(self) -> None:
        if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
            self._kill_at_s = None
            for child in self._children:
                if child.process is not None:
                    self._say(f"{child.plan.name} is killed: its time to drain is over")
                    child.kill_family()

    def _say(self, text: str) -> None:
        self._write(f"[supervisor] {text}\n".encode())

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """Turn signals into bytes on a socket, so that the loop is the only place where they act."""
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        watched = (*DRAINING_SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, _nothing) for number in watched}
        fd_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(fd_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()


def die_with(parent_pid: int) -> None:
    """Have this process drain when its supervisor dies, so that a new supervisor finds its GPU free. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have died before that.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler, because an ignored signal wakes nobody."""


def _write_to_stdout(line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
