"""A client that keeps one connection for each thread which calls it, instead of borrowing one for each call."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import redis
from redis import exceptions

from inference_tasks.state.script import Commands

__all__ = ["HeldConnections", "held"]


class HeldConnections:
    """Scripts called on connections that threads keep until they end; any other command goes the usual way.

    What redis-py does around a command costs as much again as the command. The connections are its pool's: that opens
    new ones after a fork, and closes them. At most half of them are kept; a thread beyond that borrows, as is usual.
    """

    def __init__(self, client: redis.Redis[bytes]) -> None:
        self.connection_pool = client.connection_pool
        self._usual = client
        self._most = self.connection_pool.max_connections // 2
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._of_thread = threading.local()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its reply; a connection that was lost is tried once more, as redis-py does."""
        if args[0] != "EVALSHA":
            return self._usual.execute_command(*args, **options)
        kept: _Kept | None = getattr(self._of_thread, "kept", None)
        if kept is None or kept.pid != os.getpid():
            if len(self._kept) >= self._most:
                return self._usual.execute_command(*args, **options)
            kept = self._of_thread.kept = _Kept(self.connection_pool)
            self._kept.add(kept)
        return kept.call(args)


class _Kept:
    """One connection, given back when its thread ends."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self.pid = os.getpid()
        self._pool = pool
        self._is_busy = False
        self._connection: Any = pool.get_connection()  # type: ignore[call-arg]  # the stubs are older

    def __del__(self) -> None:
        if hasattr(self, "_connection") and self.pid == os.getpid():
            self._pool.release(self._connection)

    def call(self, command: Sequence[Any]) -> Any:
        connection = self._connection
        if self._is_busy:
            # A signal's handler has raised, or calls, between a command and its reply, which is not for this call.
            connection.disconnect()
        self._is_busy = True
        try:
            try:
                connection.send_command(*command)
                reply = connection.read_response()
            except exceptions.ConnectionError:
                connection.disconnect()
                connection.send_command(*command)
                reply = connection.read_response()
        except exceptions.ResponseError:
            self._is_busy = False
            raise
        self._is_busy = False
        return reply


def held(client: Commands) -> Commands:
    """Return a client that keeps its connections, if it is one of redis-py's own for one server; else the client."""
    return HeldConnections(client) if type(client) is redis.Redis else client
