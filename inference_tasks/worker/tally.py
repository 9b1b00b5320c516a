"""What a worker has done lately, for its heartbeat: starts and slot time, waits, ends, and floors that were not met."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from inference_tasks.observe.events import WAIT_BUCKETS_S, emit
from inference_tasks.signals import slot_freed, slot_taken

if TYPE_CHECKING:
    from inference_tasks.worker.slots import Ticket

__all__ = ["Tally"]

WINDOW_S = 60.0
BUCKET_S = 1.0

K = TypeVar("K")


@dataclass(slots=True)
class _Second:
    """What fell into one second. ``work``: {(tier served, first tier): [starts, slot seconds]}."""

    at_s: float
    work: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    waits: dict[tuple[str, int], int] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    violations: dict[str, int] = field(default_factory=dict)


class Tally:
    """Counts of the last minute, and the signals and events to whoever wants to see each start and end.

    Thread-safe for one writer and any readers.

    Shapes: ``{tier served: {original tier: number}}``; waits and ends by original tier alone.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._seconds: deque[_Second] = deque()
        self._since_s = clock()
        self._last_start_s: dict[str, float] = {}

    def started(self, ticket: Ticket) -> None:
        intake, second = ticket.intake, self._second()
        served, first = intake.tier, intake.tier_first
        second.work.setdefault((served, first), [0.0, 0.0])[0] += 1
        self._last_start_s[served] = second.at_s
        wait_s = ticket.wait_s
        if wait_s is not None:
            place = (first, bisect_left(WAIT_BUCKETS_S, wait_s))
            second.waits[place] = second.waits.get(place, 0) + 1
            if wait_s > second.longest.get(first, 0.0):
                second.longest[first] = wait_s
        emit(
            "task.started",
            task=intake.name,
            tier=served,
            tier_first=first,
            lane=intake.lane,
            wait_s=wait_s,
            held_s=ticket.held_s,
        )
        if slot_taken.receivers:
            slot_taken.send(sender=self, at_s=ticket.started_s, held_s=ticket.held_s, **_about(ticket))

    def finished(self, ticket: Ticket, cost_s: float) -> None:
        intake, second, outcome = ticket.intake, self._second(), ticket.outcome
        served, first = intake.tier, intake.tier_first
        second.work.setdefault((served, first), [0.0, 0.0])[1] += cost_s
        if outcome == "success" or outcome == "failed":
            second.ended[first] = second.ended.get(first, 0) + 1
            if outcome == "failed":
                second.failed[first] = second.failed.get(first, 0) + 1
        emit("task.ended", task=intake.name, tier=served, tier_first=first, outcome=outcome, slot_s=cost_s)
        if slot_freed.receivers:
            slot_freed.send(sender=self, at_s=ticket.started_s + cost_s, cost_s=cost_s, **_about(ticket))

    def floor(self, tier: str, *, is_met: bool) -> None:
        """A window has passed in which a tier had work all the time."""
        if not is_met:
            violations = self._second().violations
            violations[tier] = violations.get(tier, 0) + 1
        emit("floor.held", tier=tier, outcome="met" if is_met else "violated")

    def _second(self) -> _Second:
        now = self._clock()
        if not self._seconds or now - self._seconds[-1].at_s >= BUCKET_S:
            self._seconds.append(_Second(now))
            while self._seconds[0].at_s < now - WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]

    def _lately(self) -> list[_Second]:
        oldest = self._clock() - WINDOW_S
        return [second for second in list(self._seconds) if second.at_s >= oldest]

    def _sums(self, index: int) -> dict[str, dict[str, float]]:
        sums: dict[str, dict[str, float]] = {}
        for second in self._lately():
            for (served, first), cell in list(second.work.items()):
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

    def waits(self) -> dict[str, dict[int, int]]:
        """Waits from submit to first start: {first tier: {place in ``WAIT_BUCKETS_S``: number}}."""
        found: dict[str, dict[int, int]] = {}
        for (first, place), number in _added(second.waits for second in self._lately()).items():
            found.setdefault(first, {})[place] = number
        return found

    def longest_wait_s(self) -> dict[str, float]:
        longest: dict[str, float] = {}
        for second in self._lately():
            for first, wait_s in list(second.longest.items()):
                longest[first] = max(longest.get(first, 0.0), round(wait_s, 4))
        return longest

    def ended(self) -> dict[str, int]:
        """Tasks that succeeded, or failed for good, by first tier."""
        return _added(second.ended for second in self._lately())

    def failed(self) -> dict[str, int]:
        """Tasks that failed for good, by first tier."""
        return _added(second.failed for second in self._lately())

    def floor_violations(self) -> dict[str, int]:
        return _added(second.violations for second in self._lately())

    def last_start_at_s(self) -> dict[str, float]:
        """Unix seconds of the last start of each tier served, however long ago, to the second."""
        ahead_s = time.time() - self._clock()
        return {served: round(at_s + ahead_s, 1) for served, at_s in list(self._last_start_s.items())}


def _added(counts: Iterable[dict[K, int]]) -> dict[K, int]:
    total: dict[K, int] = {}
    for one in counts:
        for key, number in list(one.items()):
            total[key] = total.get(key, 0) + number
    return total


def _about(ticket: Ticket) -> dict[str, str]:
    intake = ticket.intake
    return {
        "task_id": intake.id,
        "name": intake.name,
        "tier": intake.tier,
        "tier_first": intake.tier_first,
        "lane": intake.lane,
    }
