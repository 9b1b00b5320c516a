"""Whether the tiers of a worker get their floors, seen from outside the picker that promises them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from inference_routing.tier import REALTIME

__all__ = ["WINDOW", "FloorWatch"]

WINDOW = 100
"""Starts of a window, or, where slot seconds are shared, the seconds that it has at least."""

#: A window of slot seconds is so much longer than what its floor may be off by, divided by the floor.
LENGTHS = 4


class TellsFloor(Protocol):
    """Is told of each window."""

    def __call__(self, tier: str, /, *, is_met: bool) -> None: ...


@dataclass(slots=True)
class _Window:
    floor: float
    total: float = 0.0
    own: float = 0.0
    longest: float = 0.0

    def begin(self) -> None:
        self.total = self.own = self.longest = 0.0


class FloorWatch:
    """Counts windows in which a tier had work at every start, and those of them in which it got less than its floor.

    Windows follow one another; one in which the tier's queues were found empty, or which held messages that did not
    run, is begun anew. Under ``count`` a window is 100 starts that the tier could have had. Under ``time`` it is at
    least 100 slot seconds, and long enough for what is running to make no difference: a floor holds up to that only.
    """

    def __init__(self, floors: Mapping[str, float], *, by_time: bool, tell: TellsFloor) -> None:
        self._windows = {tier: _Window(floor) for tier, floor in floors.items() if floor > 0}
        self._by_time = by_time
        self._tell = tell

    def started(self, tier: str, *, has_work: Callable[[str], bool], has_lower: bool) -> None:
        """A task starts.

        Args:
            tier: that serves it.
            has_work: whether a tier has something waiting, as far as the worker knows.
            has_lower: whether a slot was free that is not kept for realtime.
        """
        for name, window in self._windows.items():
            if not has_work(name) and name != tier:
                window.begin()
            elif not self._by_time and (has_lower or name == REALTIME):
                window.total += 1
                window.own += name == tier
                if window.total >= WINDOW:
                    self._tell(name, is_met=window.own >= int(window.floor * WINDOW))
                    window.begin()

    def ended(self, tier: str, cost_s: float, slots: int) -> None:
        """A slot is free again."""
        if not self._by_time:
            return
        for name, window in self._windows.items():
            window.total += cost_s
            window.longest = max(window.longest, cost_s)
            if name == tier:
                window.own += cost_s
            running_s = window.longest * max(1, slots)
            if window.total >= max(WINDOW, LENGTHS * running_s / window.floor):
                self._tell(name, is_met=window.own + running_s >= window.floor * window.total)
                window.begin()

    def interrupted(self, tier: str) -> None:
        """A tier has nothing waiting, or what it had did not need to run."""
        window = self._windows.get(tier)
        if window is not None:
            window.begin()
