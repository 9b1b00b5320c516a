"""What a message in the dead-letter queue says of itself, and the copy of it that may run again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from inference_routing.lane import LANE_NAMES, RETURNED, QueueKey
from inference_routing.tier import TIER_NAMES
from inference_tasks.broker.messages import Outgoing
from inference_tasks.routes import HEADER
from inference_tasks.state.records import DeadLetter, TaskError
from inference_tasks.worker.copies import as_text, copy_of, raw_body
from inference_tasks.worker.intake import MAX_ID_LENGTH, Delivery, Unfit, read

__all__ = ["DEAD_HEADER", "FOREIGN", "Letter", "letter_of", "revived"]

DEAD_HEADER = "inference_dead"
FOREIGN = "foreign message"
_BY_BROKER: Mapping[str, str] = {
    "rejected": "a worker rejected it without a reason of ours",
    "expired": "it carried a time to live of its own, which is over",
    "delivery_limit": "it was returned too often",
    "maxlen": "it fell off a full queue",
}


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter as its own message describes it.

    Attributes:
        dead: in the words of the index; ``dead_at_s`` is 0 where nobody wrote the time down.
        hop: how many copies of the task's message came before this one, in its generation.
        is_named: whether the message says which task it is; else ``dead.id`` is made of the message itself.
        is_ours: whether a worker wrote down why it is here; else the broker, or somebody else, put it here.
        digest: of body and id: the same for two copies of one letter.
    """

    dead: DeadLetter
    hop: int
    is_named: bool
    is_ours: bool
    digest: bytes


def letter_of(message: Delivery, key_by_queue: Mapping[str, QueueKey]) -> Letter:
    """Read a dead letter; headers of any kind are survived, since anyone who may publish can write them.

    Args:
        message: as it came.
        key_by_queue: {queue: tier and lane}, for letters that only the broker says something of.
    """
    headers = _table(message.headers)
    dead, ours, death = _table(headers.get(DEAD_HEADER)), _table(headers.get(HEADER)), _last_death(headers)
    key = key_by_queue.get(_text(death.get("queue")))
    tier = _one_of(TIER_NAMES, dead.get("tier"), key and key.tier, ours.get("tier"))
    reason = _text(dead.get("reason")) or _text(death.get("reason")) or FOREIGN
    digest = hashlib.sha1(raw_body(message), usedforsecurity=False)
    message_id = as_text(message.properties.get("message_id")) or ""
    task_id = _text(headers.get("id"))
    is_named = 0 < len(task_id) <= MAX_ID_LENGTH and bool(_text(headers.get("task")))
    if not is_named:
        task_id = f"message:{message_id or digest.hexdigest()}"
    digest.update(task_id.encode("utf-8", "replace"))
    problem = _problem(message, tier)
    detail = _text(dead.get("detail")) or _BY_BROKER.get(reason, "")
    return Letter(
        dead=DeadLetter(
            id=task_id,
            task=_text(headers.get("task")),
            tier=tier,
            tier_first=_one_of(TIER_NAMES, ours.get("tier_first"), tier),
            lane=_one_of(LANE_NAMES, dead.get("lane"), key and key.lane, ours.get("lane")),
            reason=reason,
            detail=problem if reason == FOREIGN and problem else detail,
            error=_error(dead.get("error")),
            attempts=_whole(dead.get("attempts")),
            failures=_whole(dead.get("failures")),
            crashes=_whole(dead.get("crashes")),
            generation=_whole(ours.get("gen")),
            submitted_at_s=_seconds(ours.get("submitted_at_s")),
            dead_at_s=_seconds(dead.get("at_s")) or _moment(death.get("time")) or 0.0,
            is_replayable=not problem,
            message_id=message_id or None,
        ),
        hop=_whole(ours.get("hop")),
        is_named=is_named,
        is_ours=bool(dead),
        digest=digest.digest(),
    )


def revived(message: Delivery, letter: Letter, *, exchange: str, queue: str, now_s: float) -> Outgoing:
    """Return the copy that runs again: a life more, all limits and deadlines left behind.

    Args:
        queue: ``returned`` of the tier in which the task was last.
        now_s: from now on it waits there.
    """
    ours = _table(_table(message.headers).get(HEADER)) | {
        "v": 1,
        "tier": letter.dead.tier,
        "tier_first": letter.dead.tier_first,
        "lane": RETURNED,
        "gen": letter.dead.generation + 1,
        "hop": 0,
        "expires_at_s": None,
        "ready_at_s": now_s,
    }
    headers = {"retries": 0, "eta": None, "expires": None, HEADER: ours}
    return copy_of(message, exchange, queue, headers)


def _problem(message: Delivery, tier: str) -> str:
    """Say why the message can never run, whatever the worker; empty if it can."""
    headers = _table(message.headers)
    if not tier:
        return "no tier: neither the message nor the broker says which queue it came from"
    # Which tasks exist only a worker knows: whatever it asks for counts as known here.
    found = read(message, QueueKey(tier, RETURNED, ""), {_text(headers.get("task"))})
    return f"{found.reason}: {found.detail}" if isinstance(found, Unfit) else ""


def _last_death(headers: Mapping[str, Any]) -> Mapping[str, Any]:
    deaths = headers.get("x-death")
    if isinstance(deaths, list) and deaths:
        return _table(deaths[0])
    # The embedded broker writes these two alone.
    return {"reason": headers.get("x-first-death-reason"), "queue": headers.get("x-first-death-queue")}


def _table(value: object) -> dict[str, Any]:
    return {name: one for name, one in value.items() if isinstance(name, str)} if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _error(value: object) -> TaskError | None:
    found = _table(value)
    if isinstance(value, str) and value:
        kind, _, message = value.partition(": ")
        return {"type": kind, "message": message}
    return {"type": _text(found.get("type")), "message": _text(found.get("message"))} if found else None


def _one_of(known: tuple[str, ...], *values: object) -> str:
    return next((value for value in values if isinstance(value, str) and value in known), "")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else 0


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < 2**33 else None


def _moment(value: object) -> float | None:
    # py-amqp returns AMQP's timestamps without their zone.
    return value.replace(tzinfo=UTC).timestamp() if isinstance(value, datetime) else None
