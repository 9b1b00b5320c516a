"""Which waiting tasks move one tier up because of their age.

Aging is the classic remedy against starvation under priorities (Kleinrock 1964): what has waited long enough is served
as if it had asked for more. Here it is a move and not a priority that grows: a task that has waited for
``ages_after_s`` in its tier goes into the lane ``aged`` of the tier above, whose small weight keeps the risen work from
drowning the tier that it rises into.

Invariants: a task rises by one tier at a time and waits ``ages_after_s`` in each; among the lanes of a tier those that
have waited longest rise first; no more wait in an ``aged`` lane than ``ready_max``, so that what cannot be served yet
keeps its place below. Not promised: that a task rises at the very moment it may.

Time and counts are arguments; every function is linear in what it is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import merge
from typing import Final, NamedTuple

from inference_routing.policy import Policy

UNFINISHED_STATES: Final = frozenset({"pending", "retrying"})
"""States in which a task waits; a retrying one that is listed as aged has been due for that long."""

GIVE_UP_AT: Final = 0.98
"""Part of the life of an unfinished record after which its task has waited too long.

Below 1: the record must still be there to say how the task has ended."""


YOUNG: Final = "too young"
"""Reason of a stop at a message that has not waited long enough: so has none behind it."""


class Rise(NamedTuple):
    """Where the tasks of one tier go that have waited long enough.

    Attributes:
        tier: Where they wait.
        above: Where they go, into the lane ``aged``.
        after_s: How long they wait first.
    """

    tier: str
    above: str
    after_s: float


def rises(policy: Policy) -> tuple[Rise, ...]:
    """Return the moves that the policy asks for, the highest tier first.

    The highest first, so that a task that rises into a tier is not looked at there in the same round.
    """
    return tuple(
        Rise(tier.name, above.name, tier.ages_after_s)
        for above, tier in zip(policy.tiers, policy.tiers[1:], strict=False)
        if tier.ages_after_s is not None
    )


def room(ready_max: int, ready: int) -> int:
    """Return how many more may move into an ``aged`` lane in which ``ready`` wait."""
    return max(0, ready_max - ready)


def shares(since_by_queue: Mapping[str, Sequence[float]], places: int) -> dict[str, int]:
    """Divide places among queues so that those who have waited longest get them.

    Args:
        since_by_queue: {queue: since when each of its aged tasks waits, the oldest first}.
        places: How many may move.

    Returns:
        {queue: how many of its oldest move}; queues that get none are left out.
    """
    lines = [[(since, queue) for since in sinces] for queue, sinces in since_by_queue.items()]
    taken: dict[str, int] = {}
    for _, (_, queue) in zip(range(places), merge(*lines), strict=False):
        taken[queue] = taken.get(queue, 0) + 1
    return taken


class Step(Enum):
    """What to do with a message that was taken from the head of its queue."""

    PROMOTE = "promote"
    DISCARD = "discard"
    """It need not run: a copy has replaced it, or its task has ended."""
    GIVE_UP = "give up"
    """Its task has waited for as long as records live: to the dead letters with it."""
    STOP = "stop"
    """It is not to be moved, and so are none behind it: back to its place, and no further look."""


@dataclass(frozen=True, slots=True)
class Head:
    """A message at the head of its queue.

    Attributes:
        generation, hop: Of the message.
        submitted_at_s: When its task was submitted, as far as is known.
        since_s: Since when it waits in this tier, by its record or else by its own word; None if neither says.
        state: Of its task's record; None if there is none.
        known_generation, known_hop: Of the record.
    """

    generation: int
    hop: int
    submitted_at_s: float | None
    since_s: float | None
    state: str | None = None
    known_generation: int = 0
    known_hop: int = 0


class Decision(NamedTuple):
    """A step, and why."""

    step: Step
    reason: str


def decide(head: Head, *, now_s: float, after_s: float | None, give_up_after_s: float) -> Decision:
    """Decide about a message that was taken from the head of its queue.

    Args:
        head: The message.
        now_s: The time, by the clock of the records.
        after_s: How long tasks wait in this tier before they rise; None if they do not.
        give_up_after_s: How long a task may wait at all, from its submit on.
    """
    if head.state is not None:
        known, mine = (head.known_generation, head.known_hop), (head.generation, head.hop)
        if mine < known:
            return Decision(Step.DISCARD, "a later copy has replaced it")
        if head.generation == head.known_generation and head.state not in UNFINISHED_STATES:
            if head.state in ("processing", "waiting"):
                return Decision(Step.STOP, f"its task is {head.state}")
            if head.state == "failed":
                # The worker that takes it sees to it that its letter lies among the dead.
                return Decision(Step.STOP, "its task has failed")
            return Decision(Step.DISCARD, f"its task has ended as {head.state}")
    if head.submitted_at_s is not None and now_s - head.submitted_at_s >= give_up_after_s:
        return Decision(Step.GIVE_UP, "waited too long")
    if head.since_s is None:
        return Decision(Step.STOP, "its age is not known")
    waited_s = now_s - head.since_s
    if after_s is None or waited_s < after_s:
        return Decision(Step.STOP, YOUNG)
    return Decision(Step.PROMOTE, f"waited {waited_s:.0f} s of {after_s:g} s")


def give_up_after_s(unfinished_ttl_s: float) -> float:
    """Return how long a task may wait at all before it goes to the dead letters."""
    return unfinished_ttl_s * GIVE_UP_AT


@dataclass(frozen=True, slots=True)
class Line:
    """One queue as records and broker see it.

    Attributes:
        listed: Tasks that wait in it by their records.
        ready: Messages in it that nobody holds.
        oldest_since_s: Since when the oldest of the listed waits; None if none is.
    """

    listed: int
    ready: int
    oldest_since_s: float | None


def has_unlisted(line: Line) -> bool:
    """Say whether the queue holds messages whose tasks are not listed: Redis lost its records, or others publish.

    A message is listed before it is published and unlisted after it was taken, so at every moment at least as many are
    listed as are ready.
    """
    return line.ready > line.listed


def may_have_lost(line: Line, *, now_s: float, after_s: float) -> bool:
    """Say whether messages of listed tasks may be gone; only tasks that have waited for ``after_s`` count."""
    oldest = line.oldest_since_s
    return line.ready < line.listed and oldest is not None and now_s - oldest >= after_s
