"""A program on a pseudo-terminal: what it draws, and the keys that it is sent."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes import environment

PATIENCE_S = 60.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
ENTER_FULL_SCREEN, LEAVE_FULL_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """One command of `inference-tasks` on a terminal of its own.

    Attributes:
        output: all that it has written, with its control characters.
    """

    def __init__(
        self, *arguments: str, directory: Path, env: Mapping[str, str], width: int = 140, height: int = 50
    ) -> None:
        self._argv = (sys.executable, "-m", "inference_tasks.cli", *arguments)
        self._directory = directory
        self._env = environment(directory, {"TERM": "xterm-256color", **env})
        self._ours, self._theirs = os.openpty()
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._before = termios.tcgetattr(self._theirs)
        self._mark = 0
        self.output = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._argv,
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            cwd=self._directory,
            env=self._env,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def is_as_before(self) -> bool:
        """Whether the terminal's settings are those that it had before the program came."""
        return termios.tcgetattr(self._theirs) == self._before

    def press(self, keys: str) -> None:
        """Send keys; what is waited for next must be drawn after them."""
        self._mark = len(self.output)
        os.write(self._ours, keys.encode())

    def until(self, *texts: str) -> str:
        """Wait until all of these have been drawn since the last key, and return what has been drawn since."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            drawn = _CONTROL.sub("", self.output[self._mark :])
            if all(text in drawn for text in texts):
                return drawn
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"never drawn: {[text for text in texts if text not in drawn]}\n{drawn[-6000:]}"
            self._read(left_s)

    def end(self) -> int:
        """Wait for the end of the program and return its exit code."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self._process.poll() is None:
            assert time.monotonic() < deadline_s, f"it does not end:\n{self.output[-3000:]}"
            self._read(0.1)
        self._read(0.0)
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it to end as `kill` does."""
        self._process.terminate()

    def _read(self, longest_s: float) -> None:
        if select.select([self._ours], [], [], longest_s)[0]:
            self.output += os.read(self._ours, 1 << 16).decode(errors="replace")
