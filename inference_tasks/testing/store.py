"""A task store in memory, with the behaviour of the real one and a clock that tests move by hand.

One contract suite runs on both, so what passes with this one passes with Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_tasks.errors import TaskNotFoundError
from inference_tasks.state.packing import clean, drain_rates, failure_document, summed_rates
from inference_tasks.state.records import (
    DEFAULT_CRASH_LIMIT,
    END_STATES,
    Claim,
    Claimant,
    Crash,
    Finish,
    Renewal,
    State,
    TaskError,
    TaskRecord,
    Verdict,
    WorkerBeat,
)
from inference_tasks.state.store import MAX_ERROR_CHARS
from inference_tasks.testing.admission import FakeAdmission
from inference_tasks.testing.ledger import Kept, anew, blank

__all__ = ["FakeTaskStore"]

_LOST = "WorkerLostError"


@dataclass
class FakeTaskStore(FakeAdmission):
    """A task store without Redis; see ``FakeLedger`` for what a test may set and read."""

    max_crashes: int = DEFAULT_CRASH_LIMIT
    _stale: int = 0

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def forget_everything(self) -> None:
        """Lose all, as Redis does by FLUSHALL."""
        kept = (self._kept, self._beats, self._noted, self._letters, self._leases, self._shared, self._switched)
        for lost in (*kept, self._operators, self._refusals):
            lost.clear()
        self._since_s = None
        self.results.clear()
        self._stale = 0
        # Some time passes before anybody asks again; a token of the same microsecond would not have grown.
        self.advance(0.000_002)

    def claim(self, claimants: Sequence[Claimant], worker: str, lease_s: float) -> list[Claim]:
        """As ``TaskStore.claim``."""
        self._reach()
        return [self._claim_one(claimant, worker, lease_s) for claimant in claimants]

    def _claim_one(self, claimant: Claimant, worker: str, lease_s: float) -> Claim:
        kept = self._kept.get(claimant.id)
        if kept is None:
            kept = self._keep(self._from_message(claimant))
            self._letters.pop(claimant.id, None) if claimant.generation else None
        record = kept.record

        def refuse(verdict: Verdict) -> Claim:
            held = verdict == Verdict.HELD
            found = kept.record
            return Claim(
                verdict,
                found.token or 0,
                found.attempts,
                found.held_until_s if held else None,
                found.tier_first,
                None,
                found.worker if held else None,
            )

        is_new_life = claimant.generation > record.generation
        if claimant.generation < record.generation:
            return refuse(Verdict.SUPERSEDED)
        if claimant.hop < record.hop and not is_new_life:
            return refuse(Verdict.SUPERSEDED)
        if record.state in END_STATES and not (is_new_life and record.state == State.FAILED):
            if record.state in (State.CANCELLED, State.EXPIRED):
                return refuse(Verdict(record.state))
            is_unburied = record.state == State.FAILED and record.dead is None
            return refuse(Verdict.UNBURIED if is_unburied else Verdict.FINISHED)
        if self._is_held(record):
            return refuse(Verdict.HELD)
        if record.waits_for and not is_new_life and claimant.hop == record.hop:
            return refuse(Verdict.WAITING)

        if is_new_life:
            if record.dead is not None:
                self._letters.pop(claimant.id, None)
            record = anew(record, claimant.generation, claimant.expires_at_s)
            self.results.pop(claimant.id, None)
        elif record.state == State.PROCESSING:
            record = replace(record, crashes=record.crashes + 1)
            if record.cancel_asked:
                kept.record = replace(record, hop=claimant.hop)
                self._end_cancelled(kept)
                return refuse(Verdict.CANCELLED)
            limit = self.max_crashes if claimant.crash_limit is None else claimant.crash_limit
            if record.crashes >= limit:
                self._fail_crashed(kept, replace(record, hop=claimant.hop))
                return refuse(Verdict.CRASHED)
        record = kept.record = replace(record, hop=claimant.hop, due_at_s=None, waits_for=())
        kept.message, kept.lift_to = "", ""
        if record.expires_at_s is not None and record.expires_at_s <= self.now_s:
            kept.record = replace(record, state=State.EXPIRED, finished_at_s=self.now_s, held_until_s=None)
            self._announce(claimant.id, "REVOKED", "celery.exceptions", "TaskRevokedError", "expired")
            self._tell(claimant.id, State.EXPIRED)
            return refuse(Verdict.EXPIRED)

        token = max((record.token or 0) + 1, round(self.now_s * 1_000_000))
        held_until_s = self.now_s + lease_s
        if claimant.crash_limit is not None:
            kept.crash_limit = claimant.crash_limit
        kept.record = replace(
            record,
            state=State.PROCESSING,
            token=token,
            attempts=record.attempts + 1,
            worker=worker,
            held_until_s=held_until_s,
            started_at_s=self.now_s,
            tier=claimant.tier,
            lane=claimant.lane,
        )
        wait_s = None
        if record.attempts == 0 and record.submitted_at_s is not None:
            wait_s = max(0.0, self.now_s - record.submitted_at_s)
        return Claim(Verdict.RUN, token, record.attempts + 1, held_until_s, record.tier_first, wait_s)

    def release(self, claims: Sequence[tuple[str, int]], *, has_started: bool = False) -> None:
        """As ``TaskStore.release``."""
        self._reach()
        for task_id, token in claims:
            kept = self._kept.get(task_id)
            if kept and kept.record.state == State.PROCESSING and kept.record.token == token:
                kept.record = replace(
                    kept.record,
                    state=State.PENDING,
                    attempts=kept.record.attempts - (0 if has_started else 1),
                    held_until_s=None,
                    worker=None,
                    started_at_s=None,
                )
                if kept.record.cancel_asked:
                    self._end_cancelled(kept)

    def crashed(self, task_id: str, token: int, worker: str) -> Crash:
        """As ``TaskStore.crashed``."""
        self._reach()
        kept = self._kept.get(task_id)
        if kept is None:
            return Crash(0, False)
        record = kept.record
        if record.state != State.PROCESSING or record.token != token:
            return Crash(record.crashes, record.is_finished)
        record = replace(record, crashes=record.crashes + 1)
        if record.cancel_asked:
            kept.record = record
            self._end_cancelled(kept)
            return Crash(record.crashes, True)
        if record.crashes >= (self.max_crashes if kept.crash_limit is None else kept.crash_limit):
            self._fail_crashed(kept, record)
            return Crash(record.crashes, True)
        kept.record = replace(record, state=State.PENDING, held_until_s=None, worker=None)
        return Crash(record.crashes, False)

    def renew(
        self,
        running: Sequence[tuple[str, int, Claimant | None]],
        worker: str,
        lease_s: float,
        heartbeat: WorkerBeat | None = None,
    ) -> Renewal:
        """As ``TaskStore.renew``."""
        self._reach()
        if heartbeat is not None:
            self._beats[worker] = (replace(heartbeat, seen_at_s=self.now_s), self.now_s + lease_s)
        lost: list[str] = []
        stopping: dict[str, bool] = {}
        for task_id, token, claimant in running:
            kept = self._kept.get(task_id)
            if kept and kept.record.state == State.PROCESSING and kept.record.token == token:
                kept.record = replace(kept.record, held_until_s=self.now_s + lease_s)
                if kept.record.cancel_asked:
                    stopping[task_id] = kept.record.cancel_asked == "terminate"
                continue
            if kept is None:
                claimant = claimant or Claimant(task_id, "", "", "")
                kept = self._keep(self._from_message(claimant), crash_limit=claimant.crash_limit)
            elif kept.record.is_finished or self._is_held(kept.record) or (kept.record.token or 0) >= token:
                lost.append(task_id)
                continue
            kept.record = replace(
                kept.record,
                state=State.PROCESSING,
                token=token,
                worker=worker,
                held_until_s=self.now_s + lease_s,
                started_at_s=self.now_s,
                attempts=max(1, kept.record.attempts),
                hop=max(kept.record.hop, claimant.hop if claimant else 0),
                due_at_s=None,
                waits_for=(),
            )
        return Renewal(lost, stopping, self.switches())

    def finish(
        self,
        task_id: str,
        token: int | None,
        generation: int | None,
        state: str | None,
        error: TaskError | None = None,
        meta: bytes | str | None = None,
        result_ttl_s: float | None = None,
        *,
        name: str = "",
        tier: str = "",
        may_create: bool = True,
        due_at_s: float | None = None,
    ) -> bool:
        """As ``TaskStore.finish``."""
        return self.write(
            task_id,
            token,
            generation,
            state,
            error,
            meta,
            result_ttl_s,
            name=name,
            tier=tier,
            may_create=may_create,
            due_at_s=due_at_s,
        ).is_done

    def write(
        self,
        task_id: str,
        token: int | None,
        generation: int | None,
        state: str | None,
        error: TaskError | None = None,
        meta: bytes | str | None = None,
        result_ttl_s: float | None = None,
        *,
        name: str = "",
        tier: str = "",
        may_create: bool = True,
        due_at_s: float | None = None,
    ) -> Finish:
        """As ``TaskStore.write``; lifetimes are not kept."""
        self._reach()
        kept = self._kept.get(task_id)
        if kept is not None:
            refused = self._refused(kept.record, token, generation, state)
            if refused is not None:
                self._stale += refused == Finish.STALE
                return refused
        elif state:
            if not may_create:
                return Finish.MISSING
            made = blank(task_id, name=name, tier=tier, tier_first=tier, lane="", generation=generation or 0)
            kept = self._keep(replace(made, attempts=0 if token is None else 1))
        if kept is not None and state == State.RETRYING and kept.record.cancel_asked:
            kept.record = replace(
                kept.record, token=token or kept.record.token, failures=kept.record.failures + (token is not None)
            )
            self._end_cancelled(kept)
            return Finish.WRITTEN
        if kept is not None and state:
            is_own = token is not None and kept.record.token == token
            is_failure = state in (State.FAILED, State.RETRYING)
            shown: TaskError | None = None
            if is_failure and error and error["type"]:
                shown = {
                    "type": clean(error["type"])[:MAX_ERROR_CHARS],
                    "message": clean(error["message"])[:MAX_ERROR_CHARS],
                }
            kept.record = replace(
                kept.record,
                state=state,
                token=kept.record.token if token is None else token,
                failures=kept.record.failures + (is_failure and token is not None),
                error=shown,
                finished_at_s=self.now_s if state in END_STATES else kept.record.finished_at_s,
                held_until_s=None,
                due_at_s=None,
                waits_for=(),
            )
            if state == State.RETRYING:
                kept.record = replace(
                    kept.record,
                    lane="aged" if kept.record.lane == "aged" else "returned",
                    ready_at_s=self.now_s if due_at_s is None else due_at_s,
                    due_at_s=due_at_s,
                    hop=kept.record.hop + (due_at_s is not None and is_own),
                )
        if meta:
            self.results[task_id] = meta
            self.announced.append(task_id)
        if state in END_STATES:
            self._tell(task_id, state)
        return Finish.WRITTEN

    def _refused(
        self, record: TaskRecord, token: int | None, generation: int | None, state: str | None
    ) -> Finish | None:
        known_token = record.token or 0
        if generation is not None and generation < record.generation:
            return Finish.STALE
        if token is not None and token < known_token:
            return Finish.STALE
        if record.is_finished:
            return Finish.REPEATED if token == known_token and record.state == state else Finish.ENDED
        if token is None:
            return Finish.HELD if state and self._is_held(record) else None
        if token == known_token and record.state == state:
            return Finish.REPEATED
        if token == known_token and record.state != State.PROCESSING:
            return Finish.STALE
        return None

    def get(self, task_id: str) -> TaskRecord:
        """As ``TaskStore.get``."""
        record = self.get_many((task_id,))[0]
        if record is None:
            raise TaskNotFoundError(task_id)
        return record

    def get_many(self, task_ids: Sequence[str]) -> list[TaskRecord | None]:
        """As ``TaskStore.get_many``."""
        self._reach()
        return [kept.record if (kept := self._kept.get(task_id)) else None for task_id in task_ids]

    def fail_unclaimed(self, task_id: str, *, name: str, tier: str, error_type: str, error: str) -> bool:
        """As ``TaskStore.fail_unclaimed``."""
        why: TaskError = {"type": error_type, "message": error}
        meta = failure_document(task_id, error_type, error)
        return self.finish(task_id, None, None, State.FAILED, why, meta, name=name, tier=tier)

    def leave(self, worker: str) -> None:
        """As ``TaskStore.leave``."""
        self._reach()
        self._beats.pop(worker, None)

    def rates(self) -> dict[str, float]:
        """As ``TaskStore.rates``."""
        return summed_rates(self.workers())

    def drain_rates(self) -> dict[str, float]:
        """As ``TaskStore.drain_rates``."""
        return drain_rates(self.workers())

    def stale_writes(self) -> int:
        """As ``TaskStore.stale_writes``."""
        self._reach()
        return self._stale

    def _fail_crashed(self, kept: Kept, record: TaskRecord) -> None:
        message = f"The worker process ended without a report, {record.crashes} times."
        kept.record = replace(
            record,
            state=State.FAILED,
            finished_at_s=self.now_s,
            held_until_s=None,
            error={"type": _LOST, "message": message},
        )
        self._announce(record.id, "FAILURE", "billiard.exceptions", _LOST, message)
        self._tell(record.id, State.FAILED)
