"""What a submit is answered, and when a refused caller should come back."""

from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import Final, Literal

RefusalReason = Literal["full", "parked", "deadline", "paused"]
"""``full``: the broker refused, the ``fresh`` queue is at its bound. ``parked``: parked and returned work of the tier
has reached the bound, so that fresh work would crowd out what was accepted before. ``deadline``: so much waits before
the task that it could not start in time. ``paused``: an operator wants nothing more of it."""

DRAINED_RATIO: Final = 100
"""A refused caller is told to wait until one part in this many of the bound has drained."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The submit was accepted.

    Attributes:
        tier: Tier whose queue holds the task.
    """

    tier: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The submit was refused and left no trace; the same task may be submitted again.

    Attributes:
        tier: Tier that is full.
        limit: Its bound in messages.
        reason: What has reached the bound.
        retry_after_s: Whole seconds to wait before the next try.
    """

    tier: str
    limit: int
    reason: RefusalReason
    retry_after_s: int


Admission = Admitted | Rejected


def retry_after_s(bound: int, drained_per_s: float | None) -> int:
    """Return the whole seconds in which 1 % of the bound drains at the measured rate.

    1 when the rate is not known or nothing drains: a short wait costs a refused submit about a millisecond, while a
    long one would keep callers away from a tier that is free again.

    Invariant: at least 1. Cost: constant. Not promised: a place in the queue after that time.

    Args:
        bound: Messages that may wait in the tier.
        drained_per_s: Tasks of the tier that all workers start per second; None if not known.
    """
    if drained_per_s is None or not drained_per_s > 0:
        return 1
    wait_s = bound / DRAINED_RATIO / drained_per_s
    return max(1, ceil(wait_s)) if isfinite(wait_s) else 1


def most_ahead(timeout_s: float, drained_per_s: float | None) -> int | None:
    """Return how many tasks may wait before one that must start within ``timeout_s``; None for any number.

    An unknown rate, or none at all, refuses nothing: what cannot be told is not a reason.

    Invariant: at least 0. Cost: constant. Not promised: that it starts in time; rates change.

    Args:
        timeout_s: Seconds within which it must start.
        drained_per_s: Tasks of the tier that all workers start per second; None if not known.
    """
    if drained_per_s is None or not drained_per_s > 0:
        return None
    ahead = timeout_s * drained_per_s
    return floor(ahead) if isfinite(ahead) else None


def drained_after_s(ahead: int, drained_per_s: float | None) -> int:
    """Return the whole seconds in which the work ahead drains at the measured rate; 1 when the rate is not known.

    Invariant: at least 1. Cost: constant.

    Args:
        ahead: Tasks of the tier that wait.
        drained_per_s: Tasks of the tier that all workers start per second; None if not known.
    """
    if drained_per_s is None or not drained_per_s > 0:
        return 1
    wait_s = ahead / drained_per_s
    return max(1, ceil(wait_s)) if isfinite(wait_s) else 1
