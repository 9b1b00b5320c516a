"""The worker's consumer: Celery's own, with late binding by tier in place of the prefetch window."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

from celery import bootsteps, current_app, signals
from kombu.common import QoS

from inference_routing.cost import CostModel
from inference_routing.lane import QueueKey
from inference_routing.picker import Picker
from inference_tasks.app import inference_of
from inference_tasks.errors import StateUnavailableError
from inference_tasks.state.records import State, TaskError, WorkerBeat
from inference_tasks.worker import seam
from inference_tasks.worker.dead import Undertaker, as_text
from inference_tasks.worker.dispatcher import Dispatcher
from inference_tasks.worker.endings import tell_crashed, tell_expired
from inference_tasks.worker.intake import Intake, Unfit
from inference_tasks.worker.leases import Leases
from inference_tasks.worker.mailbox import Mailbox
from inference_tasks.worker.pool_options import PoolRequest, check_pool
from inference_tasks.worker.slots import SlotPool, Slots
from inference_tasks.worker.tally import Tally

if TYPE_CHECKING:
    from inference_tasks.state.records import Claimant
    from inference_tasks.worker.slots import Ticket

__all__ = ["InferenceConsumer", "TierStep"]

logger = logging.getLogger(__name__)

#: Exit status of a pool process that cannot load its models.
EX_NO_MODELS = 70
#: Rounds of new processes of which none becomes ready, after which the worker gives up.
MAX_FAILED_ROUNDS = 3
#: Exit status of a worker that gives up: a deployment must be mended.
EX_DEPLOYMENT = 7
TICK_S = 0.1
DRAIN_S = 2.0


@signals.worker_process_init.connect(weak=False)
def _load_models(**_: object) -> None:
    """Load the models in each pool process before its slot exists; a process without its models must not get one."""
    try:
        inference_of(current_app).load_models()
    except Exception:
        logger.critical("this process ends, since it cannot load its models", exc_info=True)
        logging.shutdown()
        os._exit(EX_NO_MODELS)


class TierConsumer:
    """What Celery calls its task consumer: the same calls as kombu's ``Consumer``, answered by the dispatcher."""

    def __init__(self, owner: InferenceConsumer) -> None:
        self._owner = owner
        self.on_message: Callable[[Any], None] | None = None
        self.channel = owner.connection.default_channel if owner.connection else None
        self.queues = list(owner.app.amqp.queues.consume_from.values())

    def consume(self) -> None:
        self._owner.begin()

    def cancel(self) -> None:
        self._owner.drain()

    def close(self) -> None: ...

    def qos(self, **_: object) -> None: ...

    def consuming_from(self, queue: Any) -> bool:
        name = getattr(queue, "name", queue)
        return any(one.name == name for one in self.queues)

    def add_queue(self, queue: Any) -> None:
        self.queues.append(queue)
        self._owner.dispatcher.serve(queue.name, on=True)

    def cancel_by_queue(self, queue: str) -> None:
        self.queues = [one for one in self.queues if one.name != queue]
        self._owner.dispatcher.serve(queue, on=False)


class TierStep(bootsteps.StartStopStep):
    """Put the tier consumer in the place of the one that Celery's ``Tasks`` step has made.

    A step after ``Tasks``, not instead of it: other steps require ``Tasks`` by class and would bring the stock one
    back.
    """

    requires = (seam.Tasks,)
    label = "Tiers"

    def __init__(self, c: InferenceConsumer, **kwargs: object) -> None:
        super().__init__(c, **kwargs)
        self.enabled = isinstance(c, InferenceConsumer)

    def start(self, c: InferenceConsumer) -> None:
        c.attach()

    def stop(self, c: InferenceConsumer) -> None:
        c.drain()

    def shutdown(self, c: InferenceConsumer) -> None:
        c.leave()

    def register_with_event_loop(self, c: InferenceConsumer, hub: Any) -> None:
        c.register(hub)


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
    hostname: str
    _flush_events: Callable[[], None]

    class Blueprint(seam.Consumer.Blueprint):  # type: ignore[misc, valid-type]
        """Celery's steps, and ours after ``Tasks``."""

        # Delays have queues of their own here, declared with the rest of the topology.
        default_steps = (
            *(step for step in seam.Consumer.Blueprint.default_steps if not step.endswith(":DelayedDelivery")),
            "inference_tasks.worker.consumer:TierStep",
        )

    def __init__(self, on_task_request: Callable[[Any], None], *args: Any, pool: Any = None, **kwargs: Any) -> None:
        self.inference = inference_of(kwargs["app"])
        settings = self.inference.settings
        self._tally = Tally()
        self._mailbox = Mailbox()
        self._pool_kind = _pool_kind(pool)
        self._raw_pool = pool
        self._reachable = True
        self._alarm = False
        self._source: Any = None
        self._draining = False
        self._ticking = False
        self._solo_heartbeat: seam.SoloHeartbeat | None = None
        self._to_pool = seam.ungated(on_task_request)
        self._overflow: deque[Any] = deque()

        policy, topology = self.inference.policy, self.inference.topology
        keys = [QueueKey(queue.tier, queue.lane, queue.name) for queue in topology.queues if queue.tier is not None]
        served = [key for key in keys if key.tier in settings.worker.tiers]
        slots = Slots(self._ready, settings.worker.reserve)
        wrapped = SlotPool(pool, take=self._take, free=self._free, crashed=self._crashed)
        self.store = self.inference.store
        costs = CostModel()
        self.dispatcher = Dispatcher(
            source=_NoSource(),
            picker=Picker(policy, served, costs),
            costs=costs,
            claims=self.store,
            slots=slots,
            queues=served,
            tasks=kwargs["app"].tasks,
            worker=kwargs.get("hostname") or "",
            lease_s=settings.state.lease_s,
            hold_s=settings.worker.hold_s,
            deliver=self._deliver,
            bury=self._bury,
            expired=partial(tell_expired, kwargs["app"]),
            crashed=self._bury_crashed,
            observer=self._tally,
            run_unclaimed=settings.state.on_state_loss == "run",
            one_at_a_time=self._pool_kind == "solo",
            connection_errors=seam.CONNECTION_ERRORS,
        )
        check_pool(PoolRequest(self._pool_kind, int(pool.limit or 1)), kwargs["app"])
        if self._pool_kind != "prefork":
            self.inference.load_models()
        super().__init__(self._request, *args, pool=wrapped, **kwargs)  # type: ignore[misc]
        self._births = 0
        signals.worker_before_create_process.connect(self._process_born)
        self._undertaker = Undertaker(
            post=self.inference.publisher.post,
            on_main=self._mailbox.post,
            later=self._later,
            fail=self._record_unfit,
            namespace=settings.namespace,
            dead_queue=topology.dead.name,
            worker=self.hostname,
        )
        self._leases = Leases(
            self.inference.new_store(),
            worker=self.hostname,
            lease_s=settings.state.lease_s,
            claimed=self._claimed,
            beat=self._beat,
            on_state=lambda reachable: self._mailbox.post(partial(self._state_seen, reachable)),
        )

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _ready(self) -> int:
        if self._pool_kind == "prefork":
            return seam.ready_processes(self._raw_pool)
        return int(self._raw_pool.num_processes or 1)

    def _process_born(self, **_: object) -> None:
        self._births += 1

    def _check_births(self) -> None:
        """Stop a worker whose processes die one after another without ever being ready."""
        if self._pool_kind != "prefork" or not self._births:
            return
        processes = self._raw_pool.num_processes
        if seam.ready_processes(self._raw_pool) >= processes:
            self._births = 0
        elif self._births > MAX_FAILED_ROUNDS * processes:
            logger.critical("%d processes in a row have ended before they were ready; giving up", self._births)
            seam.stop_worker(EX_DEPLOYMENT)

    def _take(self, task_id: str) -> Ticket:
        return self.dispatcher.take(task_id)

    def _free(self, ticket: Ticket) -> None:
        self._mailbox.post(partial(self.dispatcher.free, ticket, monotonic()))

    def _crashed(self, ticket: Ticket, info: object) -> bool:
        """A pool process died with this task: the claim is given back, the crash counted. True if that was the last."""
        if not seam.is_lost_child(info) or not ticket.token or self._draining:
            return False
        intake = ticket.intake
        try:
            crash = self.store.crashed(intake.id, ticket.token, self.hostname)
        except StateUnavailableError as exc:
            logger.warning("the crash of task %s counts when its lease ends: %s", intake.id, exc)
            return False
        logger.error("the process running task %s[%s] died (%d so far)", intake.name, intake.id, crash.crashes)
        if crash.over:
            self._bury_crashed(ticket.message, ticket.key, intake)
        return crash.over

    def _bury_crashed(self, message: Any, key: QueueKey, intake: Intake) -> None:
        limit = intake.crash_limit or self.inference.settings.worker.max_crashes
        text = f"the process running it died {limit} times"
        self._bury(message, key, Unfit("crash limit", text, intake.id, intake.name))
        tell_crashed(self.app, message, text)

    def _request(self, request: Any) -> None:
        """Celery's way to the pool. What comes by its timer (ETA, rate limits) waits for a free slot like all else."""
        if self.dispatcher.is_handing(request.id) or self.dispatcher.slots.free:
            self._to_pool(request)
        else:
            self._overflow.append(request)

    def _deliver(self, message: Any) -> None:
        handler = self.task_consumer.on_message
        if self._solo_heartbeat is None:
            handler(message)
            return
        with self._solo_heartbeat:
            handler(message)

    # -- the event loop ------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """A connection is up: declare the topology, and read from this connection from now on."""
        self.inference.declare_topology()
        if self._source is not None:
            self._source.close()
        self._source = self.inference.new_source(self.connection, self.dispatcher.queue_lost)
        self.dispatcher.attach(self._source)
        self.task_consumer = TierConsumer(self)
        self.qos = QoS(lambda prefetch_count: None, 0)
        self.qos_global = False
        self.initial_prefetch_count = 0
        if self._pool_kind == "solo":
            self._solo_heartbeat = seam.SoloHeartbeat(self.connection, self.event_dispatcher)
        if not self._leases.is_alive():
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
        self._check_births()
        try:
            self.dispatcher.tick()
        except TimeoutError as exc:
            raise seam.RecoverableConnectionError(str(exc)) from exc
        if self.dispatcher.state_lost and self._reachable:
            self.dispatcher.state_is_back()

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

    def _bury(self, message: Any, key: QueueKey, unfit: Unfit) -> None:
        self._undertaker.bury(message, key, unfit)

    def _record_unfit(self, unfit: Unfit, key: QueueKey) -> None:
        if unfit.id is not None:
            error = TaskError(type=unfit.reason, message=unfit.detail)
            self.store.finish(unfit.id, None, None, State.FAILED, error, name=unfit.name or "", tier=key.tier)

    def _bury_current(self, message: Any, reason: str, exc: object) -> None:
        key = self.dispatcher.take_back_handing()
        if key is None:
            message.reject_log_error(logger, self.connection_errors)
            return
        headers = message.headers if isinstance(message.headers, dict) else {}
        unfit = Unfit(reason, repr(exc)[:500], as_text(headers.get("id")), as_text(headers.get("task")))
        self._bury(message, key, unfit)

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

    def _beat(self) -> WorkerBeat:
        settings = self.inference.settings
        return WorkerBeat(
            node=self.hostname,
            pid=os.getpid(),
            gpu=os.environ.get("CUDA_VISIBLE_DEVICES") or None,
            pool=self._pool_kind,
            slots=self._ready(),
            reserve=settings.worker.reserve,
            tiers=tuple(settings.worker.tiers),
            busy=len(self.dispatcher.slots),
            starts_60s=self._tally.starts(),
            slot_s_60s=self._tally.slot_s(),
            started_per_s=self._tally.per_s(),
        )

    def _state_seen(self, reachable: bool) -> None:
        self._reachable = reachable
        if reachable and self.dispatcher.state_lost:
            self.dispatcher.state_is_back()

    # -- losing the connection, and the end ----------------------------------------------------------------------------

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # Celery closes the events' connection politely, which hangs for ever if its peer is frozen.
        if self.event_dispatcher and self.event_dispatcher.connection:
            seam.collect(self.event_dispatcher.connection)
        super().on_connection_error_after_connected(exc)

    def on_close(self) -> None:
        self._mailbox.run()
        self.dispatcher.connection_lost()
        self._overflow.clear()
        super().on_close()
        for ticket in list(self.dispatcher.slots):
            if seam.unaccepted(ticket.job):
                self.dispatcher.forget(ticket)

    def drain(self) -> None:
        """Take nothing new, return what is held; answers still on their way are waited for, a moment."""
        stopping = self.blueprint.state != seam.RUN or self.controller.blueprint.state != seam.RUN
        if self._draining or self._source is None or self.connection is None or not stopping:
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
        if self._source is not None and self.connection is not None:
            with suppress(*self.connection_errors):
                self._source.flush()
        self._leases.stop()
        if self._solo_heartbeat is not None:
            self._solo_heartbeat.stop()
        cut_off = [(ticket.intake.id, ticket.token) for ticket in self.dispatcher.slots if ticket.token]
        try:
            self.store.release(cut_off, has_started=True)
            self.store.leave(self.hostname)
        except StateUnavailableError as exc:
            logger.warning("this worker shows until its heartbeat ends: %s", exc)


class _NoSource:
    """Before the first connection there is nothing to ask."""

    def ask(self, queues: Sequence[str]) -> None: ...
    def subscribe(self, queues: Sequence[str]) -> None: ...
    def unsubscribe(self, queues: Sequence[str]) -> None: ...
    def give_back(self, message: object) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def flush(self, *, acks_can_wait: bool = False) -> None: ...

    on_answer: Any = None
    on_push: Any = None


def _pool_kind(pool: Any) -> str:
    module = type(pool).__module__.rpartition(".")[2]
    return {"prefork": "prefork", "thread": "threads", "solo": "solo"}.get(module, module)
