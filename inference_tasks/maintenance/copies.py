"""What a message says of its task, and the copies of it that take its place elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from inference_routing.aging import Head, Rise
from inference_routing.lane import AGED
from inference_routing.tier import TIER_NAMES
from inference_tasks.broker.addressing import first_headers
from inference_tasks.broker.messages import Outgoing, Properties
from inference_tasks.maintenance.pull import Taken
from inference_tasks.routes import HEADER
from inference_tasks.state.records import Claimant, TaskRecord

__all__ = ["Told", "buried", "claimant", "forwarded", "ours", "promoted", "put_off", "told"]

_DEAD = "inference_dead"
_LONGEST_ID = 255
_FAR_FUTURE_S = 2.0**33


@dataclass(frozen=True, slots=True)
class Told:
    """What a message says of its task; headers of any kind are survived, since anyone who may publish can write them.

    Attributes:
        id: of the task, empty if there is none that could be one.
        since_s: since when the task waits in its tier: when it got there, or became due, or was submitted.
    """

    id: str
    name: str
    generation: int
    hop: int
    tier_first: str
    submitted_at_s: float | None
    since_s: float | None

    def head(self, record: TaskRecord | None) -> Head:
        """Return what there is to decide about; what the record says goes first, if it speaks of this message."""
        if record is None:
            return Head(self.generation, self.hop, self.submitted_at_s, self.since_s)
        is_of_this = (record.generation, record.hop) == (self.generation, self.hop)
        return Head(
            generation=self.generation,
            hop=self.hop,
            submitted_at_s=record.submitted_at_s or self.submitted_at_s,
            since_s=record.ready_at_s if is_of_this and record.ready_at_s is not None else self.since_s,
            state=record.state,
            known_generation=record.generation,
            known_hop=record.hop,
        )


def told(message: Taken) -> Told:
    """Read the headers of a message."""
    headers, mine = message.headers, ours(message)
    task_id, name = headers.get("id"), headers.get("task")
    submitted_at_s = _seconds(mine.get("submitted_at_s"))
    return Told(
        id=task_id if isinstance(task_id, str) and 0 < len(task_id) <= _LONGEST_ID else "",
        name=name if isinstance(name, str) else "",
        generation=_whole(mine.get("gen")),
        hop=_whole(mine.get("hop")),
        tier_first=_text(mine.get("tier_first")),
        submitted_at_s=submitted_at_s,
        since_s=_seconds(mine.get("ready_at_s")) or _moment_s(headers.get("eta")) or submitted_at_s,
    )


def claimant(message: Taken, *, lane: str) -> Claimant | None:
    """Return what a message says of its task, as a worker would claim it in this lane; None if it says too little."""
    known, mine = told(message), ours(message)
    tier = _text(mine.get("tier"))
    if not known.id or not known.name or tier not in TIER_NAMES:
        return None
    return Claimant(
        id=known.id,
        name=known.name,
        tier=tier,
        lane=lane,
        generation=known.generation,
        submitted_at_s=known.submitted_at_s,
        expires_at_s=_seconds(mine.get("expires_at_s")),
        crash_limit=_whole(mine.get("crash_limit")) or None,
        tier_first=known.tier_first or tier,
        hop=known.hop,
        tenant=_text(mine.get("tenant")),
    )


def promoted(message: Taken, rise: Rise, *, exchange: str, queue: str, now_s: float) -> Outgoing:
    """Return the copy that waits in the tier above; where the task was submitted first stays written in it.

    Args:
        queue: the lane ``aged`` of that tier.
        now_s: from now on it waits there.
    """
    known = told(message)
    header = {
        "v": 1,
        "gen": known.generation,
        **ours(message),
        "tier": rise.above,
        "tier_first": known.tier_first or rise.tier,
        "lane": AGED,
        "hop": known.hop + 1,
        "ready_at_s": now_s,
    }
    return _copy(message, {HEADER: header}, exchange, queue)


def buried(message: Taken, dead: Mapping[str, object], *, exchange: str, queue: str) -> Outgoing:
    """Return the copy for the dead letters.

    Args:
        dead: why it is one, and where it was.
        queue: the dead-letter queue.
    """
    return _copy(message, {_DEAD: dict(dead)}, exchange, queue)


def forwarded(message: Taken, *, exchange: str, queue: str) -> Outgoing:
    """Return the copy that goes on to another queue with all that the broker wrote into it."""
    return _copy(message, message.headers, exchange, queue)


def put_off(message: Taken, changes: Mapping[str, object], *, exchange: str, routing_key: str) -> Outgoing:
    """Return the copy of a waiting task's message that goes elsewhere, with some entries of our header changed."""
    return _copy(message, {HEADER: {**ours(message), **changes}}, exchange, routing_key)


def _copy(message: Taken, more: Mapping[str, object], exchange: str, queue: str) -> Outgoing:
    known = message.properties
    priority = known.get("priority")
    return Outgoing(
        body=message.body,
        exchange=exchange,
        routing_key=queue,
        properties=Properties(
            content_type=_text(known.get("content_type")) or None,
            content_encoding=_text(known.get("content_encoding")) or None,
            headers={**first_headers(message.headers), **more},
            priority=priority if isinstance(priority, int) else None,
            correlation_id=_text(known.get("correlation_id")) or None,
            reply_to=_text(known.get("reply_to")) or None,
        ),
    )


def ours(message: Taken) -> Mapping[str, object]:
    """Return our header, empty where there is none."""
    found = message.headers.get(HEADER)
    return found if isinstance(found, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else 0


def _seconds(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < _FAR_FUTURE_S else None  # type: ignore[operator, arg-type]


def _moment_s(value: object) -> float | None:
    try:
        moment = datetime.fromisoformat(_text(value))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
