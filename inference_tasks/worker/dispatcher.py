"""Late binding: a message leaves the broker for a slot that is free, or will be within ``hold_s``."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection
from time import monotonic
from typing import TYPE_CHECKING

from inference_routing.lane import may_serve_reserved
from inference_tasks.errors import StateUnavailableError
from inference_tasks.worker.claiming import Claiming, Held
from inference_tasks.worker.demand import Demand, Wish
from inference_tasks.worker.intake import Delivery, Intake, Unfit
from inference_tasks.worker.slots import Observer, Slots, Ticket

if TYPE_CHECKING:
    from inference_routing.cost import CostModel
    from inference_routing.lane import QueueKey
    from inference_routing.picker import Pick, Picker
    from inference_tasks.worker.claiming import Claims, Ends
    from inference_tasks.worker.floors import FloorWatch
    from inference_tasks.worker.source import Source

__all__ = ["Dispatcher"]

logger = logging.getLogger(__name__)

#: Messages that Celery may keep for later without taking the room of others.
MOST_DEFERRED = 16
#: Claims are made for this many at once rather than sooner, while enough is held.
CLAIM_BATCH = 8
#: Seconds the broker may take for an answer before the connection counts as dead.
ANSWER_S = 10.0


class Dispatcher:
    """Brings picker, broker, claims and slots together; knows nothing of Celery or AMQP.

    Everything runs on the thread of the event loop, except ``free`` which other threads reach through the consumer's
    mailbox. ``pump`` is called before each poll and does what can be done: claim what has arrived, start what is held,
    ask for more. Invariant: messages inside the worker <= slots free now + starts predicted within ``hold_s``.
    """

    def __init__(
        self,
        *,
        source: Source,
        picker: Picker,
        costs: CostModel,
        claims: Claims | None,
        slots: Slots,
        queues: Collection[QueueKey],
        tasks: Collection[str],
        worker: str,
        lease_s: float,
        hold_s: float,
        deliver: Callable[[Delivery], None],
        ends: Ends,
        observer: Observer,
        floors: FloorWatch | None = None,
        run_unclaimed: bool = False,
        one_at_a_time: bool = False,
        connection_errors: tuple[type[BaseException], ...] = (),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._picker = picker
        self._costs = costs
        self.slots = slots
        self._demand = Demand(source, picker, slots, queues, hold_s=hold_s, clock=clock, floors=floors)
        self._claiming = Claiming(
            claims,
            picker=picker,
            costs=costs,
            demand=self._demand,
            tasks=tasks,
            ends=ends,
            worker=worker,
            lease_s=lease_s,
            run_unclaimed=run_unclaimed,
            is_inside=self._is_inside,
            adopt=slots.adopt,
        )
        self.hold_s = hold_s
        self._deliver = deliver
        self._ends = ends
        self._observer = observer
        self._one_at_a_time = one_at_a_time
        self._connection_errors = connection_errors
        self._clock = clock
        self._asked: deque[tuple[Wish, float, bool]] = deque()
        self._arrived: list[tuple[Delivery, Pick]] = []
        self._held: deque[Held] = deque()
        self._deferred: dict[str, Held] = {}
        self._handing: Held | None = None
        self._closing = self.state_lost = False
        self.attach(source)

    @property
    def _source(self) -> Source:
        return self._demand.source

    def _on_answer(self, queue: str, message: Delivery | None) -> None:
        wish, _, is_void = self._asked.popleft()
        pick = None if is_void else wish.pick
        if message is None:
            self._demand.found_empty(wish.key, pick)
            return
        self._demand.found(wish.key)
        if pick is None or self._closing or self.state_lost:
            if pick is not None:
                self._picker.refund(pick)
            self._source.give_back(message)
        else:
            self._arrived.append((message, pick))

    def _on_look(self, queue: str, found: bool) -> None:
        self._demand.looked(self._asked.popleft()[0].key, found=found)

    def _on_push(self, queue: str, message: Delivery) -> None:
        inside = len(self._arrived) + len(self._held)
        pick = self._demand.pushed(queue, inside, may_take=not self._closing and not self.state_lost)
        if pick is None:
            self._source.give_back(message)
        else:
            self._arrived.append((message, pick))

    def queue_lost(self, queue: str) -> None:
        """What was held of this queue went back to it with its channel."""
        key = self._demand.key(queue)
        for pick in [pick for _, pick in self._arrived if pick.key == key]:
            self._picker.refund(pick)
        self._arrived = [entry for entry in self._arrived if entry[1].key != key]
        gone = [held for held in self._held if held.key == key]
        self._held = deque(held for held in self._held if held.key != key)
        self._claiming.forget(gone)
        self._demand.missing(queue)

    def pump(self) -> bool:
        """Do what can be done now; true if it should be called again at once."""
        now = self._clock()
        arrived, held = len(self._arrived), len(self._held)
        if arrived and (self.slots.free > held or held <= len(self.slots) or arrived >= CLAIM_BATCH):
            self._claim(now)
        again = self._start(now)
        # What is still on its way and void must be back at its place before what lies behind it is asked for.
        if not self._closing and not self.state_lost and not (self._asked and self._asked[0][2]):
            self._ask(now)
        return again or bool(self._arrived and self.slots.free > len(self._held))  # came while asking

    def _claim(self, now: float) -> None:
        arrived, self._arrived = self._arrived, []
        try:
            room = self.slots.free - len(self._held)
            for place, held in enumerate(self._claiming.admit(arrived, now)):
                held.is_ahead = place >= room
                self._held.append(held)
        except StateUnavailableError as exc:
            logger.error("taking no new work until the state can be reached again: %s", exc)
            self.state_lost = True
            self._demand.unsubscribe()
            self._return_held()

    def _return_held(self) -> None:
        back = list(self._held)
        self._held.clear()
        self._claiming.give_back(back)

    def _is_inside(self, task_id: str) -> bool:
        return task_id in self._deferred or any(one.intake.id == task_id for one in (*self.slots, *self._held))

    def _start(self, now: float) -> bool:
        while self._held and self.slots.free:
            held = self._startable()
            if held is None:
                return False
            # A slot is free for it: sent back it would start no sooner. So it may be late by the length of a task.
            if held.is_ahead and self._clock() - held.arrived_s > self.hold_s + held.predicted_s:
                self._held.appendleft(held)
                self._return_all()
                return False
            self._hand_over(held)
            if self._one_at_a_time:
                return True
        return False

    def _startable(self, *, take: bool = True) -> Held | None:
        """The first held message that a free slot may run; removed from what is held if it is taken."""
        lower, free = self.slots.free_lower, self.slots.free
        for held in self._held:
            if lower or (free and may_serve_reserved(held.key)):
                if take:
                    self._held.remove(held)
                return held
        return None

    def _hand_over(self, held: Held) -> None:
        headers = held.message.headers
        # Without a claim there is no token: the result is then written as from outside.
        headers["inference_token"] = held.token or None
        headers["inference_gen"] = held.intake.generation
        headers["inference_attempt"] = held.attempts
        self._handing = held
        try:
            self._deliver(held.message)
        except self._connection_errors:
            raise
        except Exception as exc:
            logger.exception("task %s[%s] could not be handed to the pool", held.intake.name, held.intake.id)
            self._unfit(held, exc)
            return
        finally:
            self._handing = None
        if held.taken:
            return
        self._picker.refund(held.pick)
        if held.message.acknowledged:
            return
        # Celery keeps it for later: a rate limit, or an ETA. It takes a slot when it comes to the pool.
        held.is_charged = False
        self._deferred[held.intake.id] = held

    def _unfit(self, held: Held, exc: Exception) -> None:
        """Celery or the pool choked on the message: it must not stop the worker, and goes where it can be looked at."""
        if not held.taken:
            self._picker.refund(held.pick)
        self._claiming.release([(held.intake.id, held.token)])
        if not held.message.acknowledged:
            unfit = Unfit("malformed", f"it cannot be run: {exc!r:.300}", held.intake.id, held.intake.name)
            self._ends.bury(held.message, held.key, unfit)

    def take(self, task_id: str) -> Ticket:
        """A request has come to the pool: it takes a slot."""
        held = self._handing
        if held is None or held.taken or held.intake.id != task_id:
            held = self._deferred.pop(task_id, None)
            if held is None:
                raise RuntimeError(f"task {task_id!r} came to the pool without having been fetched by this worker")
        held.taken = True
        now = self._clock()
        deferred = held is not self._handing
        self._demand.started(now, held.key.tier, had_more=bool(self._held))
        if not deferred:
            self._picker.started(held.pick, now)
        ticket = Ticket(
            intake=held.intake,
            message=held.message,
            key=held.key,
            pick=None if deferred else held.pick,
            token=held.token,
            started_s=now,
            predicted_s=held.predicted_s,
            reserved=may_serve_reserved(held.key),
            held_s=now - held.arrived_s,
            wait_s=held.wait_s,
        )
        self.slots.take(ticket)
        self._observer.started(ticket)
        return ticket

    def free(self, ticket: Ticket, ended_s: float) -> None:
        """The slot is free again: charge what the task really cost."""
        if not self.slots.free_up(ticket):
            return
        cost_s = max(0.0, ended_s - ticket.started_s)
        if ticket.pick is not None:
            self._picker.finished(ticket.pick, cost_s)
        self._costs.observe(ticket.intake.name, ticket.intake.tier, cost_s)
        self._demand.observe(cost_s, ticket.intake.tier)
        self._observer.finished(ticket, cost_s)

    def forget(self, ticket: Ticket) -> None:
        """The pool dropped this job before it began, as it does when the connection is lost."""
        if self.slots.free_up(ticket):
            if ticket.pick is not None:
                self._picker.refund(ticket.pick)
            self._claiming.release([(ticket.intake.id, ticket.token)])

    def is_handing(self, task_id: str) -> bool:
        """Whether this task is the one being handed over at this moment."""
        return self._handing is not None and self._handing.intake.id == task_id

    def take_back_handing(self) -> QueueKey | None:
        """The message being handed over turned out unfit: nothing more is done with it here. Returns its queue."""
        held = self._handing
        if held is None or held.taken:
            return None
        held.taken = True
        self._picker.refund(held.pick)
        self._claiming.release([(held.intake.id, held.token)])
        return held.key

    def _ask(self, now: float) -> None:
        asked = len(self._asked)
        # Some of what Celery keeps for later (rate limits) lies beside the slots; more would pull the queue in.
        inside = len(self._held) + len(self._arrived) + asked + max(0, len(self._deferred) - MOST_DEFERRED)
        lower = 0
        if self.slots.reserve:
            coming = [pick.key for _, pick in self._arrived] + [wish.key for wish, _, _ in self._asked]
            lower = sum(not may_serve_reserved(key) for key in coming + [held.key for held in self._held])
        if wishes := self._demand.wanted(inside, lower, asked, now):
            self._asked.extend((wish, now, False) for wish in wishes)
            looks = [wish.key.name for wish in wishes if wish.pick is None]  # they come first
            self._source.look(looks)
            self._source.ask([wish.key.name for wish in wishes[len(looks) :]])

    def tick(self) -> None:
        """A few times a second: return what has waited too long.

        Raises:
            TimeoutError: the broker has stopped answering.
        """
        now = self._clock()
        if self._asked and now - self._asked[0][1] > ANSWER_S:
            raise TimeoutError(f"the broker has not answered a get or a look for {ANSWER_S:.0f} s")
        self._claiming.return_waiting(now)
        self._source.return_stale(now)
        self.return_overdue()
        if self._demand.is_subscribed and not self._closing:
            self._demand.subscribe(len(self._held) + len(self._arrived), now)

    def return_overdue(self) -> None:
        """Give back what has been held longer than ``hold_s``, unless a slot is free to start it this moment."""
        overdue_s = self.next_overdue_s
        if overdue_s is not None and overdue_s <= 0 and self._startable(take=False) is None:
            self._return_all()

    def _return_all(self) -> None:
        """Return all: were only the overdue ones returned, those behind them would start before their turn."""
        self._demand.overdue(len(self._held))
        self._source.return_stale()
        self._return_held()
        self._return_arrived()
        self._void_asked()

    def _void_asked(self) -> None:
        """Take back every pick whose message is still on its way; it will be returned when it comes."""
        for place, (wish, at_s, is_void) in enumerate(self._asked):
            if not is_void and wish.pick is not None:
                self._picker.refund(wish.pick)
            self._asked[place] = (wish, at_s, True)

    def _return_arrived(self) -> None:
        for message, pick in self._arrived:
            self._picker.refund(pick)
            self._source.give_back(message)
        self._arrived = []

    @property
    def next_overdue_s(self) -> float | None:
        """Seconds until the oldest held message must go back; None with nothing held."""
        return max(0.0, self._held[0].arrived_s + self.hold_s - self._clock()) if self._held else None

    def claimed(self) -> list[tuple[Intake, int]]:
        """Everything this worker holds a claim on: what runs and what is about to."""
        running = [(ticket.intake, ticket.token) for ticket in self.slots if ticket.token]
        return running + [(held.intake, held.token) for held in (*self._held, *self._deferred.values()) if held.token]

    def serve(self, queue: str, *, on: bool) -> None:
        """Start or stop serving a queue; when it stops, what has not started goes back, of all queues."""
        if self._demand.serve(queue, on=on) is not None and not on:
            self._return_all()

    @property
    def unanswered(self) -> int:
        return len(self._asked)

    def close(self) -> None:
        """Take nothing new and return what has not started, at once."""
        self._closing = True
        self._demand.unsubscribe()
        self._source.return_stale()
        self._return_arrived()
        self._claiming.return_waiting()
        self._return_held()
        self._claiming.give_back(list(self._deferred.values()))
        self._deferred.clear()

    def connection_lost(self) -> None:
        """Every delivery tag is void: the broker has everything back. What runs goes on."""
        self.slots.connection_lost()
        self._void_asked()
        for _, pick in self._arrived:
            self._picker.refund(pick)
        self._claiming.forget([*self._held, *self._deferred.values()])
        self._asked.clear()
        self._arrived = []
        self._held.clear()
        self._deferred.clear()
        self._claiming.forget_waiting()
        self._demand.forget_all()

    def attach(self, source: Source) -> None:
        """Go on with a new connection."""
        self._demand.source = source
        source.on_answer = self._on_answer
        source.on_look = self._on_look
        source.on_push = self._on_push
