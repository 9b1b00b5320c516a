"""HTTP clients that cost little: each sends the same request again as soon as it has been answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.benchmarks.harness import quantile

__all__ = ["Load", "offer", "request_of"]

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
# After the end of the measured time, for the answers that are still owed.
PATIENCE_S = 45.0


@dataclass
class Load:
    """What a number of clients got in a while.

    Attributes:
        taken_s: seconds of each answer with the status that was expected.
        other: {status: answers with another one}; 0 are connections that were closed, or never answered.
    """

    taken_s: list[float] = field(default_factory=list)
    other: Counter[int] = field(default_factory=Counter)
    lasted_s: float = 0.0

    def figures(self) -> dict[str, float]:
        """Return requests per second, and milliseconds."""
        return {
            "per_s": round(len(self.taken_s) / self.lasted_s, 1) if self.lasted_s else 0.0,
            "p50_ms": round(quantile(self.taken_s, 0.5) * 1e3, 2),
            "p99_ms": round(quantile(self.taken_s, 0.99) * 1e3, 2),
            "other": sum(self.other.values()),
        }


def request_of(url: str, path: str, body: object, headers: Mapping[str, str] | None = None) -> bytes:
    """Return a POST as bytes, to be sent again and again."""
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def offer(url: str, request: bytes, clients: int, seconds: float, status: int) -> Load:
    """Let this many clients send a request for a while, each on a connection that it keeps."""
    return asyncio.run(_offer(url, request, clients, seconds, status))


async def _offer(url: str, request: bytes, clients: int, seconds: float, status: int) -> Load:
    address = urlsplit(url)
    host, port = address.hostname, address.port
    assert host, url
    assert port, url
    loop = asyncio.get_running_loop()
    load = Load()
    made: list[_Client] = []
    for _ in range(clients):
        _, client = await loop.create_connection(
            lambda: _Client(request, status, load, loop.create_future()), host, port
        )
        made.append(client)
    began_s = time.perf_counter()
    for client in made:
        client.begin(began_s + seconds)
    _, silent = await asyncio.wait([client.done for client in made], timeout=seconds + PATIENCE_S)
    load.lasted_s = time.perf_counter() - began_s
    load.other[0] += len(silent)
    for client in made:
        client.close()
    return load


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes, status: int, load: Load, done: asyncio.Future[None]) -> None:
        self.done = done
        self._request = request
        self._status = status
        self._load = load
        self._until_s = 0.0
        self._sent_at_s = 0.0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def begin(self, until_s: float) -> None:
        self._until_s = until_s
        self._send()

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(_HEAD_END)
        if not found:
            return
        at = head.lower().index(_LENGTH) + len(_LENGTH)
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._buffer = b""
        now_s = time.perf_counter()
        status = int(head[9:12])
        if status == self._status:
            self._load.taken_s.append(now_s - self._sent_at_s)
        else:
            self._load.other[status] += 1
        if now_s < self._until_s:
            self._send()
        else:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self._load.other[0] += 1
            self._end()

    def _send(self) -> None:
        self._sent_at_s = time.perf_counter()
        self._transport.write(self._request)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
