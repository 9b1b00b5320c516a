"""The part of the fake task store with which tasks are cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_tasks.state.records import Cancellation, Run, State, TaskRecord
from inference_tasks.testing.depending import FakeDepending
from inference_tasks.testing.ledger import Kept, rank

__all__ = ["FakeCancelling"]


@dataclass
class FakeCancelling(FakeDepending):
    """Cancels, and tells runs of it."""

    def cancel(self, wishes: Sequence[tuple[str, str]], *, terminate: bool = False) -> list[Cancellation]:
        """As ``TaskStore.cancel``."""
        self._reach()
        return [self._cancel(task_id, nonce, terminate) for task_id, nonce in wishes]

    def _cancel(self, task_id: str, nonce: str, terminate: bool) -> Cancellation:
        kept = self._kept.get(task_id)
        if kept is None:
            return Cancellation.MISSING
        if kept.record.is_finished:
            return Cancellation.ENDED
        if nonce and self._is_held_by_others(kept, nonce):
            self._weigh(kept)
            return Cancellation.LEFT
        if self._is_held(kept.record):
            if kept.record.cancel_asked != "terminate":
                kept.record = replace(kept.record, cancel_asked="terminate" if terminate else "stop")
            return Cancellation.ASKED
        self._end_cancelled(kept)
        return Cancellation.CANCELLED

    def look(self, task_id: str, token: int) -> Run | None:
        """As ``TaskStore.look``."""
        self._reach()
        kept = self._kept.get(task_id)
        if kept is None:
            return None
        record = kept.record
        should_stop = record.cancel_asked is not None or record.is_finished or (record.token or 0) > token
        return Run(should_stop, None if record.expires_at_s is None else record.expires_at_s - self.now_s)

    def _is_held(self, record: TaskRecord) -> bool:
        is_live = record.held_until_s is not None and record.held_until_s > self.now_s
        return record.state == State.PROCESSING and is_live

    def _holders(self, kept: Kept) -> dict[str, tuple[str, float | None]]:
        """Tier and deadline of each holder, by nonce; nobody holds what has ended, or a life that nobody asked for."""
        if kept.record.is_finished or kept.held_generation != kept.record.generation:
            kept.holders.clear()
            kept.held_generation = kept.record.generation
        return kept.holders

    def _is_held_by_others(self, kept: Kept, nonce: str) -> bool:
        self._holders(kept).pop(nonce, None)
        return bool(kept.holders)

    def _weigh(self, kept: Kept) -> None:
        deadlines = [expires_at_s for _, expires_at_s in kept.holders.values()]
        known = [one for one in deadlines if one is not None]
        latest_s = max(known) if len(known) == len(deadlines) else None
        highest = max((tier for tier, _ in kept.holders.values()), key=rank)
        kept.record = replace(kept.record, expires_at_s=latest_s, tier_wanted=highest)

    def _end_cancelled(self, kept: Kept) -> None:
        kept.record = replace(
            kept.record,
            state=State.CANCELLED,
            finished_at_s=self.now_s,
            held_until_s=None,
            due_at_s=None,
            error=None,
            waits_for=(),
        )
        self._announce(kept.record.id, "REVOKED", "celery.exceptions", "TaskRevokedError", "cancelled")
        self._tell(kept.record.id, State.CANCELLED)
