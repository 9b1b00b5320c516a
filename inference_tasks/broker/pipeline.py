"""The loop behind a publisher: one thread, one connection, every message that is on its way.

Life of a message: handed over (waiting) → its record written (recorded) → written to the socket (written) → settled.
Records of all waiting messages are one call of the state store; messages are written many at a time; what the broker
answers settles each by its delivery tag. A message that fails touches no other.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass

from inference_routing.admission import RefusalReason
from inference_tasks.broker.answers import settled_by, tell
from inference_tasks.broker.embedded_link import EmbeddedLinkSettings
from inference_tasks.broker.followers import Followers
from inference_tasks.broker.kept import with_message
from inference_tasks.broker.link import LinkSettings, LinkUnavailableError
from inference_tasks.broker.messages import Accepted, Outcome, Outgoing, Refused, Unavailable, Unknown
from inference_tasks.broker.rates import Rates
from inference_tasks.broker.state_port import StatePort
from inference_tasks.broker.tickets import UNDER_WAY, Encoded, Flight, Stage, Ticket, Verdict
from inference_tasks.broker.waiting import Waiting
from inference_tasks.state.records import CONFLICT, PARKED, State

__all__ = ["Pipeline", "PipelineSettings"]

log = logging.getLogger(__name__)

# Enough to make one round trip to Redis and one write cheap per message, few enough that a batch takes milliseconds.
BATCH = 256
# A large call stops writing at this many unanswered messages; single calls go on.
WINDOW = 4096
# Waking the loop and writing to the socket cost more than a small message itself.
LINGER_S = 0.02
LAST_WRITE_S = 0.5  # for what lingers when the loop ends


@dataclass(frozen=True)
class PipelineSettings:
    """What a pipeline is built from.

    Attributes:
        state: makes the state port, inside the loop that uses it; None where no records are kept.
        rates: {tier: tasks drained per second}, blocking; asked at most once a second, for refusals and deadlines.
        lift_body_bytes: largest body of messages that are kept with their records; below 0, none are.
    """

    link: LinkSettings | EmbeddedLinkSettings
    confirm_timeout_s: float
    state: Callable[[], StatePort] | None = None
    rates: Callable[[], Mapping[str, float]] | None = None
    lift_body_bytes: int = -1


class Pipeline:
    """A thread with an event loop that publishes; made once per process, never used across a fork."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._inbox: deque[tuple[Ticket, Sequence[tuple[Outgoing, Encoded | Outcome]], bool]] = deque()
        self._woken = False
        self._lingers = False
        self._to_record = Waiting()
        self._to_write = Waiting()
        self._refused: list[Flight] = []
        self._background: set[asyncio.Task[None]] = set()
        self._open_tickets: set[Ticket] = set()
        self._rates = Rates(settings.rates)
        self._state: StatePort | None = None
        self._followers = Followers(
            encode=settings.link.encode,
            send=self._to_write.put,
            settle=self._settle,
            in_background=self._in_background,
        )
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._link = settings.link.open(self._on_verdict, self._on_lost)
        self._thread = threading.Thread(target=self._run, name="inference-publisher", daemon=True)
        self._thread.start()

    # What other threads call.

    def hand_over(self, ticket: Ticket, messages: Sequence[tuple[Outgoing, Encoded | Outcome]], *, last: bool) -> None:
        """Give messages of a ticket to the loop, in order; ``last`` says that the ticket gets no more."""
        self._inbox.append((ticket, messages, last))
        if ticket.may_linger:
            if not self._lingers:
                self._lingers = True
                self._loop.call_soon_threadsafe(self._loop.call_later, LINGER_S, self._end_lingering)
        elif not self._woken:
            # Set before the call: a second wake-up costs a system call, a missing one would cost the message.
            self._woken = True
            self._loop.call_soon_threadsafe(self._take_in)

    def is_own_thread(self) -> bool:
        """Whether the caller runs in this loop, where waiting for an outcome would never end."""
        return threading.current_thread() is self._thread

    def is_alive(self) -> bool:
        """Whether the loop still runs."""
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Close the connection and end the thread; what is unsettled ends as unavailable or unknown."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)

    # The loop.

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        if self._settings.state is not None:
            self._state = self._followers.state = self._settings.state()
        steps = [
            asyncio.create_task(self._for_ever(self._to_record, self._record)),
            asyncio.create_task(self._for_ever(self._to_write, self._write)),
            asyncio.create_task(self._watch()),
        ]
        await self._stopping.wait()
        self._take_in()
        if self._open_tickets:
            # Events are posted, not waited for: a program that ends after its last submit has some on their way.
            await asyncio.wait([asyncio.wrap_future(one.future) for one in self._open_tickets], timeout=0.5)
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        await self._write_lingering()
        await self._link.close("the publisher was closed")
        for ticket in list(self._open_tickets):
            self._give_up(ticket.flights, "the publisher was closed")
        if self._background:
            await asyncio.wait(self._background, timeout=1.0)
        for ticket in list(self._open_tickets):
            for flight in ticket.flights:
                self._settle(flight, Unknown("the publisher was closed"))
        if self._state is not None:
            await self._state.aclose()
        await self._loop.shutdown_default_executor()

    async def _for_ever(self, waiting: Waiting, step: Callable[[list[Flight]], Awaitable[None]]) -> None:
        while True:
            await waiting.wanted.wait()
            waiting.wanted.clear()
            while flights := waiting.take(BATCH, bulk=self._link.unsettled < WINDOW):
                try:
                    await step(flights)
                except Exception as exc:
                    # A mistake in here must not end the loop that everybody waits for.
                    log.exception("publishing %d messages failed", len(flights))
                    self._give_up(flights, f"publishing failed: {exc!r}")

    def _take_in(self) -> None:
        self._woken = False
        now_s = self._loop.time()
        while self._inbox:
            ticket, messages, last = self._inbox.popleft()
            if ticket.timer is None:
                ticket.progress_at_s = now_s
                self._open_tickets.add(ticket)
                self._arm(ticket, now_s)
            ticket.complete = last
            for outgoing, encoded in messages:
                ticket.outcomes.append(None)
                index = len(ticket.outcomes) - 1
                if not isinstance(encoded, Encoded):
                    ticket.outcomes[index] = encoded
                    continue
                flight = Flight(ticket, index, outgoing, encoded)
                ticket.flights.append(flight)
                ticket.open += 1
                if ticket.expired:
                    self._settle(flight, Unavailable("it was not sent in time"))
                elif outgoing.task is not None and self._settings.state is not None:
                    # Not self._state: what is handed over before the loop has begun comes here before that is made.
                    self._to_record.put(flight)
                else:
                    self._to_write.put(flight)
            if ticket.complete and not ticket.open:
                self._resolve(ticket)

    def _end_lingering(self) -> None:
        self._lingers = False
        self._take_in()
        self._wake()

    async def _write_lingering(self) -> None:
        """Send what nobody waits for, at the end of the loop: nobody would learn that it was not sent."""
        lingering = [flight for flight in self._to_write.take(BATCH, bulk=True) if flight.ticket.may_linger]
        if not lingering:
            return
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self._write(lingering)
                await asyncio.gather(*(asyncio.wrap_future(flight.ticket.future) for flight in lingering))
        except Exception:
            log.debug("%d last messages were not sent", len(lingering), exc_info=True)

    async def _record(self, flights: list[Flight]) -> None:
        assert self._state is not None  # nothing is put into this lane without it
        tasks = [with_message(flight.outgoing, self._settings.lift_body_bytes) for flight in flights]
        try:
            answers = await self._state.submit(await self._rates.limited(tasks))
        except Exception as exc:
            # Whatever the store raises, these messages are not sent: a task nobody can ask about is worse than none.
            log.debug("writing %d records failed", len(flights), exc_info=True)
            for flight in flights:
                self._settle(flight, Unavailable(str(exc) or type(exc).__name__, part="state"))
            return
        orphans, parked = list[Flight](), list[Flight]()
        for flight, answer in zip(flights, answers, strict=True):
            flight.created = answer.created
            if answer.shares and answer.state != CONFLICT:
                self._followers.joined(flight, answer)
            if flight.stage is Stage.SETTLED:
                # Its caller's time was over while the record was written.
                orphans.append(flight)
            elif answer.state == PARKED:
                flight.stage = Stage.LEAVING
                parked.append(flight)
            elif outcome := settled_by(answer, self._drained_per_s(flight)):
                self._settle(flight, outcome)
            else:
                if answer.state != State.WAITING and flight.outgoing.once_free is not None:
                    flight.outgoing = flight.outgoing.once_free
                    flight.encoded = self._settings.link.encode(flight.outgoing)
                flight.stage = Stage.RECORDED
                self._followers.sent_or_waits(flight)
        if parked:
            self._in_background(self._refuse(parked, "parked"))
        if orphans:
            # Before any other record is written: their callers may be trying again by now, under the same ids.
            await self._retract(orphans)

    async def _write(self, flights: list[Flight]) -> None:
        try:
            await self._link.connect()
        except LinkUnavailableError as exc:
            # All that wait would meet the same; the next call tries again.
            self._give_up([*flights, *self._to_write.take(BATCH**2, bulk=True)], str(exc))
            return
        reachable = []
        for flight in flights:
            outgoing = flight.outgoing
            try:
                await self._link.ensure(outgoing.exchange, outgoing.declare)
            except LinkUnavailableError as exc:
                self._give_up([flight], str(exc))
            else:
                reachable.append(flight)
        is_writable = await self._link.writable()
        # Waiting may have taken long (alarms): what is settled by now must not be sent.
        due = [flight for flight in reachable if flight.stage in UNDER_WAY]
        if not due:
            return
        if not is_writable:
            for flight in due:
                self._to_write.put(flight)
            return
        for flight in due:
            flight.stage = Stage.WRITTEN
        await self._link.write(due, self._loop.time())

    # What the broker says.

    def _on_verdict(self, flight: Flight, verdict: Verdict) -> None:
        self._wake()
        if flight.stage is Stage.SETTLED:
            return
        if verdict is Verdict.ACCEPTED:
            self._settle(flight, Accepted(task_id=flight.shares, lift=flight.lift))
        elif verdict is Verdict.UNROUTABLE and not flight.rerouted and self._link.prepare_again():
            # The queues are gone, or were never declared in this virtual host: once more, after declaring them.
            flight.rerouted = True
            flight.stage = Stage.RECORDED
            self._to_write.put(flight)
        elif verdict is Verdict.UNROUTABLE:
            where = f"exchange {flight.outgoing.exchange!r}, routing key {flight.outgoing.routing_key!r}"
            flight.stage = Stage.RECORDED
            self._give_up([flight], f"no queue takes it ({where})")
        else:
            if not self._refused:
                self._in_background(self._settle_refused())
            flight.stage = Stage.LEAVING
            self._refused.append(flight)

    async def _settle_refused(self) -> None:
        # Nacks come in bursts; those of one burst are taken back in one round trip.
        await asyncio.sleep(0)
        flights, self._refused = self._refused, []
        await self._retract(flights, "full")
        await self._refuse(flights, "full")

    async def _refuse(self, flights: Iterable[Flight], reason: RefusalReason) -> None:
        await self._rates.refresh(may_be_old=True)
        for flight in flights:
            self._settle(flight, Refused(reason, self._drained_per_s(flight)))

    def _drained_per_s(self, flight: Flight) -> float | None:
        return self._rates.of(flight.outgoing.task.tier) if flight.outgoing.task is not None else None

    async def _retract(self, flights: Iterable[Flight], refused: str = "") -> None:
        ids_by_nonce: defaultdict[str, list[str]] = defaultdict(list)
        for flight in flights:
            if flight.created and flight.outgoing.task is not None:
                ids_by_nonce[flight.outgoing.task.nonce].append(flight.outgoing.task.id)
        if self._state is None:
            return
        for nonce, ids in ids_by_nonce.items():
            try:
                await self._state.retract(ids, nonce, refused)
            except Exception as exc:
                log.warning("%d records of refused tasks stay as pending: %r", len(ids), exc)

    def _on_lost(self, flights: Sequence[Flight], reason: str) -> None:
        for flight in flights:
            self._settle(flight, Unknown(reason))
        self._wake()

    def _wake(self) -> None:
        """Go on with what the window of unanswered messages held back."""
        for waiting in (self._to_write, self._to_record):
            if waiting:
                waiting.wanted.set()

    async def _watch(self) -> None:
        """Give up a connection that answers nothing, unless it has said that it is blocked."""
        patience_s = self._settings.confirm_timeout_s
        while True:
            await asyncio.sleep(patience_s / 4)
            oldest_at_s = self._link.oldest_written_at_s()
            if oldest_at_s is None or self._loop.time() - oldest_at_s < patience_s or self._link.is_blocked:
                continue
            self._link.drop(f"no confirm within {patience_s:g} s")

    # The end of a message and of a call.

    def _give_up(self, flights: Iterable[Flight], reason: str) -> None:
        """End messages as unavailable, or as unknown where they have been written."""
        recorded: list[Flight] = []
        for flight in flights:
            if flight.stage is Stage.WRITTEN:
                self._settle(flight, Unknown(reason))
            elif flight.stage is Stage.RECORDED and flight.created:
                flight.stage = Stage.LEAVING
                recorded.append(flight)
            elif flight.stage in UNDER_WAY:
                self._settle(flight, Unavailable(reason))
        if recorded:
            self._in_background(self._take_back(recorded, reason))

    async def _take_back(self, flights: list[Flight], reason: str) -> None:
        await self._retract(flights)
        for flight in flights:
            self._settle(flight, Unavailable(reason))

    def _settle(self, flight: Flight, outcome: Outcome) -> None:
        if flight.stage is Stage.SETTLED:
            return
        flight.stage = Stage.SETTLED
        tell(flight.outgoing, outcome)
        if flight.leads:
            self._followers.settled(flight, outcome)
        ticket = flight.ticket
        ticket.outcomes[flight.index] = outcome
        ticket.open -= 1
        ticket.progress_at_s = self._loop.time()
        if ticket.complete and not ticket.open:
            self._resolve(ticket)

    def _resolve(self, ticket: Ticket) -> None:
        if ticket.timer is not None:
            ticket.timer.cancel()
        self._open_tickets.discard(ticket)
        if not ticket.future.done():
            ticket.future.set_result([outcome for outcome in ticket.outcomes if outcome is not None])

    def _arm(self, ticket: Ticket, now_s: float) -> None:
        wait_s = ticket.patience_s if ticket.timeout_s is None else ticket.timeout_s
        ticket.timer = self._loop.call_at(now_s + wait_s, self._on_timer, ticket)

    def _on_timer(self, ticket: Ticket) -> None:
        if ticket.timeout_s is None:
            patient_until_s = ticket.progress_at_s + ticket.patience_s
            if patient_until_s > self._loop.time():
                ticket.timer = self._loop.call_at(patient_until_s, self._on_timer, ticket)
                return
        ticket.expired = True
        waited_s = ticket.patience_s if ticket.timeout_s is None else ticket.timeout_s
        self._give_up(ticket.flights, f"no answer within {waited_s:g} s")

    def _in_background(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
