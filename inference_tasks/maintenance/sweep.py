"""Moving aged tasks one tier up: take them from the heads, publish copies, mark, acknowledge.

The order makes a crash harmless at every point. A copy is confirmed before its mark, and marked before the original is
acknowledged; what was taken and not acknowledged goes back to its place. So after a crash there may be one copy too
many, never one too few, and claims see to it that of all copies of a task one runs.

The cost of a round depends on what is promoted, not on how many wait: one range of a sorted set, and for each batch one
round trip of gets, one of publishes and one script.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from inference_routing.aging import (
    YOUNG,
    Decision,
    Head,
    Line,
    Rise,
    Step,
    decide,
    give_up_after_s,
    has_unlisted,
    room,
    shares,
)
from inference_routing.aging import rises as rises_of
from inference_routing.lane import AGED, LANE_NAMES
from inference_tasks.broker.messages import Accepted
from inference_tasks.errors import BrokerUnavailableError
from inference_tasks.maintenance.copies import Told, promoted, told
from inference_tasks.maintenance.graves import Graves
from inference_tasks.maintenance.pull import Pull, Taken
from inference_tasks.observe.events import emit
from inference_tasks.state.records import Move, TaskRecord, Waiting
from inference_tasks.state.switches import ALL_ON

if TYPE_CHECKING:
    from inference_tasks.app import Inference

__all__ = ["Sweep", "Swept"]

log = logging.getLogger(__name__)

#: Messages that are under way at a time: their bodies are in memory, each up to ``broker.max_body_bytes``.
BATCH = 100

#: The longest that one round works on one tier; the rest is for the next round.
ROUND_S = 20.0
LEASE_S = 60.0

#: How long a task that is listed, but was not found at the head, is not looked for again.
UNFOUND_S = 60.0

#: How long a queue is left alone whose head was looked at in vain: it was not listed, or is not to be moved.
LOOK_S = 60.0


@dataclass(slots=True)
class Swept:
    """What one round has done, summed over the tiers.

    Attributes:
        returned: messages that were taken and put back to their places.
        round_trips: how often an answer of the broker was waited for.
    """

    promoted: int = 0
    given_up: int = 0
    discarded: int = 0
    returned: int = 0
    round_trips: int = 0

    def __bool__(self) -> bool:
        return bool(self.promoted or self.given_up or self.discarded)


@dataclass(slots=True)
class _Batch:
    """What was decided about messages that were taken together."""

    rising: list[tuple[Taken, Told]] = field(default_factory=list)
    done: list[Taken] = field(default_factory=list)
    hopeless: list[tuple[Taken, Told]] = field(default_factory=list)
    back: list[Taken] = field(default_factory=list)
    stopped: tuple[Told, Decision] | None = None


class Sweep:
    """Rounds of aging, one after the other, over one connection. For one thread; any number of processes.

    Of several only one works on a tier at a time (a lease). Without it, too, each message is in one hand only.
    """

    def __init__(self, inference: Inference, pull: Pull, *, now_s: Callable[[], float] = monotonic) -> None:
        """Prepare; nothing is connected yet.

        Args:
            inference: the app.
            pull: what takes messages; kept between rounds.
            now_s: the clock for pauses; ages are told by Redis.
        """
        self._inference = inference
        self._store = inference.store
        self._pull = pull
        self._now_s = now_s
        self._exchange = inference.settings.namespace
        self._holder = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._unfound: dict[str, dict[str, float]] = {}
        self._look_at_s: dict[str, float] = {}
        self._blocked_until_s: dict[str, float] = {}
        self._graves = Graves(inference)
        self._swept = Swept()
        self._switches = ALL_ON

    def run(self) -> Swept:
        """Do one round; return what came of it.

        Raises:
            BrokerUnavailableError, StateUnavailableError: one of them does not answer; what was under way goes back.
        """
        self._swept = Swept()
        self._switches = self._store.switches()
        before = self._pull.round_trips
        policy = self._inference.policy
        rising = {one.tier: one for one in rises_of(policy)}
        with self._pull:
            for tier in policy.tiers:
                self._tier(tier.name, rising.get(tier.name))
        self._swept.round_trips += self._pull.round_trips - before
        if self._swept:
            log.info(
                "aging: %d promoted, %d to the dead letters after too long a wait, %d discarded",
                self._swept.promoted,
                self._swept.given_up,
                self._swept.discarded,
            )
        return self._swept

    def _tier(self, tier: str, rise: Rise | None) -> None:
        lease = f"aging:{tier}"
        if not self._store.lease(lease, self._holder, LEASE_S):
            return
        try:
            self._swept_tier(tier, rise)
        finally:
            self._store.unlease(lease, self._holder)

    def _swept_tier(self, tier: str, rise: Rise | None) -> None:
        settings = self._inference.settings
        end_s = self._now_s() + ROUND_S
        # What an operator has paused stays where it is, and nothing rises into what is paused or to be emptied.
        lanes = [lane for lane in LANE_NAMES if not self._switches.stopped(tier, lane)]
        queues = [self._inference.queue_by_lane[tier, lane] for lane in lanes]
        if rise and self._switches.of(rise.above, AGED):
            rise = None
        limit_s = give_up_after_s(settings.state.unfinished_ttl_s)
        after_s = min(limit_s, rise.after_s) if rise else limit_s
        now_s = self._store.server_time_s()
        aged = {queue: self._aged(queue, now_s - after_s, settings.aging.ready_max) for queue in queues}
        places = settings.aging.ready_max
        if rise and any(aged.values()):
            places = room(places, self._pull.ready(self._inference.queue_by_lane[rise.above, AGED]))
        moving = shares({queue: [one.ready_at_s for one in line] for queue, line in aged.items()}, places)
        for queue, count in moving.items():
            self._queue(queue, rise, {one.id for one in aged[queue][:count]}, now_s, end_s)
            places -= count
        if rise and places > 0:
            self._look(queues, rise, places, now_s, end_s)

    def _aged(self, queue: str, before_s: float, limit: int) -> list[Waiting]:
        """Return those that are listed as aged, without those that were not to be found a moment ago."""
        now_s = self._now_s()
        if now_s < self._blocked_until_s.get(queue, 0.0):
            return []
        found = self._store.oldest(queue, ready_before_s=before_s, limit=limit)
        listed = {one.id for one in found}
        kept = {
            task_id: until_s
            for task_id, until_s in self._unfound.get(queue, {}).items()
            if task_id in listed and until_s > now_s
        }
        self._unfound[queue] = kept
        return [one for one in found if one.id not in kept]

    def _queue(self, queue: str, rise: Rise | None, listed: set[str], now_s: float, end_s: float) -> None:
        """Take as many messages as tasks are listed, and no more: no look at what is to stay."""
        left, budget = set(listed), len(listed)
        while budget > 0 and left:
            if self._now_s() >= end_s:
                return
            wanted = min(BATCH, budget)
            taken = self._pull.take(queue, wanted)
            # Without a tier above, what is listed is judged by its whole age, which the index does not tell.
            batch = self._decided(taken, rise, listed if rise else frozenset(), now_s)
            # What is discarded was not in anybody's place.
            budget -= len(taken) - len(batch.done)
            self._carry_out(queue, rise, batch)
            left -= {told(one).id for one in taken}
            if batch.stopped is not None and batch.stopped[1].reason != YOUNG:
                # A worker takes it from the head, sooner or later; until then each look would cost deliveries.
                self._blocked_until_s[queue] = self._now_s() + LOOK_S
                return
            if batch.stopped or len(taken) < wanted:
                break
        self._unfound.setdefault(queue, {}).update(dict.fromkeys(left, self._now_s() + UNFOUND_S))

    def _decided(self, taken: Sequence[Taken], rise: Rise | None, listed: Set[str], now_s: float) -> _Batch:
        read = [(message, told(message)) for message in taken]
        strangers = [known.id for _, known in read if known.id and known.id not in listed]
        records: dict[str, TaskRecord | None] = {}
        if strangers:
            records = dict(zip(strangers, self._store.get_many(strangers), strict=True))
        limit_s = give_up_after_s(self._inference.settings.state.unfinished_ttl_s)
        batch = _Batch()
        for message, known in read:
            if batch.stopped is not None:
                batch.back.append(message)
                continue
            if known.id in listed and not _is_over(known, now_s, limit_s):
                # The index has said already that it waits, and for how long.
                decision = Decision(Step.PROMOTE if rise else Step.STOP, "listed as aged")
            else:
                record = records.get(known.id)
                head = known.head(record) if known.id else Head(0, 0, None, None)
                decision = decide(head, now_s=now_s, after_s=rise and rise.after_s, give_up_after_s=limit_s)
            match decision.step:
                case Step.PROMOTE:
                    batch.rising.append((message, known))
                case Step.DISCARD:
                    log.info("message of task %s in %s is discarded: %s", known.id, message.queue, decision.reason)
                    batch.done.append(message)
                    self._swept.discarded += 1
                case Step.GIVE_UP:
                    batch.hopeless.append((message, known))
                case Step.STOP:
                    batch.stopped = (known, decision)
                    batch.back.append(message)
        return batch

    def _carry_out(self, queue: str, rise: Rise | None, batch: _Batch) -> None:
        is_refused = False
        if batch.rising and rise:
            is_refused = not self._promote(queue, rise, batch)
        if batch.hopeless:
            buried = self._graves.bury(batch.hopeless)
            self._swept.round_trips += 1
            self._swept.given_up += len(buried)
            batch.done += buried
            batch.back += [message for message, _ in batch.hopeless if message not in buried]
            is_refused = is_refused or len(buried) < len(batch.hopeless)
        self._swept.returned += len(batch.back)
        self._pull.settle(done=batch.done, back=batch.back)
        if is_refused:
            raise BrokerUnavailableError("it did not confirm every copy; what it did not is where it was")

    def _promote(self, queue: str, rise: Rise, batch: _Batch) -> bool:
        """Publish, and mark what is confirmed; return whether that is all."""
        target = self._inference.queue_by_lane[rise.above, AGED]
        now_s = self._store.server_time_s()
        copies = [
            promoted(message, rise, exchange=self._exchange, queue=target, now_s=now_s) for message, _ in batch.rising
        ]
        self._swept.round_trips += 1
        outcomes = self._inference.publisher.send_many(copies)
        confirmed = [one for one, outcome in zip(batch.rising, outcomes, strict=True) if isinstance(outcome, Accepted)]
        for (message, known), outcome in zip(batch.rising, outcomes, strict=True):
            if not isinstance(outcome, Accepted):
                log.warning("the copy of task %s for %s was not accepted: %s", known.id, target, outcome)
                batch.back.append(message)
        moves = [Move(known.id, known.generation, known.hop + 1, rise.above, AGED) for _, known in confirmed]
        marked = self._store.promoted(moves)
        unmarked = [known.id for (_, known), is_marked in zip(confirmed, marked, strict=True) if not is_marked]
        self._note(queue, target, unmarked, now_s)
        batch.done += [message for message, _ in confirmed]
        self._swept.promoted += len(confirmed)
        if confirmed:
            emit("task.promoted", tier_from=rise.tier, tier_to=rise.above, count=len(confirmed))
        return len(confirmed) == len(copies)

    def _note(self, queue: str, target: str, unmarked: Sequence[str], now_s: float) -> None:
        """Where Redis has lost the record, at least list the task where it is now."""
        if unmarked:
            self._store.forget_ready(queue, unmarked)
            self._store.note_ready(target, [(task_id, now_s) for task_id in unmarked])

    def _look(self, queues: Sequence[str], rise: Rise, places: int, now_s: float, end_s: float) -> None:
        """Find aged tasks that are not listed, because Redis lost the lists or others published: from the head, singly.

        Singly, because nothing says how many there are: the first one that is too young is the only one disturbed.
        """
        backlogs = self._store.waiting(queues)
        for queue in queues:
            listed, oldest_since_s = backlogs[queue]
            line = Line(listed, self._pull.ready(queue), oldest_since_s)
            quiet_until_s = max(self._look_at_s.get(queue, 0.0), self._blocked_until_s.get(queue, 0.0))
            if not has_unlisted(line) or self._now_s() < quiet_until_s:
                continue
            places = self._looked(queue, rise, places, now_s, end_s)

    def _looked(self, queue: str, rise: Rise, places: int, now_s: float, end_s: float) -> int:
        while places > 0 and self._now_s() < end_s:
            batch = _Batch()
            for _ in range(min(BATCH, places)):
                one = self._decided(self._pull.take(queue, 1), rise, frozenset(), now_s)
                batch.rising += one.rising
                batch.done += one.done
                batch.hopeless += one.hopeless
                batch.back += one.back
                batch.stopped = one.stopped
                if one.stopped or not (one.rising or one.done or one.hopeless):
                    break
            else:
                self._carry_out(queue, rise, batch)
                places -= len(batch.rising)
                continue
            self._carry_out(queue, rise, batch)
            places -= len(batch.rising)
            if batch.stopped:
                self._look_at_s[queue] = self._now_s() + LOOK_S
                known, _ = batch.stopped
                if known.id:
                    # From now on, if nothing tells since when.
                    self._store.note_ready(queue, [(known.id, known.since_s or now_s)])
            break
        return places


def _is_over(known: Told, now_s: float, limit_s: float) -> bool:
    return known.submitted_at_s is not None and now_s - known.submitted_at_s >= limit_s
