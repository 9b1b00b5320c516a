"""What the worker reads from a message before it may run: who it is, and whether it can be run at all."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from celery.utils.time import maybe_iso8601
from kombu.exceptions import ContentDisallowed, DecodeError

from inference_routing.tier import TIER_NAMES
from inference_tasks.broker.addressing import is_delayed
from inference_tasks.state.records import Claimant

if TYPE_CHECKING:
    from inference_routing.lane import QueueKey

__all__ = ["Delivery", "Intake", "Unfit", "read", "ready_at_s"]

HEADER = "inference"
MAX_ID_LENGTH = 255
MAX_TENANT_LENGTH = 64


class Delivery(Protocol):
    """The part of kombu's ``Message`` that the worker uses."""

    body: bytes | str
    headers: dict[str, Any]
    properties: dict[str, object]
    delivery_info: dict[str, Any]
    content_type: str | None
    content_encoding: str | None
    errors: list[object]

    @property
    def payload(self) -> Any: ...
    @property
    def acknowledged(self) -> bool: ...
    def ack(self) -> None: ...
    def reject(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Intake:
    """A message that can be run.

    ``tier`` is the tier served (that of the queue it came from), ``tier_first`` the one it was submitted to. ``hop``
    counts the messages of the task before this one, ``retries`` the runs that raised, ``eta_s`` is when a message that
    has not come through the delay queues wants to start, unix seconds.
    """

    id: str
    name: str
    tier: str
    tier_first: str
    lane: str
    generation: int
    submitted_at_s: float | None
    expires_at_s: float | None
    crash_limit: int | None
    hop: int = 0
    retries: int = 0
    eta_s: float | None = None
    tenant: str = ""

    def claimant(self) -> Claimant:
        return Claimant(
            id=self.id,
            name=self.name,
            tier=self.tier,
            tier_first=self.tier_first,
            lane=self.lane,
            generation=self.generation,
            submitted_at_s=self.submitted_at_s,
            expires_at_s=self.expires_at_s,
            crash_limit=self.crash_limit,
            hop=self.hop,
            tenant=self.tenant,
        )


@dataclass(frozen=True, slots=True)
class Unfit:
    """A message that can never run, and why; it goes to the dead-letter queue."""

    reason: str
    detail: str
    id: str | None = None
    name: str | None = None


def read(message: Delivery, key: QueueKey, tasks: Collection[str]) -> Intake | Unfit:
    """Check a message as far as that needs no state.

    Decodes the body once; kombu keeps the result, so that Celery does not decode it again. What makes no sense in our
    header is ignored, since anyone who may publish can write it (and counts are kept by it): a tier in the header never
    moves a message, the queue it lies in decides.
    """
    headers: object = message.headers
    if not isinstance(headers, dict):
        return Unfit("malformed", f"expected a table of headers, found {type(headers).__name__}")
    task_id, name = headers.get("id"), headers.get("task")
    if not isinstance(name, str) or not name or not isinstance(task_id, str) or not 0 < len(task_id) <= MAX_ID_LENGTH:
        return Unfit(
            "malformed",
            f"expected the headers 'task' and 'id' of message protocol 2, found task={name!r:.80} id={task_id!r:.80}",
            task_id if isinstance(task_id, str) and 0 < len(task_id) <= MAX_ID_LENGTH else None,
        )
    if message.errors:
        return Unfit("undecodable", f"the body could not be decompressed: {message.errors[0]!r:.200}", task_id, name)
    if name not in tasks:
        return Unfit("unknown task", f"no task of the name {name!r:.200} is registered with this worker", task_id, name)
    try:
        payload = message.payload
    except ContentDisallowed as exc:
        detail = f"expected JSON, found {message.content_type!r:.80} ({exc})"
        return Unfit("content type refused", detail, task_id, name)
    except (DecodeError, ValueError, TypeError, LookupError, RecursionError) as exc:
        return Unfit("undecodable", f"the body is not the JSON it says it is: {exc!r:.200}", task_id, name)
    problem = _payload_problem(payload) or _moments_problem(headers)
    if problem:
        return Unfit("malformed", problem, task_id, name)
    ours = headers.get(HEADER)
    ours = ours if isinstance(ours, Mapping) else {}
    first = ours.get("tier_first")
    return Intake(
        id=task_id,
        name=name,
        tier=key.tier,
        tier_first=first if isinstance(first, str) and first in TIER_NAMES else key.tier,
        lane=key.lane,
        generation=_whole(ours.get("gen"), 0),
        submitted_at_s=_seconds(ours.get("submitted_at_s")),
        expires_at_s=_seconds(ours.get("expires_at_s")),
        crash_limit=_whole(ours.get("crash_limit"), 0) or None,
        hop=_whole(ours.get("hop"), 0),
        retries=_whole(headers.get("retries"), 0),
        eta_s=_eta_s(message),
        tenant=_tenant(ours.get("tenant")),
    )


def ready_at_s(headers: Mapping[str, object]) -> float | None:
    """Return since when a message could be started: when it got into its queue, or was due, or was submitted."""
    ours = headers.get(HEADER)
    ours = ours if isinstance(ours, Mapping) else {}
    if (moved_s := _seconds(ours.get("ready_at_s"))) is not None:
        return moved_s
    try:
        due = maybe_iso8601(headers.get("inference_due") or headers.get("eta"))  # type: ignore[arg-type]  # headers hold anything
    except (AttributeError, TypeError, ValueError):
        due = None
    return due.timestamp() if due is not None else _seconds(ours.get("submitted_at_s"))


def _payload_problem(payload: object) -> str | None:
    if not isinstance(payload, list | tuple) or len(payload) != 3:
        return f"expected the body [args, kwargs, embed], found {type(payload).__name__}"
    args, kwargs, embed = payload
    if not isinstance(args, list | tuple):
        return f"expected a list of arguments, found {type(args).__name__}"
    if not isinstance(kwargs, Mapping):
        return f"expected keyword arguments as a mapping, found {type(kwargs).__name__}"
    if embed is not None and not isinstance(embed, Mapping):
        return f"expected embedded callbacks as a mapping, found {type(embed).__name__}"
    return None


def _moments_problem(headers: Mapping[str, object]) -> str | None:
    """Say what Celery or the pool would choke on long after the hand-over, where it would end the worker."""
    limits = headers.get("timelimit")
    if limits is not None and not (
        isinstance(limits, list | tuple) and len(limits) == 2 and all(_is_limit(limit) for limit in limits)
    ):
        return f"expected 'timelimit' as two numbers of seconds above 0, found {limits!r:.80}"
    eta = headers.get("eta")
    try:
        moment = None if eta is None else maybe_iso8601(eta)  # type: ignore[arg-type]  # headers hold anything
        if moment is not None:
            moment.astimezone()
    except (AttributeError, TypeError, ValueError, OverflowError) as exc:
        return f"expected 'eta' in ISO 8601, found {eta!r:.80} ({exc!r:.80})"
    return None


def _eta_s(message: Delivery) -> float | None:
    """When it wants to start; None where the broker has seen to that: clocks differ, and it is due by the broker's."""
    eta = message.headers.get("eta")
    if eta is None or is_delayed(str(message.delivery_info.get("routing_key") or "")):
        return None
    moment = maybe_iso8601(eta)
    return None if moment is None else moment.timestamp()


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**31)


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else default


def _tenant(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_TENANT_LENGTH else ""


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < time.time() + 366 * 86400 else None
