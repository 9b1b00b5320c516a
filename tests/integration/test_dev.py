"""`inference-tasks dev`: the whole stack under one Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from inference_tasks.broker.embedded_server import EmbeddedServer
from tests.support.brokers import until
from tests.support.processes import LoggedProcess
from tests.support.servers import free_ports

APP = """
from inference_tasks import InferenceApp

app = InferenceApp("shop")

@app.inference(tier="realtime")
def classify(path: str) -> str:
    return path.upper()
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Short, as the embedded broker's socket lies in it.
    folder = tmp_path_factory.mktemp("dev")
    (folder / "shop.py").write_text(APP)
    return folder


@pytest.fixture
def env(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INFERENCE_", "CELERY_"))}
    path = os.pathsep.join([str(folder), *(entry for entry in sys.path if entry)])
    return {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def dev(*arguments: str, folder: Path, env: Mapping[str, str]) -> LoggedProcess:
    argv = (sys.executable, "-m", "inference_tasks.cli", "dev", *arguments)
    return LoggedProcess(argv, log=folder / "dev.log", env=env, directory=folder)


def submit(folder: Path, env: Mapping[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "inference_tasks.cli", "submit", "-A", "shop", "classify", "cat", "--wait"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_one_command_runs_everything_and_one_signal_ends_it(folder: Path, env: Mapping[str, str]) -> None:
    (port,) = free_ports(1)
    server = EmbeddedServer(folder / ".inference")
    with dev("-A", "shop", "--gpu", "none", "--flower-port", str(port), folder=folder, env=env) as stack:
        log = stack.wait_for(" ready.", timeout_s=60)
        assert f"Broker: the embedded one in {server.directory}" in log
        assert f"Flower: http://127.0.0.1:{port}/" in log
        assert "Aging: none" in log
        assert server.is_running()
        assert submit(folder, env) == '"CAT"'
        assert "[worker] " in stack.log
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=60) as answer:
            assert answer.status == 200
        family = stack.children()
        stack.send(signal.SIGINT)
        assert stack.wait(60) == 0
        assert not psutil.wait_procs(family, timeout=60)[1]
        assert not server.is_running()


def test_a_worker_that_dies_is_started_again(folder: Path, env: Mapping[str, str]) -> None:
    with dev("-A", "shop", "--gpu", "none", "--flower-port", "0", folder=folder, env=env) as stack:
        log = stack.wait_for(" ready.", timeout_s=60)
        started = re.search(r"worker started \(pid (\d+)\)", log)
        assert started is not None
        psutil.Process(int(started[1])).kill()
        stack.wait_for("it starts again in 1 s")
        stack.wait_for(" ready.", count=2, timeout_s=60)
        assert submit(folder, env) == '"CAT"'
        assert stack.terminate(60) == 0


def test_a_configured_broker_is_used_and_left_alone(
    folder: Path, env: Mapping[str, str], amqp_url: str, redis_url: str, namespace: str
) -> None:
    configured = {
        **env,
        "INFERENCE_BROKER__URL": amqp_url,
        "INFERENCE_STATE__URL": redis_url,
        "INFERENCE_STATE__PREFIX": f"{namespace}:",
    }
    with dev("-A", "shop", "--gpu", "none", "--flower-port", "0", folder=folder, env=configured) as stack:
        log = stack.wait_for(" ready.", timeout_s=60)
        assert "Broker: amqp://guest:********@" in log
        assert submit(folder, configured) == '"CAT"'
        stack.wait_for("beat sends the schedule", timeout_s=60)
        assert "[maintenance] " in stack.log
        assert stack.terminate(60) == 0
    assert not (folder / ".inference").exists()


def test_a_wrong_app_or_setting_ends_it_at_once(folder: Path, env: Mapping[str, str]) -> None:
    with dev("-A", "no_such_module", folder=folder, env=env) as stack:
        assert stack.wait(30) == 2
    with dev(folder=folder, env=env) as stack:
        assert stack.wait(30) == 2
        assert "-A vision:app" in stack.log
    with dev("-A", "shop", folder=folder, env={**env, "INFERENCE_WORKER__SLOTS": "0"}) as stack:
        assert stack.wait(30) == 7


def test_full_runs_every_part_of_the_system_and_each_answers(
    folder: Path, env: Mapping[str, str], amqp_url: str, redis_url: str, namespace: str
) -> None:
    configured = {
        **env,
        "INFERENCE_BROKER__URL": amqp_url,
        "INFERENCE_STATE__URL": redis_url,
        "INFERENCE_STATE__PREFIX": f"{namespace}:",
    }
    flower, gateway, metrics = free_ports(3)
    ports = ("--flower-port", str(flower), "--gateway-port", str(gateway), "--metrics-port", str(metrics))
    with dev("--full", "-A", "shop", "--gpu", "none", *ports, folder=folder, env=configured) as stack:
        stack.wait_for(" ready.", timeout_s=120)
        stack.wait_for("beat sends the schedule", timeout_s=120)
        stack.wait_for("Listening on ", timeout_s=120)
        places = dict(re.findall(r"^(\w[\w ]+): (http://\S+)", stack.log, re.MULTILINE))
        assert places["Gateway"] == f"http://127.0.0.1:{gateway}/"
        request = urllib.request.Request(
            f"{places['Gateway']}v1/tasks/classify",
            data=b'{"args": ["cat"]}',
            headers={"Content-Type": "application/json", "Prefer": "wait=60"},
        )
        with urllib.request.urlopen(request, timeout=90) as answer:
            assert json.load(answer)["result"] == "CAT"
        until(lambda: answers(f"{places['Flower']}healthcheck") == "OK", "Flower answers")
        of_all, of_worker = places["Metrics of all"], places["Metrics of the worker"]
        until(lambda: 'inference_tier_workers{tier="realtime"} 1' in answers(of_all), "maintenance tells of the worker")
        until(lambda: "inference_tasks_started_total{" in answers(of_worker), "the worker tells of its start")
        family = stack.children()
        assert len(family) >= 4
        stack.send(signal.SIGINT)
        assert stack.wait(90) == 0
        assert not psutil.wait_procs(family, timeout=60)[1]
    for name in ("worker", "maintenance", "gateway", "flower"):
        assert f"[{name}] " in stack.log, name


def test_a_stack_that_is_killed_takes_its_processes_along(folder: Path, env: Mapping[str, str]) -> None:
    flower, gateway, metrics = free_ports(3)
    ports = ("--flower-port", str(flower), "--gateway-port", str(gateway), "--metrics-port", str(metrics))
    try:
        with dev("--full", "-A", "shop", "--gpu", "none", *ports, folder=folder, env=env) as stack:
            stack.wait_for(" ready.", timeout_s=120)
            stack.wait_for("Listening on ", timeout_s=120)
            until(lambda: answers(f"http://127.0.0.1:{flower}/healthcheck") == "OK", "Flower answers")
            ours = [one for one in stack.children() if "inference_tasks.cli" in one.cmdline()]
            assert {one.cmdline()[3] for one in ours} >= {"worker", "gateway", "flower"}
            stack.send(signal.SIGKILL)
            assert not psutil.wait_procs(ours, timeout=60)[1]
    finally:
        EmbeddedServer(folder / ".inference").stop()


def answers(url: str) -> str:
    """What is answered there; empty while nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
