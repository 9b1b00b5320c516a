"""To the dead letters with what has waited for as long as records live."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inference_routing.lane import QueueKey
from inference_tasks.broker.messages import Accepted
from inference_tasks.maintenance.copies import Told, buried
from inference_tasks.maintenance.pull import Taken
from inference_tasks.state.records import DeadLetter, TaskError

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["REASON", "Graves"]

log = logging.getLogger(__name__)

REASON = "waited too long"


class Graves:
    """Ends tasks as failed and their messages as dead letters, which can be replayed."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._place = {queue: QueueKey(tier, lane, queue) for (tier, lane), queue in inference.queue_by_lane.items()}

    def bury(self, hopeless: Sequence[tuple[Taken, Told]]) -> list[Taken]:
        """Return those whose letter lies among the dead by now: they may be acknowledged.

        First the record fails, then the letter is confirmed, then it is listed: a crash in between leaves a failed task
        whose message is still in its queue, and whoever takes it next buries it.
        """
        store, settings = self._inference.store, self._inference.settings
        at_s = time.time()
        detail = f"it did not start within {settings.state.unfinished_ttl_s / 86400:g} days (state.unfinished_ttl_s)"
        error: TaskError = {"type": REASON, "message": detail}
        letters, copies = [], []
        for message, known in hopeless:
            place = self._place[message.queue]
            store.fail_unclaimed(known.id, name=known.name, tier=place.tier, error_type=REASON, error=detail)
            letters.append(
                DeadLetter(
                    id=known.id,
                    task=known.name,
                    tier=place.tier,
                    tier_first=known.tier_first or place.tier,
                    lane=place.lane,
                    reason=REASON,
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
                "reason": REASON,
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
            log.error("task %s goes to the dead letters: %s", letters[index].id, detail)
        return [hopeless[index][0] for index in confirmed]
