"""What has become of tasks whose message is gone: dropped by a full queue, or lost without a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from inference_routing.aging import Line, has_unlisted, may_have_lost
from inference_routing.lane import LANE_NAMES
from inference_tasks.broker.messages import Accepted
from inference_tasks.errors import BrokerUnavailableError
from inference_tasks.maintenance.copies import Told, forwarded, told
from inference_tasks.maintenance.pull import Pull, Taken
from inference_tasks.observe.events import emit

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["DROPPED", "GONE", "Dropped", "Reconciliation"]

log = logging.getLogger(__name__)

DROPPED = "drop-head: the queue was full, and newer tasks took its place"
GONE = "message gone: it is in no queue any more"

BATCH = 200
#: The longest that one round takes; the rest is for the next one.
ROUND_S = 20.0

#: Tasks of one queue that one round compares.
MOST_COMPARED = 1000

#: Records and queues may disagree in their order by the time that a submit takes, and by what was given back.
MARGIN_S = 60.0

#: Twice within this time is once: a busy moment must not count as two.
BETWEEN_LOOKS_S = 50.0


class Dropped:
    """Empties the queue of what full ``drop-head`` queues have dropped. For one thread; any number of processes."""

    def __init__(self, inference: Inference, pull: Pull) -> None:
        self._inference = inference
        self._pull = pull

    def run(self) -> int:
        """Record what was dropped; return how many tasks ended so.

        Whoever waits for one of them learns it. What lies there for another reason goes on to the dead letters.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer; what was taken goes back.
        """
        queue = self._inference.topology.dropped.name
        end_s, ended = monotonic() + ROUND_S, 0
        with self._pull:
            while (ready := self._pull.ready(queue)) and monotonic() < end_s:
                taken = self._pull.take(queue, min(BATCH, ready))
                if not taken:
                    break
                ended += self._settle(taken)
        if ended:
            log.warning("%d tasks were dropped, because their queue was full (drop-head)", ended)
        return ended

    def _settle(self, taken: Sequence[Taken]) -> int:
        read = [(message, told(message)) for message in taken]
        others = [message for message, known in read if not known.id or not _fell_off(message)]
        gone = [(known.id, known.generation, known.hop) for message, known in read if known.id and _fell_off(message)]
        if others:
            settings, dead = self._inference.settings, self._inference.topology.dead.name
            copies = [forwarded(message, exchange=settings.namespace, queue=dead) for message in others]
            for outcome in self._inference.publisher.send_many(copies):
                if not isinstance(outcome, Accepted):
                    raise BrokerUnavailableError(f"the dead letters did not take a copy: {outcome}")
        ended = self._inference.store.dropped(gone, DROPPED)
        if ended:
            emit("task.dropped", reason="drop-head", count=ended)
        self._pull.settle(done=taken)
        return ended


def _fell_off(message: Taken) -> bool:
    deaths = message.headers.get("x-death")
    last = deaths[0] if isinstance(deaths, list) and deaths else None
    reason = last.get("reason") if isinstance(last, Mapping) else message.headers.get("x-first-death-reason")
    return reason == "maxlen"


class Reconciliation:
    """Finds tasks that wait by their records and whose message is in no queue, and ends them as dropped.

    A message is missed when its queue has fewer messages than tasks are listed, and is empty or has a younger one at
    its head. Missed twice, a minute apart, it is gone; a task that has waited less than ``reconcile_after_s`` is never
    asked for. A look at a head counts as one delivery of that message, and is made only where something is missing.
    """

    def __init__(self, inference: Inference, pull: Pull, *, now_s: Callable[[], float] = monotonic) -> None:
        self._inference = inference
        self._store = inference.store
        self._pull = pull
        self._now_s = now_s
        self._missed_at_s: dict[str, dict[str, float]] = {}

    def run(self) -> int:
        """Compare once; return how many tasks ended.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer.
        """
        ended = 0
        with self._pull:
            for tier in self._inference.policy.tiers:
                ended += self._tier([self._inference.queue_by_lane[tier.name, lane] for lane in LANE_NAMES])
        if ended:
            log.error("%d tasks ended as dropped: their messages are in no queue any more", ended)
        return ended

    def _tier(self, queues: Sequence[str]) -> int:
        now_s = self._store.server_time_s()
        backlogs = self._store.waiting(queues)
        lines = {
            queue: Line(listed, self._pull.ready(queue), oldest_since_s)
            for queue, (listed, oldest_since_s) in backlogs.items()
        }
        after_s = self._inference.settings.maintenance.reconcile_after_s
        # What is missing in one lane may lie in another one: `topology apply` moves messages between a tier's lanes.
        is_clear = not any(has_unlisted(line) for line in lines.values())
        ended = 0
        for queue, line in lines.items():
            if is_clear and may_have_lost(line, now_s=now_s, after_s=after_s):
                ended += self._queue(queue, line, now_s - after_s)
            else:
                self._missed_at_s.pop(queue, None)
        return ended

    def _queue(self, queue: str, line: Line, before_s: float) -> int:
        if line.ready:
            since_s = self._head_since_s(queue)
            if since_s is None:
                return 0
            before_s = min(before_s, since_s - MARGIN_S)
        # Not more than are missing: of those that are listed, the oldest are the first to go missing.
        limit = min(MOST_COMPARED, line.listed - line.ready)
        missing = [one.id for one in self._store.oldest(queue, ready_before_s=before_s, limit=limit)]
        seen, now_s = self._missed_at_s.get(queue, {}), self._now_s()
        self._missed_at_s[queue] = {task_id: seen.get(task_id, now_s) for task_id in missing}
        sure = [task_id for task_id in missing if now_s - seen.get(task_id, now_s) >= BETWEEN_LOOKS_S]
        return self._end(queue, sure)

    def _head_since_s(self, queue: str) -> float | None:
        taken = self._pull.take(queue, 1)
        if not taken:
            return None
        self._pull.settle(back=taken)
        head: Told = told(taken[0])
        record = self._store.get_many([head.id])[0] if head.id else None
        return head.head(record).since_s

    def _end(self, queue: str, task_ids: Sequence[str]) -> int:
        if not task_ids:
            return 0
        # First those that the index should not list at all: without a record, or waiting elsewhere by now.
        self._store.forget_ready(queue, task_ids)
        records = [record for record in self._store.get_many(task_ids) if record is not None]
        place = {name: key for key, name in self._inference.queue_by_lane.items()}[queue]
        gone = [(record.id, record.generation, record.hop) for record in records if (record.tier, record.lane) == place]
        ended = self._store.dropped(gone, GONE)
        if ended:
            emit("task.dropped", reason="gone", count=ended)
        for task_id, _, _ in gone:
            log.error("the message of task %s is not in %s any more", task_id, queue)
        return ended
