"""Metrics over HTTP, beside what a health check asks for."""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from inference_tasks.errors import DeploymentError

__all__ = ["Address", "MetricsServer", "parse_address"]

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
#: A scraper that is slower than this to ask, or to take the answer, is let go.
CLIENT_S = 10.0

_servers: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


class Address(NamedTuple):
    """Where to listen; port 0 takes any free one."""

    host: str
    port: int

    def after(self, places: int) -> Address:
        """Return the address so many ports further; any free port stays that."""
        return Address(self.host, self.port + places if self.port else 0)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``PORT`` or ``HOST:PORT``; without a host it is the loopback address.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected PORT or HOST:PORT, such as 9108 or 0.0.0.0:9108, found {text!r}")
    return Address(host.strip("[]") or LOOPBACK, int(port))


class MetricsServer:
    """Answers ``/metrics`` and ``/healthz`` from threads of its own until it is closed.

    A process that is forked off does not keep the port.
    """

    def __init__(self, address: Address, collector: Collector, health: Callable[[], str | None]) -> None:
        """Take the port; nothing is answered before ``start``.

        Args:
            address: where to listen.
            collector: what ``/metrics`` tells.
            health: what is wrong, None if nothing is.

        Raises:
            DeploymentError: the port cannot be had.
        """
        handler = type("Handler", (_Handler,), {"collector": collector, "health": staticmethod(health)})
        try:
            self._server = (_Server6 if ":" in address.host else _Server)(address, handler)
        except OSError as exc:
            raise DeploymentError(
                f"Metrics cannot be served on {address}: {exc.strerror or exc}. Choose another --metrics-port."
            ) from exc
        self.address = Address(address.host, self._server.server_address[1])
        _servers.add(self)

    def start(self) -> Self:
        """Begin to answer."""
        threading.Thread(target=self._server.serve_forever, name="inference-metrics", daemon=True).start()
        return self

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()

    def let_go(self) -> None:
        """In a forked process: close the copy of the socket, leave the parent's alone."""
        self._server.socket.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A port in use must be an error, but one that has just been left must not.
    allow_reuse_address = True
    allow_reuse_port = False


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_S
    collector: Collector
    health: Callable[[], str | None]

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                try:
                    body = encode(self.collector)
                except Exception:
                    log.exception("metrics could not be told")
                    self._answer(500, b"metrics could not be told; the log says why\n")
                    return
                self._answer(200, body, content_type)
            case "/healthz":
                wrong = self.health()
                self._answer(503 if wrong else 200, f"{wrong or 'ok'}\n".encode())
            case _:
                self._answer(404, b"here are /metrics and /healthz\n")

    def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a line for each scrape tells nobody anything."""


def _let_go_all() -> None:
    for server in list(_servers):
        server.let_go()


os.register_at_fork(after_in_child=_let_go_all)
