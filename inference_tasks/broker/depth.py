"""How many messages wait in each queue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from kombu import Connection

from inference_routing.topology import Topology
from inference_tasks.errors import BrokerUnavailableError

__all__ = ["Depths"]


class Depths:
    """Asks the broker over one connection that stays open; safe to share between threads, closed by ``close``."""

    def __init__(self, url: str, *, connect_timeout_s: float = 3.0) -> None:
        self._connection = Connection(url, connect_timeout=connect_timeout_s)
        self._channel: Any = None
        self._lock = threading.Lock()

    def of(self, topology: Topology) -> dict[str, int]:
        """Return {queue: ready messages} of the tiers and the dead letters."""
        return self.of_queues(queue.name for queue in topology.queues)

    def of_queues(self, names: Iterable[str]) -> dict[str, int]:
        """Return {queue: ready messages}; a queue that does not exist is left out.

        Raises:
            BrokerUnavailableError: the broker cannot be reached.
        """
        with self._lock:
            depths: dict[str, int] = {}
            for name in names:
                depth = self._depth(name)
                if depth is not None:
                    depths[name] = depth
            return depths

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        with self._lock:
            self._channel = None
            self._connection.release()

    def _depth(self, name: str) -> int | None:
        try:
            # The first failure may be of a connection that ended while nobody asked.
            try:
                return self._ask(name)
            except self._connection.connection_errors:
                self._channel = None
                self._connection.collect()
                return self._ask(name)
        except self._connection.connection_errors as exc:
            raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc

    def _ask(self, name: str) -> int | None:
        if self._channel is None:
            self._channel = self._connection.channel()
        try:
            return int(self._channel.queue_declare(name, passive=True).message_count)
        except self._connection.channel_errors as exc:
            # The broker closes the channel with every such answer.
            self._channel = None
            if getattr(exc, "code", None) == 404:
                return None
            raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
