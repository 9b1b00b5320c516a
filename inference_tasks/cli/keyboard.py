"""Single keys from the terminal, while something else is drawn on it."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Self

__all__ = ["Keyboard"]

_NAMES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down", "\x1b": "escape"}
_KEYS = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Za-z])|.", re.DOTALL)


class Keyboard:
    """The keys of standard input, without waiting for Enter and without showing them; none if it is no terminal.

    Ctrl-C stays what it is. The terminal is as before when this ends, however it ends.
    """

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[object] = []

    def __enter__(self) -> Self:
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # as it came

    def wait(self, longest_s: float) -> list[str]:
        """Return the next keys, by their characters or as ``up``, ``down``, ``escape``; nothing if none comes."""
        if self._fd is None:
            time.sleep(longest_s)
            return []
        if not select.select([self._fd], [], [], max(0.0, longest_s))[0]:
            return []
        text = os.read(self._fd, 256).decode(errors="replace")
        # A terminal that is gone reads as nothing, for ever.
        return [_NAMES.get(key, key) for key in _KEYS.findall(text)] if text else ["q"]
