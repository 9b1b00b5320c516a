"""A real Flower beside a real worker: what its pages and its API show of the tiers."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.servers import LOOPBACK, RabbitMQNode, free_ports

pytest.importorskip("flower")

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

@app.inference(tier="offline")
def wait_for(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.02)
"""

CALLS = """
import sys
from vision import classify, embed, wait_for

classify.submit(1)
classify.delay(2)
embed.submit_many([(3,), (4,)])
embed.apply_async((5,), tier="P2")
wait_for.submit(sys.argv[1])
"""

LATER = """
from vision import embed

embed.delay(6)
"""

T = TypeVar("T")


def seen(look: Callable[[], T], expected: Callable[[T], bool], timeout_s: float = 90.0) -> T:
    """What `look` returns once it is what the test expects, or at last."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if expected(found) or time.monotonic() > deadline_s:
            return found
        time.sleep(0.1)


class Flower:
    """A Flower process and the requests that a browser or a script sends it."""

    def __init__(self, directory: Path, env: Mapping[str, str], *options: str) -> None:
        (self.port,) = free_ports(1)
        path = os.pathsep.join([str(directory), *(entry for entry in sys.path if entry)])
        self.env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **env}
        head = (sys.executable, "-m", "celery", "-A", "vision:app", "flower")
        argv = (*head, f"--conf={CONFIG}", f"--port={self.port}", *options)
        self.process = LoggedProcess(argv, log=directory / "flower.log", env=self.env, directory=directory)

    def get(self, path: str, user: str | None = USER) -> tuple[int, str]:
        headers = {} if user is None else {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
        request = urllib.request.Request(f"http://{LOOPBACK}:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, user: str | None = USER) -> int:
        headers = {} if user is None else {"Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.port}{path}", data=b"", headers=headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

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
    for name, text in (("vision.py", APP), ("calls.py", CALLS), ("later.py", LATER)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def worker(folder: Path, env: Mapping[str, str]) -> Iterator[WorkerProcess]:
    options = ("-A", "vision", "--gpu", "none", "--pool", "threads", "--slots", "1")
    with WorkerProcess.command(*options, directory=folder, env=env) as worker:
        yield worker


@pytest.fixture
def flower(folder: Path, env: Mapping[str, str], worker: WorkerProcess) -> Iterator[Flower]:
    flower = Flower(folder, {**env, "FLOWER_BASIC_AUTH": USER})
    with flower.process as process:
        process.wait_for("Connected to", timeout_s=60)
        # A heartbeat has come: events are listened to from here on.
        assert seen(lambda: flower.json("/workers?json=1")["data"], lambda workers: len(workers) == 1)
        yield flower


def run(folder: Path, flower: Flower, *argv: str) -> None:
    subprocess.run([sys.executable, *argv], cwd=folder, env=flower.env, check=True, timeout=60)


def test_workers_tasks_with_their_tier_and_the_queues_are_shown(folder: Path, flower: Flower) -> None:
    release = folder / "release"
    run(folder, flower, "calls.py", str(release))
    tiers = {"(1,)": "realtime", "(2,)": "realtime", "(3,)": "batch", "(4,)": "batch", "(5,)": "offline"}

    def are_done(tasks: dict[str, dict[str, Any]]) -> bool:
        return all(tasks.get(args, {}).get("state") == "SUCCESS" for args in tiers) and any(
            task["state"] == "STARTED" for task in tasks.values()
        )

    tasks = seen(flower.tasks, are_done)
    assert {args: tasks[args]["tier"] for args in tiers} == tiers
    assert {task["lane"] for task in tasks.values()} == {"fresh"}

    # The only slot is taken now: what comes next waits, and its tier is known all the same.
    run(folder, flower, "later.py")
    waiting = seen(flower.tasks, lambda tasks: "(6,)" in tasks)["(6,)"]
    assert (waiting["state"], waiting["tier"]) == ("PENDING", "batch")
    queues = seen(flower.queues, lambda queues: queues.get("inference.batch") == "1")
    assert queues["inference.batch"] == "1"
    assert {"inference.realtime", "inference.batch", "inference.offline"} <= queues.keys()

    (name,) = flower.json("/api/workers?refresh=1")
    assert name.startswith("cpu-")
    _, page = flower.get("/tasks")
    assert re.search(r'<th data-column="tier">\s*Tier', page)
    table = "/tasks/datatable?draw=1&start=0&length=100&order[0][column]=0&order[0][dir]=asc&columns[0][data]=tier"
    rows = flower.json(table.replace("[", "%5B").replace("]", "%5D"))["data"]
    shown = [row["tier"] for row in rows]
    assert shown == sorted(shown)
    assert set(shown) == {"realtime", "batch", "offline"}
    detail = flower.get(f"/task/{waiting['uuid']}")[1]
    assert re.search(r"(?i)tier", detail)
    assert "batch" in detail
    _in_a_browser(folder, flower)

    release.touch()
    assert seen(flower.tasks, lambda tasks: tasks["(6,)"]["state"] == "SUCCESS")["(6,)"]["tier"] == "batch"


def _in_a_browser(folder: Path, flower: Flower) -> None:
    """The table is filled by a script; where there is a browser, see that the tier arrives in it."""
    browser = shutil.which("chromium")
    if browser is None:
        return
    quiet = ("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    head = (browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet)
    argv = (*head, f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=5000", "--dump-dom")
    page = f"http://{USER}@{LOOPBACK}:{flower.port}/tasks"
    dom = subprocess.run([*argv, page], capture_output=True, text=True, timeout=60, check=True).stdout
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", dom)
    assert {"realtime", "batch", "offline"} <= set(cells)


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
    columns = "name,uuid,state,tier,received,runtime,worker"
    assert shown.stdout.split() == ["::1", "7", columns, "False", "http://127.0.0.1:1/api/"]
