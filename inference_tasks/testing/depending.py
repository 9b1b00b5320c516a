"""The part of the fake task store that knows which tasks wait for which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from inference_tasks.state.records import (
    DEPENDENCY_CYCLE,
    DEPENDENCY_FAILED,
    DEPENDENCY_UNKNOWN,
    Freed,
    Lift,
    NewTask,
    State,
    SubmitAnswer,
    TaskRecord,
    Visit,
    Visitor,
)
from inference_tasks.testing.ledger import FakeLedger, Kept, rank

__all__ = ["FakeDepending"]


@dataclass
class FakeDepending(FakeLedger):
    """Frees and fails those that wait; who waits for whom is worked out of the records."""

    on_freed: Callable[[Sequence[Freed]], None] | None = None

    def visited(self, visitors: Sequence[Visitor]) -> list[Visit]:
        """As ``TaskStore.visited``."""
        self._reach()
        return [self._visit(visitor) for visitor in visitors]

    def _visit(self, visitor: Visitor) -> Visit:
        claimant = visitor.claimant
        kept = self._kept.get(claimant.id)
        if kept is None:
            made = replace(
                self._from_message(claimant),
                state=State.WAITING,
                lane="returned",
                hop=claimant.hop,
                ready_at_s=self.now_s,
                waits_for=tuple(sorted(set(visitor.needs))),
            )
            kept = self._keep(made, crash_limit=claimant.crash_limit)
            kept.message = visitor.message
        record = kept.record
        if record.generation != claimant.generation or claimant.hop < record.hop:
            return Visit("over")
        if record.state == State.FAILED and record.dead is None:
            return Visit("unburied")
        if record.state != State.WAITING:
            return Visit("over")
        for need in record.waits_for:
            found = self._kept.get(need)
            if found is not None and found.record.is_finished and found.record.state != State.SUCCESS:
                self._fail_dependent(kept, need, found.record.state)
                return Visit("unburied")
        open_needs = self._open(record.waits_for)
        kept.record = record = replace(record, waits_for=open_needs)
        if record.expires_at_s is not None and record.expires_at_s <= self.now_s:
            kept.record = replace(record, state=State.EXPIRED, finished_at_s=self.now_s, waits_for=())
            self._announce(record.id, "REVOKED", "celery.exceptions", "TaskRevokedError", "expired")
            self._tell(record.id, State.EXPIRED)
            return Visit("over")
        if not open_needs:
            return Visit("free", tier=kept.lift_to or record.tier)
        noted = {task_id for _, task_id in self._noted}
        return Visit("wait", open_needs, tuple(one for one in open_needs if one not in self._kept and one not in noted))

    def to_lift(self, wishes: Sequence[tuple[str, str, str]]) -> list[Lift]:
        """As ``TaskStore.to_lift``."""
        self._reach()
        found: dict[str, Lift] = {}
        left = list(wishes)
        for task_id, tier, because in left:
            kept = self._kept.get(task_id)
            if kept is None or kept.record.is_finished or rank(kept.lift_to or kept.record.tier) >= rank(tier):
                continue
            record = kept.record
            if record.state == State.WAITING:
                kept.lift_to = tier
                self._mark_lift(kept, record.tier, tier, because)
                # The list grows while it is read.
                left += [(need, tier, because) for need in record.waits_for]
            elif record.state == State.PENDING and kept.message:
                if task_id not in found or rank(tier) > rank(found[task_id].tier):
                    found[task_id] = Lift(record.id, record.generation, record.hop, tier, because, kept.message)
            elif record.state == State.PENDING:
                kept.record = replace(record, not_lifted="its message is not kept (state.lift_body_bytes)")
            elif record.state == State.RETRYING:
                kept.record = replace(record, not_lifted="it is parked until it is tried again")
        return list(found.values())

    def to_lower(self) -> list[Lift]:
        """As ``TaskStore.to_lower``."""
        self._reach()
        found = []
        for kept in self._kept.values():
            record = kept.record
            if record.lifted_from is None or record.state not in (State.PENDING, State.WAITING):
                continue
            tier = max(self._needed(record), record.lifted_from, key=rank)
            if rank(tier) >= rank(kept.lift_to or record.tier):
                continue
            if record.state == State.WAITING:
                kept.lift_to = "" if tier == record.tier else tier
                self._mark_lift(kept, record.tier, tier, "-")
            elif kept.message:
                found.append(Lift(record.id, record.generation, record.hop, tier, "-", kept.message))
        return found

    def _needed(self, record: TaskRecord) -> str:
        waiting = [one for one in self._kept.values() if record.id in one.record.waits_for]
        tiers = [one.lift_to or one.record.tier for one in waiting]
        return max([*tiers, record.tier_wanted or ""], key=rank)

    def _open(self, needs: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            need
            for need in sorted(set(needs))
            if not ((kept := self._kept.get(need)) and kept.record.state == State.SUCCESS)
        )

    def _blocked(self, task: NewTask) -> SubmitAnswer | None:
        """Why a task cannot wait for what it needs."""
        for need in task.depends_on:
            if need == task.id or self._leads_to(need, task.id):
                return SubmitAnswer(False, DEPENDENCY_CYCLE, dependency=need)
        if task.id in self._kept:
            return SubmitAnswer(False, self._kept[task.id].record.state)
        for need in task.depends_on:
            kept = self._kept.get(need)
            if kept is None:
                return SubmitAnswer(False, DEPENDENCY_UNKNOWN, dependency=need)
            if kept.record.is_finished and kept.record.state != State.SUCCESS:
                state = kept.record.state
                return SubmitAnswer(False, DEPENDENCY_FAILED, dependency=need, dependency_state=state)
        return None

    def _leads_to(self, start: str, task_id: str) -> bool:
        unseen, seen = [start], {start}
        while unseen:
            kept = self._kept.get(unseen.pop())
            for need in kept.record.waits_for if kept else ():
                if need == task_id:
                    return True
                if need not in seen:
                    seen.add(need)
                    unseen.append(need)
        return False

    def _tell(self, task_id: str, state: str) -> None:
        """Tell those who wait for a task how it has ended."""
        freed: list[Freed] = []
        for kept in list(self._kept.values()):
            record = kept.record
            if record.state != State.WAITING or task_id not in record.waits_for:
                continue
            if state != State.SUCCESS:
                self._fail_dependent(kept, task_id, state)
                continue
            kept.record = replace(record, waits_for=tuple(need for need in record.waits_for if need != task_id))
            if not kept.record.waits_for and kept.message:
                freed.append(Freed(record.id, record.generation, record.hop, kept.lift_to or record.tier, kept.message))
        if freed and self.on_freed is not None:
            self.on_freed(freed)

    def _fail_dependent(self, kept: Kept, cause: str, state: str) -> None:
        message = f"It needed task {cause}, which ended as {state}."
        kept.record = replace(
            kept.record,
            state=State.FAILED,
            finished_at_s=self.now_s,
            error={"type": "DependencyFailedError", "message": message},
            waits_for=(),
        )
        self._announce(kept.record.id, "FAILURE", "inference_tasks.errors", "DependencyFailedError", message)
        self._tell(kept.record.id, State.FAILED)

    def dropped(self, gone: Sequence[tuple[str, int, int]], reason: str) -> int:
        """As ``TaskStore.dropped``."""
        ended = 0
        for one in gone:
            if super().dropped([one], reason):
                ended += 1
                self._tell(one[0], State.DROPPED)
        return ended
