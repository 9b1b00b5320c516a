"""What becomes of messages that shall not run, and of those whose run has failed for good.

Whoever waits for such a task in Celery's canvas must hear of it, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import (
    Ignore,
    MaxRetriesExceededError,
    Reject,
    Retry,
    TaskRevokedError,
    TimeLimitExceeded,
    WorkerLostError,
)

from inference_tasks.broker.embedded_server import is_embedded
from inference_tasks.dependencies import Waits
from inference_tasks.errors import DependencyFailedError, PermanentError, StateUnavailableError
from inference_tasks.retries import ENDING, EXHAUSTED
from inference_tasks.runs import CANCELLED
from inference_tasks.state.records import Finish, State, TaskError
from inference_tasks.worker import seam
from inference_tasks.worker.copies import RETRY_S, Mover, let_go
from inference_tasks.worker.dead import Death, Undertaker
from inference_tasks.worker.intake import Unfit
from inference_tasks.worker.parking import Parking

if TYPE_CHECKING:
    from celery import Celery

    from inference_routing.lane import QueueKey
    from inference_tasks.app import Inference
    from inference_tasks.state.records import Claim, TaskRecord
    from inference_tasks.worker.intake import Delivery, Intake
    from inference_tasks.worker.mailbox import Mailbox
    from inference_tasks.worker.slots import Ticket

__all__ = ["Endings"]

logger = logging.getLogger(__name__)

MOST_CHARS = 500
#: No worker could run these, whatever it is told.
NEVER_RUN = frozenset({"malformed", "undecodable", "content type refused"})
#: A message that its own task gives back waits this long, or it would come round as fast as the broker can.
REQUEUE_S = 1.0

_REASON_BY_ERROR = {
    WorkerLostError.__name__: "crash limit",
    DependencyFailedError.__name__: "dependency failed",
    PermanentError.__name__: "permanent error",
    TimeLimitExceeded.__name__: "time limit",
    Reject.__name__: "rejected by the task",
    MaxRetriesExceededError.__name__: EXHAUSTED,
}
_REPLACED = "Replaced by new task"  # mirrors celery.app.task.Task.on_replace


class Endings:
    """Decides what becomes of a message: dead letter, parked, or let go."""

    def __init__(
        self,
        inference: Inference,
        mailbox: Mailbox,
        later: Callable[[float, Callable[[], None]], None],
        *,
        worker: str,
    ) -> None:
        self._app = inference.celery_app
        self._store = inference.store
        self._mailbox = mailbox
        self._later = later
        self._worker = worker
        self._crash_limit = inference.settings.worker.max_crashes
        self._lease_s = inference.settings.state.lease_s
        # The embedded broker's delays are kept by workers: there a message that meets a claim may as well wait here.
        self._parks_held = not is_embedded(inference.settings.broker.url)
        self._mover = Mover(post=inference.publisher.post, on_main=mailbox.post, later=later)
        self._parking = Parking(
            self._mover,
            later=later,
            delay_prefix=inference.topology.delay_prefix,
            queue_by_lane=inference.queue_by_lane,
            waits=Waits(inference.settings, inference.queue_by_lane),
        )
        self._undertaker = Undertaker(
            self._mover,
            self._store,
            on_main=mailbox.post,
            later=later,
            namespace=inference.settings.namespace,
            dead_queue=inference.topology.dead.name,
            worker=worker,
        )

    # -- messages that do not run --------------------------------------------------------------------------------------

    def bury(self, message: Delivery, key: QueueKey, unfit: Unfit) -> None:
        """Move a message that cannot run to the dead letters, and mark its task as failed."""
        is_replayable = unfit.reason not in NEVER_RUN
        death = Death(unfit.reason, unfit.detail, unfit.id, unfit.name, is_replayable=is_replayable, is_failed=False)
        self._undertaker.bury(message, key, death)

    def unburied(self, message: Delivery, key: QueueKey, intake: Intake) -> None:
        """Move the message of a task that has failed to the dead letters: who failed it did not come to that.

        Raises:
            StateUnavailableError: its record cannot be read.
        """
        record = self._store.get_many((intake.id,))[0]
        if record is None or record.state != State.FAILED or record.dead is not None:
            let_go(message)
        else:
            self._bury_failed(message, key, intake, record)

    def crashed(self, message: Delivery, key: QueueKey, intake: Intake) -> None:
        """Move a message whose task has killed its process once too often; its error callbacks and its chord hear."""
        text = f"the process running it died {intake.crash_limit or self._crash_limit} times"
        try:
            record = self._store.get_many((intake.id,))[0]
        except StateUnavailableError:
            record = None
        if record is not None and not (record.error and record.error["type"] == WorkerLostError.__name__):
            # It had ended by itself: its process died after that.
            self.unburied(message, key, intake)
            return
        if record is not None:
            self._bury_failed(message, key, intake, record)
        else:
            error: TaskError = {"type": WorkerLostError.__name__, "message": text}
            self._undertaker.bury(message, key, Death("crash limit", text, intake.id, intake.name, error))
        context = _context(message)
        if context is not None:
            backend = _backend(self._app, message)
            backend.mark_as_failure(context.id, WorkerLostError(text), request=context, store_result=False)

    def _bury_failed(self, message: Delivery, key: QueueKey, intake: Intake, record: TaskRecord) -> None:
        error = record.error
        kind = error["type"] if error else ""
        reason = _REASON_BY_ERROR.get(kind) or self._reason_by_count(intake)
        counts = (record.attempts, record.failures, record.crashes)
        self._undertaker.bury(message, key, Death(reason, _said(error), intake.id, intake.name, error, *counts))

    def revoked(self, message: Delivery, why: str) -> None:
        """Let the chord of a task that was cancelled, or not started in time, count it."""
        context = _context(message)
        if context is not None and context.chord:
            backend = _backend(self._app, message)
            backend.mark_as_revoked(context.id, TaskRevokedError(why), request=context, store_result=False)

    def met_claim(self, message: Delivery, key: QueueKey, claim: Claim) -> bool:
        """Park a message whose task is held by a live claim; false where it is to wait in the worker."""
        if self._parks_held:
            self._parking.met_claim(message, key, claim.held_until_s, self._lease_s)
        return self._parks_held

    def too_early(self, message: Delivery, key: QueueKey, intake: Intake) -> bool:
        """Park a message that a plain client sent with a time to start at; false where it is due, or Celery waits."""
        wait_s = 0.0 if intake.eta_s is None else intake.eta_s - time.time()
        if wait_s > 0 and self._parks_held:
            self._parking.park(message, key, wait_s)
            return True
        if wait_s <= 0:
            # Celery would put it on its timer, past the shares. Since when it waits is still told from it.
            message.headers["inference_due"] = message.headers.get("eta")
            message.headers["eta"] = None
        return False

    def waits(self, message: Delivery, key: QueueKey) -> None:
        """Park a message whose task waits for others: nobody else would look at it again on the embedded broker."""
        self._parking.waits(message, key)

    # -- runs that end -------------------------------------------------------------------------------------------------

    def of_run(self, ticket: Ticket, info: object, *, is_stopping: bool) -> Callable[[], None] | None:
        """Say what is to be done with the message of a run that ended with an error, once Celery has noted the end.

        Called in whichever thread the pool reports in. None: Celery settles the message, by acknowledging it (a retry)
        or by returning it (its process died, and it may run again).
        """
        ticket.outcome = _outcome(info)
        if seam.is_lost_child(info):
            return None if is_stopping else self._of_crash(ticket)
        error = seam.error_of(info)
        if error is None or isinstance(error, Retry):
            return None
        if isinstance(error, Reject) and getattr(error, "requeue", False):
            return partial(self._mailbox.post, partial(self._requeue, ticket))
        if isinstance(error, Ignore):
            said = error.args[0] if error.args else None
            if said == CANCELLED:
                seam.tell_revoked(ticket.intake.id)
                return partial(self._mailbox.post, partial(let_go, ticket.message))
            is_replaced = said == _REPLACED
            return partial(self._mailbox.post, partial(self._ignored, ticket, is_replaced))
        return partial(self._undertaker.bury, ticket.message, ticket.key, self._death(ticket, error))

    def _death(self, ticket: Ticket, error: BaseException) -> Death:
        intake = ticket.intake
        # An error that cannot be pickled comes as a stand-in with its name.
        kind = str(getattr(error, "exc_cls_name", None) or type(error).__name__)
        told: TaskError = {"type": kind, "message": str(error)[:MOST_CHARS]}
        marked = getattr(error, ENDING, None)
        if isinstance(marked, str):
            reason = marked
        elif isinstance(error, PermanentError):
            reason = "permanent error"
        else:
            reason = _REASON_BY_ERROR.get(kind) or self._reason_by_count(intake)
        failures = intake.retries + 1
        attempts = ticket.message.headers.get("inference_attempt") or failures
        return Death(reason, _said(told), intake.id, intake.name, told, attempts, failures, max(0, attempts - failures))

    def _reason_by_count(self, intake: Intake) -> str:
        """For errors that say nothing of it themselves."""
        task = self._app.tasks.get(intake.name)
        limit = None if task is None else task.max_retries
        return EXHAUSTED if intake.retries and limit is not None and intake.retries >= limit else "error not retried"

    def _of_crash(self, ticket: Ticket) -> Callable[[], None] | None:
        """A pool process died with this task: the claim is given back, the crash counted."""
        if not ticket.token:
            return None
        intake = ticket.intake
        try:
            crash = self._store.crashed(intake.id, ticket.token, self._worker)
        except StateUnavailableError as exc:
            logger.warning("the crash of task %s counts when its lease ends: %s", intake.id, exc)
            return None
        logger.error("the process running task %s[%s] died (%d so far)", intake.name, intake.id, crash.crashes)
        return partial(self.crashed, ticket.message, ticket.key, intake) if crash.over else None

    def _requeue(self, ticket: Ticket) -> None:
        """The task gave its message back (``Reject(requeue=True)``): the run counts as an attempt, not as a failure."""
        self._give_claim_back(ticket)
        self._parking.park(ticket.message, ticket.key, REQUEUE_S)

    def _ignored(self, ticket: Ticket, is_replaced: bool) -> None:
        """The task wants no end recorded; or another one goes on under its id, and may be claimed from now on."""
        if is_replaced:
            self._give_claim_back(ticket)
            let_go(ticket.message)
            return
        intake = ticket.intake
        try:
            # Without a result: nobody waits for one that never comes.
            outcome = self._store.write(
                intake.id, ticket.token or None, intake.generation, State.SUCCESS, may_create=False
            )
            if outcome is Finish.ENDED:
                # It recorded an end of its own before.
                self.unburied(ticket.message, ticket.key, intake)
                return
        except StateUnavailableError as exc:
            logger.warning("task %s[%s] shows as processing for now: %s", intake.name, intake.id, exc)
            self._later(RETRY_S, partial(self._ignored, ticket, is_replaced))
            return
        let_go(ticket.message)

    def _give_claim_back(self, ticket: Ticket) -> None:
        try:
            self._store.release([(ticket.intake.id, ticket.token)] if ticket.token else [], has_started=True)
        except StateUnavailableError as exc:
            logger.warning("the claim of task %s ends by its lease, not at once: %s", ticket.intake.id, exc)

    # -- the end of the worker -----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether a message is on its way elsewhere."""
        return bool(self._mover.under_way) or self._undertaker.is_busy


def _outcome(info: object) -> str:
    """Return how a run that raised has ended, as the event ``task.ended`` has it."""
    error = seam.error_of(info)
    if seam.is_lost_child(info) or error is None:
        return "crashed"
    if isinstance(error, Retry):
        return "retried"
    if isinstance(error, Reject) and getattr(error, "requeue", False):
        return "returned"
    if isinstance(error, Ignore):
        return "cancelled" if error.args and error.args[0] == CANCELLED else "ignored"
    return "failed"


def _said(error: TaskError | None) -> str:
    return f"{error['type']}: {error['message']}"[:MOST_CHARS] if error else ""


def _backend(app: Celery, message: Delivery) -> Any:
    task = app.tasks.get(str(message.headers["task"]))
    return app.backend if task is None else task.backend


def _context(message: Delivery) -> Context | None:
    """The request as a run would see it; None where the message has nobody to tell."""
    payload = message.payload
    embed = payload[2] if isinstance(payload, list | tuple) and len(payload) == 3 else None
    if not isinstance(embed, Mapping) or not (embed.get("chord") or embed.get("errbacks")):
        return None
    args, kwargs, _ = payload
    return Context({**message.headers, **embed, "args": args, "kwargs": kwargs, "is_eager": False})
