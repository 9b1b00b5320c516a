"""What a worker has done lately, for its heartbeat: starts and slot time by tier served and by original tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from inference_tasks.signals import slot_freed, slot_taken

if TYPE_CHECKING:
    from inference_tasks.worker.slots import Ticket

__all__ = ["Tally"]

WINDOW_S = 60.0
BUCKET_S = 1.0


class Tally:
    """Counts of the last minute, and the signals to whoever wants to see each start and end.

    Thread-safe for one writer and any readers.

    Shapes: ``{tier served: {original tier: number}}``.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[float, dict[tuple[str, str], list[float]]]] = deque()
        self._since_s = clock()

    def started(self, ticket: Ticket) -> None:
        self._cell(ticket)[0] += 1
        if slot_taken.receivers:
            slot_taken.send(sender=self, at_s=ticket.started_s, held_s=ticket.held_s, **_about(ticket))

    def finished(self, ticket: Ticket, cost_s: float) -> None:
        self._cell(ticket)[1] += cost_s
        if slot_freed.receivers:
            slot_freed.send(sender=self, at_s=ticket.started_s + cost_s, cost_s=cost_s, **_about(ticket))

    def _cell(self, ticket: Ticket) -> list[float]:
        now = self._clock()
        if not self._buckets or now - self._buckets[-1][0] >= BUCKET_S:
            self._buckets.append((now, {}))
            while self._buckets[0][0] < now - WINDOW_S:
                self._buckets.popleft()
        return self._buckets[-1][1].setdefault((ticket.intake.tier, ticket.intake.tier_first), [0.0, 0.0])

    def _sums(self, index: int) -> dict[str, dict[str, float]]:
        oldest = self._clock() - WINDOW_S
        sums: dict[str, dict[str, float]] = {}
        for at_s, cells in list(self._buckets):
            if at_s < oldest:
                continue
            for (served, first), cell in list(cells.items()):
                row = sums.setdefault(served, {})
                row[first] = row.get(first, 0.0) + cell[index]
        return sums

    def starts(self) -> dict[str, dict[str, int]]:
        return {served: {first: int(n) for first, n in row.items()} for served, row in self._sums(0).items()}

    def slot_s(self) -> dict[str, dict[str, float]]:
        return {served: {first: round(s, 4) for first, s in row.items()} for served, row in self._sums(1).items()}

    def per_s(self) -> dict[str, float]:
        """Starts per second by tier served, over the last minute or since the worker began."""
        span = min(WINDOW_S, max(1.0, self._clock() - self._since_s))
        return {served: round(sum(row.values()) / span, 4) for served, row in self._sums(0).items()}


def _about(ticket: Ticket) -> dict[str, str]:
    intake = ticket.intake
    return {
        "task_id": intake.id,
        "name": intake.name,
        "tier": intake.tier,
        "tier_first": intake.tier_first,
        "lane": intake.lane,
    }
