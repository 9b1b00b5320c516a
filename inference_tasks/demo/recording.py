"""What the demo's workers did, as lines of a file: written by many processes, read while it grows."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

__all__ = ["VARIABLE", "Recording", "Run", "Slot", "record"]

VARIABLE = "DEMO_RECORDING"
"""Environment variable with the path of the file; without it nothing is written."""


@dataclass(frozen=True, slots=True)
class Run:
    """One task that has run, as its process saw it; times in unix seconds."""

    number: int
    tier: str
    started_at_s: float
    ended_at_s: float
    label: str


@dataclass(frozen=True, slots=True)
class Slot:
    """One use of a slot, as the worker measured it."""

    tier: str
    cost_s: float


def record(what: Run | Slot) -> None:
    """Append one line."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        # One short write in append mode: lines of several processes do not mix.
        os.write(_descriptor(path, os.getpid()), f"{json.dumps(asdict(what))}\n".encode())


@cache
def _descriptor(path: str, _pid: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


class Recording:
    """Reads the file from where it stopped last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[Run | Slot]:
        """Return what was written since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            *lines, _ = file.read().split(b"\n")
        self._offset += sum(len(line) + 1 for line in lines)
        rows = [json.loads(line) for line in lines]
        return [Slot(**row) if "cost_s" in row else Run(**row) for row in rows]
