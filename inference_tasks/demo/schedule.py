"""What is submitted when: the same on both sides, and more than one worker can do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from inference_routing.tier import BATCH, OFFLINE, REALTIME

__all__ = ["Arrival", "Schedule"]

# Of what the worker can do: realtime asks for much less than its weight, batch and offline for more than is left. That
# stays so if the worker turns out to be faster or slower than when it was measured.
OFFERED = {REALTIME: 0.2, BATCH: 0.65, OFFLINE: 0.4}
# Waiting at the start, in seconds of work for each second of the run.
BACKLOG = {BATCH: 0.10, OFFLINE: 0.05}
DELIVERY_S = 0.25


class Arrival(NamedTuple):
    """So many calls of one tier, due so long after the start."""

    offset_s: float
    tier: str
    calls: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The load of one run, in proportion to what the worker can do.

    Attributes:
        capacity_per_s: tasks that the worker was measured to finish in a second.
        run_s: length of the run.
    """

    capacity_per_s: float
    run_s: float

    @property
    def backlog(self) -> dict[str, int]:
        """{tier: calls that wait when the run starts}."""
        return {tier: round(part * self.run_s * self.capacity_per_s) for tier, part in BACKLOG.items()}

    @property
    def per_s(self) -> dict[str, float]:
        """{tier: calls per second}."""
        return {tier: part * self.capacity_per_s for tier, part in OFFERED.items()}

    def arrivals(self) -> list[Arrival]:
        """Return all of the run in order: realtime one by one, the others in deliveries; nobody waits for an answer."""
        start = [Arrival(0.0, tier, count) for tier, count in self.backlog.items()]
        return [*start, *sorted(itertools.chain(self._realtime(), self._deliveries(BATCH), self._deliveries(OFFLINE)))]

    def _realtime(self) -> Iterator[Arrival]:
        every_s = 1 / self.per_s[REALTIME]
        for index in range(int(self.run_s / every_s)):
            yield Arrival((index + 0.5) * every_s, REALTIME, 1)

    def _deliveries(self, tier: str) -> Iterator[Arrival]:
        sent = 0
        for index in range(1, int(self.run_s / DELIVERY_S)):
            due = round(self.per_s[tier] * index * DELIVERY_S)
            if due > sent:
                yield Arrival(index * DELIVERY_S, tier, due - sent)
            sent = due
