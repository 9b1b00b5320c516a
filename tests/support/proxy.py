"""A TCP proxy that breaks the line between a client and a server in the ways that networks do.

It runs an event loop in a thread of its own; every verb is safe to call from the test and has taken effect when it
returns.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
_CHUNK_BYTES = 64 * 1024
_CALL_TIMEOUT_S = 10.0


class FaultProxy:
    """Forwards a loopback port to a server, until told otherwise.

    Verbs: `down` refuse and reset · `reset_peer` reset what is open · `black_hole` go silent, keep everything open ·
    `latency` delay each chunk, both ways · `resume` back to normal. The port stays the same all the time.
    """

    def __init__(self, upstream_port: int, upstream_host: str = LOOPBACK) -> None:
        self._upstream = (upstream_host, upstream_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._latency_s = 0.0
        self._flowing = asyncio.Event()
        self.port = 0
        self.accepted = 0

    def url(self, upstream_url: str) -> str:
        """The same address, by way of this proxy."""
        parts = urlsplit(upstream_url)
        rights, at, _host = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{rights}{at}{LOOPBACK}:{self.port}"))

    def down(self) -> None:
        """Reset every open connection and refuse new ones."""
        self._call(self._down())

    def reset_peer(self) -> None:
        """Reset every open connection, on both sides; new ones are served."""
        self._call(self._reset())

    def black_hole(self) -> None:
        """Forward nothing and close nothing: a half-open line. What was sent meanwhile arrives after `resume`."""
        self._call(self._set_flow(flowing=False))

    def latency(self, delay_s: float) -> None:
        """Deliver each chunk this much later, in both directions; 0 takes it back."""
        self._call(self._set_latency(delay_s))

    def resume(self) -> None:
        """End every fault."""
        self._call(self._resume())

    @property
    def open_connections(self) -> int:
        """Client connections that are open now."""
        return self._call(self._count())

    def start(self) -> None:
        """Listen; the port is known afterwards."""
        self._thread.start()
        self._call(self._resume())

    def close(self) -> None:
        """Reset what is open and end the thread."""
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CALL_TIMEOUT_S)
        self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, verb: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(verb, self._loop).result(_CALL_TIMEOUT_S)

    async def _resume(self) -> None:
        self._latency_s = 0.0
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, LOOPBACK, self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _down(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._reset()

    async def _reset(self) -> None:
        for writer in self._links:
            _arm_reset(writer)
            writer.transport.abort()
        await asyncio.sleep(0)  # abort() closes the sockets in the next turn of the loop

    async def _shut(self) -> None:
        await self._down()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set_flow(self, *, flowing: bool) -> None:
        if flowing:
            self._flowing.set()
        else:
            self._flowing.clear()

    async def _set_latency(self, delay_s: float) -> None:
        self._latency_s = delay_s

    async def _count(self) -> int:
        return len(self._links) // 2

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        try:
            await self._link(reader, writer)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._upstream)
        pair = {writer, far_writer}
        self._links |= pair
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._links -= pair
            for each in pair:
                each.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction until its end, which is passed on as such."""
        while chunk := await reader.read(_CHUNK_BYTES):
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
            await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()
        await self._flowing.wait()
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()


def _arm_reset(writer: asyncio.StreamWriter) -> None:
    """Make the close of a socket a reset (RST) instead of an orderly end."""
    link = writer.get_extra_info("socket")
    if link is not None and not writer.transport.is_closing():
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
