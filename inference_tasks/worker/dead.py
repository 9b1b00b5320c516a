"""The way to the dead-letter queue: published with a confirm, noted in the index, then acknowledged."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from inference_tasks.errors import InferenceError
from inference_tasks.observe.events import emit
from inference_tasks.routes import HEADER
from inference_tasks.state.records import DeadLetter, TaskError
from inference_tasks.worker.copies import RETRY_S, Mover, as_text, copy_of, let_go, raw_body

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey
    from inference_tasks.worker.intake import Delivery

__all__ = ["Death", "Undertaker", "as_text", "raw_body"]

logger = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Death:
    """Why a message goes to the dead letters, and what is known of its task.

    Attributes:
        is_replayable: whether it could run, if it were tried again.
        is_failed: whether the record says already that the task has failed; else it is made to say so.
    """

    reason: str
    detail: str
    id: str | None
    name: str | None
    error: TaskError | None = None
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    is_replayable: bool = True
    is_failed: bool = True


class Graveyard(Protocol):
    """The part of the task store that is used here."""

    def bury(self, letters: list[DeadLetter]) -> None: ...
    def fail_unclaimed(self, task_id: str, *, name: str, tier: str, error_type: str, error: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class _Burial:
    message: Delivery
    death: Death
    letter: DeadLetter


class Undertaker:
    """Moves messages to the dead-letter queue, with the reason in a header, and notes them in the index.

    In this order: the copy is confirmed, the index written, the message acknowledged. A crash in between leaves the
    message; its next claim answers ``unburied`` or ``finished``. What is confirmed at about the same time is noted in
    one round trip.
    """

    def __init__(
        self,
        mover: Mover,
        store: Graveyard,
        *,
        on_main: Callable[[Callable[[], None]], None],
        later: Callable[[float, Callable[[], None]], None],
        namespace: str,
        dead_queue: str,
        worker: str,
    ) -> None:
        self._mover = mover
        self._store = store
        self._on_main = on_main
        self._later = later
        self._namespace = namespace
        self._dead_queue = dead_queue
        self._worker = worker
        self._confirmed: list[_Burial] = []

    @property
    def is_busy(self) -> bool:
        """Whether something confirmed is not noted yet."""
        return bool(self._confirmed)

    def bury(self, message: Delivery, key: QueueKey, death: Death) -> None:
        """Begin; may be called in any thread."""
        where = self._dead_queue
        logger.error("message %s of %s goes to %s: %s: %s", death.id, key.name, where, death.reason, death.detail)
        emit("task.buried", tier=key.tier, reason=death.reason)
        at_s = time.time()
        letter = _letter(message, key, death, at_s)
        said: dict[str, object] = {
            "reason": death.reason,
            "detail": death.detail,
            "queue": key.name,
            "tier": key.tier,
            "lane": key.lane,
            "worker": self._worker,
            "at_s": at_s,
            "attempts": death.attempts,
            "failures": death.failures,
            "crashes": death.crashes,
            "error": dict(death.error) if death.error else None,
        }
        copy = copy_of(message, self._namespace, where, {"inference_dead": said}, message_id=letter.message_id)
        self._mover.move(
            copy, then=partial(self._is_confirmed, _Burial(message, death, letter)), too_large=partial(_reject, message)
        )

    def _is_confirmed(self, burial: _Burial) -> None:
        self._confirmed.append(burial)
        if len(self._confirmed) == 1:
            # Behind what has been posted already: other confirms, most likely.
            self._on_main(self._note)

    def _note(self, pause_s: float = RETRY_S) -> None:
        burials = list(self._confirmed)
        try:
            for burial in burials:
                death = burial.death
                if not death.is_failed and death.id is not None:
                    self._store.fail_unclaimed(
                        death.id,
                        name=death.name or "",
                        tier=burial.letter.tier,
                        error_type=death.reason,
                        error=death.detail,
                    )
            self._store.bury([burial.letter for burial in burials])
        except InferenceError as exc:
            logger.warning("%d dead letter(s) are not in the index yet: %s", len(burials), exc)
            self._later(pause_s, partial(self._note, min(LONGEST_PAUSE_S, 2 * pause_s)))
            return
        # New ones may have come while the index was written only if this was called from within: there is one thread.
        self._confirmed.clear()
        for burial in burials:
            let_go(burial.message)


def _reject(message: Delivery) -> None:
    """The header makes the copy too large: the broker moves the message itself, with a reason of its own."""
    if not message.acknowledged:
        message.reject()


def _letter(message: Delivery, key: QueueKey, death: Death, at_s: float) -> DeadLetter:
    headers: object = message.headers
    ours = headers.get(HEADER) if isinstance(headers, dict) else None
    ours = ours if isinstance(ours, Mapping) else {}
    generation, submitted_at_s = ours.get("gen"), ours.get("submitted_at_s")
    message_id = uuid.uuid4().hex
    return DeadLetter(
        id=death.id if death.id is not None and death.name is not None else f"message:{message_id}",
        task=death.name or "",
        tier=key.tier,
        tier_first=as_text(ours.get("tier_first")) or key.tier,
        lane=key.lane,
        reason=death.reason,
        detail=death.detail,
        error=death.error,
        attempts=death.attempts,
        failures=death.failures,
        crashes=death.crashes,
        generation=generation if isinstance(generation, int) and 0 <= generation < 2**31 else 0,
        submitted_at_s=float(submitted_at_s) if isinstance(submitted_at_s, int | float) else None,
        dead_at_s=at_s,
        is_replayable=death.is_replayable,
        message_id=message_id,
    )
