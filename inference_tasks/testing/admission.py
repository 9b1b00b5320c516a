"""The part of the fake task store that takes tasks in, refuses them, and joins equal ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inference_tasks.state.records import CONFLICT, LATE, PARKED, PAUSED, NewTask, ShareKey, State, SubmitAnswer
from inference_tasks.state.submits import brought_together, parted
from inference_tasks.testing.ledger import Kept, blank, rank
from inference_tasks.testing.scenes import FakeScenes

__all__ = ["FakeAdmission"]


@dataclass
class FakeAdmission(FakeScenes):
    """Takes tasks in, and back."""

    def submit(self, tasks: Sequence[NewTask]) -> list[SubmitAnswer]:
        """As ``TaskStore.submit``."""
        self._reach()
        by_script = parted(tasks)
        answers = {script: [self._submit(task) for task in found] for script, found in by_script.items()}
        return brought_together(tasks, answers)

    def _submit(self, task: NewTask) -> SubmitAnswer:
        blocked = self._blocked(task)
        if blocked is not None:
            return blocked
        answer: SubmitAnswer | None = None
        task_id, free = task.id, []
        for key in task.shared:
            known_id, known_print, until_s = self._shared.get(key.digest, ("", "", 0.0))
            found = self._kept.get(known_id) if until_s > self.now_s else None
            if found is None or not self._is_joinable(found, key):
                free.append(key)
            elif known_print != key.print:
                return SubmitAnswer(False, CONFLICT, shares=known_id)
            elif answer is None:
                task_id, answer = known_id, self._join(found, task)
        if answer is None:
            answer = self._admit(task, tuple(key.digest for key in free))
            if not answer.created:
                return answer
        for key in free:
            self._shared[key.digest] = (task_id, key.print, self.now_s + max(1, math.ceil(key.window_s)))
        return answer

    def _is_joinable(self, kept: Kept, key: ShareKey) -> bool:
        record = kept.record
        if record.is_finished:
            return record.state == State.SUCCESS and (record.finished_at_s or 0.0) + key.reuse_s > self.now_s
        return record.cancel_asked is None

    def _join(self, kept: Kept, task: NewTask) -> SubmitAnswer:
        record = kept.record
        if record.is_finished:
            return SubmitAnswer(False, record.state, shares=record.id)
        expires_at_s = self._by_own_clock(task.expires_at_s, task.submitted_at_s)
        self._holders(kept)[task.nonce] = (task.tier, expires_at_s)
        if record.expires_at_s is not None and (expires_at_s is None or expires_at_s > record.expires_at_s):
            record = replace(record, expires_at_s=expires_at_s)
        if rank(task.tier) > rank(record.tier_wanted or record.tier):
            record = replace(record, tier_wanted=task.tier)
        kept.record = record
        is_unsure = record.state == State.PENDING and not kept.is_confirmed and record.token is None
        lift = task.tier if rank(task.tier) > rank(record.tier) else ""
        return SubmitAnswer(False, record.state, shares=record.id, is_unsure=is_unsure, lift=lift)

    def _admit(self, task: NewTask, shared: tuple[str, ...]) -> SubmitAnswer:
        bound = self.bounds.get(task.tier)
        if task.may_be_refused:
            if self.switches().refusing(task.tier):
                self._refuse(task.tier_first, PAUSED)
                return SubmitAnswer(False, PAUSED)
            if bound is not None and self._away().count(task.tier) >= bound:
                self._refuse(task.tier_first, PARKED)
                return SubmitAnswer(False, PARKED)
            ahead = self._ahead(task.tier)
            if task.max_ahead is not None and ahead > task.max_ahead:
                self._refuse(task.tier_first, LATE)
                return SubmitAnswer(False, LATE, ahead=ahead)
        due_at_s = self._by_own_clock(task.due_at_s, task.submitted_at_s)
        expires_at_s = self._by_own_clock(task.expires_at_s, task.submitted_at_s)
        record = blank(
            task.id,
            name=task.name,
            tier=task.tier,
            tier_first=task.tier_first,
            lane="returned" if due_at_s is not None and task.lane == "fresh" else task.lane,
            generation=task.generation,
            submitted_at_s=self.now_s,
            expires_at_s=expires_at_s,
        )
        kept = self._keep(
            replace(
                record,
                hop=max(0, task.hop - 1),
                ready_at_s=self.now_s if due_at_s is None else due_at_s,
                due_at_s=due_at_s,
                tenant=task.tenant or None,
                tier_wanted=task.tier if task.shared else None,
            ),
            nonce=task.nonce,
        )
        if task.shared:
            kept.shared, kept.held_generation = shared, task.generation
            kept.holders[task.nonce] = (task.tier, expires_at_s)
        kept.message = task.message
        needs = self._open(task.depends_on)
        if needs:
            kept.record = replace(kept.record, state=State.WAITING, waits_for=needs)
        return SubmitAnswer(True, kept.record.state)

    def _ahead(self, tier: str) -> int:
        records = [kept.record for kept in self._kept.values()]
        waiting = [one for one in records if one.tier == tier and self._queue(one)]
        fresh = [one for one in waiting if one.lane == "fresh" and one.state != State.RETRYING]
        return len(fresh) + sum(one.lane == "returned" and (one.ready_at_s or 0.0) <= self.now_s for one in waiting)

    def _by_own_clock(self, at_s: float | None, submitted_at_s: float | None) -> float | None:
        return at_s if at_s is None or submitted_at_s is None else self.now_s + (at_s - submitted_at_s)

    def confirmed(self, task_ids: Iterable[str]) -> None:
        """As ``TaskStore.confirmed``."""
        self._reach()
        for task_id in task_ids:
            if task_id in self._kept:
                self._kept[task_id].is_confirmed = True

    def retract(self, task_ids: Iterable[str], nonce: str, refused: str = "") -> int:
        """As ``TaskStore.retract``."""
        self._reach()
        return sum(self._retract(task_id, nonce, refused) for task_id in dict.fromkeys(task_ids))

    def _retract(self, task_id: str, nonce: str, refused: str) -> bool:
        kept = self._kept.get(task_id)
        if kept is None:
            return False
        is_last = kept.nonce == nonce
        if kept.shared and not kept.record.is_finished:
            is_last = not self._is_held_by_others(kept, nonce)
            if not is_last:
                self._weigh(kept)
        if kept.record.state not in (State.PENDING, State.WAITING) or not is_last or kept.record.token is not None:
            return False
        del self._kept[task_id]
        if refused:
            self._refuse(kept.record.tier_first, refused)
        for digest in kept.shared:
            if self._shared.get(digest, ("",))[0] == task_id:
                del self._shared[digest]
        return True
