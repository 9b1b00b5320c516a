"""The half of the fake task store that knows what waits, what is dead, and the counts of all.

The scripts keep counts and indices step by step; here they are worked out of the records when somebody asks, so that
the one checks the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from inference_routing.topology import queue_name
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.calling import DEFAULT_NAMESPACE
from inference_tasks.state.packing import clean, failure_document, full_counts
from inference_tasks.state.records import (
    Accounts,
    Backlog,
    Claimant,
    DeadKind,
    DeadLetter,
    Move,
    State,
    TaskRecord,
    Waiting,
)

__all__ = ["FakeLedger", "Kept", "blank", "rank"]


_TIERS = ("offline", "batch", "realtime")


def rank(tier: str) -> int:
    """The higher, the more urgent; below all tiers what is none."""
    return _TIERS.index(tier) if tier in _TIERS else -1


@dataclass
class Kept:
    """A record, and what the store knows beside it."""

    record: TaskRecord
    nonce: str | None = None
    crash_limit: int | None = None
    shared: tuple[str, ...] = ()
    is_confirmed: bool = False
    holders: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    held_generation: int = 0
    message: str = ""
    lift_to: str = ""


@dataclass
class FakeLedger:
    """Records in a dictionary, and what follows from them. Records never expire; ``now_s`` is the clock.

    ``is_away`` makes every call raise ``StateUnavailableError``. ``results`` holds Celery's result documents by id,
    ``announced`` their ids in the order in which they were published.
    """

    now_s: float = 1_000_000.0
    is_away: bool = False
    namespace: str = DEFAULT_NAMESPACE
    bounds: Mapping[str, int] = field(default_factory=dict)
    results: dict[str, bytes | str] = field(default_factory=dict)
    announced: list[str] = field(default_factory=list)
    _kept: dict[str, Kept] = field(default_factory=dict)
    _noted: dict[tuple[str, str], float] = field(default_factory=dict)
    _letters: dict[str, DeadLetter] = field(default_factory=dict)
    _leases: dict[str, tuple[str, float]] = field(default_factory=dict)
    _shared: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    _since_s: float | None = None
    _refusals: dict[str, dict[str, int]] = field(default_factory=dict)

    def accounts(self) -> Accounts:
        """As ``TaskStore.accounts``."""
        self._reach()
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for kept in self._kept.values():
            record = kept.record
            counts[record.tier_first].update(["admitted", record.state])
            if record.dead is not None:
                counts[record.tier_first].update([f"dead:{record.dead}"])
        by_tier = {tier: full_counts(found) for tier, found in sorted(counts.items())}
        refused = {tier: dict(counts) for tier, counts in self._refusals.items()}
        return Accounts(self._since_s, by_tier, dict(Counter(self._away())), refused)

    def _refuse(self, tier_first: str, reason: str) -> None:
        counts = self._refusals.setdefault(tier_first, {})
        counts[reason] = counts.get(reason, 0) + 1

    def oldest(self, queue: str, ready_before_s: float | None = None, limit: int = 100) -> list[Waiting]:
        """As ``TaskStore.oldest``."""
        self._reach()
        before_s = self.now_s if ready_before_s is None else ready_before_s
        index = self._index(queue)
        found = sorted((at_s, task_id) for task_id, at_s in index.items() if at_s <= before_s)
        return [Waiting(task_id, at_s) for at_s, task_id in found[:limit]]

    def waiting(self, queues: Sequence[str]) -> dict[str, Backlog]:
        """As ``TaskStore.waiting``."""
        self._reach()
        found = {queue: [at_s for at_s in self._index(queue).values() if at_s <= self.now_s] for queue in queues}
        return {queue: Backlog(len(times), min(times, default=None)) for queue, times in found.items()}

    def promoted(self, moves: Sequence[Move]) -> list[bool]:
        """As ``TaskStore.promoted``."""
        self._reach()
        return [self._promote(move) for move in moves]

    def _promote(self, move: Move) -> bool:
        kept = self._kept.get(move.id)
        if kept is None or kept.record.generation != move.generation:
            return False
        is_free = kept.record.state == State.WAITING and not kept.record.waits_for
        if not is_free and not self._is_due(kept.record):
            return False
        if kept.record.hop != move.hop - 1:
            return False
        place = {"tier": move.tier, "lane": move.lane, "ready_at_s": self.now_s, "due_at_s": None}
        if is_free:
            kept.nonce, kept.lift_to = None, ""
        before = kept.record
        kept.record = replace(before, state=State.PENDING, hop=move.hop, **place)  # type: ignore[arg-type]
        if move.because:
            self._mark_lift(kept, before.tier, move.tier, move.because)
        return True

    def _mark_lift(self, kept: Kept, tier_before: str, tier: str, because: str) -> None:
        first = kept.record.lifted_from or tier_before
        if first == tier:
            kept.record = replace(kept.record, lifted_from=None, lifted_by=None)
        else:
            by = kept.record.lifted_by if because == "-" else because
            kept.record = replace(kept.record, lifted_from=first, lifted_by=by, not_lifted=None)

    def note_ready(self, queue: str, tasks: Sequence[tuple[str, float]]) -> int:
        """As ``TaskStore.note_ready``."""
        self._reach()
        noted = 0
        for task_id, since_s in tasks:
            kept = self._kept.get(task_id)
            if kept is None:
                self._noted[queue, task_id] = since_s
            noted += kept is None or self._queue(kept.record) == queue
        return noted

    def forget_ready(self, queue: str, task_ids: Iterable[str]) -> int:
        """As ``TaskStore.forget_ready``."""
        self._reach()
        return sum(self._noted.pop((queue, task_id), None) is not None for task_id in task_ids)

    def dropped(self, gone: Sequence[tuple[str, int, int]], reason: str) -> int:
        """As ``TaskStore.dropped``."""
        self._reach()
        ended = 0
        for task_id, generation, hop in gone:
            kept = self._kept.get(task_id)
            if kept is None or not self._is_due(kept.record):
                continue
            if kept.record.generation != generation or kept.record.hop > hop:
                continue
            kept.record = replace(
                kept.record,
                state=State.DROPPED,
                finished_at_s=self.now_s,
                error={"type": "dropped", "message": clean(reason)},
                due_at_s=None,
            )
            self._announce(task_id, "REVOKED", "celery.exceptions", "TaskRevokedError", f"dropped: {reason}")
            ended += 1
        return ended

    def server_time_s(self) -> float:
        """As ``TaskStore.server_time_s``."""
        self._reach()
        return self.now_s

    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """As ``TaskStore.lease``."""
        self._reach()
        found = self._leases.get(name)
        if found is not None and found[0] != holder and found[1] > self.now_s:
            return False
        self._leases[name] = (holder, self.now_s + ttl_s)
        return True

    def unlease(self, name: str, holder: str) -> None:
        """As ``TaskStore.unlease``."""
        self._reach()
        if self._leases.get(name, ("", 0.0))[0] == holder:
            del self._leases[name]

    def bury(self, letters: Sequence[DeadLetter]) -> None:
        """As ``TaskStore.bury``."""
        self._reach()
        for letter in letters:
            known = self._letters.get(letter.id)
            if known is not None and known.generation > letter.generation:
                continue
            self._letters[letter.id] = letter
            kept = self._kept.get(letter.id)
            if kept and kept.record.state == State.FAILED and kept.record.generation == letter.generation:
                kind = DeadKind.REPLAYABLE if letter.is_replayable else DeadKind.UNFIT
                kept.record = replace(kept.record, dead=kind)

    def dead_letters(self, *, newest_first: bool = True, offset: int = 0, limit: int = 100) -> list[DeadLetter]:
        """As ``TaskStore.dead_letters``."""
        self._reach()
        found = sorted(self._letters.values(), key=lambda one: (one.dead_at_s, one.id), reverse=newest_first)
        return found[offset : offset + limit]

    def dead_letter(self, task_id: str) -> DeadLetter | None:
        """As ``TaskStore.dead_letter``."""
        self._reach()
        return self._letters.get(task_id)

    def dead_count(self) -> int:
        """As ``TaskStore.dead_count``."""
        self._reach()
        return len(self._letters)

    def replayed(self, task_id: str, generation: int) -> bool:
        """As ``TaskStore.replayed``."""
        self._reach()
        kept, letter = self._kept.get(task_id), self._letters.get(task_id)
        if kept is None:
            if letter is None:
                return True
            made = blank(task_id, name=letter.task, tier=letter.tier, tier_first=letter.tier_first, lane=letter.lane)
            kept = self._keep(replace(made, attempts=letter.attempts, submitted_at_s=letter.submitted_at_s))
        elif kept.record.state != State.FAILED or kept.record.generation >= generation:
            if kept.record.generation != generation:
                return False
            if letter is not None and letter.generation < generation:
                del self._letters[task_id]
            return True
        self._letters.pop(task_id, None)
        self.results.pop(task_id, None)
        kept.record = replace(
            anew(kept.record, generation), state=State.PENDING, hop=0, lane="returned", ready_at_s=self.now_s
        )
        return True

    def dead_dropped(self, task_ids: Iterable[str]) -> None:
        """As ``TaskStore.dead_dropped``."""
        self._reach()
        for task_id in task_ids:
            self._letters.pop(task_id, None)
            kept = self._kept.get(task_id)
            if kept is not None and kept.record.dead is not None:
                kept.record = replace(kept.record, dead=DeadKind.DROPPED)

    def _reach(self) -> None:
        if self.is_away:
            raise StateUnavailableError("the fake store is away")
        # A task that was noted without a record, and has one in that queue by now, is in the index once.
        for queue, task_id in [*self._noted]:
            kept = self._kept.get(task_id)
            if kept is not None and self._queue(kept.record) == queue:
                del self._noted[queue, task_id]

    def _keep(self, record: TaskRecord, *, nonce: str | None = None, crash_limit: int | None = None) -> Kept:
        if self._since_s is None:
            self._since_s = self.now_s
        kept = self._kept[record.id] = Kept(record, nonce, crash_limit)
        return kept

    def _from_message(self, claimant: Claimant) -> TaskRecord:
        if claimant.tier:
            self._noted.pop((queue_name(self.namespace, claimant.tier, claimant.lane), claimant.id), None)
        record = blank(
            claimant.id,
            name=claimant.name,
            tier=claimant.tier,
            tier_first=claimant.tier_first or claimant.tier,
            lane=claimant.lane,
            generation=claimant.generation,
            submitted_at_s=claimant.submitted_at_s,
            expires_at_s=claimant.expires_at_s,
        )
        since_s = min(self.now_s, claimant.submitted_at_s or self.now_s)
        return replace(record, ready_at_s=since_s, tenant=claimant.tenant or None)

    def _is_due(self, record: TaskRecord) -> bool:
        is_parked = record.state == State.RETRYING and (record.ready_at_s or 0.0) > self.now_s
        return record.state in (State.PENDING, State.RETRYING) and not is_parked

    def _queue(self, record: TaskRecord) -> str | None:
        """The queue in whose index the task is, if it is in one."""
        if record.state not in (State.PENDING, State.RETRYING) or not record.tier:
            return None
        return queue_name(self.namespace, record.tier, record.lane)

    def _index(self, queue: str) -> dict[str, float]:
        noted = {task_id: at_s for (where, task_id), at_s in self._noted.items() if where == queue}
        records = (kept.record for kept in self._kept.values())
        return noted | {record.id: record.ready_at_s or 0.0 for record in records if self._queue(record) == queue}

    def _away(self) -> list[str]:
        """The tier of each task that is parked or lies in ``returned``."""
        records = [kept.record for kept in self._kept.values()]
        return [
            record.tier
            for record in records
            if (self._queue(record) and (record.state == State.RETRYING or record.lane == "returned"))
            or (record.state == State.WAITING and record.tier)
        ]

    def _announce(self, task_id: str, status: str, module: str, error_type: str, message: str) -> None:
        self.results[task_id] = failure_document(task_id, error_type, message, status=status, module=module)
        self.announced.append(task_id)


def anew(record: TaskRecord, generation: int, expires_at_s: float | None = None) -> TaskRecord:
    """Return the record at the beginning of another life, with the deadline of that one."""
    return replace(
        record,
        generation=generation,
        failures=0,
        crashes=0,
        finished_at_s=None,
        expires_at_s=expires_at_s,
        error=None,
        dead=None,
        due_at_s=None,
        cancel_asked=None,
    )


def blank(
    task_id: str,
    *,
    name: str,
    tier: str,
    tier_first: str,
    lane: str,
    generation: int = 0,
    submitted_at_s: float | None = None,
    expires_at_s: float | None = None,
) -> TaskRecord:
    """Return the record of a task that nobody has started."""
    return TaskRecord(
        id=task_id,
        name=name,
        state=State.PENDING,
        tier=tier,
        tier_first=tier_first,
        lane=lane,
        generation=generation,
        attempts=0,
        failures=0,
        crashes=0,
        token=None,
        worker=None,
        submitted_at_s=submitted_at_s,
        started_at_s=None,
        finished_at_s=None,
        expires_at_s=expires_at_s,
        held_until_s=None,
        error=None,
    )
