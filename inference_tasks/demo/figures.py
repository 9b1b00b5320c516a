"""What was measured of one side: starts, waits, shares, and what the files turned out to be."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from inference_routing.tier import TIER_NAMES
from inference_tasks.demo.recording import Run, Slot

__all__ = ["Figures", "TierFigures", "due_shares", "quantile"]


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier of one side.

    Attributes:
        submitted: calls that were sent, the refused ones included.
        waiting: neither started nor refused.
        share: of the slot time that all tiers got, 0 to 1; None if nothing ran.
        promised: while all tiers have work, 0 to 1.
        share_due: what the weights give the tier at this load, see ``due_shares``; None if nothing ran.
        wait_p50_s, wait_p99_s: from the moment a call was due to the start of its task. One that has not started counts
            with its wait so far, so that a queue that never comes to it does not look fast.
    """

    submitted: int
    refused: int
    waiting: int
    started: int
    promised: float
    share: float | None
    share_due: float | None
    wait_p50_s: float | None
    wait_p99_s: float | None


@dataclass
class Figures:
    """Collects what one side submitted and what its worker recorded. Submits may come from another thread."""

    promised: Mapping[str, float]
    content_types: Counter[str] = field(default_factory=Counter)
    _due_at_s: dict[int, tuple[str, float]] = field(default_factory=dict)
    _submitted: Counter[str] = field(default_factory=Counter)
    _refused: Counter[str] = field(default_factory=Counter)
    _waits_s: dict[str, list[float]] = field(default_factory=lambda: {tier: [] for tier in TIER_NAMES})
    _run_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _slot_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submitted(self, numbers: Iterable[int], tier: str, due_at_s: float) -> None:
        """Note calls, before they are sent."""
        with self._lock:
            for number in numbers:
                self._due_at_s[number] = (tier, due_at_s)
                self._submitted[tier] += 1

    def refused(self, numbers: Iterable[int]) -> None:
        """Note calls that were not accepted."""
        with self._lock:
            for number in numbers:
                tier, _ = self._due_at_s.pop(number)
                self._refused[tier] += 1

    def add(self, rows: Iterable[Run | Slot], until_s: float = math.inf) -> None:
        """Take in what the worker recorded; runs of other calls, or started later than ``until_s``, do not count."""
        with self._lock:
            for row in rows:
                if isinstance(row, Slot):
                    self._slot_s[row.tier] += row.cost_s
                elif row.started_at_s <= until_s and (known := self._due_at_s.pop(row.number, None)) is not None:
                    tier, due_at_s = known
                    self._waits_s[tier].append(max(0.0, row.started_at_s - due_at_s))
                    self._run_s[tier] += row.ended_at_s - row.started_at_s
                    self.content_types[row.label] += 1

    @property
    def started(self) -> int:
        """Tasks of all tiers that have run."""
        return sum(map(len, self._waits_s.values()))

    def tiers(self, now_s: float) -> dict[str, TierFigures]:
        """Return the figures by tier."""
        with self._lock:
            waiting = Counter(tier for tier, _ in self._due_at_s.values())
            waits = {tier: sorted(self._waits_s[tier]) for tier in TIER_NAMES}
            for tier, due_at_s in self._due_at_s.values():
                waits[tier].append(max(0.0, now_s - due_at_s))
            used_s = dict(self._slot_s or self._run_s)
        total_s = sum(used_s.values())
        due = due_shares(self.promised, self._wanted(used_s, total_s)) if total_s else {}
        return {
            tier: TierFigures(
                submitted=self._submitted[tier],
                refused=self._refused[tier],
                waiting=waiting[tier],
                started=len(self._waits_s[tier]),
                promised=self.promised[tier],
                share=used_s.get(tier, 0.0) / total_s if total_s else None,
                share_due=due.get(tier),
                wait_p50_s=quantile(waits[tier], 0.5),
                wait_p99_s=quantile(waits[tier], 0.99),
            )
            for tier in TIER_NAMES
        }

    def _wanted(self, used_s: Mapping[str, float], total_s: float) -> dict[str, float]:
        """Return what each tier has asked for so far, in shares of the slot time that there was."""
        mean_s = total_s / max(1, self.started)
        wanted = {}
        for tier in TIER_NAMES:
            started = len(self._waits_s[tier])
            each_s = used_s.get(tier, 0.0) / started if started else mean_s
            wanted[tier] = (self._submitted[tier] - self._refused[tier]) * each_s / total_s
        return wanted


def due_shares(promised: Mapping[str, float], wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the share that is due to each tier: all it wants, at most its weight's part of what the others leave.

    Args:
        promised: {tier: share while all have work}.
        wanted: {tier: what it has asked for}, in the same unit; the sum may be above 1.
    """
    due: dict[str, float] = {}
    while len(due) < len(promised):
        left = 1.0 - sum(due.values())
        weights = {tier: share for tier, share in promised.items() if tier not in due}
        fair = {tier: left * share / sum(weights.values()) for tier, share in weights.items()}
        content = {tier: wanted.get(tier, 0.0) for tier in fair if wanted.get(tier, 0.0) <= fair[tier]}
        due |= content or fair
    return due


def quantile(values: Iterable[float], ratio: float) -> float | None:
    """Return the smallest value that at least ``ratio`` of all do not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)] if ordered else None
