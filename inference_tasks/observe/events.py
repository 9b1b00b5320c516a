"""The catalogue of events: everything that a worker, a client or the maintenance worker tells of its work.

Metrics, logs and tests subscribe to it. An event that nobody listens to costs the look at an empty tuple. Events stay
in the process in which they happen, and a forked one begins without receivers: what goes on in a pool's processes is
told by the worker's main process, as far as it sees it. No event carries an id, an argument or a result.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["EVENTS", "WAIT_BUCKETS_S", "Event", "Receiver", "emit", "subscribe", "unsubscribe"]

log = logging.getLogger(__name__)

WAIT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0),
)
"""Upper bounds of the buckets that waits are counted in, in seconds; above the last one there is one more."""

Receiver: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Is given the event's name, and its measurements and labels by name. On the thread of the event: it must be quick."""


@dataclass(frozen=True, slots=True)
class Event:
    """One kind of event.

    Attributes:
        name: what it is, then what happened to it.
        when: when it is told, and by whom.
        measurements: {name: unit}.
        labels: what it is counted by. Each has a bounded number of values: tiers, lanes, names of registered tasks,
            and words from lists in the code.
    """

    name: str
    when: str
    measurements: Mapping[str, str]
    labels: tuple[str, ...]


EVENTS: tuple[Event, ...] = (
    Event(
        "task.submitted",
        "A client has the broker's confirm of a new task.",
        {},
        ("tier",),
    ),
    Event(
        "task.refused",
        "A client was refused a new task: full, parked, paused, late, broker or state unavailable.",
        {},
        ("tier", "reason"),
    ),
    Event(
        "queue.asked",
        "A worker has asked a queue for a message; `outcome` is `message` or `empty`.",
        {},
        ("tier", "lane", "outcome"),
    ),
    Event(
        "task.claimed",
        "A worker has asked for the claim of a task; `verdict` is `run`, or why it does not run here and now.",
        {},
        ("tier", "verdict"),
    ),
    Event(
        "task.started",
        "A worker hands a task to its pool. `wait_s` is the time since the submit, and missing for later attempts.",
        {"wait_s": "seconds", "held_s": "seconds"},
        ("task", "tier", "tier_first", "lane"),
    ),
    Event(
        "task.ended",
        "The slot of a task is free again; `outcome` is `success`, `failed`, `retried`, `crashed`, `cancelled`, "
        "`ignored` or `returned`.",
        {"slot_s": "seconds"},
        ("task", "tier", "tier_first", "outcome"),
    ),
    Event(
        "task.returned",
        "A worker gives back messages that waited in it for longer than it may hold them.",
        {"count": "tasks"},
        (),
    ),
    Event(
        "task.buried",
        "A worker moves a message to the dead letters.",
        {},
        ("tier", "reason"),
    ),
    Event(
        "floor.held",
        "A worker has served a window of 100 starts (or of 100 s of slot time) in which a tier had work all the time; "
        "`outcome` is `met`, or `violated` if the tier got less than its floor.",
        {},
        ("tier", "outcome"),
    ),
    Event(
        "state.seen",
        "A worker has tried to renew its claims in Redis; `reachable` is 1 or 0.",
        {"reachable": "flag"},
        (),
    ),
    Event(
        "task.promoted",
        "The maintenance worker has moved waiting tasks up one tier because of their age.",
        {"count": "tasks"},
        ("tier_from", "tier_to"),
    ),
    Event(
        "task.dropped",
        "The maintenance worker has recorded the end of tasks without a message; `reason` is `drop-head` or `gone`.",
        {"count": "tasks"},
        ("reason",),
    ),
)

_receivers: tuple[Receiver, ...] = ()


def emit(name: str, **values: object) -> None:
    """Tell an event of the catalogue to all who listen."""
    if not _receivers:
        return
    for receiver in _receivers:
        try:
            receiver(name, values)
        except Exception:
            # Watching must not stop the work.
            log.exception("a receiver of events failed at %s", name)


def subscribe(receiver: Receiver) -> None:
    """Have a receiver told of all events in this process from now on; once, however often it is asked for."""
    global _receivers
    unsubscribe(receiver)
    _receivers = (*_receivers, receiver)


def unsubscribe(receiver: Receiver) -> None:
    """Tell a receiver no more."""
    global _receivers
    _receivers = tuple(one for one in _receivers if one != receiver)


def _forget_receivers() -> None:
    global _receivers
    _receivers = ()


# What a forked process counts nobody would see, and a lock of a receiver may be held for ever in there.
os.register_at_fork(after_in_child=_forget_receivers)
