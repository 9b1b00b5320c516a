"""How many messages wait in each queue."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Self

from kombu import Connection

from inference_routing.topology import Topology
from inference_tasks.broker.dial import dial
from inference_tasks.errors import BrokerUnavailableError

__all__ = ["Depths"]

NOT_FOUND = 404


class Depths:
    """Asks the broker over one connection that stays open until ``close``; safe to share between threads."""

    def __init__(self, url: str, *, connect_timeout_s: float = 3.0) -> None:
        self._url = url
        self._connect_timeout_s = connect_timeout_s
        self._connection: Connection | None = None
        self._channel: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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
            self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            connection.release()

    def _depth(self, name: str) -> int | None:
        for is_last in (False, True):
            connection = self._connection
            if connection is None:
                connection = self._connection = dial(
                    self._url, self._connect_timeout_s, answer_timeout_s=self._connect_timeout_s
                )
            try:
                return self._ask(connection, name)
            except connection.connection_errors as exc:
                self._hang_up()
                # The first failure may be of a connection that ended while nobody asked.
                if is_last:
                    raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
        return None

    def _ask(self, connection: Connection, name: str) -> int | None:
        if self._channel is None:
            self._channel = connection.channel()
        try:
            return int(self._channel.queue_declare(name, passive=True).message_count)
        except connection.channel_errors as exc:
            # The broker closes the channel with every such answer.
            self._channel = None
            if getattr(exc, "code", None) == NOT_FOUND:
                return None
            raise BrokerUnavailableError(str(exc) or type(exc).__name__) from exc
