"""Putting off a message that is here and must not start now: a copy waits in the broker, not in the worker."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from inference_routing.lane import AGED, RETURNED
from inference_tasks.broker.addressing import delay_address
from inference_tasks.dependencies import WAITED, Waits
from inference_tasks.routes import HEADER
from inference_tasks.worker import seam
from inference_tasks.worker.copies import RETRY_S, Mover, copy_of, let_go

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey
    from inference_tasks.worker.intake import Delivery

__all__ = ["Parking"]

logger = logging.getLogger(__name__)

MET = "met"
"""In our header: how often the message has met a live claim."""


class Parking:
    """Publishes copies of messages into the delay queues; each comes back through ``returned`` of its tier.

    The copy is the same message of its task (its hop stays), so it takes nobody's place.
    """

    def __init__(
        self,
        mover: Mover,
        *,
        later: Callable[[float, Callable[[], None]], None],
        delay_prefix: str,
        queue_by_lane: Mapping[tuple[str, str], str],
        waits: Waits,
    ) -> None:
        self._mover = mover
        self._later = later
        self._delay_prefix = delay_prefix
        self._queue_by_lane = queue_by_lane
        self._waits = waits

    def park(self, message: Delivery, key: QueueKey, delay_s: float, *, has_met: bool = False) -> None:
        """Have the message come back after this many seconds, rounded up; then it is acknowledged here."""
        lane = AGED if key.lane == AGED else RETURNED
        whole_s = max(1, math.ceil(delay_s))
        exchange, routing_key = delay_address(self._delay_prefix, self._queue_by_lane[key.tier, lane], whole_s)
        ours = message.headers.get(HEADER)
        header = {**ours, "lane": lane} if isinstance(ours, Mapping) else {}
        if has_met:
            header[MET] = self._times_met(message) + 1
        copy = copy_of(message, exchange, routing_key, {HEADER: header} if header else {})
        self._mover.move(copy, then=partial(let_go, message), too_large=partial(self._return, message))

    def waits(self, message: Delivery, key: QueueKey) -> None:
        """Have the message of a task that waits for others come round where such are looked at."""
        ours = message.headers.get(HEADER)
        waited_s = ours.get(WAITED) if isinstance(ours, Mapping) else None
        next_s = self._waits.next_s(waited_s, is_kept=True)
        exchange, routing_key = self._waits.address(key.tier, next_s)
        header = {**ours, WAITED: next_s} if isinstance(ours, Mapping) else {}
        copy = copy_of(message, exchange, routing_key, {HEADER: header} if header else {})
        self._mover.move(copy, then=partial(let_go, message), too_large=partial(self._return, message))

    def met_claim(self, message: Delivery, key: QueueKey, held_until_s: float | None, lease_s: float) -> None:
        """Park a message whose task another message of it is running, until that one's lease could be over.

        A second the first time: the other run may be ending right now, as it does when a retry without a delay is
        faster than the note that it was asked for.
        """
        delay_s = 1.0
        if self._times_met(message) and held_until_s is not None:
            # By two clocks: at the most a whole lease, which is what a clock that is right would say.
            delay_s = min(max(1.0, held_until_s - time.time() + 1), lease_s + 1)
        logger.info("message of %s met a live claim on its task; it comes back in %.0f s", key.name, delay_s)
        self.park(message, key, delay_s, has_met=True)

    def _times_met(self, message: Delivery) -> int:
        ours = message.headers.get(HEADER)
        met = ours.get(MET) if isinstance(ours, Mapping) else None
        return met if isinstance(met, int) and met > 0 else 0

    def _return(self, message: Delivery) -> None:
        """The copy would be too large for a delay: the message goes back to its place, after a while."""
        self._later(RETRY_S, partial(seam.nack, message))
