"""The worker's consumer: Celery's own, with late binding by tier in place of the prefetch window."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from kombu.common import QoS

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey
from inference_routing.picker import Picker
from inference_tasks.app import inference_of
from inference_tasks.errors import StateUnavailableError
from inference_tasks.observe.events import emit
from inference_tasks.state.script import load
from inference_tasks.worker import seam
from inference_tasks.worker.dead import as_text
from inference_tasks.worker.dispatcher import ANSWER_S, Dispatcher
from inference_tasks.worker.endings import Endings
from inference_tasks.worker.events import flush_in_loop
from inference_tasks.worker.floors import FloorWatch
from inference_tasks.worker.heartbeat import Heartbeat
from inference_tasks.worker.intake import Unfit
from inference_tasks.worker.leases import Leases
from inference_tasks.worker.mailbox import Mailbox
from inference_tasks.worker.obeying import Obedience
from inference_tasks.worker.pool_options import PoolRequest, check_pool, pool_kind
from inference_tasks.worker.processes import Processes
from inference_tasks.worker.slots import SlotPool, Slots
from inference_tasks.worker.source import NoSource
from inference_tasks.worker.steps import TierConsumer
from inference_tasks.worker.stopping import Stopper
from inference_tasks.worker.tally import Tally
from inference_tasks.worker.tracebacks import use_brief_tracebacks

if TYPE_CHECKING:
    from inference_tasks.state.records import Claimant
    from inference_tasks.state.store import TaskStore
    from inference_tasks.worker.slots import Ticket

__all__ = ["InferenceConsumer"]

logger = logging.getLogger(__name__)

EX_CUT_OFF = 1  # exit status of a worker stopped with tasks running that it could not end
TICK_S = 0.1
DRAIN_S = 2.0


class InferenceConsumer(seam.Consumer):
    """Celery's consumer with the dispatcher inside.

    Slots, claims and costs live here and not on the connection: what runs when a connection is lost goes on, keeps its
    slot and its claim, and ends as usual.
    """

    # Celery sets these, its type stubs do not know them.
    connection_errors: tuple[type[BaseException], ...]
    controller: Any
    event_dispatcher: Any
    task_consumer: Any
    blueprint: Any
    connection: Any
    hub: Any
    hostname: str
    _flush_events: Callable[[], None]

    class Blueprint(seam.Consumer.Blueprint):  # type: ignore[misc, valid-type]
        """Celery's steps, and ours after ``Tasks``."""

        # Delays have queues of their own here, declared with the rest of the topology.
        default_steps = (
            *(step for step in seam.Consumer.Blueprint.default_steps if not step.endswith(":DelayedDelivery")),
            "inference_tasks.worker.steps:TierStep",
        )

    def __init__(self, on_task_request: Callable[[Any], None], *args: Any, pool: Any = None, **kwargs: Any) -> None:
        self.inference = inference_of(kwargs["app"])
        settings = self.inference.settings
        self._tally = Tally()
        self._mailbox = Mailbox()
        self._pool_kind = pool_kind(pool)
        self._raw_pool = pool
        self._reachable, self._alarm = True, False
        self._source: Any = None
        self._draining = False
        self._ticking = False
        self._solo_heartbeat: seam.SoloHeartbeat | None = None
        self._to_pool = seam.ungated(on_task_request)
        self._overflow: deque[Any] = deque()
        use_brief_tracebacks()
        for script in ("finish", "submit"):  # read here once: the first run of each new process would wait for that
            load(script)

        policy, topology = self.inference.policy, self.inference.topology
        keys = [QueueKey(queue.tier, queue.lane, queue.name) for queue in topology.queues if queue.tier is not None]
        served = [key for key in keys if key.tier in settings.worker.tiers]
        slots = Slots(self._ready, settings.worker.reserve)
        wrapped = SlotPool(pool, take=lambda task_id: self.dispatcher.take(task_id), free=self._free, ended=self._ended)
        self.store = self.inference.store
        worker = kwargs.get("hostname") or ""
        self._endings = Endings(self.inference, self._mailbox, self._later, worker=worker)
        costs = CostModel()
        self.dispatcher = Dispatcher(
            source=NoSource(),
            picker=Picker(policy, served, costs),
            costs=costs,
            claims=self.store,
            slots=slots,
            queues=served,
            tasks=kwargs["app"].tasks,
            worker=worker,
            lease_s=settings.state.lease_s,
            hold_s=settings.worker.hold_s,
            deliver=self._deliver,
            ends=self._endings,
            observer=self._tally,
            floors=FloorWatch(
                {tier.name: float(tier.floor) for tier in policy.tiers},
                by_time=policy.share == "time",
                tell=self._tally.floor,
            ),
            run_unclaimed=settings.state.on_state_loss == "run",
            one_at_a_time=self._pool_kind == "solo",
            connection_errors=seam.CONNECTION_ERRORS,
        )
        self.obedience = Obedience(self.dispatcher, served, node=worker)
        check_pool(PoolRequest(self._pool_kind, int(pool.limit or 1)), kwargs["app"])
        if self._pool_kind != "prefork":
            self.inference.load_models()
        super().__init__(self._request, *args, pool=wrapped, **kwargs)  # type: ignore[misc]
        self._processes = Processes(pool) if self._pool_kind == "prefork" else None
        stopper = Stopper(slots, pool, can_kill=self._processes is not None)
        self._leases = Leases(
            self.inference.new_store(),
            worker=self.hostname,
            lease_s=settings.state.lease_s,
            claimed=self._claimed,
            beat=Heartbeat(
                node=self.hostname,
                pool=self._pool_kind,
                settings=settings.worker,
                slots=slots,
                tally=self._tally,
                state=self._what_state,
            ),
            on_state=lambda reachable: self._mailbox.post(partial(self._state_seen, reachable)),
            on_stopping=lambda stopping: self._mailbox.post(partial(stopper.asked, stopping)),
            on_switches=lambda switches: self._mailbox.post(partial(self.obedience.obey, switches)),
        )

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _ready(self) -> int:
        if self._processes is not None:
            return self._processes.ready
        return int(self._raw_pool.num_processes or 1)

    def _free(self, ticket: Ticket) -> None:
        self._mailbox.post(partial(self.dispatcher.free, ticket, monotonic()))

    def _ended(self, ticket: Ticket, info: object) -> Callable[[], None] | None:
        return self._endings.of_run(ticket, info, is_stopping=self._draining)

    def _request(self, request: Any) -> None:
        """Celery's way to the pool. What comes by its timer (ETA, rate limits) waits for a free slot like all else."""
        if self.dispatcher.is_handing(request.id) or self.dispatcher.slots.free:
            self._to_pool(request)
        else:
            self._overflow.append(request)

    def _deliver(self, message: Any) -> None:
        with self._solo_heartbeat or nullcontext():
            self.task_consumer.on_message(message)

    # -- the event loop ------------------------------------------------------------------------------------------------

    def ensure_connected(self, conn: Any) -> Any:
        return seam.bound(super().ensure_connected(conn), ANSWER_S)

    def attach(self) -> None:
        """A connection is up: declare the topology, and read from this connection from now on."""
        self.inference.declare_topology()
        if self._source is not None:
            self._source.close()
        self._source = self.inference.new_source(self.connection, self.dispatcher.queue_lost)
        self.dispatcher.attach(self._source)
        self.task_consumer = TierConsumer(self)
        flush_in_loop(self.event_dispatcher)
        self.qos = QoS(lambda prefetch_count: None, 0)
        self.qos_global = False
        self.initial_prefetch_count = 0
        if self._pool_kind == "solo":
            self._solo_heartbeat = seam.SoloHeartbeat(self.connection, self.event_dispatcher)
        if not self._leases.is_alive():
            self.obedience.begin(self.store)
            self._leases.start()

    def register(self, hub: Any) -> None:
        self._mailbox.register(hub)
        self._source.register(hub, self._readable)
        if not self._ticking:
            self._ticking = True
            seam.order_tick(hub, self._raw_pool, self._pump)
        hub.call_repeatedly(TICK_S, self._tick)

    def begin(self) -> None:
        self._mailbox.wake()

    def _readable(self) -> None:
        self._source.drain()

    def _pump(self) -> None:
        if self._draining or self.task_consumer is None or self.task_consumer.on_message is None:
            return
        self._mailbox.run()
        while self._overflow and self.dispatcher.slots.free:
            self._to_pool(self._overflow.popleft())
        again = self.dispatcher.pump()
        self._mailbox.run()
        self._source.flush(acks_can_wait=not self.dispatcher.slots.free)
        if again:
            self._mailbox.wake()
        due_s = self.dispatcher.next_overdue_s
        if due_s is not None and not self._alarm:
            self._alarm = True
            self._later(due_s + 0.001, self._overdue)

    def _overdue(self) -> None:
        self._alarm = False
        self.dispatcher.return_overdue()
        self._mailbox.wake()

    def on_send_event_buffered(self) -> None:  # type: ignore[override]
        """Leave events in their buffer until the next tick; Celery publishes them at each turn of its loop."""

    def _tick(self) -> None:
        self._flush_events()
        self._source.flush()
        if self._processes is not None:
            self._processes.check()
        try:
            self.dispatcher.tick()
        except TimeoutError as exc:
            raise seam.RecoverableConnectionError(str(exc)) from exc
        if self.dispatcher.state_lost and self._reachable:
            self._reachable = False
            self._leases.hurry()  # the next renewal tells when the state is back

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        # The poll that follows may already have its time-out: wake it, so that the new timer is seen.
        self.timer.call_after(delay_s, call)
        self._mailbox.wake()

    def call_soon_ack(self, p: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Acknowledge on the loop's thread: py-amqp's channels belong to it."""
        call = partial(p, *args, **kwargs)
        if not self._mailbox.is_owner:
            self._mailbox.post(call)
            return
        call()
        if self._draining:
            self._source.flush()

    # -- bad messages --------------------------------------------------------------------------------------------------

    def _bury_current(self, message: Any, reason: str, exc: object) -> None:
        key = self.dispatcher.take_back_handing()
        if key is None:
            message.reject_log_error(logger, self.connection_errors)
            return
        headers = message.headers if isinstance(message.headers, dict) else {}
        unfit = Unfit(reason, repr(exc)[:500], as_text(headers.get("id")), as_text(headers.get("task")))
        self._endings.bury(message, key, unfit)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._bury_current(message, "undecodable", exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._bury_current(message, "malformed", "no task in the message")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._bury_current(message, "unknown task", exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._bury_current(message, "malformed", exc)

    # -- claims --------------------------------------------------------------------------------------------------------

    def _claimed(self) -> Sequence[tuple[str, int, Claimant]]:
        return [(intake.id, token, intake.claimant()) for intake, token in self.dispatcher.claimed()]

    def _what_state(self) -> str:
        return "draining" if self._draining else self.obedience.state

    def _state_seen(self, reachable: bool) -> None:
        emit("state.seen", reachable=reachable)
        if reachable and self.dispatcher.state_lost:
            self.dispatcher.state_lost = False
            logger.info("the state can be reached again: taking work")
        self._reachable = reachable

    # -- losing the connection, and the end ----------------------------------------------------------------------------

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # Celery closes the events' connection politely, which hangs for ever if its peer is frozen.
        if self.event_dispatcher and self.event_dispatcher.connection:
            seam.collect(self.event_dispatcher.connection)
        super().on_connection_error_after_connected(exc)

    def on_close(self) -> None:
        """Celery's call for both a lost connection and an ordered stop."""
        self._mailbox.run()
        if self._is_stopping and self.connection is not None:
            self.drain()
            self._let_jobs_reach_the_pool()
        else:
            self.dispatcher.connection_lost()
            self._overflow.clear()
        super().on_close()
        for ticket in list(self.dispatcher.slots):
            if seam.unaccepted(ticket.job) and not self.pool.keeps_jobs:
                self.dispatcher.forget(ticket)

    @property
    def _is_stopping(self) -> bool:
        return any(one.blueprint.state != seam.RUN for one in (self, self.controller))

    def _let_jobs_reach_the_pool(self) -> None:
        """Turn the loop until every job handed over has been taken by a process.

        Celery drops at its stop what no process has acknowledged yet, though one may be running it: the message would
        go back while its task runs.
        """
        if self.hub is None:
            return
        end = monotonic() + DRAIN_S
        while any(seam.unaccepted(ticket.job) for ticket in self.dispatcher.slots) and monotonic() < end:
            self._mailbox.wake()
            self.hub.run_once()
            self._mailbox.run()
        self.pool.keeps_jobs = not any(seam.unaccepted(ticket.job) for ticket in self.dispatcher.slots)

    def drain(self) -> None:
        """Take nothing new, return what is held; answers still on their way are waited for, a moment."""
        if self._draining or self._source is None or self.connection is None or not self._is_stopping:
            return
        self._draining = True
        try:
            self._mailbox.run()
            self.dispatcher.close()
            self._source.finish(lambda: self.dispatcher.unanswered, DRAIN_S)
        except self.connection_errors as exc:
            logger.debug("the connection was lost while draining: %r", exc)

    def leave(self) -> None:
        """The end: the last acknowledgements go out, and what a cold stop has cut off can start again elsewhere."""
        self._mailbox.run()
        end = monotonic() + DRAIN_S
        while self._endings.is_busy and monotonic() < end:
            self._mailbox.wait(0.05)
            self._mailbox.run()
        if self._source is not None and self.connection is not None:
            with suppress(*self.connection_errors):
                self._source.flush()
                self._source.close()
        self._leases.stop()
        if self._solo_heartbeat is not None:
            self._solo_heartbeat.stop()
        self._release_running(self.store)

    def _release_running(self, store: TaskStore) -> None:
        """Let what runs here start elsewhere, and take the heartbeat back."""
        cut_off = [(ticket.intake.id, ticket.token) for ticket in self.dispatcher.slots if ticket.token]
        try:
            store.release(cut_off, has_started=True)
            store.leave(self.hostname)
        except StateUnavailableError as exc:
            logger.warning("this worker shows until its heartbeat ends: %s", exc)

    def cancel_active_requests(self) -> None:
        """End what runs, at a cold stop. A thread cannot be ended from outside, so the process ends with it.

        Called from a signal handler, maybe in the middle of anything: nothing that was in use is touched.
        """
        if self._processes is not None:
            super().cancel_active_requests()
            self._processes.end_unaccepted(ticket.job for ticket in self.dispatcher.slots)
            return
        logger.warning("ending at once with %d task(s) running; they start again elsewhere", len(self.dispatcher.slots))
        self._release_running(self.inference.new_store())
        logging.shutdown()
        os._exit(EX_CUT_OFF)
