"""Declaring and comparing the topology on a real broker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from kombu import Connection

from inference_routing.policy import default_policy
from inference_routing.topology import Topology, build_topology
from inference_tasks.broker.addressing import delay_address
from inference_tasks.broker.depth import Depths
from inference_tasks.broker.management import Management, ManagementError
from inference_tasks.broker.topology import TopologyReport, broker_version, check, declare
from inference_tasks.errors import BrokerUnavailableError, DeploymentError
from tests.support.servers import RabbitMQNode


@pytest.fixture
def management_url(rabbitmq: RabbitMQNode) -> str:
    return rabbitmq.management_url


@pytest.fixture
def topology() -> Topology:
    return build_topology(default_policy(), queue_type={"realtime": "classic", "batch": "quorum", "offline": "classic"})


def declare_differently(url: str, name: str, arguments: Mapping[str, object]) -> None:
    with Connection(url) as connection:
        channel: Any = connection.default_channel
        channel.queue_declare(name, durable=True, auto_delete=False, arguments=dict(arguments))


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


def test_everything_is_declared_and_doing_it_again_changes_nothing(
    amqp_url: str, topology: Topology, management_url: str
) -> None:
    missing = check(topology, amqp_url)
    assert len(missing.missing) == len(topology.queues) + 28 + 30
    for _ in range(2):
        assert declare(topology, amqp_url) == []
    assert check(topology, amqp_url, management_url=management_url) == TopologyReport(())
    with Depths(amqp_url) as depths:
        assert depths.of(topology) == {queue.name: 0 for queue in topology.queues}


def test_looking_changes_nothing(amqp_url: str, topology: Topology) -> None:
    check(topology, amqp_url)
    assert not check(topology, amqp_url).is_as_wanted


@pytest.mark.parametrize("told_by", ["management", "refusal"])
def test_queues_with_other_arguments_are_told_and_used_as_they_are(
    amqp_url: str, topology: Topology, management_url: str, told_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = dict(topology.queue("realtime").arguments)
    declare_differently(amqp_url, "inference.realtime", wanted | {"x-max-length": 5, "x-overflow": "drop-head"})
    address = management_url if told_by == "management" else None
    with caplog.at_level(logging.WARNING):
        differing = declare(topology, amqp_url, management_url=address)
    told = {(one.argument, one.wanted, one.found) for one in differing}
    assert told == {("x-max-length", 1000, 5), ("x-overflow", "reject-publish", "drop-head")}
    assert "inference.realtime" in caplog.text
    report = check(topology, amqp_url, management_url=address)
    assert (list(report.differences), report.missing) == (differing, ())
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        channel.basic_publish(channel.prepare_message(b"x"), exchange="inference", routing_key="inference.realtime")
    depths = Depths(amqp_url)
    assert eventually(lambda: depths.of_queues(["inference.realtime"]) == {"inference.realtime": 1})
    depths.close()


def test_another_queue_type_is_told(amqp_url: str, topology: Topology) -> None:
    declare_differently(amqp_url, "inference.batch", {})
    differing = declare(topology, amqp_url)
    told = {one.argument: (one.wanted, one.found, one.by) for one in differing}
    assert told["x-queue-type"] == ("quorum", "classic", "new queue")
    assert told["x-dead-letter-exchange"] == ("inference", None, "policy")
    assert told["x-max-length"] == (100_000, None, "policy")


def test_bounds_by_policy_are_set_and_work(
    rabbitmq: RabbitMQNode, amqp_url: str, vhost: str, management_url: str
) -> None:
    topology = build_topology(default_policy(), queue_type="classic", bounds="policy")
    assert declare(topology, amqp_url, management_url=management_url) == []
    management = Management(management_url, vhost)
    policies = management.policies()
    assert policies["inference.realtime"]["definition"] == {"max-length": 1000, "overflow": "reject-publish"}
    assert management.queue("nobody") is None
    assert eventually(lambda: (management.queue("inference.realtime") or {}).get("policy") == "inference.realtime")
    management.delete_policy("inference.realtime")
    management.delete_policy("inference.realtime")
    assert "inference.realtime" not in management.policies()


def test_bounds_by_policy_without_the_management_api_are_told_as_not_set(
    amqp_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    topology = build_topology(default_policy(), queue_type="classic", bounds="policy")
    with caplog.at_level(logging.WARNING):
        declare(topology, amqp_url, management_url="http://127.0.0.1:1")
    assert "not set" in caplog.text


def test_a_parked_message_comes_back_through_the_returned_lane_and_not_early(amqp_url: str, topology: Topology) -> None:
    declare(topology, amqp_url)
    exchange, key = delay_address(topology.delay_prefix, "inference.batch", 2)
    depths = Depths(amqp_url)
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        sent_at_s = time.monotonic()
        channel.basic_publish(channel.prepare_message(b"x"), exchange=exchange, routing_key=key)
    assert eventually(lambda: depths.of(topology)["inference.batch.returned"] == 1)
    assert time.monotonic() - sent_at_s >= 2
    assert depths.of(topology)["inference.batch"] == 0
    depths.close()


def test_a_user_without_the_right_to_declare_uses_what_is_there(
    rabbitmq: RabbitMQNode, amqp_url: str, vhost: str, topology: Topology
) -> None:
    rabbitmq.api("PUT", f"/api/users/{vhost}", {"password": "secret", "tags": ""})
    rabbitmq.api("PUT", f"/api/permissions/{vhost}/{vhost}", {"configure": "^$", "write": ".*", "read": ".*"})
    limited = amqp_url.replace("guest:guest", f"{vhost}:secret")
    with pytest.raises(DeploymentError, match=r"inference"):
        declare(topology, limited)
    declare(topology, amqp_url)
    assert declare(topology, limited) == []
    rabbitmq.api("DELETE", f"/api/users/{vhost}")


def test_a_missing_queue_has_no_depth(amqp_url: str) -> None:
    depths = Depths(amqp_url)
    assert depths.of_queues(["nobody", "nobody-else"]) == {}
    depths.close()


def test_depths_go_on_after_the_connection_was_closed(rabbitmq: RabbitMQNode, amqp_url: str) -> None:
    declare_differently(amqp_url, "here", {})
    depths = Depths(amqp_url)
    assert depths.of_queues(["here"]) == {"here": 0}
    rabbitmq.close_all_connections()
    assert eventually(lambda: depths.of_queues(["here"]) == {"here": 0})
    depths.close()


def test_the_version_is_told(amqp_url: str, management_url: str) -> None:
    assert broker_version(amqp_url) >= (3, 8)
    assert Management(management_url).versions()["rabbitmq"].startswith(".".join(map(str, broker_version(amqp_url))))


def test_what_cannot_be_reached_is_told_by_type() -> None:
    topology = build_topology(default_policy())
    for ask in (declare, check):
        with pytest.raises(BrokerUnavailableError):
            ask(topology, "amqp://guest:guest@127.0.0.1:1//")
    with pytest.raises(BrokerUnavailableError):
        Depths("amqp://guest:guest@127.0.0.1:1//").of(topology)
    with pytest.raises(ManagementError):
        Management("http://127.0.0.1:1").versions()
