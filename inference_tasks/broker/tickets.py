"""A caller's call (ticket) and the messages of it that are on their way (flights)."""

from __future__ import annotations

from concurrent.futures import Future
from enum import Enum, auto
from typing import TYPE_CHECKING

from inference_tasks.broker.messages import Outcome, Outgoing

if TYPE_CHECKING:
    import asyncio

__all__ = ["UNDER_WAY", "Encoded", "Flight", "Stage", "Ticket", "Verdict"]


class Verdict(Enum):
    """What the broker said of one message."""

    ACCEPTED = auto()
    REFUSED = auto()
    UNROUTABLE = auto()


class Stage(Enum):
    """How far a message has come. LEAVING: its outcome is certain, and waits for its record to be taken back."""

    WAITING = auto()
    RECORDED = auto()
    WRITTEN = auto()
    LEAVING = auto()
    SETTLED = auto()


UNDER_WAY = (Stage.WAITING, Stage.RECORDED)


class Encoded:
    """One message as bytes, complete but for the message id, which carries the delivery tag.

    Attributes:
        head: everything before the message id.
        tail: everything after it.
        size_bytes: body and properties, what the size limit speaks of.
        message_id: the id the message came with, already in ``head``; None where the channel adds one.
    """

    __slots__ = ("head", "message_id", "size_bytes", "tail")

    def __init__(self, head: bytes, tail: bytes, size_bytes: int, message_id: str | None) -> None:
        self.head = head
        self.tail = tail
        self.size_bytes = size_bytes
        self.message_id = message_id


class Flight:
    """One message between the call that sends it and its outcome.

    Attributes:
        created: this submit wrote the task's record, or holds a share in it, so it may take that back.
        shares: the id of the task that it has joined, whose message this then is; empty where it has its own.
        lift: the tier that the task which it has joined should be lifted to; empty for none.
        leads: the id of the shared task whose only message of this process it is; empty for none.
        rerouted: it came back because no queue took it, and is on its second way.
    """

    __slots__ = (
        "created",
        "encoded",
        "index",
        "leads",
        "lift",
        "outgoing",
        "rerouted",
        "shares",
        "stage",
        "tag",
        "ticket",
        "written_at_s",
    )

    def __init__(self, ticket: Ticket, index: int, outgoing: Outgoing, encoded: Encoded) -> None:
        self.ticket = ticket
        self.index = index
        self.outgoing = outgoing
        self.encoded = encoded
        self.stage = Stage.WAITING
        self.created = False
        self.shares = ""
        self.leads = ""
        self.lift = ""
        self.rerouted = False
        self.tag = 0
        self.written_at_s = 0.0


class Ticket:
    """One call: the outcomes of its messages in their order, and the future its caller waits on.

    All but the future belongs to the loop.

    Attributes:
        urgent: a call of a single message, which does not queue behind the many of a large one.
        may_linger: nobody waits for it, so it can be written together with what comes next.
        timeout_s: seconds the whole call may take; None lets it take as long as it goes forward, then
        patience_s: is the longest time without an answer.
        complete: the caller has handed over all of it.
        open: how many of its messages are not settled.
    """

    __slots__ = (
        "complete",
        "expired",
        "flights",
        "future",
        "may_linger",
        "open",
        "outcomes",
        "patience_s",
        "progress_at_s",
        "timeout_s",
        "timer",
        "urgent",
    )

    def __init__(self, *, urgent: bool, patience_s: float, timeout_s: float | None, may_linger: bool = False) -> None:
        self.urgent = urgent
        self.may_linger = may_linger
        self.patience_s = patience_s
        self.timeout_s = timeout_s
        self.future: Future[list[Outcome]] = Future()
        # A caller that is cancelled while it waits must not cancel what the loop will settle.
        self.future.set_running_or_notify_cancel()
        self.outcomes: list[Outcome | None] = []
        self.flights: list[Flight] = []
        self.open = 0
        self.complete = False
        self.expired = False
        self.progress_at_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
