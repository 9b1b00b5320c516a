"""How long RabbitMQ lets a message stay unacknowledged, and which tasks run longer than that.

From 3.12 the queues carry the time-out themselves. Before, the node's own value counts; no API tells it, but the
management API names the node's files of configuration, which can be read on the broker's own machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["DEFAULT_S", "LongTask", "NodeTimeout", "configuration_line", "long_tasks", "node_timeout"]

DEFAULT_S = 1800.0
"""RabbitMQ's default since 3.8.17."""
MARGIN_S = 60.0

_SYSCTL = re.compile(r"^\s*consumer_timeout\s*=\s*(\S+)", re.MULTILINE)
_ERLANG = re.compile(r"^[^%\n]*\{\s*consumer_timeout\s*,\s*([a-z0-9_]+)\s*\}", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class NodeTimeout:
    """The consumer time-out of a node.

    Attributes:
        timeout_s: seconds; None if it is switched off.
        origin: the file it stands in, or ``default``.
    """

    timeout_s: float | None
    origin: str


@dataclass(frozen=True, slots=True)
class LongTask:
    """A task that may run longer than the broker waits for its acknowledgement."""

    name: str
    time_limit_s: float


class Nodes(Protocol):
    """What is needed of ``Management``."""

    def nodes(self) -> list[dict[str, object]]: ...


def node_timeout(management: Nodes) -> NodeTimeout | None:
    """Return the shortest consumer time-out of the broker's nodes, None if it cannot be known from here.

    Raises:
        ManagementError: the management API does not answer.
    """
    found: list[NodeTimeout] = []
    for node in management.nodes():
        files = node.get("config_files")
        read = _read([str(one) for one in files]) if isinstance(files, list) and files else None
        if read is None:
            return None
        found.append(read)
    return min(found, key=lambda one: float("inf") if one.timeout_s is None else one.timeout_s) if found else None


def long_tasks(time_limit_s_by_task: Mapping[str, float], timeout_s: float | None) -> list[LongTask]:
    """Return the tasks whose time limit, with a margin to return the message, is longer than the time-out."""
    if timeout_s is None:
        return []
    return [
        LongTask(name, limit_s)
        for name, limit_s in sorted(time_limit_s_by_task.items())
        if limit_s + MARGIN_S > timeout_s
    ]


def configuration_line(tasks: Iterable[LongTask]) -> str:
    """Return the line of rabbitmq.conf that lets these tasks run."""
    longest_s = max(task.time_limit_s for task in tasks)
    return f"consumer_timeout = {int((longest_s + 5 * MARGIN_S) * 1000)}"


def _read(files: list[str]) -> NodeTimeout | None:
    found = NodeTimeout(DEFAULT_S, "default")
    for name in files:
        try:
            text = Path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        matches = (_ERLANG if name.endswith(".config") else _SYSCTL).findall(text)
        if matches:
            value = matches[-1].replace("_", "")
            # undefined, false, 0: switched off.
            off = not value.isdecimal() or value == "0"
            found = NodeTimeout(None if off else int(value) / 1000, name)
    return found
