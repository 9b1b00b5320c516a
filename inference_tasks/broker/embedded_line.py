"""A connection to the embedded broker that never waits for an answer, for event loops.

Not redis-py's: its connections read with a time-out, and the socket to watch is private to them.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from typing import TypeAlias

__all__ = ["Line", "Reply", "ReplyError"]

Reply: TypeAlias = "bytes | int | str | list[Reply] | ReplyError | None"

CHUNK_BYTES = 256 * 1024
#: Seconds after which a server that takes no more bytes counts as dead.
SEND_S = 5


class ReplyError(Exception):
    """The server's answer to a command was an error; returned among the replies, not raised."""


class Line:
    """A Unix socket that speaks RESP2: commands are gathered and written together, replies read when they are there.

    Everything raises ``ConnectionError`` when the server is gone.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack("ll", SEND_S, 0))
        self._buffer = b""
        self._outgoing: list[bytes] = []
        try:
            self._socket.connect(str(path))
        except OSError as exc:
            self._socket.close()
            raise ConnectionRefusedError(f"the embedded broker cannot be reached at {path}: {exc}") from exc

    def fileno(self) -> int:
        return self._socket.fileno()

    def put(self, *parts: str | bytes | int) -> None:
        """Add one command to what ``flush`` writes."""
        self._outgoing.append(b"*%d\r\n" % len(parts))
        for part in parts:
            raw = part if isinstance(part, bytes) else str(part).encode()
            self._outgoing.append(b"$%d\r\n%b\r\n" % (len(raw), raw))

    def flush(self) -> None:
        """Write the commands gathered so far, in one piece."""
        if not self._outgoing:
            return
        data = b"".join(self._outgoing)
        self._outgoing.clear()
        try:
            self._socket.sendall(data)
        except BlockingIOError as exc:
            raise ConnectionResetError(f"the embedded broker takes nothing for {SEND_S} s") from exc
        except OSError as exc:
            raise ConnectionResetError(f"the connection to the embedded broker was lost: {exc}") from exc

    def call(self, *parts: str | bytes | int) -> Reply:
        """Write one command and wait for its reply; only while no other reply is expected."""
        self.put(*parts)
        self.flush()
        while self.wait(SEND_S):
            for reply in self.replies():
                return reply
        raise ConnectionResetError(f"the embedded broker has not answered for {SEND_S} s")

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be read; false if there was nothing in time."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def replies(self) -> Iterator[Reply]:
        """Yield every complete reply that has arrived, without waiting."""
        self._receive()
        while (parsed := _parse(self._buffer, 0)) is not None:
            reply, end = parsed
            self._buffer = self._buffer[end:]
            yield reply

    def _receive(self) -> None:
        while True:
            try:
                chunk = self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as exc:
                raise ConnectionResetError(f"the connection to the embedded broker was lost: {exc}") from exc
            if not chunk:
                raise ConnectionResetError("the embedded broker closed the connection")
            self._buffer += chunk
            if len(chunk) < CHUNK_BYTES:
                return

    def close(self) -> None:
        self._socket.close()


def _parse(buffer: bytes, at: int) -> tuple[Reply, int] | None:
    """Return the reply at this place and where it ends, None while it is incomplete."""
    line_end = buffer.find(b"\r\n", at)
    if line_end < 0:
        return None
    kind, head, at = buffer[at : at + 1], buffer[at + 1 : line_end], line_end + 2
    if kind == b"$":
        size = int(head)
        if size < 0:
            return None, at
        end = at + size
        return (buffer[at:end], end + 2) if len(buffer) >= end + 2 else None
    if kind == b":":
        return int(head), at
    if kind == b"+":
        return head.decode(), at
    if kind == b"-":
        return ReplyError(head.decode(errors="replace")), at
    if kind != b"*":
        raise ConnectionResetError(f"the embedded broker does not speak RESP: {buffer[:40]!r}")
    items: list[Reply] = []
    for _ in range(int(head)):
        parsed = _parse(buffer, at)
        if parsed is None:
            return None
        item, at = parsed
        items.append(item)
    return items, at
