"""The gateway while RabbitMQ or Redis is away: what it answers, what it loses (nothing), how it comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import PATIENCE_S, until
from tests.support.gateway import GatewayProcess, problem, submit
from tests.support.proxy import FaultProxy
from tests.support.rig import Rig
from tests.support.servers import RabbitMQNode

CONFIRM_S = 2.0


@dataclass(frozen=True)
class Line:
    """A gateway whose lines to the servers can be broken; the worker's and the test's are others."""

    rig: Rig
    app: InferenceApp
    gateway: GatewayProcess
    http: httpx.Client
    broker: FaultProxy
    redis: FaultProxy

    def wait_ready(self) -> None:
        until(lambda: self.http.get("/readyz").status_code == 200, "the gateway is ready again")

    def wait_waiting(self, count: int) -> None:
        """Wait until so many clients wait."""
        text = f"inference_gateway_waiting_clients {count}.0"
        until(lambda: text in self.http.get("/metrics").text, f"{count} clients wait")


@pytest.fixture
def line(
    rig: Rig, rabbitmq_proxy: FaultProxy, redis_proxy: FaultProxy, amqp_url: str, redis_url: str
) -> Iterator[Line]:
    options: dict[str, Any] = {
        "broker": {
            "url": rabbitmq_proxy.url(amqp_url),
            "confirm_timeout_s": CONFIRM_S,
            "connect_timeout_s": 1.0,
        },
        "state": {"url": redis_proxy.url(redis_url), "socket_timeout_s": 1.0},
    }
    with GatewayProcess.of(rig, **options) as gateway, gateway.client() as http:
        made = Line(rig, rig.app(), gateway, http, rabbitmq_proxy, redis_proxy)
        made.wait_ready()  # its first submit would have to declare the queues within these times
        yield made


def test_a_gateway_that_is_ready_has_declared_the_queues(line: Line, rabbitmq: RabbitMQNode, vhost: str) -> None:
    queues = rabbitmq.api("GET", f"/api/queues/{vhost}")
    assert isinstance(queues, list)
    assert {one.name for one in inference_of(line.app).topology.queues} <= {one["name"] for one in queues}


def test_without_the_broker_nothing_is_accepted_and_readiness_names_it(line: Line) -> None:
    assert submit(line.http, "step.batch").status_code == 202
    line.broker.down()
    body = problem(submit(line.http, "step.batch"), 503)
    assert body["type"].endswith((":broker-unavailable", ":outcome-unknown"))
    until(lambda: line.http.get("/readyz").status_code == 503, "the gateway is not ready")
    assert problem(line.http.get("/readyz"), 503)["missing"] == ["broker"]
    problem(line.http.get("/v1/tiers"), 503)
    assert line.http.get("/healthz").status_code == 200
    line.gateway.wait_for("Tasks cannot be accepted now: broker: ")
    line.broker.resume()
    line.wait_ready()
    line.gateway.wait_for("Tasks can be accepted again")
    assert submit(line.http, "step.batch").status_code == 202


def test_a_broker_that_says_nothing_leaves_the_outcome_unknown_and_names_the_id(line: Line) -> None:
    assert submit(line.http, "step.batch").status_code == 202
    line.broker.black_hole()
    started_at_s = time.monotonic()
    body = problem(submit(line.http, "step.batch"), 503)
    assert time.monotonic() - started_at_s < 4 * CONFIRM_S
    assert body["type"].endswith(":outcome-unknown")
    assert line.http.get(f"/v1/tasks/{body['task_id']}").json()["state"] == "pending"
    line.broker.resume()
    line.wait_ready()


def test_without_redis_nothing_is_accepted_or_looked_up_and_readiness_names_it(line: Line) -> None:
    accepted = submit(line.http, "step.batch")
    line.redis.down()
    before = line.rig.waiting(line.app)
    for headers in ({}, {"Prefer": "wait=5"}):
        assert problem(submit(line.http, "step.batch", headers=headers), 503)["type"].endswith(":state-unavailable")
    problem(line.http.get(accepted.headers["location"]), 503)
    problem(line.http.get(accepted.json()["links"]["events"]), 503)
    until(lambda: line.http.get("/readyz").status_code == 503, "the gateway is not ready")
    assert problem(line.http.get("/readyz"), 503)["missing"] == ["state"]
    assert line.rig.waiting(line.app) == before
    line.redis.resume()
    line.wait_ready()
    assert line.http.get(accepted.headers["location"]).json()["state"] == "pending"


@pytest.mark.parametrize("fault", ["down", "reset_peer", "black_hole"])
def test_an_end_that_was_announced_while_redis_was_away_is_not_missed(line: Line, fault: str) -> None:
    gate = line.rig.gate()

    async def asked() -> httpx.Response:
        async with line.gateway.async_client() as http:
            waits = asyncio.create_task(
                http.post("/v1/tasks/gated.batch", json={"args": [1, str(gate)]}, headers={"Prefer": "wait=55"})
            )
            await asyncio.to_thread(line.rig.wait_started, 1, timeout_s=PATIENCE_S)
            getattr(line.redis, fault)()
            gate.open()
            store = inference_of(line.app).store
            (task_id,) = line.rig.history.values("taken", "id")

            def has_ended() -> bool:
                return store.get(str(task_id)).is_finished

            await asyncio.to_thread(until, has_ended, "the task ends")
            line.redis.resume()
            return await waits

    with line.rig.worker():
        started_at_s = time.monotonic()
        answer = asyncio.run(asked())
    assert answer.status_code == 200
    assert answer.json()["result"] == 1
    assert time.monotonic() - started_at_s < 45


def test_who_waits_while_redis_is_away_is_told_that_the_task_was_accepted(line: Line) -> None:
    async def asked() -> httpx.Response:
        async with line.gateway.async_client() as http:
            waits = asyncio.create_task(http.post("/v1/tasks/step.batch", json={}, headers={"Prefer": "wait=4"}))
            await asyncio.to_thread(line.wait_waiting, 1)
            await asyncio.to_thread(until, lambda: line.rig.waiting(line.app) == 1, "the task is in the broker")
            line.redis.down()
            return await waits

    answer = asyncio.run(asked())
    assert answer.status_code == 202
    line.redis.resume()
    line.wait_ready()
    assert line.http.get(answer.headers["location"]).json()["state"] == "pending"


def left_behind(line: Line, task: str) -> str:
    """A client waits for a task and leaves; return the task's id once the gateway has noticed."""

    async def asked() -> None:
        async with line.gateway.async_client() as http:
            waits = asyncio.create_task(http.post(f"/v1/tasks/{task}", json={}, headers={"Prefer": "wait=55"}))
            await asyncio.to_thread(line.wait_waiting, 1)
            await asyncio.to_thread(until, lambda: line.rig.waiting(line.app) == 1, "the task is in the broker")
            waits.cancel()

    asyncio.run(asked())
    line.wait_waiting(0)
    message = line.rig.take(line.app, task.rpartition(".")[2])
    return str(message.headers["id"])


def test_a_client_that_leaves_while_it_waits_gives_up_its_realtime_task(line: Line) -> None:
    task_id = left_behind(line, "step.realtime")
    until(lambda: line.http.get(f"/v1/tasks/{task_id}").json()["state"] == "cancelled", "the task is cancelled")


def test_a_client_that_leaves_does_not_give_up_a_task_of_another_tier(line: Line) -> None:
    task_id = left_behind(line, "step.batch")
    assert line.http.get(f"/v1/tasks/{task_id}").json()["state"] == "pending"


def test_it_starts_before_its_servers_do(rig: Rig, rabbitmq_proxy: FaultProxy, redis_proxy: FaultProxy) -> None:
    options = rig.options
    broker = {"url": rabbitmq_proxy.url(options["broker"]["url"]), "connect_timeout_s": 1.0}
    state = {"url": redis_proxy.url(options["state"]["url"]), "socket_timeout_s": 1.0}
    rabbitmq_proxy.down()
    redis_proxy.down()
    with GatewayProcess.of(rig, broker=broker, state=state) as gateway, gateway.client() as http:
        assert problem(http.get("/readyz"), 503)["missing"] == ["broker", "state"]
        problem(submit(http, "step.batch"), 503)
        rabbitmq_proxy.resume()
        redis_proxy.resume()
        until(lambda: http.get("/readyz").status_code == 200, "the gateway is ready")
        assert submit(http, "step.batch").status_code == 202
