"""The commands on a real broker, a real Redis and real workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import LoggedProcess, WorkerProcess
from tests.support.servers import RabbitMQNode

APP = """
import os, time
from inference_tasks import InferenceApp

app = InferenceApp("shop")

@app.inference(tier="realtime")
def classify(path: str, size: int = 1) -> dict:
    return {"path": path, "size": size, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}

@app.inference(tier="batch")
def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"

@app.inference(tier="batch")
def stand(gate: str) -> str:
    while not os.path.exists(gate):
        time.sleep(0.01)
    return "went on"

@app.inference(tier="offline")
def fail() -> None:
    raise ValueError("no such model")
"""

LONG = """
from inference_tasks import InferenceApp
app = InferenceApp("long", worker={"slots": 1, "longest_run_s": 7200})

@app.inference(time_limit_s=3600.0)
def train() -> None: ...
"""


@pytest.fixture
def env(amqp_url: str, redis_url: str, namespace: str, rabbitmq: RabbitMQNode) -> dict[str, str]:
    return {
        "INFERENCE_BROKER__URL": amqp_url,
        "INFERENCE_BROKER__MANAGEMENT_URL": rabbitmq.management_url,
        "INFERENCE_STATE__URL": redis_url,
        "INFERENCE_STATE__PREFIX": f"{namespace}:",
        # Heartbeats come three times in a lease; so what a worker did is known within the second.
        "INFERENCE_STATE__LEASE_S": "3",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "long.py").write_text(LONG)
    return tmp_path


class Shell:
    """Runs commands as a user would, in a folder with the app."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": path, **env}

    def __call__(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "inference_tasks.cli", *arguments],
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def tiers_when(self, shown: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What `tiers` says, once the last heartbeats show what is waited for."""
        deadline_s = time.monotonic() + 60
        while True:
            tiers = {one["tier"]: one for one in json.loads(self("tiers", "--json").stdout)}
            if shown(tiers) or time.monotonic() > deadline_s:
                return tiers


@pytest.fixture
def shell(folder: Path, env: Mapping[str, str]) -> Shell:
    return Shell(folder, env)


def test_a_task_from_submit_to_result(shell: Shell, folder: Path, env: Mapping[str, str]) -> None:
    with WorkerProcess.command("-A", "shop", "--gpu", "none", "--pool", "threads", directory=folder, env=env) as worker:
        done = shell("submit", "-A", "shop", "classify", "cat.png", "--kwargs", '{"size": 3}', "--wait", "--json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["result"] == {"path": "cat.png", "size": 3, "gpu": ""}

        # By the settings alone, without the app.
        status = shell("status", answer["id"], "--json")
        record = json.loads(status.stdout)
        assert (record["state"], record["name"], record["tier"]) == ("success", "shop.classify", "realtime")
        assert record["worker"].startswith("cpu-")
        assert json.loads(shell("result", answer["id"]).stdout)["path"] == "cat.png"

        failed = shell("submit", "-A", "shop:app", "shop.fail", "--wait")
        assert failed.returncode == 6
        assert "ValueError: no such model" in failed.stderr
        assert "Traceback" not in failed.stderr

        waits = shell("submit", "-A", "shop", "stand", str(folder / "gate")).stdout.strip()
        assert shell("result", waits, "--timeout", "0.1").returncode == 124
        (folder / "gate").touch()
        assert shell("status", waits, "--watch", "--json").stdout.splitlines()[-1].count('"success"') == 1

        tiers = shell.tiers_when(lambda tiers: bool(tiers["batch"]["share"]))
        assert tiers["realtime"]["ready_by_lane"] == {"fresh": 0, "returned": 0, "aged": 0}
        assert [tiers[tier]["workers"] for tier in ("realtime", "batch", "offline")] == [1, 1, 1]
        assert tiers["batch"]["share"] > 0.9
        assert sum(one["share_by_origin"] for one in tiers.values()) == pytest.approx(1.0)
        assert worker.terminate() == 0


def test_an_unknown_task_and_a_full_tier_have_their_codes(shell: Shell) -> None:
    assert shell("status", "nobody").returncode == 3
    bounds = {"INFERENCE_TIERS__REALTIME__BOUND": "1", "INFERENCE_TIERS__REALTIME__QUEUE_TYPE": "classic"}
    codes = [shell("submit", "-A", "shop", "classify", "x", **bounds).returncode for _ in range(2)]
    assert codes == [0, 4]


def test_the_topology_is_checked(shell: Shell) -> None:
    before = shell("topology", "check")
    assert before.returncode == 7
    assert "queue inference.realtime is missing" in before.stderr
    assert shell("submit", "-A", "shop", "classify", "x").returncode == 0
    assert shell("topology", "check").returncode == 0
    after = shell("topology", "check", "--json", INFERENCE_TIERS__REALTIME__BOUND="5")
    assert after.returncode == 7
    assert json.loads(after.stdout)["differences"] == [
        {"queue": "inference.realtime", "argument": "x-max-length", "wanted": 5, "found": 1000, "by": "policy"}
    ]


def test_unreachable_servers_have_a_code_and_a_finding(shell: Shell) -> None:
    nowhere = {"INFERENCE_BROKER__URL": "amqp://127.0.0.1:1/", "INFERENCE_STATE__URL": "redis://127.0.0.1:1/0"}
    submitted = shell("submit", "-A", "shop", "classify", "x", **nowhere)
    assert submitted.returncode == 5
    assert "inference-tasks doctor" in submitted.stderr
    assert shell("tiers", **nowhere).returncode == 5
    examined = shell("doctor", "--json", **nowhere)
    assert examined.returncode == 1
    errors = {one["subject"]: one for one in json.loads(examined.stdout) if one["level"] == "error"}
    assert errors.keys() == {"broker", "Redis"}
    assert all(one["advice"] for one in errors.values())


def test_the_doctor_finds_nothing_wrong_with_fresh_servers(shell: Shell) -> None:
    examined = shell("doctor", "-A", "shop", "--json")
    found = {one["subject"]: one for one in json.loads(examined.stdout)}
    assert examined.returncode == 0, examined.stdout
    assert found["broker: rights"]["level"] == "ok"
    assert found["clock"]["level"] == "ok"
    # Nobody has started the maintenance worker.
    warned = {one["subject"] for one in found.values() if one["level"] == "warning"}
    assert warned == {"Redis: persistence", "maintenance"}


def test_the_doctor_sees_missing_rights(shell: Shell, rabbitmq: RabbitMQNode, vhost: str) -> None:
    rights = {"configure": "^inference.*", "write": "^nothing$", "read": ".*"}
    rabbitmq.api("PUT", f"/api/permissions/{vhost}/guest", rights)
    found = {one["subject"]: one for one in json.loads(shell("doctor", "--json").stdout)}
    assert found["broker: rights"]["level"] == "error"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pool", "gevent"), "Use threads"),
        (("--pool", "solo", "--slots", "2"), "solo"),
        (("--pool", "threads", "--max-tasks-per-child", "3"), "worker_max_tasks_per_child"),
        (("--autoscale", "4,1"), "--slots"),
        (("--gpu", "7"), "0, 1"),
    ],
)
def test_a_worker_refuses_what_it_could_not_keep(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    gpu = () if "--gpu" in arguments else ("--gpu", "none")
    refused = shell("worker", "-A", "shop", *gpu, *arguments, CUDA_VISIBLE_DEVICES="0,1")
    assert refused.returncode == 7, refused.stderr
    assert said in refused.stderr


def test_a_worker_refuses_an_option_that_the_apps_code_overrules(shell: Shell) -> None:
    refused = shell("worker", "-A", "long", "--gpu", "none", "--slots", "2")
    assert refused.returncode == 7
    assert "code outranks the command line" in refused.stderr


def test_a_worker_refuses_tasks_that_the_broker_would_take_back_while_they_run(
    shell: Shell, rabbitmq: RabbitMQNode
) -> None:
    overview = rabbitmq.api("GET", "/api/overview")
    assert isinstance(overview, dict)
    if tuple(map(int, overview["rabbitmq_version"].split(".")[:2])) >= (3, 12):
        pytest.skip("from RabbitMQ 3.12 on the queues carry the time-out")
    refused = shell("worker", "-A", "long", "--gpu", "none")
    assert refused.returncode == 7
    assert "consumer_timeout = 3900000" in refused.stderr
    assert shell("doctor", "-A", "long").returncode == 1


def test_each_gpu_has_a_worker_with_a_name_of_its_own_per_start(
    shell: Shell, folder: Path, env: Mapping[str, str]
) -> None:
    two = {**env, "CUDA_VISIBLE_DEVICES": "0,1"}
    workers = WorkerProcess.command("-A", "shop", "--slots", "1", directory=folder, env=two)
    with workers:
        workers.wait_for(" ready.", count=2, timeout_s=60)
        assert shell.tiers_when(lambda tiers: tiers["batch"]["workers"] == 2)["realtime"]["workers"] == 2
        ran_on = {
            json.loads(shell("submit", "-A", "shop", "classify", "x", "--wait", "--json").stdout)["result"]["gpu"]
            for _ in range(3)
        }
        assert ran_on <= {"0", "1"}
        slow = shell("submit", "-A", "shop", "sleep", "2").stdout.strip()
        workers.wait_for("shop.sleep")
        workers.send(signal.SIGTERM)
        assert workers.wait(60) == 0
        assert json.loads(shell("status", slow, "--json").stdout)["state"] == "success"
        names = {word for word in workers.log.split() if word.startswith(("gpu0-", "gpu1-")) and "@" in word}
        assert len(names) == 2


CELERY = """
from celery.bin.celery import celery, main
from inference_tasks.cli import celery_command
# What the entry point of an installed package does.
celery.add_command(celery_command)
main()
"""


def test_celerys_command_line_has_the_same_worker_and_commands(
    shell: Shell, folder: Path, env: Mapping[str, str]
) -> None:
    (folder / "with_plugin.py").write_text(CELERY)
    options = ("--gpu", "none", "--pool", "threads", "--slots", "3")
    argv = (sys.executable, "with_plugin.py", "-A", "shop", "inference", "worker", *options)
    worker = LoggedProcess(argv, log=folder / "celery.log", env=shell.env, directory=folder)
    with worker:
        worker.wait_for(" ready.", timeout_s=60)
        # The module had been imported before the options were known; so the command has started over.
        assert worker.log.count("Running on the CPU") == 1
        assert shell.tiers_when(lambda tiers: tiers["batch"]["workers"] == 1)["batch"]["slots"] == 3
        asked = ("-A", "shop", "inference", "submit", "classify", "x", "--wait", "--json")
        done = subprocess.run(
            [sys.executable, "with_plugin.py", *asked],
            env=shell.env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["result"]["gpu"] == ""
        assert worker.terminate() == 0


def test_a_drain_that_takes_too_long_is_ended_when_asked_for(
    shell: Shell, folder: Path, env: Mapping[str, str]
) -> None:
    options = ("--gpu", "none", "--pool", "threads", "--kill-after-s", "1")
    with WorkerProcess.command("-A", "shop", *options, directory=folder, env=env) as worker:
        assert shell("submit", "-A", "shop", "sleep", "120").returncode == 0
        worker.wait_for("shop.sleep")
        assert worker.terminate() == 128 + signal.SIGKILL
        assert "cpu is killed" in worker.log
