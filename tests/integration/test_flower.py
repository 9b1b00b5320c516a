"""A real Flower beside a real worker: what its pages and its API show of the tiers."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support import fake_gpu
from tests.support.browser import Browser
from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.servers import LOOPBACK, RabbitMQNode, free_ports

pytest.importorskip("flower")

from inference_tasks.observe.flower_pages import HIDDEN

CONFIG = Path(__file__).parents[2] / "config" / "flowerconfig.py"
USER = "somebody:secret"

APP = """
import time
from pathlib import Path
from inference_tasks import InferenceApp

app = InferenceApp("vision")

@app.inference(tier="realtime")
def classify(number: int) -> int:
    return number

@app.inference(tier="batch")
def embed(number: int) -> int:
    return number

@app.inference(tier="batch")
def greet(prompt: str) -> str:
    return f"Hello, {prompt}"

@app.inference(tier="offline")
def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.02)
"""

CALLS = """
from vision import classify, embed

classify.submit(1)
classify.delay(2)
embed.submit_many([(3,), (4,)])
embed.apply_async((5,), tier="P2")
"""

HOLD = """
import sys
from vision import wait_for

wait_for.submit(sys.argv[1])
"""

PRIVATE = """
import sys
from vision import greet

print(greet.submit(sys.argv[1]).id)
"""

ORDERED = "&".join(
    f"{name.replace('[', '%5B').replace(']', '%5D')}={value}"
    for name, value in (("order[0][column]", 0), ("order[0][dir]", "asc"), ("columns[0][data]", "tier"))
)

T = TypeVar("T")


def seen(look: Callable[[], T], expected: Callable[[T], bool], timeout_s: float = 90.0) -> T:
    """What `look` returns once it is what the test expects, or at last."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if expected(found) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


BY_CELERY = ("celery", "-A", "vision:app", "flower", f"--conf={CONFIG}")
BY_COMMAND = ("inference_tasks.cli", "flower", "-A", "vision:app")


class Flower:
    """A Flower process and the requests that a browser or a script sends it."""

    def __init__(
        self, directory: Path, env: Mapping[str, str], *options: str, start: tuple[str, ...] = BY_CELERY
    ) -> None:
        (self.port,) = free_ports(1)
        path = os.pathsep.join([str(directory), *(entry for entry in sys.path if entry)])
        self.env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}
        argv = (sys.executable, "-m", *start, f"--port={self.port}", *options)
        self.process = LoggedProcess(argv, log=directory / "flower.log", env=self.env, directory=directory)

    def get(self, path: str, user: str | None = USER) -> tuple[int, str]:
        return self._ask(path, user, None)

    def post(self, path: str, user: str | None = USER) -> int:
        return self._ask(path, user, b"")[0]

    def _ask(self, path: str, user: str | None, body: bytes | None) -> tuple[int, str]:
        headers = {} if user is None else {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
        request = urllib.request.Request(f"http://{LOOPBACK}:{self.port}{path}", data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def json(self, path: str) -> Any:
        status, text = self.get(path)
        assert status == 200, text
        return json.loads(text)

    def tasks(self) -> dict[str, dict[str, Any]]:
        """{arguments: task} of all tasks that the API knows."""
        return {task["args"] or "": task for task in self.json("/api/tasks").values()}

    def queues(self) -> dict[str, str]:
        """{queue: messages} of the Broker tab."""
        _, page = self.get("/broker")
        rows = re.findall(r'<tr id="([^"]+)">\s*<td>[^<]*</td>\s*<td[^>]*>\s*(\d+)', page)
        return dict(rows)


@pytest.fixture
def env(amqp_url: str, redis_url: str, namespace: str, rabbitmq: RabbitMQNode) -> dict[str, str]:
    return {
        "INFERENCE_BROKER__URL": amqp_url,
        "INFERENCE_BROKER__MANAGEMENT_URL": rabbitmq.management_url,
        "INFERENCE_STATE__URL": redis_url,
        "INFERENCE_STATE__PREFIX": f"{namespace}:",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fake_gpu.install(tmp_path)
    for name, text in {"vision": APP, "calls": CALLS, "hold": HOLD, "private": PRIVATE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def worker(folder: Path, env: Mapping[str, str]) -> Iterator[WorkerProcess]:
    options = ("-A", "vision", "--gpu", "0", "--pool", "threads", "--slots", "1")
    with WorkerProcess.command(*options, directory=folder, env=env) as worker:
        yield worker


@pytest.fixture(params=["celery", "command"])
def flower(
    folder: Path, env: Mapping[str, str], worker: WorkerProcess, request: pytest.FixtureRequest
) -> Iterator[Flower]:
    """Started in both ways; by the command with arguments shown, by Celery as it comes."""
    if request.param == "celery":
        flower = Flower(folder, {**env, "FLOWER_BASIC_AUTH": USER})
    else:
        variables = {"FLOWER_BASIC_AUTH": USER, "INFERENCE_FLOWER__SHOW_ARGUMENTS": "true"}
        flower = Flower(folder, {**env, **variables}, start=BY_COMMAND)
    with flower.process as process:
        process.wait_for("Connected to", timeout_s=60)
        # A heartbeat has come: events are listened to from here on.
        assert seen(lambda: flower.json("/workers?json=1")["data"], lambda workers: len(workers) == 1)
        yield flower


def run(folder: Path, flower: Flower, *argv: str) -> None:
    subprocess.run([sys.executable, *argv], cwd=folder, env=flower.env, check=True, timeout=60)


def hold_the_slot(folder: Path, flower: Flower, release: Path) -> None:
    """Have the only slot taken until `release` exists.

    To be called once all else has run: shares go by time, so the lowest tier may come before a higher one is empty.
    """
    run(folder, flower, "hold.py", str(release))
    started = seen(lambda: flower.json("/api/tasks?state=STARTED"), bool)
    assert [task["name"] for task in started.values()] == ["vision.wait_for"]


@pytest.mark.parametrize("flower", ["command"], indirect=True)
def test_workers_tasks_with_their_tier_and_the_queues_are_shown(folder: Path, flower: Flower) -> None:
    release = folder / "release"
    run(folder, flower, "calls.py")
    tiers = {"(1,)": "realtime", "(2,)": "realtime", "(3,)": "batch", "(4,)": "batch", "(5,)": "offline"}
    wait_states(flower, SUCCESS=5)
    hold_the_slot(folder, flower, release)
    tasks = flower.tasks()
    assert {args: tasks[args]["tier"] for args in tiers} == tiers
    assert {task["lane"] for task in tasks.values()} == {"fresh"}
    assert {task["gpu"] for task in tasks.values()} == {"gpu0"}
    assert all(0 <= task["wait"] < 90 for task in tasks.values())

    # The only slot is taken now: what comes next waits, and its tier is known all the same.
    run(folder, flower, "-c", "from vision import embed; embed.delay(6)")
    waiting = seen(flower.tasks, lambda tasks: "(6,)" in tasks)["(6,)"]
    assert (waiting["state"], waiting["tier"], waiting["wait"]) == ("PENDING", "batch", None)
    queues = seen(flower.queues, lambda queues: queues.get("inference.batch") == "1")
    assert queues["inference.batch"] == "1"
    assert {"inference.realtime", "inference.batch", "inference.offline", "inference.dead"} <= queues.keys()

    (name,) = flower.json("/api/workers?refresh=1")
    assert name.startswith("gpu0-")
    _, page = flower.get("/tasks")
    assert re.search(r'<th data-column="tier">\s*Tier', page)
    rows = flower.json(f"/tasks/datatable?draw=1&start=0&length=100&{ORDERED}")["data"]
    shown = [row["tier"] for row in rows]
    assert shown == sorted(shown)
    assert set(shown) == {"realtime", "batch", "offline"}
    detail = flower.get(f"/task/{waiting['uuid']}")[1]
    assert re.search(r"(?i)tier", detail)
    assert "batch" in detail

    release.touch()
    ended = seen(flower.tasks, lambda tasks: tasks["(6,)"]["state"] == "SUCCESS")["(6,)"]
    assert (ended["tier"], ended["result"]) == ("batch", "6")
    # It could have been started when it was sent, and was when the slot was free.
    assert ended["wait"] == pytest.approx(ended["started"] - ended["sent"], abs=0.5)


@pytest.mark.parametrize("flower", ["celery"], indirect=True)
def test_a_browser_shows_tiers_waits_and_gpus_and_nothing_private(
    folder: Path, flower: Flower, browser: Browser
) -> None:
    secret, release = "the secret prompt", folder / "release"
    run(folder, flower, "calls.py")
    wait_states(flower, SUCCESS=5)
    hold_the_slot(folder, flower, release)
    run(folder, flower, "private.py", secret)
    (waiting,) = wait_states(flower, SUCCESS=5, STARTED=1, PENDING=1)["PENDING"]
    release.touch()
    wait_states(flower, SUCCESS=7)

    authorization = "Basic " + base64.b64encode(USER.encode()).decode()
    browser.call("Network.enable")
    browser.call("Network.setExtraHTTPHeaders", headers={"Authorization": authorization})
    browser.screen(1600, 640)
    browser.open(f"http://{LOOPBACK}:{flower.port}/tasks")
    browser.until("document.querySelectorAll('#tasks-table tbody tr').length === 7")
    rows = browser.value(
        "[...document.querySelectorAll('#tasks-table tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    headings = browser.value("[...document.querySelectorAll('th[data-column]')].map((one) => one.dataset.column)")
    shown = [dict(zip(headings, row, strict=False)) for row in rows]
    assert {one["tier"] for one in shown} == {"realtime", "batch", "offline"}
    assert {one["gpu"] for one in shown} == {"gpu0"}
    assert all(float(one["wait"]) >= 0 for one in shown)
    browser.keep("flower-tasks")

    # The management API counts a new queue's messages some seconds later.
    assert seen(flower.queues, lambda queues: queues.get("inference.dead") == "0")["inference.dead"] == "0"
    private = [browser.value("document.documentElement.outerHTML")]
    for path, name in ((f"/task/{waiting}", "flower-task"), ("/broker", "flower-broker")):
        browser.open(f"http://{LOOPBACK}:{flower.port}{path}")
        browser.until(f"location.pathname === '{path}' && document.readyState === 'complete'")
        private.append(browser.value("document.documentElement.outerHTML"))
        browser.keep(name)
    assert HIDDEN in private[1]
    assert "inference.dead" in private[2]
    (worker,) = flower.json("/api/workers")
    found = f"/tasks/datatable?draw=1&start=0&length=100&search%5Bvalue%5D=secret&{ORDERED}"
    assert flower.json(found)["recordsFiltered"] == 0
    api = ("/api/tasks", f"/api/task/info/{waiting}", f"/api/task/result/{waiting}", "/metrics", f"/worker/{worker}")
    private += [flower.get(path)[1] for path in (*api, f"/api/workers?refresh=1&workername={worker}")]
    assert flower.json(f"/api/task/result/{waiting}") == {"task-id": waiting, "state": "SUCCESS", "result": HIDDEN}
    assert not [text for text in private if secret in text or str(release) in text]
    assert browser.complaints == []


def wait_states(flower: Flower, **wanted: int) -> dict[str, list[str]]:
    """Wait until the API knows so many tasks in these states and no other, and return {state: ids}."""

    def by_state() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for task in flower.json("/api/tasks").values():
            found.setdefault(task["state"], []).append(task["uuid"])
        return found

    def counts(found: Mapping[str, list[str]]) -> dict[str, int]:
        return {state: len(ids) for state, ids in found.items()}

    states = seen(by_state, lambda found: counts(found) == wanted)
    assert counts(states) == wanted
    return states


@pytest.mark.parametrize("flower", ["celery"], indirect=True)
def test_the_arguments_of_what_runs_are_hidden_on_the_page_of_its_worker(folder: Path, flower: Flower) -> None:
    release = folder / "release"
    hold_the_slot(folder, flower, release)
    (worker,) = flower.json("/api/workers?refresh=1")

    def active() -> list[dict[str, Any]]:
        known = flower.json(f"/api/workers?refresh=1&workername={worker}")[worker]
        return list(known.get("active", ()))

    (running,) = seen(active, lambda tasks: len(tasks) == 1)
    assert (running["name"], running["args"], running["kwargs"]) == ("vision.wait_for", HIDDEN, HIDDEN)
    page = flower.get(f"/worker/{worker}")[1]
    assert "vision.wait_for" in page
    assert str(release) not in page
    release.touch()


@pytest.mark.parametrize("flower", ["command"], indirect=True)
def test_nothing_is_shown_without_the_password(flower: Flower) -> None:
    assert [flower.get(path, user=None)[0] for path in ("/workers", "/tasks", "/broker", "/api/tasks")] == [401] * 4
    assert flower.get("/tasks", user="somebody:else")[0] == 401


def test_without_a_password_flower_changes_nothing_and_is_local(
    folder: Path, env: Mapping[str, str], worker: WorkerProcess
) -> None:
    local = Flower(folder, {**env, "FLOWER_UNAUTHENTICATED_API": "true"})
    with local.process as process:
        process.wait_for("Connected to", timeout_s=60)
        assert seen(lambda: local.json("/workers?json=1")["data"], lambda workers: len(workers) == 1)
        (name,) = local.json("/api/workers?refresh=1")
        assert local.post(f"/api/worker/shutdown/{name}", user=None) in (403, 405)
        assert worker.is_running
    open_to_all = Flower(folder, env, "--address=0.0.0.0")
    with open_to_all.process as process:
        assert process.wait(60) == 2
        assert "without a password" in process.log
        assert "Traceback" not in process.log


def test_variables_and_command_line_win_over_the_configuration(folder: Path, env: Mapping[str, str]) -> None:
    script = """
import sys
from tornado.options import options
from flower.command import apply_env_options, apply_options
import vision
vision.app.set_current()
apply_env_options()
apply_options("flower", sys.argv[1:])
print(options.address, options.max_tasks, options.tasks_columns, options.read_only, options.broker_api)
"""
    (folder / "options.py").write_text(script)
    flower = Flower(folder, {**env, "FLOWER_MAX_TASKS": "7", "FLOWER_BROKER_API": "http://127.0.0.1:1/api/"})
    argv = [sys.executable, "options.py", f"--conf={CONFIG}", "--address=::1", "--read_only=false"]
    shown = subprocess.run(argv, cwd=folder, env=flower.env, capture_output=True, text=True, check=True, timeout=60)
    columns = "name,uuid,state,tier,lane,wait,gpu,received,runtime,worker"
    assert shown.stdout.split() == ["::1", "7", columns, "False", "http://127.0.0.1:1/api/"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://guest:wrong@{host}"])
def test_the_command_says_why_the_broker_tab_would_be_empty(
    folder: Path, env: Mapping[str, str], rabbitmq: RabbitMQNode, address: str
) -> None:
    wrong = address.format(host=rabbitmq.management_url.rpartition("@")[2])
    flower = Flower(folder, {**env, "INFERENCE_BROKER__MANAGEMENT_URL": wrong}, start=BY_COMMAND)
    with flower.process as process:
        assert process.wait(60) == 7
        assert "Flower's Broker tab would be empty" in process.log
        assert "--no-broker-tab" in process.log
        assert "wrong" not in process.log
        assert "Traceback" not in process.log


def test_the_command_starts_without_the_management_api_if_told_to(folder: Path, env: Mapping[str, str]) -> None:
    variables = {**env, "INFERENCE_BROKER__MANAGEMENT_URL": "http://127.0.0.1:1", "FLOWER_BASIC_AUTH": USER}
    flower = Flower(folder, variables, "--no-broker-tab", start=BY_COMMAND)
    with flower.process as process:
        process.wait_for("Connected to", timeout_s=60)
        assert flower.get("/tasks")[0] == 200
        assert process.terminate(30) == 0
    taken = Flower(folder, {**env, "FLOWER_BASIC_AUTH": USER}, start=BY_COMMAND)
    with socket.socket() as line:
        line.bind((LOOPBACK, taken.port))
        line.listen()
        with taken.process as process:
            assert process.wait(60) == 7
            assert "Flower cannot listen there" in process.log
