"""Changing queues that exist, on a real broker, under load and through kills."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from kombu import Connection

from inference_routing.policy import default_policy
from inference_routing.topology import Topology, build_topology
from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.broker.apply import Change, apply_topology
from inference_tasks.broker.topology import broker_version, check, declare
from inference_tasks.errors import BrokerUnavailableError, DeploymentError, QueueFullError, TaskNotFoundError
from tests.support.brokers import Broker, depth, until
from tests.support.history import History
from tests.support.servers import RabbitMQNode
from tests.support.tier_app import make_app

# Applies the settings given as JSON and prints each change; ends at once after the change of the named step, if any.
APPLIER = """
import json, os, signal, sys
from inference_tasks.app import inference_of
from inference_tasks.broker.apply import apply_topology
from inference_tasks.broker.topology import broker_version
from tests.support.tier_app import make_app

settings = inference_of(make_app(json.loads(sys.argv[1]))).settings
broker = settings.broker
wanted = settings.topology(broker_version(broker.url))
for change in apply_topology(wanted, broker.url, management_url=broker.management_url):
    print(change, flush=True)
    if change.step == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def broker(
    rabbitmq: RabbitMQNode, amqp_url: str, redis_url: str, namespace: str, history: History, tmp_path: Path
) -> Iterator[Broker]:
    options: dict[str, Any] = {
        "namespace": namespace,
        "broker": {"url": amqp_url, "management_url": rabbitmq.management_url, "queue_type": "classic"},
        "state": {"url": redis_url},
    }
    made = Broker(options, history, tmp_path, is_exact=True)
    yield made
    made.close()


# So long that a queue which gets no more messages is not empty before the next attempt to change it has started.
NAP_S = 0.05


class Load:
    """A client that submits tasks to one tier, faster than one slot runs them, until it is stopped."""

    def __init__(self, app: InferenceApp, tier: str) -> None:
        self.accepted: dict[str, int] = {}
        self.refused: list[str] = []
        self.errors: list[BaseException] = []
        self._step: Any = app.tasks[f"step.{tier}"]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            number += 1
            try:
                self.accepted[self._step.submit(number, NAP_S).id] = number
            except QueueFullError as error:
                self.refused.append(error.task_id or "")
            except BrokerUnavailableError as error:
                self.errors.append(error)
            self._ended.wait(0.6 * NAP_S)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


def topology_for(app: InferenceApp) -> Topology:
    """The topology for the version of the broker that is there."""
    settings = inference_of(app).settings
    return settings.topology(broker_version(str(settings.broker.url)))


def applied(options: Mapping[str, Any], kill_at: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", APPLIER, json.dumps(options), kill_at],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return done.returncode, done.stdout + done.stderr


def succeeded(app: InferenceApp, ids: list[str]) -> bool:
    return all(record is not None and record.state == "success" for record in inference_of(app).store.get_many(ids))


def helpers(node: RabbitMQNode, vhost: str) -> list[str]:
    """What `topology apply` makes for a while."""
    names = [
        str(one["name"])
        for kind in ("queues", "exchanges")
        for one in node.api("GET", f"/api/{kind}/{vhost}")  # type: ignore[attr-defined]
    ]
    return [name for name in names if name.endswith((".switch", ".otherwise", ".moving"))]


def test_under_load_and_through_kills_at_every_step_each_accepted_task_ends_once(
    broker: Broker, rabbitmq: RabbitMQNode, vhost: str, history: History
) -> None:
    app = broker.app(tiers={"batch": {"bound": 60}})
    wanted = {**broker.options, "tiers": {"batch": {"bound": 70}}}
    with broker.worker(tiers={"batch": {"bound": 60}}), Load(app, "batch") as load:
        until(lambda: len(load.refused) > 10, "the queue is full")
        for step in ("prepared", "switched", "moved", "deleted", "declared", "bound"):
            code, output = applied(wanted, kill_at=step)
            assert code == -9, (step, output)
        code, output = applied(wanted)
        assert (code, output.count("is as wanted")) == (0, 1), output
        settled = len(load.accepted)
        until(lambda: len(load.accepted) > settled + 50, "work goes on")
        load.stop()
        ids = list(load.accepted)
        until(lambda: succeeded(app, ids), f"all {len(ids)} succeed", timeout_s=120)
    assert load.errors == []
    assert history.counts("end", "number") == dict.fromkeys(load.accepted.values(), 1)
    for task_id in load.refused:
        with pytest.raises(TaskNotFoundError):
            app.status(task_id)
    topology = topology_for(make_app(wanted))
    assert check(topology, str(broker.options["broker"]["url"]), management_url=rabbitmq.management_url).is_as_wanted
    assert helpers(rabbitmq, vhost) == []
    assert applied(wanted) == (0, "")


def test_a_kill_in_the_middle_of_moving_loses_nothing_and_properties_stay(
    broker: Broker, rabbitmq: RabbitMQNode, vhost: str, amqp_url: str
) -> None:
    app = broker.app()
    topology = inference_of(app).topology
    queue = topology.queue("offline").name
    inference_of(app).declare_topology()
    properties = {
        "type": "t",
        "app_id": "a",
        "message_id": "m",
        "timestamp": 1_700_000_000,
        "correlation_id": "c",
        "reply_to": "r",
        "expiration": "3600000",
        "user_id": "guest",
    }
    headers = {"n": None, "i": -(2**40), "f": 1.5, "t": [True, {"deep": "x"}], "b": False}
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        for number in range(2500):
            message = channel.prepare_message(
                str(number).encode(),
                content_type="text/x",
                content_encoding="utf-8",
                headers=headers,
                properties={**properties, "delivery_mode": 2},
                priority=3,
            )
            channel.basic_publish(message, exchange=topology.exchange.name, routing_key=queue)
        # The broker's own bookkeeping is added to a message of a quorum queue, so not all headers are compared.
        until(lambda: depth(app, "offline") == 2500, "all are stored")
        wanted = {**broker.options, "tiers": {"offline": {"bound": 10}}, "broker": {**broker.options["broker"]}}
        wanted["broker"]["queue_type"] = "quorum"
        code, output = applied(wanted, kill_at="moved")
        assert (code, "1000 messages moved" in output or " messages moved" in output) == (-9, True), output
        code, output = applied(wanted)
        assert code == 0, output
        bodies: list[int] = []
        for lane in ("fresh", "returned", "aged"):
            name = topology.queue("offline", lane).name
            while (taken := channel.basic_get(name, no_ack=True)) is not None:
                bodies.append(int(taken.body))
                assert {key: taken.headers[key] for key in headers} == headers
                left = {key: taken.properties[key] for key in properties if key != "user_id"}
                assert left == {key: value for key, value in properties.items() if key != "user_id"}
                assert (taken.properties["priority"], taken.properties["delivery_mode"]) == (3, 2)
                assert (taken.content_type, taken.content_encoding) == ("text/x", "utf-8")
                assert taken.delivery_info["routing_key"] == queue
        assert sorted(set(bodies)) == list(range(2500))
        assert len(bodies) <= 2500 + 200
    assert helpers(rabbitmq, vhost) == []


def test_a_queue_is_kept_while_a_message_of_it_is_held(
    broker: Broker, amqp_url: str, rabbitmq: RabbitMQNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    inference = inference_of(broker.app())
    inference.declare_topology()
    queue = inference.topology.queue("batch").name
    wanted = topology_for(make_app({**broker.options, "tiers": {"batch": {"bound": 200_000}}}))
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        channel.basic_publish(
            channel.prepare_message(b"held"), exchange=inference.topology.exchange.name, routing_key=queue
        )
        until(lambda: (held := channel.basic_get(queue)) is not None and held.body == b"held", "the message is taken")
        steps: list[str] = []
        for change in apply_topology(wanted, amqp_url, management_url=rabbitmq.management_url):
            steps.append(change.step)
            if change.step == "waiting":
                assert change.messages == 1
                # As a worker that dies: what it held goes back.
                channel.close()
        assert steps[:3] == ["prepared", "switched", "waiting"]
        assert "moved" in steps
        assert steps[-4:] == ["deleted", "declared", "bound", "done"]
        again: Any = connection.channel()
        assert again.basic_get(inference.topology.queue("batch", "returned").name).body == b"held"


def test_dead_letters_wait_aside_and_come_back(
    broker: Broker, amqp_url: str, rabbitmq: RabbitMQNode, vhost: str
) -> None:
    inference = inference_of(broker.app())
    inference.declare_topology()
    topology = inference.topology
    wanted = topology_for(make_app({**broker.options, "broker": {**broker.options["broker"], "queue_type": "quorum"}}))
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel

        def publish(body: bytes) -> None:
            channel.basic_publish(
                channel.prepare_message(body), exchange=topology.exchange.name, routing_key=topology.dead.name
            )

        publish(b"before")
        replaced: list[str] = []
        for change in apply_topology(wanted, amqp_url, management_url=rabbitmq.management_url):
            if (change.queue, change.step) == (topology.dead.name, "deleted"):
                publish(b"meanwhile")
            if change.step == "done":
                replaced.append(change.queue)
        assert sorted(replaced) == sorted(queue.name for queue in topology.queues)
        bodies = [channel.basic_get(topology.dead.name, no_ack=True).body for _ in range(2)]
    assert sorted(bodies) == [b"before", b"meanwhile"]
    assert helpers(rabbitmq, vhost) == []


def test_a_second_one_at_once_is_refused(broker: Broker, amqp_url: str, rabbitmq: RabbitMQNode) -> None:
    inference_of(broker.app()).declare_topology()
    wanted = topology_for(make_app({**broker.options, "tiers": {"batch": {"bound": 7}}}))
    first = apply_topology(wanted, amqp_url, management_url=rabbitmq.management_url)
    assert next(first).step == "policy"
    with pytest.raises(DeploymentError, match="Another"):
        list(apply_topology(wanted, amqp_url, management_url=rabbitmq.management_url))
    cast("Generator[Change, None, None]", first).close()


@pytest.mark.parametrize("declared_as", ["policy", "arguments"])
def test_a_bound_is_changed_live_without_a_new_queue(
    broker: Broker, rabbitmq: RabbitMQNode, amqp_url: str, vhost: str, declared_as: str
) -> None:
    options = {**broker.options, "broker": {**broker.options["broker"], "bounds": declared_as}}

    def topology_of(bound: int) -> tuple[InferenceApp, Topology]:
        app = make_app({**options, "tiers": {"realtime": {"bound": bound}}})
        return app, topology_for(app)

    def accepted(app: InferenceApp) -> int:
        """How many more the queue takes."""
        count = 0
        while count < 100:
            try:
                cast(Any, app.tasks["step.realtime"]).submit(count)
            except QueueFullError:
                return count
            count += 1
        return count

    management_url = rabbitmq.management_url
    app, first = topology_of(5)
    inference_of(app).declare_topology()
    queue = first.queue("realtime").name
    assert check(first, amqp_url, management_url=management_url).is_as_wanted
    assert accepted(app) == 5

    _, lower = topology_of(3)
    told = check(lower, amqp_url, management_url=management_url).differences
    assert [(one.queue, one.argument, one.wanted, one.found, one.by) for one in told] == [
        (queue, "x-max-length", 3, 5, "policy")
    ]
    changes = list(apply_topology(lower, amqp_url, management_url=management_url))
    assert [(one.queue, one.step) for one in changes] == [(queue, "policy")]
    assert check(lower, amqp_url, management_url=management_url).is_as_wanted
    # An older process starts: it neither undoes the change nor fails.
    assert [one.wanted for one in declare(first, amqp_url, management_url=management_url)] in ([5], [])
    assert check(lower, amqp_url, management_url=management_url).is_as_wanted
    with Connection(amqp_url) as connection:
        channel: Any = connection.default_channel
        until(lambda: _effective(rabbitmq, vhost, queue).get("max-length") == 3, "the policy is in effect")
        assert accepted(app) == 0
        channel.queue_purge(queue)
        assert accepted(app) == 3
        if declared_as == "policy":
            _, higher = topology_of(8)
            changes = list(apply_topology(higher, amqp_url, management_url=management_url))
            assert [(one.queue, one.step) for one in changes] == [(queue, "policy")]
            until(lambda: _effective(rabbitmq, vhost, queue).get("max-length") == 8, "the policy is in effect")
            assert accepted(app) == 5
            assert depth(app, "realtime") == 8
            higher_or_first = higher
        else:
            # Back at the argument of the queue: the policy says nothing of it any more.
            changes = list(apply_topology(first, amqp_url, management_url=management_url))
            assert [(one.step, "max-length" in one.detail) for one in changes] == [("policy", False)]
            higher_or_first = first
    assert check(higher_or_first, amqp_url, management_url=management_url).is_as_wanted
    assert list(apply_topology(higher_or_first, amqp_url, management_url=management_url)) == []


def _effective(node: RabbitMQNode, vhost: str, queue: str) -> Mapping[str, object]:
    found: Any = node.api("GET", f"/api/queues/{vhost}/{queue}")
    return found.get("effective_policy_definition") or {}


def test_somebody_elses_policy_in_the_way_is_told(broker: Broker, rabbitmq: RabbitMQNode, amqp_url: str) -> None:
    inference = inference_of(broker.app())
    inference.declare_topology()
    wanted = topology_for(make_app({**broker.options, "tiers": {"realtime": {"bound": 3}}}))
    queue = wanted.queue("realtime").name
    rabbitmq.api(
        "PUT",
        f"/api/policies/{broker.namespace}/theirs",
        {"pattern": f"^{queue}$", "definition": {"max-length": 900}, "priority": 50, "apply-to": "queues"},
    )
    with pytest.raises(DeploymentError, match="higher priority"):
        list(apply_topology(wanted, amqp_url, management_url=rabbitmq.management_url))


def test_without_the_management_api_nothing_is_begun(broker: Broker, amqp_url: str) -> None:
    app = broker.app()
    inference = inference_of(app)
    inference.declare_topology()
    if not topology_for(app).policies:
        assert list(apply_topology(topology_for(app), amqp_url)) == []
    wanted = topology_for(make_app({**broker.options, "tiers": {"realtime": {"bound": 2000}}}))
    for address in (None, "http://127.0.0.1:1"):
        with pytest.raises(DeploymentError, match="management"):
            list(apply_topology(wanted, amqp_url, management_url=address))
    assert check(inference.topology, amqp_url).missing == ()


def test_what_is_missing_is_declared(broker: Broker, amqp_url: str) -> None:
    topology = build_topology(default_policy(), broker.namespace)
    assert [one.step for one in apply_topology(topology, amqp_url)] == ["created"] * len(topology.queues)
    assert check(topology, amqp_url).is_as_wanted
