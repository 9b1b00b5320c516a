"""From a message that has arrived to one that may start: read, predicted, claimed; and back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from inference_tasks.errors import StateUnavailableError
from inference_tasks.observe.events import emit
from inference_tasks.worker.intake import Delivery, Intake, Unfit, read

if TYPE_CHECKING:
    from inference_routing.cost import CostModel
    from inference_routing.lane import QueueKey
    from inference_routing.picker import Pick, Picker
    from inference_tasks.state.records import Claim, Claimant
    from inference_tasks.worker.demand import Demand

__all__ = ["Claiming", "Claims", "Ends", "Held"]

logger = logging.getLogger(__name__)

#: A message that meets a live claim and is not parked goes back no sooner than this.
HELD_CLAIM_S = 1.0


class Claims(Protocol):
    """The part of the task store that is used here."""

    def claim(self, claimants: Sequence[Claimant], worker: str, lease_s: float) -> list[Claim]: ...
    def release(self, claims: Sequence[tuple[str, int]]) -> None: ...


class Ends(Protocol):
    """What becomes of messages that shall not run; see ``Endings``."""

    def bury(self, message: Delivery, key: QueueKey, unfit: Unfit) -> None: ...
    def crashed(self, message: Delivery, key: QueueKey, intake: Intake) -> None: ...
    def revoked(self, message: Delivery, why: str) -> None: ...
    def unburied(self, message: Delivery, key: QueueKey, intake: Intake) -> None: ...
    def met_claim(self, message: Delivery, key: QueueKey, claim: Claim) -> bool: ...
    def too_early(self, message: Delivery, key: QueueKey, intake: Intake) -> bool: ...
    def waits(self, message: Delivery, key: QueueKey) -> None: ...


@dataclass(slots=True, eq=False)
class Held:
    """A message inside the worker that has not started."""

    message: Delivery
    pick: Pick
    intake: Intake
    arrived_s: float
    predicted_s: float
    token: int = 0
    attempts: int = 0
    wait_s: float | None = None
    is_delayed: bool = False  # submitted to start later
    taken: bool = False
    is_ahead: bool = False  # no slot was free for it when it was claimed
    is_charged: bool = True  # its pick is open; no more once Celery keeps it for later

    @property
    def key(self) -> QueueKey:
        return self.pick.key


class Claiming:
    """Claims tasks for this worker before they start, many in one round trip."""

    def __init__(
        self,
        claims: Claims | None,
        *,
        picker: Picker,
        costs: CostModel,
        demand: Demand,
        tasks: Collection[str],
        ends: Ends,
        worker: str,
        lease_s: float,
        run_unclaimed: bool,
        is_inside: Callable[[str], bool],
        adopt: Callable[[Intake, int, Delivery], bool],
    ) -> None:
        self._claims = claims
        self._picker = picker
        self._costs = costs
        self._demand = demand
        self._tasks = tasks
        self._ends = ends
        self._worker = worker
        self._lease_s = lease_s
        self._run_unclaimed = run_unclaimed
        self._is_inside = is_inside
        self._adopt = adopt
        self._waiting: deque[tuple[float, Delivery]] = deque()
        # Tasks on which this worker may have a claim that it does not know of, since an answer was lost.
        self._in_doubt: set[str] = set()

    def admit(self, arrived: Sequence[tuple[Delivery, Pick]], now: float) -> list[Held]:
        """Return those of the messages that may start, in their order; the others are dealt with.

        Raises:
            StateUnavailableError: no claim can be had; the readable messages have gone back.
        """
        batch: list[Held] = []
        for message, pick in arrived:
            intake = read(message, pick.key, self._tasks)
            if isinstance(intake, Unfit):
                self._discard(pick)
                self._ends.bury(message, pick.key, intake)
                continue
            is_delayed = message.headers.get("eta") is not None
            if self._ends.too_early(message, pick.key, intake):
                self._discard(pick)
                continue
            predicted_s = self._costs.predict_s(intake.name, intake.tier)
            self._picker.predicted(pick, predicted_s)
            arrived_s = message.delivery_info.get("arrived_s", now)
            batch.append(Held(message, pick, intake, arrived_s, predicted_s, is_delayed=is_delayed))
        if not batch or self._claims is None:
            return batch
        try:
            claims = self._claims.claim([held.intake.claimant() for held in batch], self._worker, self._lease_s)
        except StateUnavailableError as exc:
            if self._run_unclaimed:
                logger.warning("running %d task(s) without a claim: %s", len(batch), exc)
                return batch
            for held in batch:
                self._in_doubt.add(held.intake.id)
                self._picker.refund(held.pick)
                self._demand.source.give_back(held.message)
            raise
        return [held for held, claim in zip(batch, claims, strict=True) if self._may_start(held, claim, now)]

    def _may_start(self, held: Held, claim: Claim, now: float) -> bool:
        is_in_doubt = held.intake.id in self._in_doubt
        self._in_doubt.discard(held.intake.id)
        emit("task.claimed", tier=held.intake.tier, verdict=str(claim.verdict))
        if claim.verdict == "run":
            held.token, held.attempts = claim.token, claim.attempts
            held.wait_s = None if held.is_delayed else claim.wait_s
            self._demand.kept()
            return True
        if claim.verdict == "held":
            self._picker.refund(held.pick)
            if claim.worker == self._worker and self._adopt(held.intake, claim.token, held.message):
                logger.info("task %s[%s] runs on: its message came back", held.intake.name, held.intake.id)
                return False
            if is_in_doubt and claim.worker == self._worker and not self._is_inside(held.intake.id):
                # The answer to an earlier claim of ours was lost: nothing runs under it. The name alone says nothing:
                # a worker of the same name may be running it, or have died of it.
                self.release([(held.intake.id, claim.token)])
            elif self._ends.met_claim(held.message, held.key, claim):
                return False
            self._waiting.append((now + HELD_CLAIM_S, held.message))
            return False
        self._discard(held.pick)
        if claim.verdict == "unburied":
            try:
                self._ends.unburied(held.message, held.key, held.intake)
            except StateUnavailableError as exc:
                logger.warning("the failed task %s is not among the dead letters yet: %s", held.intake.id, exc)
                self._waiting.append((now + HELD_CLAIM_S, held.message))
            return False
        if claim.verdict == "waiting":
            self._ends.waits(held.message, held.key)
            return False
        if claim.verdict == "crashed":
            self._ends.crashed(held.message, held.key, held.intake)
            return False
        logger.info("task %s[%s] need not run: %s", held.intake.name, held.intake.id, claim.verdict)
        if claim.verdict in ("expired", "cancelled"):
            self._ends.revoked(held.message, str(claim.verdict))
        held.message.ack()
        return False

    def _discard(self, pick: Pick) -> None:
        self._picker.refund(pick)
        self._demand.discarded(pick.key.tier)

    def give_back(self, helds: Sequence[Held]) -> None:
        """Return messages that have not started, with their claims."""
        self.forget(helds)
        for held in helds:
            self._demand.source.give_back(held.message)

    def forget(self, helds: Sequence[Held]) -> None:
        """Give back the claims of messages that the broker has already."""
        for held in helds:
            if held.is_charged:
                self._picker.refund(held.pick)
        self.release([(held.intake.id, held.token) for held in helds])

    def release(self, claims: Sequence[tuple[str, int]]) -> None:
        """Give back claims of tasks that have not started."""
        claims = [claim for claim in claims if claim[1]]
        if claims and self._claims is not None:
            try:
                self._claims.release(claims)
            except StateUnavailableError as exc:
                self._in_doubt.update(task_id for task_id, _ in claims)
                logger.warning("%d claim(s) of unstarted tasks end by their lease, not at once: %s", len(claims), exc)

    def return_waiting(self, now: float | None = None) -> None:
        """Return the messages that met a live claim, those that have waited long enough by ``now``, else all."""
        while self._waiting and (now is None or self._waiting[0][0] <= now):
            self._demand.source.give_back(self._waiting.popleft()[1])

    def forget_waiting(self) -> None:
        """The broker has them back already."""
        self._waiting.clear()
