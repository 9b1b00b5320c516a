"""Slots of a worker: how many exist, which task holds which, and the pool that tells when one is free again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from inference_tasks.worker import seam

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey
    from inference_routing.picker import Pick
    from inference_tasks.worker.intake import Delivery, Intake

__all__ = ["Observer", "SlotPool", "Slots", "Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One slot in use, from the hand-over to the pool until the slot is free again.

    ``started_s`` and ``predicted_s`` are on the worker's monotonic clock, in seconds. ``wait_s``: from submit to start,
    None for later attempts and for what was submitted with a delay. ``outcome``: as the event ``task.ended`` has it,
    known when the run has ended. ``is_adrift``: the connection on which its message was delivered is lost, and the
    broker will deliver it again.
    """

    intake: Intake
    message: Delivery
    key: QueueKey
    pick: Pick | None
    token: int
    started_s: float
    predicted_s: float
    reserved: bool
    held_s: float = 0.0
    wait_s: float | None = None
    outcome: str = "success"
    is_adrift: bool = False
    job: object | None = field(default=None, repr=False)


class Observer(Protocol):
    """Told of each start and end. Times in seconds on the worker's monotonic clock."""

    def started(self, ticket: Ticket) -> None: ...
    def finished(self, ticket: Ticket, cost_s: float) -> None: ...


class Slots:
    """Which slots exist and which are taken.

    A slot exists once its process has loaded its models, so the number comes from ``ready`` each time; it is taken from
    the hand-over on and freed exactly once, by whichever of result, error, time limit or lost connection comes first.
    """

    def __init__(self, ready: Callable[[], int], reserve: int = 0) -> None:
        self._ready = ready
        self.reserve = reserve
        self._taken: set[Ticket] = set()
        self._lower = 0

    def __len__(self) -> int:
        return len(self._taken)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._taken)

    @property
    def ready(self) -> int:
        """Slots that exist now."""
        return self._ready()

    @property
    def free(self) -> int:
        """Slots that exist and run nothing."""
        return max(0, self._ready() - len(self._taken))

    @property
    def free_lower(self) -> int:
        """Free slots that are not kept for realtime work."""
        ready = self._ready()
        return max(0, min(ready - len(self._taken), ready - self.reserve - self._lower))

    def take(self, ticket: Ticket) -> None:
        self._taken.add(ticket)
        if not ticket.reserved:
            self._lower += 1

    def connection_lost(self) -> None:
        """The broker has the messages of all that runs back."""
        for ticket in self._taken:
            ticket.is_adrift = True

    def adopt(self, intake: Intake, token: int, message: Delivery) -> bool:
        """Keep a message that came back while the run of its very claim goes on here: it is settled when that ends.

        False if there is no such run, or it has its message. Not a copy of another hop: a retry's own, acknowledged
        at the end of the run that asked for it, would be lost.
        """
        for ticket in self._taken:
            if ticket.intake.id == intake.id and ticket.token == token and ticket.is_adrift:
                same = (ticket.intake.generation, ticket.intake.hop) == (intake.generation, intake.hop)
                if not same or ticket.message.acknowledged:
                    return False
                seam.replace_delivery(ticket.message, message)
                ticket.is_adrift = False
                return True
        return False

    def free_up(self, ticket: Ticket) -> bool:
        """Free the ticket's slot; false if that has happened already."""
        if ticket not in self._taken:
            return False
        self._taken.discard(ticket)
        if not ticket.reserved:
            self._lower -= 1
        return True


class SlotPool:
    """A Celery pool that tells when a job takes a slot, when that slot is free again, and of runs that end in an error.

    Every other attribute is the pool's own. The slot is taken in ``apply_async``, the one place every request passes,
    and freed by result, error or hard time limit (prefork), by the future's own end (threads, also when the tracer
    itself raises), or by the return of the call (solo).
    """

    _own = frozenset({"_pool", "_take", "_free", "_ended", "keeps_jobs"})

    def __init__(
        self,
        pool: Any,
        *,
        take: Callable[[str], Ticket],
        free: Callable[[Ticket], None],
        ended: Callable[[Ticket, object], Callable[[], None] | None],
    ) -> None:
        """Wrap a pool.

        Args:
            pool: Celery's.
            take: called with a task's id before it goes to the pool.
            free: called when its slot is free again.
            ended: called with the error information of a run that raised or was lost. What it returns is called once
                Celery has noted the end, and settles the message; with None, Celery does.
        """
        self._pool = pool
        self._take = take
        self._free = free
        self._ended = ended
        self.keeps_jobs = False

    def flush(self) -> None:
        """Drop the jobs that no process has taken, unless they are to be kept; Celery calls this at each close."""
        if not self.keeps_jobs:
            flush = getattr(self._pool, "flush", None)
            if flush is not None:
                flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._pool, name, value)

    def apply_async(
        self,
        target: Callable[..., object],
        args: Any = None,
        kwargs: Any = None,
        *,
        callback: Callable[..., object] | None = None,
        error_callback: Callable[..., object] | None = None,
        timeout_callback: Callable[..., object] | None = None,
        correlation_id: str = "",
        **options: Any,
    ) -> Any:
        ticket = self._take(correlation_id)

        def note(call: Callable[..., object] | None, info: object, *a: object, **k: object) -> object:
            after = None if info is None else self._ended(ticket, info)
            if after is not None:
                # Celery must neither acknowledge nor return the message.
                seam.settled(call)
            try:
                return call(*a, **k) if call else None
            finally:
                if after is not None:
                    after()

        def on_result(*a: object, **k: object) -> object:
            try:
                return note(callback, seam.failure_in(a), *a, **k)
            finally:
                if not in_thread:
                    self._free(ticket)

        def on_error(info: object, *a: object, **k: object) -> object:
            try:
                return note(error_callback, info, info, *a, **k)
            finally:
                self._free(ticket)

        def on_timeout(soft: bool, timeout: float) -> object:
            try:
                return timeout_callback(soft, timeout) if timeout_callback else None
            finally:
                if not soft:
                    self._free(ticket)

        in_thread = False
        try:
            job = self._pool.apply_async(
                target,
                args,
                kwargs,
                callback=on_result,
                error_callback=on_error,
                timeout_callback=on_timeout,
                correlation_id=correlation_id,
                **options,
            )
        except BaseException:
            self._free(ticket)
            raise
        future = getattr(job, "f", None)
        if future is not None:
            in_thread = True
            future.add_done_callback(lambda _: self._free(ticket))
        elif job is None:
            self._free(ticket)
        ticket.job = job
        return job
