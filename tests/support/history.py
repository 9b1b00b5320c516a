"""What happened in a test, written by all its processes into one file of JSON lines.

A task writes `log("start", id=…)`; the test reads the entries in the order in which they were written.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PATH_VARIABLE = "INFERENCE_TEST_HISTORY"
_POLL_S = 0.01

Value: TypeAlias = str | int | float | bool | list[str] | list[int] | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: what, when (`at_s` unix, `mono_s` monotonic seconds), where, the writer's own fields."""

    event: str
    at_s: float
    mono_s: float
    pid: int
    fields: Mapping[str, Value]

    def __getitem__(self, name: str) -> Value:
        return self.fields[name]


class History:
    """The file of one test; safe to append to from many processes and threads.

    An append is one write() to a file opened with O_APPEND, which Linux never interleaves on a local file system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def env(self) -> dict[str, str]:
        """What a worker's environment needs for `log()` to write here."""
        return {PATH_VARIABLE: str(self.path)}

    def append(self, event: str, **fields: Value) -> None:
        """Add one entry."""
        head = {"event": event, "at_s": time.time(), "mono_s": time.monotonic(), "pid": os.getpid()}
        line = json.dumps({**head, "fields": fields}).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def __iter__(self) -> Iterator[Entry]:
        """The entries so far, in the order of their writing."""
        if not self.path.exists():
            return
        *lines, _unfinished = self.path.read_bytes().split(b"\n")
        for line in lines:
            yield Entry(**json.loads(line))

    def of(self, event: str) -> list[Entry]:
        """The entries of one kind."""
        return [entry for entry in self if entry.event == event]

    def values(self, event: str, name: str) -> list[Value]:
        """One field of the entries of one kind, in order."""
        return [entry[name] for entry in self.of(event)]

    def counts(self, event: str, name: str) -> Counter[Value]:
        """How often each value of a field occurs."""
        return Counter(self.values(event, name))

    def wait_until(self, reached: Callable[[History], bool], *, timeout_s: float = 60.0) -> None:
        """Wait until the predicate holds of this history.

        Raises:
            TimeoutError: It did not hold in time; the message shows the last entries.
        """
        deadline = time.monotonic() + timeout_s
        while not reached(self):
            if time.monotonic() > deadline:
                last = "\n".join(map(str, list(self)[-20:]))
                raise TimeoutError(f"not reached within {timeout_s} s; the last entries:\n{last}")
            time.sleep(_POLL_S)

    def wait_for(self, event: str, *, count: int = 1, timeout_s: float = 60.0) -> list[Entry]:
        """Wait for `count` entries of one kind and return all of that kind."""
        self.wait_until(lambda history: len(history.of(event)) >= count, timeout_s=timeout_s)
        return self.of(event)


def log(event: str, **fields: Value) -> None:
    """Add an entry to the history named by the environment; called by the tasks of tests."""
    History(Path(os.environ[PATH_VARIABLE])).append(event, **fields)
