"""Where a task message goes: its tier, its lane, its delay, and the header that says so."""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from kombu.transport.native_delayed_delivery import calculate_routing_key, level_name

from inference_routing.tier import BATCH
from inference_tasks.broker.publisher import Publisher
from inference_tasks.errors import kept_delay_s
from inference_tasks.routes import HEADER, choose, full_tier_name, running_tenant
from inference_tasks.state.records import NewTask

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Address", "TierDoor", "TierRequest", "address", "delay_address", "first_headers", "is_delayed", "queue_of"]

_DELAYED_KEY = re.compile(r"^(?:[01]\.){28}")

# What the broker writes when it moves a message, and the worker when it hands one over. In a copy they would be wrong:
# RabbitMQ takes a second death of the same kind for a cycle and drops the message.
_OF_ONE_DELIVERY = re.compile(r"^(x-death|x-first-death-|x-last-death-|x-delivery-count|x-acquired-count|inference_)")

# Of our header: what another task under the same id takes over.
_OF_ONE_LIFE = ("gen", "hop", "submitted_at_s", "expires_at_s", "tier_first")


@dataclass(frozen=True)
class TierDoor:
    """All that publishing into the tiers needs to know.

    Attributes:
        exchange: the topic exchange of the tiers.
        queue_by_lane: {(tier, lane): queue name, which is its routing key too}.
        bounds: {tier: messages that may wait in its ``fresh`` lane}.
        delay_prefix: of kombu's native delayed delivery.
        default_tier: of tasks without one of their own.
    """

    publisher: Publisher
    exchange: str
    queue_by_lane: Mapping[tuple[str, str], str]
    bounds: Mapping[str, int]
    delay_prefix: str
    default_tier: str = BATCH
    lane_by_queue: Mapping[str, tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        lanes = {queue: lane for lane, queue in self.queue_by_lane.items()}
        object.__setattr__(self, "lane_by_queue", lanes)

    def lane_of(self, routing_key: str) -> tuple[str, str] | None:
        """Return tier and lane of a routing key, delayed or not; None if it leads to no queue of the tiers."""
        return self.lane_by_queue.get(queue_of(routing_key))


@dataclass(frozen=True, slots=True)
class TierRequest:
    """What one call asked for.

    Attributes:
        tier: at the call, by name or alias.
        timeout_s: at the call or of the task.
        by_worker: published by a worker process outside of any running task.
        inherited_tier: of a later step of the canvas that lifts this one.
    """

    tier: str | None = None
    timeout_s: float | None = None
    crash_limit: int | None = None
    by_worker: bool = False
    inherited_tier: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Exchange and routing key of a task message, its header, and its record."""

    exchange: str
    routing_key: str
    tier: str
    header: Mapping[str, object]
    task: NewTask


def is_delayed(routing_key: str) -> bool:
    """Whether a message of this routing key has come through the delay queues."""
    return _DELAYED_KEY.match(routing_key) is not None


def queue_of(routing_key: str) -> str:
    """Return the queue that a message of this routing key reaches, at once or through the delay queues."""
    return _DELAYED_KEY.sub("", routing_key, count=1)


def first_headers(headers: Mapping[str, object]) -> dict[str, object]:
    """Return a message's headers as they were first published, for a copy of it."""
    return {name: value for name, value in headers.items() if not _OF_ONE_DELIVERY.match(name)}


def delay_address(delay_prefix: str, queue: str, delay_s: int) -> tuple[str, str]:
    """Return exchange and routing key under which a message reaches ``queue`` after ``delay_s`` seconds.

    It enters at the level of the highest set bit; entering at the top would cost a hop for each of 28 levels.
    """
    kept_delay_s(queue, delay_s)
    level = level_name(delay_s.bit_length() - 1, delay_prefix)  # type: ignore[call-arg]  # its stub is older
    return level, calculate_routing_key(delay_s, queue)


def address(
    app: Celery, door: TierDoor, lane: tuple[str, str], headers: Mapping[str, object], request: TierRequest
) -> Address:
    """Decide tier, lane, delay and hop of a task message that is routed to ``lane``.

    Each message of a task that takes the place of another one has a hop more, so that a claim can tell which is old.

    Tier: asked for at the call > of the message that is published again > of the queue it was routed to. Lane: what a
    worker publishes, and what comes back later, is admitted work and goes to ``returned``, which is never full.
    """
    now_s = time.time()
    task_id, name = str(headers["id"]), str(headers["task"])
    prior, is_again = _prior(app, task_id, headers)
    routed_tier, routed_lane = lane
    tier = routed_tier
    if request.tier is not None:
        tier = full_tier_name(request.tier)
    elif isinstance(prior.get("tier"), str):
        tier = full_tier_name(str(prior["tier"]))
    choice = choose(app, request.tier, tier, tier)
    if request.inherited_tier is not None and choice.asked is None and not is_again:
        tier = request.inherited_tier
    delay_s = _delay_s(headers.get("eta"), now_s)
    by_worker = choice.by_worker or request.by_worker
    if prior.get("lane") == "aged" or routed_lane == "aged":
        to_lane = "aged"
    elif by_worker or is_again or delay_s or routed_lane == "returned":
        to_lane = "returned"
    else:
        to_lane = "fresh"
    submitted_at_s = _number(prior.get("submitted_at_s")) or now_s
    expires_at_s = _number(prior.get("expires_at_s"))
    if not is_again:
        expires_at_s = _earliest(
            now_s + request.timeout_s if request.timeout_s is not None else None, _moment_s(headers.get("expires"))
        )
    generation = _whole(prior.get("gen"))
    hop = _whole(prior.get("hop")) + 1 if is_again else 0
    header: dict[str, object] = {
        "v": 1,
        "tier": tier,
        "tier_first": prior.get("tier_first") or tier,
        "asked": choice.asked or prior.get("asked"),
        "lane": to_lane,
        "gen": generation,
        "hop": hop,
        "submitted_at_s": submitted_at_s,
        "expires_at_s": expires_at_s,
        "crash_limit": prior.get("crash_limit", request.crash_limit),
    }
    tenant = prior.get("tenant") or running_tenant(app)
    if isinstance(tenant, str):
        header["tenant"] = tenant
    queue = door.queue_by_lane[tier, to_lane]
    exchange, routing_key = delay_address(door.delay_prefix, queue, delay_s) if delay_s else (door.exchange, queue)
    task = NewTask(
        id=task_id,
        name=name,
        tier=tier,
        tier_first=str(header["tier_first"]),
        lane=to_lane,
        generation=generation,
        nonce=secrets.token_hex(8),
        submitted_at_s=submitted_at_s,
        expires_at_s=expires_at_s,
        worker_published=by_worker,
        hop=hop,
        due_at_s=now_s + delay_s if delay_s else None,
        tenant=str(tenant or ""),
    )
    return Address(exchange, routing_key, tier, header, task)


def _prior(app: Celery, task_id: str, headers: Mapping[str, object]) -> tuple[Mapping[str, object], bool]:
    """Return our header of the same task's earlier message, and whether there is one.

    A retry brings it along. What takes the place of the running task (``Task.replace``) is another task under its id:
    it has tier and deadline of its own, but is the next message of the same life.
    """
    prior = headers.get(HEADER)
    running = app.current_worker_task
    if running is None:
        return (prior, True) if isinstance(prior, Mapping) and prior else ({}, False)
    if running.request.id != task_id:
        # Somebody handed the headers of the running task on to another task.
        return {}, False
    if isinstance(prior, Mapping) and prior:
        return prior, True
    ours = (running.request.headers or {}).get(HEADER)
    if not isinstance(ours, Mapping):
        return {}, False
    return {name: ours[name] for name in _OF_ONE_LIFE if name in ours}, True


def _delay_s(eta: object, now_s: float) -> int:
    """Whole seconds until ``eta``, rounded up: late by less than a second, early never."""
    due_s = _moment_s(eta)
    return max(0, math.ceil(due_s - now_s)) if due_s is not None else 0


def _moment_s(moment: object) -> float | None:
    if not isinstance(moment, str) or not moment:
        return None
    return datetime.fromisoformat(moment).timestamp()


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _earliest(*moments: float | None) -> float | None:
    return min((one for one in moments if one is not None), default=None)
