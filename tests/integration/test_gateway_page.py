"""The status page: what it is told, what it never is, and what a browser makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from inference_tasks.gateway.keys import new_key
from tests.support.browser import Browser
from tests.support.gateway import GatewayProcess, problem, rig_of, submit
from tests.support.servers import RabbitMQNode, RedisNode

pytestmark = pytest.mark.xdist_group("gateway-page")

OFFLINE_BOUND = 5


@dataclass(frozen=True)
class Stage:
    gateway: GatewayProcess
    http: httpx.Client
    key: str
    other_key: str


@pytest.fixture(scope="module")
def stage(rabbitmq: RabbitMQNode, redis_node: RedisNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("gateway-page")
    made = [new_key(tenant) for tenant in ("acme", "other")]
    file = directory / "keys.json"
    rows = [{"id": key.id, "tenant": key.tenant, "sha256": key.sha256} for _, key in made]
    file.write_text(json.dumps({"keys": rows}))
    options = {"tiers": {"offline": {"bound": OFFLINE_BOUND}}, "worker": {"tiers": ["realtime", "batch"]}}
    with (
        rig_of(rabbitmq, redis_node, directory, options) as rig,
        rig.worker("--pool", "threads", "--concurrency", "2"),
        GatewayProcess.of(rig, "--keys", str(file)) as gateway,
        gateway.client(headers={"X-API-Key": made[0][0]}) as http,
    ):
        yield Stage(gateway, http, made[0][0], made[1][0])


def test_the_overview_tells_of_tiers_and_tasks_and_nothing_of_arguments(stage: Stage) -> None:
    done = submit(stage.http, "total", [1, 2, 12345], headers={"Prefer": "wait=20"}).json()
    assert done["result"] == 12348
    answer = stage.http.get("/v1/overview")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    found = answer.json()
    assert [one["tier"] for one in found["tiers"]] == ["realtime", "batch", "offline"]
    assert found["tiers"][2]["bound"] == OFFLINE_BOUND
    latest = found["tasks"][0]
    assert (latest["id"], latest["state"], latest["attempts"]) == (done["id"], "success", 1)
    assert latest["submitted_at_s"] <= latest["started_at_s"] <= latest["finished_at_s"]
    for told in ("12345", "12348"):
        assert told not in answer.text


def test_the_error_of_a_task_is_named_but_not_quoted(stage: Stage) -> None:
    submit(stage.http, "raises", headers={"Prefer": "wait=20"})
    answer = stage.http.get("/v1/overview")
    assert answer.json()["tasks"][0]["error_type"] == "ValueError"
    assert "no such picture" not in answer.text


def test_a_tenant_sees_its_own_tasks_only_and_nobody_without_a_key_any(stage: Stage) -> None:
    own = submit(stage.http, "step.batch").json()["id"]
    seen = stage.http.get("/v1/overview", headers={"X-API-Key": stage.other_key}).json()["tasks"]
    assert own not in {one["id"] for one in seen}
    with stage.gateway.client() as stranger:
        problem(stranger.get("/v1/overview"), 401)


def test_the_page_needs_no_key_loads_nothing_from_elsewhere_and_runs_only_its_own_script(stage: Stage) -> None:
    with stage.gateway.client() as stranger:
        answer = stranger.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"//\w|\bsrc=|@import|url\(|innerHTML", answer.text)
    assert "/" not in stage.http.get("/openapi.json").json()["paths"]


def test_a_browser_asks_for_a_key_and_shows_live_what_happens(stage: Stage, browser: Browser) -> None:
    browser.screen(1100, 800)
    browser.open(f"{stage.gateway.url}/")
    browser.until("document.querySelector('#ask') && !document.querySelector('#ask').hidden")
    assert browser.value("document.querySelector('#shown').hidden")

    enter(browser, "itk_wrong")
    browser.until("document.querySelector('#live').textContent === 'this key is not known'")
    # The browser itself notes both answers of 401.
    assert [one for one in browser.complaints if "401" not in one] == []
    browser.complaints.clear()

    enter(browser, stage.key)
    browser.until("document.querySelector('#live').textContent === 'live'")
    assert browser.value("[...document.querySelectorAll('.tier h3')].map((one) => one.textContent)") == [
        "realtime",
        "batch",
        "offline",
    ]
    assert stage.key not in browser.value("location.href + document.documentElement.outerHTML")
    assert browser.value("localStorage.length + document.cookie.length") == 0

    # Live: nothing is done in the page any more.
    found = submit(stage.http, "add.realtime", 1, 2).json()["id"]
    row = f"document.querySelector('td[title=\"{found}\"]')"
    browser.until(f"{row} && {row}.parentNode.textContent.includes('success')")
    for _ in range(OFFLINE_BOUND - 1):
        submit(stage.http, "step.offline")
    waiting = "document.querySelector('.tier.offline dd').textContent"
    browser.until(f"{waiting} === '{OFFLINE_BOUND - 1} of {OFFLINE_BOUND}'")

    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.value(colour)
    browser.screen(375, 800, scheme="dark")
    assert browser.value(colour) != light
    assert browser.value("document.documentElement.scrollWidth") <= 375
    assert browser.screenshot().startswith(b"\x89PNG")
    assert browser.complaints == []

    browser.value("document.querySelector('#forget').click()")
    browser.until("!document.querySelector('#ask').hidden && sessionStorage.length === 0")


def enter(browser: Browser, key: str) -> None:
    """Type a key into the form and send it."""
    browser.value("document.querySelector('#key').focus()")
    browser.call("Input.insertText", text=key)
    browser.value("document.querySelector('#ask button').click()")


def test_the_page_says_when_the_gateway_is_away_and_comes_back_by_itself(stage: Stage, browser: Browser) -> None:
    browser.screen(1100, 800)
    browser.open(f"{stage.gateway.url}/")
    browser.until("document.querySelector('#ask') && !document.querySelector('#ask').hidden")
    enter(browser, stage.key)
    browser.until("document.querySelector('#live').textContent === 'live'")
    browser.call("Network.enable")
    offline = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.call("Network.emulateNetworkConditions", **offline)
    browser.until("document.querySelector('#live').textContent === 'the gateway does not answer'")
    browser.call("Network.emulateNetworkConditions", **{**offline, "offline": False})
    browser.until("document.querySelector('#live').textContent === 'live'")
