"""The gateway as a process of its own."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import NoReturn

import uvicorn

from inference_tasks.gateway.app import gateway_app
from inference_tasks.gateway.service import Gateway

__all__ = ["serve"]

GRACE_S = 10
BACKLOG = 4096


class _Server(uvicorn.Server):
    """Lets those who wait go before it waits for them to go."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, tell: Callable[[str], object]) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._tell = tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for server in self.servers:
            for line in server.sockets:
                host, port = line.getsockname()[:2]
                self._tell(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.end_waits()
        await super().shutdown(sockets=sockets)


def serve(gateway: Gateway, host: str, port: int, *, tell: Callable[[str], object]) -> None:
    """Serve until a signal ends it: SIGTERM or SIGINT answers who waits, then ends.

    Args:
        tell: is told where it listens.
    """
    config = uvicorn.Config(
        gateway_app(gateway),
        host=host,
        port=port,
        backlog=BACKLOG,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    # uvicorn raises the signal that ended it once more at its end, for the handler that was there before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    _Server(config, gateway, tell).run()


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)
