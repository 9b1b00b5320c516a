"""Messages that wait for the publisher's loop to take them a step further."""

from __future__ import annotations

import asyncio
from collections import deque

from inference_tasks.broker.tickets import UNDER_WAY, Flight

__all__ = ["Waiting"]


class Waiting:
    """Messages waiting for one step; those of single calls go first.

    Attributes:
        wanted: set when there is something that must not wait for more.
    """

    def __init__(self) -> None:
        self._urgent: deque[Flight] = deque()
        self._bulk: deque[Flight] = deque()
        self.wanted = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._urgent or self._bulk)

    def put(self, flight: Flight) -> None:
        """Add a message; one that may linger waits for the next that may not."""
        ticket = flight.ticket
        (self._urgent if ticket.urgent else self._bulk).append(flight)
        if not ticket.may_linger:
            self.wanted.set()

    def take(self, limit: int, *, bulk: bool) -> list[Flight]:
        """Take up to ``limit`` messages that nobody has given up."""
        taken: list[Flight] = []
        for waiting in (self._urgent, self._bulk) if bulk else (self._urgent,):
            while waiting and len(taken) < limit:
                flight = waiting.popleft()
                if flight.stage in UNDER_WAY:
                    taken.append(flight)
        return taken
