"""Submits over HTTP that share one task: by an idempotency key, or because they ask for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.brokers import until
from tests.support.gateway import GatewayProcess, problem, submit
from tests.support.rig import Rig


@dataclass(frozen=True)
class Stage:
    rig: Rig
    gateway: GatewayProcess
    http: httpx.Client


@pytest.fixture
def stage(rig: Rig) -> Iterator[Stage]:
    with rig.worker(), GatewayProcess.of(rig) as gateway, gateway.client() as http:
        yield Stage(rig, gateway, http)


def ended(stage: Stage, task_id: str) -> dict[str, Any]:
    """Look a task up until it has succeeded."""
    found: dict[str, Any] = {}

    def has_ended() -> bool:
        found.update(stage.http.get(f"/v1/tasks/{task_id}").json())
        return found["state"] == "success"

    until(has_ended, "the task succeeds")
    return found


def test_the_same_idempotency_key_is_the_same_task_and_in_the_end_the_same_answer(stage: Stage) -> None:
    headers = {"Idempotency-Key": '"order-17"'}
    first = submit(stage.http, "add", 4, 5, headers=headers)
    assert first.status_code == 202
    ended(stage, first.json()["id"])
    again = submit(stage.http, "add", 4, 5, headers={**headers, "Prefer": "wait=20"})
    without_quotes = submit(stage.http, "add", 4, 5, headers={"Idempotency-Key": "order-17"})
    for answer in (again, without_quotes):
        assert (answer.status_code, answer.json()["id"], answer.json()["result"]) == (200, first.json()["id"], 9)
    other = problem(submit(stage.http, "add", 4, 6, headers=headers), 422)
    assert other["type"].endswith(":idempotency-conflict")
    problem(submit(stage.http, "add", 4, 5, headers={"Idempotency-Key": '"unfinished'}), 422)


def test_fifty_submits_at_once_under_one_idempotency_key_are_one_task(stage: Stage) -> None:
    async def asked() -> list[httpx.Response]:
        async with stage.gateway.async_client() as http:
            headers = {"Idempotency-Key": '"fifty"', "Prefer": "wait=20"}
            body = {"args": [20, 30]}
            return await asyncio.gather(*(http.post("/v1/tasks/add", json=body, headers=headers) for _ in range(50)))

    answers = asyncio.run(asked())
    assert {(answer.status_code, answer.json()["result"]) for answer in answers} == {(200, 50)}
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_a_call_like_one_that_waits_joins_it(stage: Stage) -> None:
    gate = stage.rig.gate("joined")
    first, second = (submit(stage.http, "gated.batch", 30, str(gate), dedup=True) for _ in range(2))
    gate.open()
    assert first.json()["id"] == second.json()["id"]
    assert ended(stage, first.json()["id"])["result"] == 30
