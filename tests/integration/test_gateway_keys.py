"""The gateway with API keys: who may ask, for which tenant and tiers, how much; and how keys are changed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference_tasks.gateway.keys import ApiKey, new_key
from tests.support.brokers import until
from tests.support.gateway import APP, GatewayProcess, problem, rig_of, submit
from tests.support.processes import environment
from tests.support.rig import Rig
from tests.support.servers import RabbitMQNode, RedisNode

pytestmark = pytest.mark.xdist_group("gateway-keys")

RIGHTS: Mapping[str, Mapping[str, object]] = {
    "acme": {},
    "other": {"tiers": ["batch", "P2"]},
    "slow": {"rate_per_s": 0.5},
    "few": {"in_flight_max": 2},
    "admin": {"may_name_tenants": True},
}


@dataclass(frozen=True)
class Stage:
    rig: Rig
    gateway: GatewayProcess
    file: Path
    key_by_tenant: Mapping[str, str]
    http: httpx.Client

    def headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key_by_tenant[tenant]}"}


def written(file: Path, entries: Mapping[str, tuple[ApiKey, Mapping[str, object]]]) -> None:
    rows = [{"id": key.id, "tenant": key.tenant, "sha256": key.sha256, **rights} for key, rights in entries.values()]
    file.write_text(json.dumps({"keys": rows}))


@pytest.fixture(scope="module")
def stage(rabbitmq: RabbitMQNode, redis_node: RedisNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("gateway-keys")
    made = {tenant: new_key(tenant) for tenant in RIGHTS}
    file = directory / "keys.json"
    written(file, {tenant: (key, RIGHTS[tenant]) for tenant, (_, key) in made.items()})
    with (
        rig_of(rabbitmq, redis_node, directory, {}) as rig,
        rig.worker(),
        GatewayProcess.of(rig, "--keys", str(file)) as gateway,
        gateway.client() as http,
    ):
        yield Stage(rig, gateway, file, {tenant: secret for tenant, (secret, _) in made.items()}, http)


def test_without_a_key_or_with_a_wrong_one_nobody_is_served(stage: Stage) -> None:
    for headers in ({}, {"Authorization": "Bearer itk_wrong"}, {"X-API-Key": "wrong"}, {"Authorization": "Basic eDp5"}):
        answer = submit(stage.http, "step.batch", headers=headers)
        assert problem(answer, 401)["type"].endswith(":unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/tasks/x", "/v1/tasks/x/events", "/v1/tiers", "/metrics"):
            problem(stage.http.get(path, headers=headers), 401)
    # Whoever watches the process needs none.
    assert stage.http.get("/healthz").status_code == 200
    assert stage.http.get("/readyz").status_code == 200


def test_a_key_may_come_in_either_header(stage: Stage) -> None:
    assert submit(stage.http, "step.batch", headers=stage.headers("acme")).status_code == 202
    headers = {"X-API-Key": stage.key_by_tenant["acme"]}
    assert submit(stage.http, "step.batch", headers=headers).status_code == 202


def test_a_tier_that_the_key_may_not_use_is_refused(stage: Stage) -> None:
    body = problem(submit(stage.http, "step.batch", tier="realtime", headers=stage.headers("other")), 403)
    assert body["tier"] == "realtime"
    assert submit(stage.http, "step.batch", tier="offline", headers=stage.headers("other")).status_code == 202


def test_one_tenant_never_sees_the_tasks_of_another(stage: Stage) -> None:
    made = submit(stage.http, "add", 1, 2, headers={**stage.headers("acme"), "Prefer": "wait=20"})
    assert made.json()["tenant"] == "acme"
    where = made.headers["location"]
    assert stage.http.get(where, headers=stage.headers("acme")).json()["result"] == 3
    unknown = problem(stage.http.get("/v1/tasks/nobody", headers=stage.headers("other")), 404)
    foreign = problem(stage.http.get(where, headers=stage.headers("other")), 404)
    assert foreign["type"] == unknown["type"]
    problem(stage.http.get(f"{where}/events", headers=stage.headers("other")), 404)
    problem(stage.http.delete(where, headers=stage.headers("other")), 404)
    assert stage.http.get(where, headers=stage.headers("admin")).json()["tenant"] == "acme"


def test_naming_another_tenant_is_a_right_of_its_own(stage: Stage) -> None:
    body = problem(submit(stage.http, "step.batch", tenant="acme", headers=stage.headers("other")), 403)
    assert body["type"].endswith(":tenant-not-allowed")
    named = submit(stage.http, "step.batch", tenant="acme", headers=stage.headers("admin"))
    assert named.status_code == 202
    assert stage.http.get(named.headers["location"], headers=stage.headers("acme")).status_code == 200
    problem(submit(stage.http, "step.batch", tenant="a b", headers=stage.headers("admin")), 422)


def test_a_key_that_asks_too_often_is_told_when_to_come_back(stage: Stage) -> None:
    headers = stage.headers("slow")
    assert stage.http.get("/v1/tiers", headers=headers).status_code == 200
    body = problem(stage.http.get("/v1/tiers", headers=headers), 429)
    assert (body["reason"], body["limit"]) == ("rate", 0.5)
    # Not the other keys'.
    assert stage.http.get("/v1/tiers", headers=stage.headers("acme")).status_code == 200
    time.sleep(body["retry_after_s"])
    assert stage.http.get("/v1/tiers", headers=headers).status_code == 200


def test_a_key_has_so_many_tasks_under_way_and_no_more(stage: Stage) -> None:
    headers, gate = stage.headers("few"), stage.rig.gate("few")
    for number in (1, 2):
        assert submit(stage.http, "gated.realtime", number, str(gate), headers=headers).status_code == 202
    body = problem(submit(stage.http, "add.realtime", 1, 1, headers=headers), 429)
    assert (body["reason"], body["limit"]) == ("in_flight", 2)
    # What was not accepted for another reason does not count.
    problem(submit(stage.http, "add.realtime", 1, headers=headers), 422)
    gate.open()
    until(lambda: submit(stage.http, "step.batch", headers=headers).status_code == 202, "there is room again")


def test_a_key_is_changed_without_a_restart_while_both_are_valid(stage: Stage) -> None:
    entries = json.loads(stage.file.read_text())["keys"]
    secret, added = new_key("acme")

    def ask(key: str) -> int:
        return stage.http.get("/v1/tiers", headers={"X-API-Key": key}).status_code

    def write(rows: list[dict[str, Any]]) -> None:
        stage.file.write_text(json.dumps({"keys": rows}))

    try:
        write([*entries, {"id": added.id, "tenant": "acme", "sha256": added.sha256}])
        until(lambda: ask(secret) == 200, "the new key is valid")
        assert ask(stage.key_by_tenant["acme"]) == 200
        stage.file.write_text("{")
        # The file is looked at when somebody asks.
        until(lambda: ask(secret) == 200 and "stay as they were" in stage.gateway.log, "the broken file is noticed")
    finally:
        write(entries)
    until(lambda: ask(secret) == 401, "the removed key is not valid")


def test_no_key_stands_in_the_log_or_in_the_arguments(stage: Stage) -> None:
    submit(stage.http, "step.batch", headers=stage.headers("acme"))
    submit(stage.http, "step.batch", headers={"X-API-Key": "itk_canary"})
    arguments = Path(f"/proc/{stage.gateway.pid}/cmdline").read_text()
    for secret in (*stage.key_by_tenant.values(), "itk_canary"):
        assert secret not in stage.gateway.log
        assert secret not in arguments


def command(directory: Path, *arguments: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "inference_tasks.cli", "gateway", *arguments),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=directory,
        env=environment(directory, env),
        check=False,
    )


def test_without_keys_it_listens_on_this_machine_only(stage: Stage, tmp_path: Path) -> None:
    ran = command(tmp_path, "-A", APP, "--host", "0.0.0.0", "--port", "0", env=stage.rig.env())
    assert ran.returncode == 2
    assert "gateway key new" in ran.stderr


def test_a_file_of_keys_that_is_wrong_is_refused_with_all_that_is_wrong(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text('[[keys]]\nid = "a"\nsha256 = "secret-itself"\ntenat = "x"\n')
    ran = command(tmp_path, "-A", APP, "--keys", "keys.toml", env=stage.rig.env())
    assert ran.returncode == 7
    assert "did you mean tenant?" in ran.stderr
    assert "64 hexadecimal digits" in ran.stderr
    assert "secret-itself" not in ran.stderr


def test_a_new_key_is_shown_once_and_its_entry_makes_it_valid(stage: Stage, tmp_path: Path) -> None:
    ran = command(tmp_path, "key", "new", "--tenant", "fresh", env=stage.rig.env())
    assert ran.returncode == 0, ran.stderr
    first, _, entry = ran.stdout.partition("\n\n")
    secret = first.removeprefix("key: ").strip()
    assert secret not in entry
    (tmp_path / "keys.toml").write_text(entry)
    with (
        GatewayProcess.of(stage.rig, "--host", "0.0.0.0", "--keys", str(tmp_path / "keys.toml"), name="new") as gateway,
        httpx.Client(base_url=gateway.url.replace("0.0.0.0", "127.0.0.1"), trust_env=False) as http,
    ):
        assert http.get("/v1/tiers", headers={"X-API-Key": secret}).status_code == 200
        problem(http.get("/v1/tiers"), 401)


def test_a_batch_is_its_tenants_alone_and_keeps_to_the_tiers_and_numbers_of_its_key(stage: Stage) -> None:
    def upload(tenant: str, *lines: Mapping[str, object]) -> dict[str, Any]:
        headers = {**stage.headers(tenant), "Content-Type": "application/jsonl"}
        content = "\n".join(map(json.dumps, lines)).encode()
        answer = stage.http.post("/v1/batches", params={"max_wait_s": 0}, content=content, headers=headers)
        assert answer.status_code == 201, answer.text
        body: dict[str, Any] = answer.json()
        return body

    line = {"task": "step.batch", "custom_id": "same"}
    acme = upload("acme", line)
    for path in (acme["links"]["self"], acme["links"]["results"]):
        problem(stage.http.get(path, headers=stage.headers("other")), 404)
        assert stage.http.get(path, headers=stage.headers("acme")).status_code == 200
        assert stage.http.get(path, headers=stage.headers("admin")).status_code == 200
        problem(stage.http.get(path), 401)

    # The same custom_id of another tenant is another task.
    other = upload("other", line, {"task": "step.realtime"}, {"task": "step.batch", "tenant": "acme"})
    assert [(one["first"], one["problem"]) for one in other["refused_lines"]] == [
        (2, "tier-not-allowed"),
        (3, "tenant-not-allowed"),
    ]
    ids = [
        stage.http.get(batch["links"]["results"], headers=stage.headers(tenant)).json()["id"]
        for tenant, batch in (("acme", acme), ("other", other))
    ]
    assert ids[0] != ids[1]
