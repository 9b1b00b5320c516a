"""Every answer of the gateway, from a live one with a real broker, Redis and worker behind it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import PATIENCE_S, until
from tests.support.gateway import GatewayProcess, problem, rig_of, submit
from tests.support.rig import Rig
from tests.support.servers import RabbitMQNode, RedisNode

pytestmark = pytest.mark.xdist_group("gateway")

BOUND = 3
BODY_LIMIT = 64 * 1024
CLIENTS = 300


@dataclass(frozen=True)
class Stage:
    """A gateway, its worker, which serves realtime and batch only, and a client."""

    rig: Rig
    app: InferenceApp
    gateway: GatewayProcess
    http: httpx.Client

    def record_count(self) -> int:
        """How many tasks have ever been admitted."""
        return sum(counts["admitted"] for counts in inference_of(self.app).store.accounts().by_tier.values())


@pytest.fixture(scope="module")
def stage(rabbitmq: RabbitMQNode, redis_node: RedisNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    options = {
        "tiers": {"offline": {"bound": BOUND}},
        "worker": {"tiers": ["realtime", "batch"]},
        "gateway": {"max_body_bytes": BODY_LIMIT},
    }
    directory = tmp_path_factory.mktemp("gateway")
    with (
        rig_of(rabbitmq, redis_node, directory, options) as rig,
        rig.worker("--pool", "threads", "--concurrency", "4"),
        GatewayProcess.of(rig) as gateway,
        gateway.client() as http,
    ):
        yield Stage(rig, rig.app(), gateway, http)


def ended(stage: Stage, task_id: str) -> dict[str, Any]:
    """Look a task up until it has ended."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(stage.http.get(f"/v1/tasks/{task_id}").json())
        return "retry_after_s" not in found or found["state"] in ("success", "failed")

    until(has_ended, "the end of the task")
    return found


def events(lines: Sequence[str]) -> list[dict[str, str]]:
    """Server-sent events, taken apart."""
    found: list[dict[str, str]] = []
    for block in "\n".join(lines).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":")
        if "event" in fields:
            found.append(fields)
    return found


# -- accepted ----------------------------------------------------------------------------------------------------------


def test_a_task_is_accepted_and_looked_up_where_the_answer_says(stage: Stage) -> None:
    answer = submit(stage.http, "add.realtime", 2, 3)
    assert answer.status_code == 202
    body = answer.json()
    assert body["state"] == "pending"
    assert body["tier"] == "realtime"
    assert answer.headers["location"] == body["links"]["self"] == f"/v1/tasks/{body['id']}"
    assert int(answer.headers["retry-after"]) >= 1
    assert "preference-applied" not in answer.headers
    found = ended(stage, body["id"])
    assert (found["state"], found["result"], found["attempts"]) == ("success", 5, 1)
    assert "retry-after" not in stage.http.get(answer.headers["location"]).headers


def test_who_prefers_to_wait_gets_the_result_with_the_answer(stage: Stage) -> None:
    answer = submit(stage.http, "add.realtime", 40, 2, headers={"Prefer": "wait=20"})
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=20"
    assert answer.json()["result"] == 42
    assert answer.headers["location"].endswith(answer.json()["id"])


def test_a_failed_task_is_a_good_answer_that_says_so(stage: Stage) -> None:
    answer = submit(stage.http, "raises", headers={"Prefer": "wait=20"})
    assert answer.status_code == 200
    body = answer.json()
    assert body["state"] == "failed"
    assert body["error"] == {"type": "ValueError", "message": "no such picture"}
    assert "result" not in body


def test_a_task_whose_result_nobody_keeps_ends_the_wait_too(stage: Stage) -> None:
    answer = submit(stage.http, "silent", 1, headers={"Prefer": "wait=20"})
    assert (answer.status_code, answer.json()["state"]) == (200, "success")


def test_a_wait_that_is_too_short_ends_in_time_and_the_task_goes_on(stage: Stage) -> None:
    gate = stage.rig.gate("short")
    started_at_s = time.monotonic()
    answer = submit(stage.http, "gated.batch", 1, str(gate), headers={"Prefer": "wait=1"})
    assert time.monotonic() - started_at_s >= 1
    assert answer.status_code == 202
    found = stage.http.get(answer.headers["location"])
    assert found.json()["state"] in ("pending", "processing")
    assert int(found.headers["retry-after"]) >= 1
    gate.open()
    assert ended(stage, answer.json()["id"])["result"] == 1


@pytest.mark.parametrize(
    ("named", "tier"), [("priority", "realtime"), ("default", "batch"), ("flex", "offline"), ("auto", "realtime")]
)
def test_service_tiers_are_other_names_of_the_tiers(stage: Stage, named: str, tier: str) -> None:
    answer = submit(stage.http, "step.realtime", service_tier=named)
    # Nobody serves offline here, so it may be full by now.
    assert answer.status_code in ((202, 429) if tier == "offline" else (202,))
    assert answer.json()["tier"] == tier


def test_a_tier_has_aliases_and_a_task_a_short_name(stage: Stage) -> None:
    answer = submit(stage.http, "add", 1, 1, tier="p0")
    assert (answer.status_code, answer.json()["tier"]) == (202, "realtime")
    assert problem(submit(stage.http, "realtime", 1), 404)["detail"].startswith("Several tasks end with")


# -- refused -----------------------------------------------------------------------------------------------------------


def test_a_full_tier_says_when_to_come_back(stage: Stage) -> None:
    for _ in range(50):
        answer = submit(stage.http, "step.offline")
        if answer.status_code != 202:
            break
    body = problem(answer, 429)
    assert (body["tier"], body["limit"], body["reason"]) == ("offline", BOUND, "full")
    assert body["type"].endswith(":queue-full")


def test_an_unknown_task_is_not_found_and_the_nearest_is_named(stage: Stage) -> None:
    assert problem(submit(stage.http, "step.realtine"), 404)["nearest"] == "step.realtime"


def test_an_unknown_id_is_not_found(stage: Stage) -> None:
    for path in ("/v1/tasks/nobody", "/v1/tasks/nobody/events"):
        assert problem(stage.http.get(path), 404)["type"].endswith(":task-not-found")


@pytest.mark.parametrize(
    ("task", "body", "where"),
    [
        ("add", {"args": [1]}, ""),
        ("add", {"args": [1, 2, 3]}, ""),
        ("add", {"kwargs": {"x": 1, "z": 2}}, ""),
        ("add", {"args": [1, "2"]}, "y"),
        ("total", {"args": [[1, "x"]]}, "numbers.1"),
        ("add", {"args": [1, 2], "teir": "batch"}, "teir"),
        ("add", {"args": {"x": 1}}, "args"),
        ("add", {"args": [1, 2], "timeout_s": -1}, "timeout_s"),
        ("add", {"args": [1, 2], "tier": 3}, "tier"),
        ("add", [1, 2], ""),
    ],
)
def test_what_does_not_fit_the_task_is_refused_before_anything_is_sent(
    stage: Stage, task: str, body: object, where: str
) -> None:
    before = stage.record_count()
    answer = problem(stage.http.post(f"/v1/tasks/{task}", json=body), 422)
    assert [one["where"] for one in answer["errors"]] == [where]
    assert stage.record_count() == before


@pytest.mark.parametrize("body", [{"tier": "batsch"}, {"tier": "batch", "service_tier": "flex"}])
def test_a_tier_that_cannot_be_meant_is_refused(stage: Stage, body: dict[str, Any]) -> None:
    problem(submit(stage.http, "step.batch", **body), 422)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"args": [1, 2]',
        b'{"args": [NaN]}',
        b'{"args": [1e999]}',
        b'{"args": [-Infinity]}',
        b'{"args": ["\\ud800"]}',
        b'{"args": ["\xff"]}',
        b'{"args": ["\xed\xa0\x80"]}',
        b'{"args": ' + b"[" * 2000 + b"]" * 2000 + b"}",
        b"[" * 30_000,
    ],
)
def test_what_is_no_json_is_refused(stage: Stage, body: bytes) -> None:
    answer = stage.http.post("/v1/tasks/step.batch", content=body, headers={"Content-Type": "application/json"})
    assert problem(answer, 400)["type"].endswith(":malformed-json")


@pytest.mark.parametrize("media_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/x-pickle"])
def test_another_media_type_is_refused(stage: Stage, media_type: str) -> None:
    headers = {"Content-Type": media_type} if media_type else {}
    problem(stage.http.post("/v1/tasks/step.batch", content=b"{}", headers=headers), 415)


def test_too_large_a_body_is_refused_by_what_it_announces(stage: Stage) -> None:
    body = {"args": ["x" * BODY_LIMIT]}
    assert problem(stage.http.post("/v1/tasks/step.batch", json=body), 413)["limit_bytes"] == BODY_LIMIT


def test_too_large_a_body_is_refused_when_it_announces_nothing(stage: Stage) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b"[" * (BODY_LIMIT // 10)

    answer = stage.http.post("/v1/tasks/step.batch", content=chunks(), headers={"Content-Type": "application/json"})
    problem(answer, 413)


def test_a_million_names_are_refused_by_their_size(stage: Stage) -> None:
    body = {"kwargs": {f"k{number}": 0 for number in range(100_000)}}
    problem(stage.http.post("/v1/tasks/step.batch", json=body), 413)


def test_another_method_or_path_is_a_problem_too(stage: Stage) -> None:
    answer = stage.http.put("/v1/tasks/step.batch")
    problem(answer, 405)
    assert "POST" in answer.headers["allow"]
    problem(stage.http.get("/nothing/here"), 404)


def test_a_page_whose_name_leads_here_is_not_served(stage: Stage) -> None:
    problem(stage.http.get("/v1/tiers", headers={"Host": "evil.example:8000"}), 403)


def test_a_task_that_waits_is_cancelled_and_one_that_has_ended_is_not(rig: Rig) -> None:
    with GatewayProcess.of(rig) as gateway, gateway.client() as http:
        where = submit(http, "step.batch").headers["location"]
        cancelled = http.delete(where)
        assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelled")
        assert http.get(where).json()["state"] == "cancelled"
        assert problem(http.delete(where), 409)["state"] == "cancelled"
        problem(http.delete("/v1/tasks/nobody"), 404)
        problem(http.delete(where, params={"terminate": "perhaps"}), 422)


def test_a_task_that_runs_is_asked_to_stop(stage: Stage) -> None:
    gate = stage.rig.gate("asked")
    where = submit(stage.http, "gated.batch", 20, str(gate)).headers["location"]
    stage.rig.wait_started(20, timeout_s=PATIENCE_S)
    asked = stage.http.delete(where)
    gate.open()
    assert (asked.status_code, asked.json()["state"]) == (202, "processing")


# -- followed ----------------------------------------------------------------------------------------------------------


def test_events_tell_each_state_once_and_end_with_the_task(stage: Stage) -> None:
    gate = stage.rig.gate("followed")
    task_id = submit(stage.http, "gated.realtime", 7, str(gate)).json()["id"]
    stage.rig.wait_started(7, timeout_s=PATIENCE_S)
    lines: list[str] = []
    with stage.http.stream("GET", f"/v1/tasks/{task_id}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        for line in answer.iter_lines():
            lines.append(line)
            if line.startswith("data: ") and json.loads(line[6:])["state"] == "processing":
                gate.open()
    told = events(lines)
    assert lines[0] == "retry: 2000"
    assert [json.loads(one["data"])["state"] for one in told] == ["processing", "success"]
    assert json.loads(told[-1]["data"])["result"] == 7
    # Back with what was seen last: only the end is new; and with the end seen there is nothing more.
    with stage.http.stream("GET", f"/v1/tasks/{task_id}/events", headers={"Last-Event-ID": told[0]["id"]}) as answer:
        again = events(list(answer.iter_lines()))
    assert [one["id"] for one in again] == [told[-1]["id"]]
    assert stage.http.get(f"/v1/tasks/{task_id}/events", headers={"Last-Event-ID": told[-1]["id"]}).status_code == 204


# -- operated ----------------------------------------------------------------------------------------------------------


def test_the_tiers_are_told(stage: Stage) -> None:
    tiers = {one["tier"]: one for one in stage.http.get("/v1/tiers").json()["tiers"]}
    assert list(tiers) == ["realtime", "batch", "offline"]
    assert tiers["offline"]["bound"] == BOUND
    assert (tiers["realtime"]["workers"], tiers["offline"]["workers"]) == (1, 0)


def test_it_is_well_and_ready(stage: Stage) -> None:
    assert stage.http.get("/healthz").json() == {"status": "ok"}
    assert stage.http.get("/readyz").json() == {"status": "ok"}


def test_its_figures_have_no_ids_in_their_labels(stage: Stage) -> None:
    task_id = submit(stage.http, "add.realtime", 1, 1).json()["id"]
    stage.http.get(f"/v1/tasks/{task_id}")
    stage.http.get("/no/such/path")
    text = stage.http.get("/metrics").text
    assert 'inference_gateway_submitted_total{tier="realtime"}' in text
    assert 'route="/v1/tasks/{task_id}",status="200"' in text
    assert "inference_gateway_subscription_up 1.0" in text
    assert task_id not in text
    assert "/no/such/path" not in text


def test_hundreds_of_clients_wait_on_one_connection_to_redis_and_one_to_the_broker(stage: Stage) -> None:
    gate = stage.rig.gate("crowd")
    process = psutil.Process(stage.gateway.pid)

    async def crowd() -> list[httpx.Response]:
        async with stage.gateway.async_client() as http:
            asked = [
                asyncio.create_task(
                    http.post(
                        "/v1/tasks/gated.realtime",
                        json={"args": [1000 + number, str(gate)], "tier": "batch"},
                        headers={"Prefer": "wait=50"},
                    )
                )
                for number in range(CLIENTS)
            ]

            def waiting() -> bool:
                text = stage.http.get("/metrics").text
                return f"inference_gateway_waiting_clients {CLIENTS}.0" in text

            await asyncio.to_thread(until, waiting, "all clients wait")
            listening = {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}
            far = [
                one.raddr.port
                for one in process.net_connections()
                if one.status == psutil.CONN_ESTABLISHED and one.laddr.port not in listening
            ]
            # To Redis: the subscription, the publisher's own, and the pool of look-ups; whatever the number of clients.
            assert len(far) < 40, sorted(far)
            gate.open()
            return await asyncio.gather(*asked)

    answers = asyncio.run(crowd())
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answer.json()["result"] for answer in answers) == [1000 + number for number in range(CLIENTS)]


def test_a_gateway_that_ends_answers_who_waits(stage: Stage) -> None:
    gate = stage.rig.gate("ending")
    with GatewayProcess.of(stage.rig, name="ending") as gateway:

        async def asked() -> httpx.Response:
            async with gateway.async_client() as http:
                waits = asyncio.create_task(
                    http.post("/v1/tasks/gated.batch", json={"args": [8, str(gate)]}, headers={"Prefer": "wait=50"})
                )
                await asyncio.to_thread(stage.rig.wait_started, 8, timeout_s=PATIENCE_S)
                gateway.send(signal.SIGTERM)
                return await waits

        answer = asyncio.run(asked())
        assert answer.status_code == 202
        assert gateway.wait() == 0
    gate.open()
    assert ended(stage, answer.json()["id"])["state"] == "success"


def test_nothing_that_a_client_sends_stands_in_the_log(stage: Stage) -> None:
    submit(stage.http, "raises", headers={"Prefer": "wait=20"})
    submit(stage.http, "add", "canary-in-an-argument", 1)
    stage.http.get("/v1/tasks/canary-in-a-path?token=canary-in-a-query")
    stage.http.get("/v1/tiers", headers={"Authorization": "Bearer canary-in-a-header"})
    assert "canary" not in stage.gateway.log
