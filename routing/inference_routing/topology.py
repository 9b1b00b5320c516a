"""Exchanges, queues and bindings as data: the one description that is declared, checked and applied."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from inference_routing.lane import FRESH, LANE_NAMES, RETURNED
from inference_routing.policy import Policy
from inference_routing.tier import Tier

DEAD: Final = "dead"
"""Lane of the dead-letter queue, which belongs to no tier."""

DROPPED: Final = "dropped"
"""Lane of the queue that takes what full ``drop-head`` queues drop, so that it can be told; it belongs to no tier."""

WAITING: Final = "waiting"
"""Lane of the queue in which messages of tasks that wait for other tasks arrive to be looked at, time and again."""

MAINTENANCE: Final = "maintenance"
"""Lane of the queue of the maintenance worker's own tasks, which belongs to no tier: never stuck behind the tiers."""

DELAY: Final = "delay"
"""Lane of the queues that hold parked messages, which belong to no tier."""

DELIVERY_LIMIT: Final = 1_000_000
"""Deliveries before the broker gives a message up.

Why so many: a message that comes too late for a slot goes back, and on a quorum queue each return counts (3.10 and
4.0); crashes are counted elsewhere. Not -1: on 3.10 that dead-letters at once. Not left out: then a returned message
goes to the back of the queue, and from 4.0 the limit is 20."""

DELAY_LEVELS: Final = 28
"""Delays are binary numbers of this many bits: one queue per bit, the longest delay is 2**28 - 1 seconds."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_LONGEST_NAMESPACE: Final = 150
# Why 150: a routing key has at most 255 bytes, of which a delay takes 56 and tier and lane up to 18.

QueueType = Literal["quorum", "classic"]
Bounds = Literal["arguments", "policy"]
ArgumentValue = str | int
Arguments = Mapping[str, ArgumentValue]

SETTABLE_BY_POLICY: Final = frozenset(
    {
        "x-consumer-timeout",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-delivery-limit",
        "x-max-length",
        "x-overflow",
    }
)
"""Arguments of ours that a policy can set on a queue that was declared without them; ``x-queue-type`` is not one."""

_LOWEST_WINS: Final = frozenset({"x-consumer-timeout", "x-delivery-limit", "x-max-length"})


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """An exchange to declare."""

    name: str
    type: str = "topic"
    durable: bool = True


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A queue to declare.

    Attributes:
        name: Name of the queue, which is also the routing key that leads to it.
        durable: Always true: no work of ours lives in a queue that a restart of the broker empties.
        arguments: ``{argument: value}`` as declared; treat it as read-only.
        lane: ``fresh``, ``returned``, ``aged``, or that of a queue without a tier.
        tier: Tier that the queue's work is charged to; None for the lanes that belong to no tier.
    """

    name: str
    durable: bool
    arguments: Arguments
    lane: str
    tier: str | None


@dataclass(frozen=True, slots=True)
class BindingSpec:
    """A binding from an exchange to a queue or to another exchange."""

    source: str
    destination: str
    routing_key: str
    destination_type: Literal["queue", "exchange"] = "queue"


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy of the broker that sets what is not declared as an argument.

    The broker applies one policy to a queue: the one of the highest priority whose pattern matches.
    """

    name: str
    pattern: str
    definition: Arguments
    priority: int = 10
    apply_to: Literal["queues"] = "queues"


@dataclass(frozen=True, slots=True)
class DelayLevels:
    """Where parked messages wait; what kombu's native delayed delivery declares, entry for entry.

    A message with a delay enters at the exchange of the highest bit that is set, waits in the queue of each set bit and
    leaves through ``delivery``.

    Attributes:
        exchanges: One topic exchange per bit, the highest first, then ``delivery``.
        queues: One queue per bit with a fixed time to live, the highest first.
        bindings: Among those, and from ``delivery`` to the queues in which due messages arrive.
        delivery: Name of the exchange that due messages leave through.
    """

    exchanges: tuple[ExchangeSpec, ...]
    queues: tuple[QueueSpec, ...]
    bindings: tuple[BindingSpec, ...]
    delivery: str


@dataclass(frozen=True, slots=True)
class Topology:
    """All that the broker holds for one namespace.

    Attributes:
        exchange: The topic exchange of the namespace: publishes and dead letters go through it.
        queues: Every lane of every tier, the highest tier first, then the queues without a tier.
        bindings: From the exchange to these queues.
        delay_prefix: Prefix of the delay exchanges and queues (kombu's setting).
        delay: Where parked messages wait.
        policies: What must be set by policy; empty where arguments say it all.
    """

    exchange: ExchangeSpec
    queues: tuple[QueueSpec, ...]
    bindings: tuple[BindingSpec, ...]
    delay_prefix: str
    delay: DelayLevels
    policies: tuple[PolicySpec, ...] = ()

    def queue(self, tier: str, lane: str = FRESH) -> QueueSpec:
        """Return the queue of that tier and lane.

        Raises:
            KeyError: There is none.
        """
        for queue in self.queues:
            if queue.tier == tier and queue.lane == lane:
                return queue
        raise KeyError((tier, lane))

    def _without_tier(self, lane: str) -> QueueSpec:
        return next(queue for queue in self.queues if queue.tier is None and queue.lane == lane)

    @property
    def dead(self) -> QueueSpec:
        """The dead-letter queue."""
        return self._without_tier(DEAD)

    @property
    def dropped(self) -> QueueSpec:
        """Where full ``drop-head`` queues drop to."""
        return self._without_tier(DROPPED)

    @property
    def waiting(self) -> QueueSpec:
        """Where messages of tasks that wait for other tasks arrive, each time that their delay is over."""
        return self._without_tier(WAITING)

    @property
    def maintenance(self) -> QueueSpec:
        """The queue of the maintenance worker."""
        return self._without_tier(MAINTENANCE)


@dataclass(frozen=True, slots=True)
class Difference:
    """An argument of an existing queue that is not as wanted.

    Attributes:
        queue: Name of the queue.
        argument: Name of the argument, with its ``x-``.
        wanted: Value that would be declared; None if the argument would not be given.
        found: Value that the queue has; None if it has none.
        by: What can change it: a policy, or only a new queue.
    """

    queue: str
    argument: str
    wanted: ArgumentValue | None
    found: ArgumentValue | None
    by: Literal["policy", "new queue"]


def queue_name(namespace: str, tier: str, lane: str = FRESH) -> str:
    """Return the name, and routing key, of a tier's queue: ``inference.batch``, ``inference.batch.returned``."""
    return f"{namespace}.{tier}" if lane == FRESH else f"{namespace}.{tier}.{lane}"


def build_topology(
    policy: Policy,
    namespace: str = "inference",
    *,
    queue_type: Mapping[str, QueueType] | QueueType = "quorum",
    bounds: Bounds = "arguments",
    consumer_timeout_ms: int | None = None,
) -> Topology:
    """Describe what the broker must hold for this policy.

    Only ``fresh`` is bounded: whatever comes back was accepted before. No delay ends in a bounded queue, because what
    dead-letters into a full one is lost (classic) or comes minutes late (quorum): a parked message whose key names a
    ``fresh`` queue arrives in the tier's ``returned``.

    Args:
        policy: Tiers with their bounds.
        namespace: Name of the exchange, and prefix of every queue.
        queue_type: One for all tiers, or ``{tier: type}``; a tier that is missing gets quorum queues.
        bounds: Whether bound and overflow are arguments of the queue, or a policy that can be changed later.
        consumer_timeout_ms: Longest time that a message may be held by a worker, for RabbitMQ 3.12 and later; None
            leaves it to the node. Quorum queues carry it as an argument. Classic queues have it set by policy, because
            4.3 knows consumer timeouts on quorum queues only.

    Raises:
        ValueError: The namespace cannot be one.
    """
    if not _NAMESPACE.fullmatch(namespace) or len(namespace) > _LONGEST_NAMESPACE or namespace.startswith("amq."):
        raise ValueError(
            f"expected a namespace of words out of letters, digits, '-' and '_', joined by '.', of at most"
            f" {_LONGEST_NAMESPACE} characters and without 'amq.' in front, found {namespace!r}"
        )
    types: dict[str, QueueType] = {
        tier.name: queue_type if isinstance(queue_type, str) else queue_type.get(tier.name, "quorum")
        for tier in policy.tiers
    }
    queues: list[QueueSpec] = []
    policies: list[PolicySpec] = []
    for tier in policy.tiers:
        for lane in LANE_NAMES:
            name = queue_name(namespace, tier.name, lane)
            wanted = _wanted_arguments(tier, lane, namespace, types[tier.name], consumer_timeout_ms)
            by_policy = _names_by_policy(types[tier.name], bounds) & wanted.keys()
            arguments = {argument: value for argument, value in wanted.items() if argument not in by_policy}
            queues.append(QueueSpec(name, True, arguments, lane, tier.name))
            if by_policy:
                definition = {argument.removeprefix("x-"): wanted[argument] for argument in sorted(by_policy)}
                policies.append(PolicySpec(name, f"^{re.escape(name)}$", definition))
    dead_type: QueueType = "quorum" if "quorum" in types.values() else "classic"
    queues.extend(
        QueueSpec(f"{namespace}.{lane}", True, _arguments_of_type(dead_type), lane, None)
        for lane in (DEAD, DROPPED, WAITING, MAINTENANCE)
    )
    return Topology(
        exchange=ExchangeSpec(namespace),
        queues=tuple(queues),
        bindings=tuple(BindingSpec(namespace, queue.name, f"#.{queue.name}") for queue in queues),
        delay_prefix=namespace,
        delay=_delay_levels(namespace, queues),
        policies=tuple(policies),
    )


def differences(wanted: QueueSpec, found_arguments: Mapping[str, object]) -> list[Difference]:
    """Compare the arguments of an existing queue with those that would be declared.

    A number compares equal to its text, as the broker's error messages give it; a queue without a type is classic.

    Args:
        wanted: The queue as it would be declared.
        found_arguments: ``{argument: value}`` of the existing queue.

    Returns:
        One entry per argument that differs, in alphabetical order; empty when a declare would succeed.
    """
    found = {name: _plain(value) for name, value in found_arguments.items()}
    found.setdefault("x-queue-type", "classic")
    return [
        difference(wanted, name, found.get(name))
        for name in sorted(wanted.arguments.keys() | found.keys())
        if wanted.arguments.get(name) != found.get(name)
    ]


def difference(wanted: QueueSpec, argument: str, found: object) -> Difference:
    """Describe how one argument differs, where only that one is known: the broker's refusals name one at a time.

    A policy helps where the queue has no argument of its own, or a number that is to become smaller: where both give a
    number the broker takes the smaller one, and of the other arguments it keeps the queue's own.
    """
    value, existing = wanted.arguments.get(argument), _plain(found)
    is_lowered = argument in _LOWEST_WINS and isinstance(value, int) and isinstance(existing, int) and value < existing
    can_policy = argument in SETTABLE_BY_POLICY and value is not None and (existing is None or is_lowered)
    return Difference(wanted.name, argument, value, existing, "policy" if can_policy else "new queue")


def _wanted_arguments(
    tier: Tier, lane: str, namespace: str, queue_type: QueueType, consumer_timeout_ms: int | None
) -> dict[str, ArgumentValue]:
    arguments = _arguments_of_type(queue_type)
    arguments["x-dead-letter-exchange"] = namespace
    arguments["x-dead-letter-routing-key"] = f"{namespace}.{DEAD}"
    if lane == FRESH and tier.overflow == "drop-head":
        # Apart from the dead letters: a burst that drops a million must not bury the failures of a day.
        arguments["x-dead-letter-routing-key"] = f"{namespace}.{DROPPED}"
    if lane == FRESH:
        arguments["x-max-length"] = tier.bound
        arguments["x-overflow"] = tier.overflow
    if consumer_timeout_ms is not None:
        arguments["x-consumer-timeout"] = consumer_timeout_ms
    return arguments


def _arguments_of_type(queue_type: QueueType) -> dict[str, ArgumentValue]:
    arguments: dict[str, ArgumentValue] = {"x-queue-type": queue_type}
    if queue_type == "quorum":
        # Why not on classic: they refuse the argument, and a return does not count there.
        arguments["x-delivery-limit"] = DELIVERY_LIMIT
    return arguments


def _names_by_policy(queue_type: QueueType, bounds: Bounds) -> set[str]:
    names = {"x-max-length", "x-overflow"} if bounds == "policy" else set()
    return names | {"x-consumer-timeout"} if queue_type == "classic" else names


def _delay_levels(prefix: str, queues: Iterable[QueueSpec]) -> DelayLevels:
    """Mirrors kombu.transport.native_delayed_delivery, whose publisher side is used as it is.

    Always quorum queues: only those dead-letter at least once, so that no parked message is lost between two levels.
    """
    delivery = f"{prefix}_celery_delayed_delivery"
    names = [f"{prefix}_celery_delayed_{level}" for level in range(DELAY_LEVELS)]
    levels = list(reversed(range(DELAY_LEVELS)))
    exchanges = [ExchangeSpec(names[level]) for level in levels]
    exchanges.append(ExchangeSpec(delivery))
    delay_queues: list[QueueSpec] = []
    bindings: list[BindingSpec] = []
    for level in levels:
        below = names[level - 1] if level else delivery
        arguments: dict[str, ArgumentValue] = {
            "x-queue-type": "quorum",
            "x-overflow": "reject-publish",
            "x-message-ttl": 2**level * 1000,
            "x-dead-letter-exchange": below,
            "x-dead-letter-strategy": "at-least-once",
        }
        delay_queues.append(QueueSpec(names[level], True, arguments, DELAY, None))
        higher_bits = "*." * (DELAY_LEVELS - 1 - level)
        bindings.append(BindingSpec(names[level], names[level], f"{higher_bits}1.#"))
        bindings.append(BindingSpec(names[level], below, f"{higher_bits}0.#", "exchange"))
    returned = {queue.tier: queue.name for queue in queues if queue.lane == RETURNED}
    for queue in queues:
        arrives_in = returned[queue.tier] if queue.lane == FRESH else queue.name
        bindings.append(BindingSpec(delivery, arrives_in, f"#.{queue.name}"))
    return DelayLevels(tuple(exchanges), tuple(delay_queues), tuple(bindings), delivery)


def _plain(value: object) -> ArgumentValue | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, int):
        return int(value)
    text = str(value)
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else text
