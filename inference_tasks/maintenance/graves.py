"""To the dead letters with what has waited for as long as records live."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inference_routing.lane import QueueKey
from inference_tasks.broker.messages import Accepted
from inference_tasks.maintenance.copies import Told, buried
from inference_tasks.maintenance.pull import Taken
from inference_tasks.state.records import DeadLetter, TaskError

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["REASON", "Grave", "Graves"]

log = logging.getLogger(__name__)

REASON = "waited too long"


@dataclass(frozen=True, slots=True)
class Grave:
    """A message that goes to the dead letters, where it was, and why.

    Attributes:
        error: of its task.
        is_failed: whether the record says already that the task has failed.
    """

    message: Taken
    known: Told
    place: QueueKey
    reason: str
    error: TaskError
    is_failed: bool = False


class Graves:
    """Ends tasks as failed and their messages as dead letters, which can be replayed."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._place = {queue: QueueKey(tier, lane, queue) for (tier, lane), queue in inference.queue_by_lane.items()}

    def bury(self, hopeless: Sequence[tuple[Taken, Told]]) -> list[Taken]:
        """Bury what has waited for as long as records live; see ``lay``."""
        days = self._inference.settings.state.unfinished_ttl_s / 86400
        error: TaskError = {
            "type": REASON,
            "message": f"it did not start within {days:g} days (state.unfinished_ttl_s)",
        }
        return self.lay(
            [Grave(message, known, self._place[message.queue], REASON, error) for message, known in hopeless]
        )

    def lay(self, graves: Sequence[Grave]) -> list[Taken]:
        """Return those whose letter lies among the dead by now: they may be acknowledged.

        First the record fails, then the letter is confirmed, then it is listed: a crash in between leaves a failed task
        whose message is still in its queue, and whoever takes it next buries it.
        """
        store, settings = self._inference.store, self._inference.settings
        at_s = time.time()
        letters, copies = [], []
        for grave in graves:
            message, known, place, error = grave.message, grave.known, grave.place, grave.error
            detail = error["message"]
            if not grave.is_failed:
                kind = error["type"]
                store.fail_unclaimed(known.id, name=known.name, tier=place.tier, error_type=kind, error=detail)
            letters.append(
                DeadLetter(
                    id=known.id,
                    task=known.name,
                    tier=place.tier,
                    tier_first=known.tier_first or place.tier,
                    lane=place.lane,
                    reason=grave.reason,
                    detail=detail,
                    error=error,
                    attempts=0,
                    failures=0,
                    crashes=0,
                    generation=known.generation,
                    submitted_at_s=known.submitted_at_s,
                    dead_at_s=at_s,
                    is_replayable=True,
                    message_id=None,
                )
            )
            dead = {
                "reason": grave.reason,
                "detail": detail,
                "queue": place.name,
                "tier": place.tier,
                "lane": place.lane,
                "worker": f"maintenance@{socket.gethostname()}",
                "at_s": at_s,
                "error": dict(error),
            }
            copies.append(buried(message, dead, exchange=settings.namespace, queue=self._inference.topology.dead.name))
        outcomes = self._inference.publisher.send_many(copies)
        confirmed = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Accepted)]
        store.bury([letters[index] for index in confirmed])
        for index in confirmed:
            log.error("task %s goes to the dead letters: %s", letters[index].id, letters[index].detail)
        return [graves[index].message for index in confirmed]
