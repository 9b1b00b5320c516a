"""Batches over HTTP: many tasks in one upload, their progress and their results, on real servers."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from tests.support.brokers import until
from tests.support.gateway import GatewayProcess, problem, rig_of
from tests.support.prometheus import scraped
from tests.support.rig import Rig
from tests.support.servers import RabbitMQNode, RedisNode

pytestmark = pytest.mark.xdist_group("gateway-batches")

BOUND = 5
BODY_LIMIT = 4096


@dataclass(frozen=True)
class Stage:
    """A gateway, its worker, which does not serve offline, and a client."""

    rig: Rig
    app: InferenceApp
    http: httpx.Client

    def admitted(self) -> int:
        return sum(counts["admitted"] for counts in inference_of(self.app).store.accounts().by_tier.values())

    def figures(self) -> defaultdict[tuple[str, ...], float]:
        return defaultdict(float, scraped(str(self.http.base_url.join("/metrics"))))


@pytest.fixture(scope="module")
def stage(rabbitmq: RabbitMQNode, redis_node: RedisNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    options = {
        "tiers": {"offline": {"bound": BOUND}},
        "broker": {"queue_type": "classic"},
        "worker": {"tiers": ["realtime", "batch"]},
        "gateway": {"max_body_bytes": BODY_LIMIT},
    }
    directory = tmp_path_factory.mktemp("gateway-batches")
    with (
        rig_of(rabbitmq, redis_node, directory, options) as rig,
        rig.worker("--pool", "threads", "--concurrency", "2"),
        GatewayProcess.of(rig) as gateway,
        gateway.client() as http,
    ):
        yield Stage(rig, rig.app(), http)


def upload(stage: Stage, *lines: object, max_wait_s: float = 20) -> dict[str, Any]:
    content = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    answer = stage.http.post(
        "/v1/batches",
        params={"max_wait_s": max_wait_s},
        content=content.encode(),
        headers={"Content-Type": "application/jsonl"},
    )
    assert answer.status_code == 201, answer.text
    body: dict[str, Any] = answer.json()
    assert answer.headers["location"] == body["links"]["self"]
    assert body["lines"] == body["accepted"] + body["refused"]
    assert body["refused"] == sum(one["last"] - one["first"] + 1 for one in body["refused_lines"])
    return body


def finished(stage: Stage, batch: dict[str, Any]) -> dict[str, int]:
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(stage.http.get(batch["links"]["self"]).json())
        return bool(found["counts"]["pending"] == 0)

    until(has_ended, "the end of the batch")
    counts: dict[str, int] = found["counts"]
    return counts


def results(stage: Stage, batch: dict[str, Any]) -> list[dict[str, Any]]:
    answer = stage.http.get(batch["links"]["results"])
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/jsonl")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_every_line_runs_is_counted_and_gives_a_result_in_its_place(stage: Stage) -> None:
    many = 1200
    lines = [{"task": "add", "args": [number, 1], "custom_id": f"one-{number}"} for number in range(many)]
    batch = upload(stage, *lines, {"task": "raises"})
    assert (batch["lines"], batch["accepted"], batch["state"]) == (many + 1, many + 1, "uploaded")
    counts = finished(stage, batch)
    assert (counts["success"], counts["failed"]) == (many, 1)
    rows = sorted(results(stage, batch), key=lambda row: int(row["line"]))
    assert [row.get("result") for row in rows[:many]] == [number + 1 for number in range(many)]
    assert [row["custom_id"] for row in rows[:3]] == ["one-0", "one-1", "one-2"]
    assert rows[many]["state"] == "failed"
    assert rows[many]["error"] == {"type": "ValueError", "message": "no such picture"}


def test_a_line_that_cannot_be_meant_is_refused_by_its_number_and_the_others_run(stage: Stage) -> None:
    batch = upload(
        stage,
        {"task": "add", "args": [1, 1]},
        "",
        "not JSON",
        {"task": "nobody"},
        {"task": "add", "args": ["1", 1], "oops": 1},
        {"task": "total", "args": [["x"]]},
        {"task": "total", "args": [[1] * BODY_LIMIT]},
        {"task": "add", "args": [2, 2]},
    )
    assert [(one["first"], one["last"], one["problem"]) for one in batch["refused_lines"]] == [
        (2, 2, "malformed-json"),
        (3, 3, "unknown-task"),
        (4, 4, "invalid-request"),
        (5, 5, "invalid-arguments"),
        (6, 6, "too-large"),
    ]
    assert finished(stage, batch)["success"] == 2
    assert [row["line"] for row in results(stage, batch)] == [1, 7]


def test_lines_with_a_custom_id_are_the_same_tasks_in_a_second_upload(stage: Stage) -> None:
    lines = [{"task": "add", "args": [number, 0], "custom_id": f"twice-{number}"} for number in range(20)]
    first = upload(stage, *lines)
    finished(stage, first)
    before = stage.admitted()
    second = upload(stage, *lines, *lines[:3])
    assert second["id"] != first["id"]
    assert second["accepted"] == 23
    # Ended long ago, and counted in the second as well.
    assert finished(stage, second)["success"] == 23
    assert stage.admitted() == before
    ids = [row["id"] for row in results(stage, first)]
    assert [row["id"] for row in results(stage, second)] == ids + ids[:3]
    assert finished(stage, first)["success"] == 20


def test_when_a_tier_stays_full_the_rest_is_refused_by_its_line_numbers(stage: Stage) -> None:
    lines = [{"task": "step.offline", "custom_id": f"full-{number}"} for number in range(BOUND + 700)]
    accepted = ("inference_gateway_submitted_total", "offline")
    before = stage.figures()
    batch = upload(stage, *lines, max_wait_s=0.5)
    assert batch["accepted"] == BOUND
    assert {one["problem"] for one in batch["refused_lines"]} == {"queue-full"}
    after = stage.figures()
    assert after[accepted] == before[accepted] + BOUND
    assert after["inference_gateway_refused_total", "queue-full", "full", "offline"] > 0
    assert batch["refused_lines"][-1]["last"] == BOUND + 700
    assert stage.http.get(batch["links"]["self"]).json()["counts"]["pending"] == BOUND
    for row in results(stage, batch):
        assert row["state"] == "pending"
        stage.http.delete(f"/v1/tasks/{row['id']}")
    assert finished(stage, batch)["cancelled"] == BOUND


def test_an_upload_waits_while_a_tier_is_full_and_goes_on_when_there_is_room(stage: Stage) -> None:
    # What was cancelled still lies in the queue, until somebody serves the tier.
    lines = [{"task": "step.offline"} for _ in range(4 * BOUND)]
    with stage.rig.worker("--pool", "threads", name="offline", worker={"tiers": ["offline"]}):
        batch = upload(stage, *lines, max_wait_s=60)
        assert batch["accepted"] == 4 * BOUND
        assert finished(stage, batch)["success"] == 4 * BOUND


def test_what_came_before_the_client_left_runs_and_may_be_sent_again(stage: Stage) -> None:
    lines = [json.dumps({"task": "add", "args": [number, 0], "custom_id": f"cut-{number}"}) for number in range(600)]
    before = stage.admitted()

    def cut_off() -> Iterator[bytes]:
        yield "\n".join(lines).encode()
        until(lambda: stage.admitted() >= before + 500, "the first lines are accepted")
        raise ConnectionError("the client has left")

    with pytest.raises(ConnectionError):
        stage.http.post("/v1/batches", content=cut_off(), headers={"Content-Type": "application/jsonl"})
    until(lambda: stage.admitted() >= before + 599, "all whole lines are accepted")
    whole = upload(stage, *lines)
    assert finished(stage, whole)["success"] == 600
    assert stage.admitted() == before + 600


def test_what_is_no_batch_is_said_so(stage: Stage) -> None:
    assert problem(stage.http.get("/v1/batches/b-nothing"), 404)["type"].endswith(":batch-not-found")
    problem(stage.http.get("/v1/batches/b-nothing/results"), 404)
    problem(stage.http.post("/v1/batches", json=[]), 415)
    headers = {"Content-Type": "application/jsonl"}
    problem(stage.http.post("/v1/batches", params={"max_wait_s": "long"}, content=b"", headers=headers), 422)
    assert upload(stage)["lines"] == 0
