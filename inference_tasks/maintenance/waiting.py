"""Messages of tasks that wait for other tasks, when they come round: let go, put off again, or given up.

The message of a waiting task lies in the delay queues, and from there comes into the queue ``waiting``. Whoever ends
what the task waits for has let it go long before, as a rule; here only what that has missed is made up for: a process
that died in between, a message too large to be kept in Redis, a loss of Redis.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from inference_routing.aging import Line, has_unlisted
from inference_routing.lane import RETURNED, QueueKey
from inference_tasks.broker.kept import as_kept
from inference_tasks.broker.messages import Accepted, Outgoing
from inference_tasks.dependencies import KEPT_CHARS, MISSING_SINCE, NEEDS, WAITED, Waits, is_id
from inference_tasks.errors import BrokerUnavailableError
from inference_tasks.maintenance.copies import claimant, forwarded, ours, put_off, told
from inference_tasks.maintenance.graves import Grave, Graves
from inference_tasks.maintenance.pull import Pull, Taken
from inference_tasks.state.records import Claimant, Move, TaskError, Visit, Visitor

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["FAILED", "UNKNOWN", "Round"]

log = logging.getLogger(__name__)

#: Reasons of dead letters.
FAILED = "dependency failed"
UNKNOWN = "dependency unknown"

BATCH = 100
#: The longest that one round takes; the rest is for the next one.
ROUND_S = 20.0


@dataclass(slots=True)
class _Sorted:
    """What was decided about messages that were taken together."""

    free: list[tuple[Taken, Claimant]] = field(default_factory=list)
    later: list[tuple[Taken, Outgoing]] = field(default_factory=list)
    graves: list[Grave] = field(default_factory=list)
    done: list[Taken] = field(default_factory=list)


class Round:
    """Empties the queue. For one thread; any number of processes.

    A copy is confirmed before its message is acknowledged, and keeps its hop where it only comes round again: a crash
    in between leaves one message too many, never one too few.

    When is a dependency unknown? A task whose record is gone, as after a loss of Redis, may still have its message in a
    queue, and nothing tells which. It has one no more when, for as long as the longest round takes, at each visit it
    had no record and was in no index, and at the end of that time no queue of the tiers holds more messages than are
    listed: then each message there belongs to a task that is known, and a waiting one would have come round itself.
    What is parked for longer than that (a retry, a delayed submit) is not seen by this: then the dependent goes to the
    dead letters though its dependency comes back, and can be replayed.
    """

    def __init__(self, inference: Inference, pull: Pull) -> None:
        self._inference = inference
        self._store = inference.store
        self._pull = pull
        self._exchange = inference.settings.namespace
        self._longest_s = inference.settings.maintenance.waiting_longest_s
        self._waits = Waits(inference.settings, inference.queue_by_lane)
        self._graves = Graves(inference)

    def run(self) -> int:
        """Look at what has come round; return how many tasks were let go.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer; what was taken goes back.
        """
        queue = self._inference.topology.waiting.name
        end_s, let_go = monotonic() + ROUND_S, 0
        with self._pull:
            left = self._pull.ready(queue)
            while left > 0 and monotonic() < end_s:
                taken = self._pull.take(queue, min(BATCH, left))
                if not taken:
                    break
                left -= len(taken)
                let_go += self._settle(taken)
        if let_go:
            log.info("%d tasks had waited for others, and nobody else has let them go", let_go)
        return let_go

    def _settle(self, taken: Sequence[Taken]) -> int:
        found = _Sorted()
        readable = [(message, said) for message in taken if (said := claimant(message, lane=RETURNED)) is not None]
        known = {message.tag for message, _ in readable}
        strangers = [message for message in taken if message.tag not in known]
        visits = self._store.visited([self._visitor(message, said) for message, said in readable])
        for (message, said), visit in zip(readable, visits, strict=True):
            self._sort(found, message, said, visit)
        let_go = self._let_go(found)
        found.done += self._sent([message for message, _ in found.later], [copy for _, copy in found.later])
        dead = self._inference.topology.dead.name
        letters = [forwarded(message, exchange=self._exchange, queue=dead) for message in strangers]
        found.done += self._sent(strangers, letters)
        if found.graves:
            found.done += self._graves.lay(found.graves)
        settled = {message.tag for message in found.done}
        back = [message for message in taken if message.tag not in settled]
        self._pull.settle(done=found.done, back=back)
        if back:
            raise BrokerUnavailableError("it did not confirm every copy; what it did not is where it was")
        return let_go

    def _visitor(self, message: Taken, said: Claimant) -> Visitor:
        needs = ours(message).get(NEEDS)
        ids = tuple(dict.fromkeys(one for one in needs if is_id(one))) if isinstance(needs, list) else ()
        kept = as_kept(self._free(message, said))
        return Visitor(said, ids, kept if len(kept) <= KEPT_CHARS else "")

    def _free(self, message: Taken, said: Claimant) -> Outgoing:
        queue = self._inference.queue_by_lane[said.tier, RETURNED]
        changes = {"lane": RETURNED, "hop": said.hop, "tier": said.tier}
        return put_off(message, changes, exchange=self._exchange, routing_key=queue)

    def _sort(self, found: _Sorted, message: Taken, said: Claimant, visit: Visit) -> None:
        if visit.outcome == "free":
            # It may have been lifted meanwhile.
            found.free.append((message, said._replace(tier=visit.tier or said.tier)))
        elif visit.outcome == "unburied":
            record = self._store.get_many([said.id])[0]
            error: TaskError = (record.error if record else None) or {"type": "", "message": "it has failed"}
            found.graves.append(self._grave(message, said, FAILED, error, is_failed=True))
        elif visit.outcome != "wait":
            found.done.append(message)
        else:
            self._wait(found, message, said, visit)

    def _wait(self, found: _Sorted, message: Taken, said: Claimant, visit: Visit) -> None:
        mine, now_s = ours(message), self._store.server_time_s()
        since_s = None
        if visit.missing:
            before = mine.get(MISSING_SINCE)
            since_s = float(before) if isinstance(before, int | float) and 0 < before <= now_s else now_s
            if now_s - since_s >= self._longest_s and self._is_all_listed():
                what = f"task {visit.missing[0]}, which it needs, has neither a record nor a message"
                error: TaskError = {"type": "DependencyUnknownError", "message": what}
                found.graves.append(self._grave(message, said, UNKNOWN, error))
                return
        is_kept = len(as_kept(self._free(message, said))) <= KEPT_CHARS
        next_s = self._waits.next_s(mine.get(WAITED), is_kept=is_kept)
        # What it needs no more is not looked for again: after a loss of Redis nobody would know of its success.
        changes = {NEEDS: list(visit.needs), WAITED: next_s, MISSING_SINCE: since_s}
        # Whoever was to lift it may have died before.
        self._inference.lifts.lift(visit.needs, said.tier, said.id)
        exchange, routing_key = self._waits.address(said.tier, next_s)
        found.later.append((message, put_off(message, changes, exchange=exchange, routing_key=routing_key)))

    def _grave(
        self, message: Taken, said: Claimant, reason: str, error: TaskError, *, is_failed: bool = False
    ) -> Grave:
        place = QueueKey(said.tier, RETURNED, message.queue)
        return Grave(message, told(message), place, reason, error, is_failed)

    def _let_go(self, found: _Sorted) -> int:
        copies = []
        for message, said in found.free:
            copy = self._free(message, said._replace(hop=said.hop + 1))
            copies.append(copy)
        sent = {message.tag for message in self._sent([message for message, _ in found.free], copies)}
        done = [(message, said) for message, said in found.free if message.tag in sent]
        self._store.promoted([Move(said.id, said.generation, said.hop + 1, said.tier, RETURNED) for _, said in done])
        found.done += [message for message, _ in done]
        return len(done)

    def _sent(self, messages: Sequence[Taken], copies: Sequence[Outgoing]) -> list[Taken]:
        """Publish the copies; return the messages whose copies the broker has confirmed."""
        if not copies:
            return []
        outcomes = self._inference.publisher.send_many(copies)
        return [message for message, outcome in zip(messages, outcomes, strict=True) if isinstance(outcome, Accepted)]

    def _is_all_listed(self) -> bool:
        queues = list(self._inference.queue_by_lane.values())
        backlogs = self._store.waiting(queues)
        return not any(has_unlisted(Line(backlogs[queue].waiting, self._pull.ready(queue), None)) for queue in queues)
