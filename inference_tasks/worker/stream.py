"""A small push window on one queue, while it is asked so often that single gets cannot keep up."""

from __future__ import annotations

from collections import deque
from math import ceil, exp
from typing import Any

__all__ = ["Stream"]

#: Seconds over which the rate of asking is averaged.
AVERAGE_S = 0.1
#: Fewer asks than this per hold and single gets are as good.
LEAST_ASKS = 3.0
#: Most messages on their way or in stock.
MAX_PREFETCH = 64
#: Part of ``hold_s`` that messages are meant to spend in the worker, those picked already among them.
FILLED_PART = 0.75
#: Messages of one queue that are not waiting but running.
RUNNING = 2


class Stream:
    """How often a queue is asked, the prefetch that this deserves, and what was pushed but not asked for yet.

    A get on a quorum queue is an entry in its log, a push is not: tasks of a millisecond cost the broker a third. Order
    and shares stay the picker's: a pushed message waits here until its queue is asked, and goes back after ``hold_s``
    like any other.
    """

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._count = 0.0
        self._asked_at_s = 0.0
        self.prefetch = 0
        self.tag: str | None = None
        self.stock: deque[Any] = deque()

    def asked(self, now: float) -> None:
        """The queue is asked for a message."""
        self._count = self._count * exp((self._asked_at_s - now) / AVERAGE_S) + 1
        self._asked_at_s = now

    def wanted_prefetch(self, now: float) -> int:
        """The prefetch for the present rate of asking; 0 for none. Small changes are not worth a new subscription."""
        per_hold = self._count * exp((self._asked_at_s - now) / AVERAGE_S) / AVERAGE_S * self._hold_s
        if per_hold < (LEAST_ASKS / 2 if self.prefetch else LEAST_ASKS):
            return 0
        wanted = min(MAX_PREFETCH, ceil(per_hold * FILLED_PART) + RUNNING)
        return self.prefetch if wanted / 2 < self.prefetch < wanted * 2 else wanted

    def is_stale(self, now: float) -> bool:
        """Whether something has lain in the stock longer than allowed."""
        return bool(self.stock) and now - self.stock[0].delivery_info["arrived_s"] > self._hold_s
