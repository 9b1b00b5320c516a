import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.transport import native_delayed_delivery

from inference_routing.policy import default_policy
from inference_routing.topology import (
    BindingSpec,
    Bounds,
    Difference,
    QueueType,
    Topology,
    build_topology,
    difference,
    differences,
)

# What RabbitMQ 4.3 takes for each queue type, of what versions since 3.10 have taken.
TAKEN_BY_4_3 = {
    "quorum": {
        "x-queue-type", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-dead-letter-strategy", "x-max-length",
        "x-overflow", "x-delivery-limit", "x-message-ttl", "x-consumer-timeout",
    },
    "classic": {
        "x-queue-type", "x-dead-letter-exchange", "x-dead-letter-routing-key", "x-max-length", "x-overflow",
        "x-message-ttl",
    },
}  # fmt: skip

QUEUE_TYPES: tuple[QueueType | dict[str, QueueType], ...] = ("quorum", "classic", {"offline": "classic"})
BOUNDS: tuple[Bounds, ...] = ("arguments", "policy")
ALL_SORTS = [
    build_topology(default_policy(), queue_type=queue_type, bounds=bounds, consumer_timeout_ms=timeout_ms)
    for queue_type, bounds, timeout_ms in itertools.product(QUEUE_TYPES, BOUNDS, (None, 7_200_000))
]


def arguments(topology: Topology, tier: str, lane: str) -> dict[str, str | int]:
    return dict(topology.queue(tier, lane).arguments)


def test_every_tier_has_its_three_lanes_and_all_share_one_dead_letter_queue() -> None:
    topology = build_topology(default_policy())
    assert [queue.name for queue in topology.queues] == [
        "inference.realtime", "inference.realtime.returned", "inference.realtime.aged",
        "inference.batch", "inference.batch.returned", "inference.batch.aged",
        "inference.offline", "inference.offline.returned", "inference.offline.aged",
        "inference.dead", "inference.dropped", "inference.waiting", "inference.maintenance",
    ]  # fmt: skip
    assert (topology.exchange.name, topology.exchange.type, topology.exchange.durable) == ("inference", "topic", True)
    assert topology.dead.name == "inference.dead"
    assert topology.dropped.name == "inference.dropped"
    assert topology.waiting.name == "inference.waiting"
    assert topology.maintenance.name == "inference.maintenance"
    assert topology.queue("batch").name == "inference.batch"
    with pytest.raises(KeyError):
        topology.queue("batch", "stale")


def test_every_queue_is_bound_by_its_name_with_anything_in_front() -> None:
    topology = build_topology(default_policy(), "vision")
    assert set(topology.bindings) == {
        BindingSpec("vision", queue.name, f"#.{queue.name}", "queue") for queue in topology.queues
    }


def test_only_fresh_lanes_are_bounded() -> None:
    policy = default_policy()
    policy = replace(policy, tiers=(*policy.tiers[:2], replace(policy.tiers[2], overflow="drop-head")))
    topology = build_topology(policy)
    assert arguments(topology, "realtime", "fresh") == {
        "x-queue-type": "quorum",
        "x-delivery-limit": 1_000_000,
        "x-dead-letter-exchange": "inference",
        "x-dead-letter-routing-key": "inference.dead",
        "x-max-length": 1_000,
        "x-overflow": "reject-publish",
    }
    assert arguments(topology, "offline", "fresh")["x-overflow"] == "drop-head"
    for queue in (topology.dead, topology.dropped, topology.maintenance):
        assert dict(queue.arguments) == {"x-queue-type": "quorum", "x-delivery-limit": 1_000_000}
    for queue in topology.queues:
        assert ("x-max-length" in queue.arguments) == (queue.lane == "fresh")
        assert ("x-overflow" in queue.arguments) == (queue.lane == "fresh")


def test_only_what_a_drop_head_queue_drops_goes_elsewhere_than_to_the_dead_letters() -> None:
    policy = default_policy()
    policy = replace(policy, tiers=(*policy.tiers[:2], replace(policy.tiers[2], overflow="drop-head")))
    keys = {queue.name: queue.arguments.get("x-dead-letter-routing-key") for queue in build_topology(policy).queues}
    assert keys.pop("inference.offline") == "inference.dropped"
    assert {keys.pop(f"inference.{name}") for name in ("dead", "dropped", "waiting", "maintenance")} == {None}
    assert set(keys.values()) == {"inference.dead"}


@pytest.mark.parametrize("topology", ALL_SORTS)
def test_no_argument_is_one_that_rabbitmq_4_3_refuses(topology: Topology) -> None:
    for queue in (*topology.queues, *topology.delay.queues):
        assert queue.durable
        assert set(queue.arguments) <= TAKEN_BY_4_3[str(queue.arguments["x-queue-type"])]
    assert all(exchange.durable for exchange in (topology.exchange, *topology.delay.exchanges))


@pytest.mark.parametrize("topology", ALL_SORTS)
def test_every_quorum_queue_that_is_consumed_has_the_high_delivery_limit(topology: Topology) -> None:
    for queue in topology.queues:
        limit = queue.arguments.get("x-delivery-limit")
        assert limit == (1_000_000 if queue.arguments["x-queue-type"] == "quorum" else None)


def test_the_queue_type_can_differ_by_tier() -> None:
    topology = build_topology(default_policy(), queue_type={"realtime": "classic", "batch": "quorum"})
    assert arguments(topology, "realtime", "aged")["x-queue-type"] == "classic"
    assert arguments(topology, "batch", "fresh")["x-queue-type"] == "quorum"
    assert arguments(topology, "offline", "fresh")["x-queue-type"] == "quorum"
    assert build_topology(default_policy(), queue_type="classic").dead.arguments == {"x-queue-type": "classic"}


def test_bounds_can_be_left_to_a_policy_that_fits_one_queue() -> None:
    topology = build_topology(default_policy(), "a.b", bounds="policy")
    assert not {"x-max-length", "x-overflow"} & arguments(topology, "batch", "fresh").keys()
    policy = {policy.name: policy for policy in topology.policies}["a.b.batch"]
    assert policy.definition == {"max-length": 100_000, "overflow": "reject-publish"}
    assert len(topology.policies) == 3
    assert [queue.name for queue in topology.queues if re.search(policy.pattern, queue.name)] == ["a.b.batch"]
    assert not re.search(policy.pattern, "axb.batch")
    assert build_topology(default_policy()).policies == ()


def test_the_consumer_timeout_is_an_argument_on_quorum_queues_and_a_policy_on_classic_ones() -> None:
    topology = build_topology(default_policy(), queue_type={"offline": "classic"}, consumer_timeout_ms=7_200_000)
    for lane in ("fresh", "returned", "aged"):
        assert arguments(topology, "realtime", lane)["x-consumer-timeout"] == 7_200_000
        assert "x-consumer-timeout" not in arguments(topology, "offline", lane)
    assert {policy.name: dict(policy.definition) for policy in topology.policies} == {
        name: {"consumer-timeout": 7_200_000}
        for name in ("inference.offline", "inference.offline.returned", "inference.offline.aged")
    }


@pytest.mark.parametrize("namespace", ["", "a b", "a.#", "*", "a..b", ".a", "amq.x", "ä", "x" * 151])
def test_a_namespace_that_would_break_routing_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="namespace"):
        build_topology(default_policy(), namespace)


@given(
    st.lists(st.sampled_from(["realtime", "returned", "batch", "dead", "dropped", "a"]), min_size=1, max_size=4).map(
        ".".join
    )
)
def test_no_routing_key_is_a_suffix_of_another(namespace: str) -> None:
    keys = [tuple(queue.name.split(".")) for queue in build_topology(default_policy(), namespace).queues]
    for one, other in itertools.permutations(keys, 2):
        assert one[-len(other) :] != other


class RecordingChannel:
    """Takes what kombu declares and writes it down."""

    def __init__(self) -> None:
        self.exchanges: dict[str, tuple[str, bool]] = {}
        self.queues: dict[str, dict[str, object]] = {}
        self.bindings: set[BindingSpec] = set()

    def channel(self) -> "RecordingChannel":
        return self

    def exchange_declare(self, *, exchange: str, type: str, durable: bool, **_: Any) -> None:
        self.exchanges[exchange] = (type, durable)

    def queue_declare(self, *, queue: str, arguments: dict[str, object], **_: Any) -> tuple[str, int, int]:
        self.queues[queue] = arguments
        return queue, 0, 0

    def queue_bind(self, *, queue: str, exchange: str, routing_key: str, **_: Any) -> None:
        if exchange:
            self.bindings.add(BindingSpec(exchange, queue, routing_key))

    def exchange_bind(self, *, destination: str, source: str, routing_key: str, **_: Any) -> None:
        self.bindings.add(BindingSpec(source, destination, routing_key, "exchange"))

    def prepare_queue_arguments(self, arguments: dict[str, object] | None, **_: Any) -> dict[str, object]:
        return dict(arguments or {})


def test_the_delay_levels_are_what_kombu_declares() -> None:
    channel = RecordingChannel()
    declare: Any = native_delayed_delivery.declare_native_delayed_delivery_exchanges_and_queues
    declare(channel, "quorum", "vision")
    topology = build_topology(default_policy(), "vision")
    delay = topology.delay
    assert topology.delay_prefix == "vision"
    assert channel.exchanges == {exchange.name: (exchange.type, exchange.durable) for exchange in delay.exchanges}
    assert channel.queues == {queue.name: queue.arguments for queue in delay.queues}
    assert channel.bindings == {binding for binding in delay.bindings if binding.source != delay.delivery}


def test_no_parked_message_arrives_in_a_bounded_queue() -> None:
    topology = build_topology(default_policy())
    bounded = {queue.name for queue in topology.queues if "x-max-length" in queue.arguments}
    arrivals = {b.routing_key: b.destination for b in topology.delay.bindings if b.source == topology.delay.delivery}
    assert not bounded & set(arrivals.values())
    assert {key.removeprefix("#.") for key in arrivals} == {queue.name for queue in topology.queues}
    assert arrivals["#.inference.batch"] == arrivals["#.inference.batch.returned"] == "inference.batch.returned"
    assert arrivals["#.inference.batch.aged"] == "inference.batch.aged"


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
@pytest.mark.parametrize("bounds", ["arguments", "policy"])
def test_a_queue_as_declared_has_no_differences(queue_type: QueueType, bounds: Bounds) -> None:
    for queue in build_topology(default_policy(), queue_type=queue_type, bounds=bounds).queues:
        assert differences(queue, dict(queue.arguments)) == []


def test_a_queue_without_a_type_is_a_classic_one() -> None:
    queue = build_topology(default_policy(), queue_type="classic").dead
    assert differences(queue, {}) == []


def test_numbers_that_came_as_text_are_numbers() -> None:
    queue = build_topology(default_policy()).queue("realtime")
    assert differences(queue, {name: str(value) for name, value in queue.arguments.items()}) == []
    assert differences(queue, {name: str(value).encode() for name, value in queue.arguments.items()}) == []


def test_each_difference_says_what_can_change_it() -> None:
    queue = build_topology(default_policy(), consumer_timeout_ms=5000).queue("realtime")
    found = {
        "x-queue-type": "classic",
        "x-dead-letter-exchange": "elsewhere",
        "x-dead-letter-routing-key": "inference.dead",
        "x-max-length": 5_000,
        "x-consumer-timeout": 4_000,
        "x-max-priority": 3,
    }
    name = "inference.realtime"
    assert differences(queue, found) == [
        Difference(name, "x-consumer-timeout", 5_000, 4_000, "new queue"),
        Difference(name, "x-dead-letter-exchange", "inference", "elsewhere", "new queue"),
        Difference(name, "x-delivery-limit", 1_000_000, None, "policy"),
        Difference(name, "x-max-length", 1_000, 5_000, "policy"),
        Difference(name, "x-max-priority", None, 3, "new queue"),
        Difference(name, "x-overflow", "reject-publish", None, "policy"),
        Difference(name, "x-queue-type", "quorum", "classic", "new queue"),
    ]


def test_a_refusal_that_names_one_argument_is_described_alone() -> None:
    queue = build_topology(default_policy()).queue("realtime")
    assert difference(queue, "x-max-length", "500") == Difference(queue.name, "x-max-length", 1_000, 500, "new queue")
    assert difference(queue, "x-max-length", None).by == "policy"
