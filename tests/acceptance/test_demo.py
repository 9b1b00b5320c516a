"""`inference-tasks demo` as a user calls it: real files, a real model, real workers, and nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from kombu import Connection

from inference_routing.topology import queue_name
from tests.support.brokers import until
from tests.support.processes import LoggedProcess, program
from tests.support.prometheus import scraped

TIERS = ("realtime", "batch", "offline")
LANES = ("fresh", "returned", "aged")
MANY_SECONDS = 240


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The folder for the demo's temporary files: short enough for a socket, open to RabbitMQ's own user."""
    folder = Path(tempfile.mkdtemp(prefix="d-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def env(temporary: Path) -> dict[str, str]:
    """An environment without any broker configured."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("INFERENCE_", "CELERY_"))}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**inherited, "PYTHONPATH": path, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}


def processes_of(folder: Path) -> list[str]:
    """The processes that were started by a demo with this folder, whoever they run as."""
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), *process.environ().values()]
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if any(str(folder) in text for text in told):
            found.append(f"{process.pid}: {' '.join(process.cmdline())}")
    return found


def run(*arguments: str, env: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inference_tasks.cli", "demo", *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=MANY_SECONDS,
        check=False,
    )


@pytest.mark.serial
@pytest.mark.parametrize("broker", ["embedded", "rabbitmq"])
def test_realtime_waits_less_than_in_one_queue_and_files_are_classified(
    broker: str, env: Mapping[str, str], tmp_path: Path, temporary: Path
) -> None:
    if broker == "rabbitmq" and program("rabbitmq-server") is None:
        pytest.skip("rabbitmq-server is not installed")
    asked = () if broker == "embedded" else ("--broker", broker)
    done = run(*asked, "--seconds", "5", "--json", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["broker"] == broker
    assert "Broker: " in done.stderr
    ours, fifo = told["ours"], told["fifo"]
    assert 0 <= ours["tiers"]["realtime"]["wait_p99_s"] < fifo["tiers"]["realtime"]["wait_p99_s"]
    for side in (ours, fifo):
        assert side["files"] == sum(side["content_types"].values()) > 0
        assert side["files"] == sum(side["tiers"][tier]["started"] for tier in TIERS)
        assert len(side["content_types"]) > 3
        assert sum(side["tiers"][tier]["share"] for tier in TIERS) == pytest.approx(1.0)
    assert all(ours["tiers"][tier]["started"] for tier in TIERS)
    # The same load on both sides, except for what was not due yet when the one or the other ended.
    assert fifo["tiers"]["realtime"]["submitted"] == pytest.approx(ours["tiers"]["realtime"]["submitted"], abs=2)
    assert not processes_of(temporary)
    assert not list(temporary.iterdir())
    assert not list(tmp_path.iterdir())


@contextmanager
def depths_seen(amqp_url: str, queues: Sequence[str]) -> Iterator[dict[str, list[tuple[float, int]]]]:
    """Look at queues many times a second: {queue: (monotonic seconds, messages ready)}, growing until the end."""
    seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
    stopped = threading.Event()

    def look() -> None:
        with Connection(amqp_url) as connection:
            channel: Any = connection.default_channel
            while not stopped.wait(0.02):
                for queue in queues:
                    count = channel.queue_declare(queue, passive=True).message_count
                    seen[queue].append((time.monotonic(), count))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        stopped.set()
        thread.join()


@pytest.mark.serial
def test_what_top_tells_meanwhile_is_what_prometheus_and_redis_say(
    amqp_url: str, redis_url: str, env: Mapping[str, str], tmp_path: Path
) -> None:
    mine = {**env, "INFERENCE_BROKER__URL": amqp_url, "INFERENCE_STATE__URL": redis_url}
    inference_tasks = (sys.executable, "-m", "inference_tasks.cli")
    argv = [*inference_tasks, "demo", "--seconds", "25"]
    with LoggedProcess(argv, log=tmp_path / "demo.log", env=mine, directory=tmp_path) as demo:
        hint = re.search("terminal: (.*) inference-tasks top\n", demo.wait_for(" inference-tasks top\n", timeout_s=30))
        assert hint is not None
        named = dict(word.split("=", 1) for word in shlex.split(hint[1]))
        assert set(named) == {"INFERENCE_NAMESPACE", "INFERENCE_STATE__PREFIX"}
        mine |= named
        name = named["INFERENCE_NAMESPACE"]
        queues = {(tier, lane): queue_name(name, tier, lane) for tier in TIERS for lane in LANES}
        argv = [*inference_tasks, "maintenance", "-A", "inference_tasks.demo.tasks:app", "--metrics-port", "0"]
        with LoggedProcess(argv, log=tmp_path / "maintenance.log", env=mine, directory=tmp_path) as maintenance:
            url = maintenance.wait_for("Metrics on http://", timeout_s=30).partition("Metrics on ")[2].split()[0]
            # Its lines come every two seconds; ten are two seconds before the end of its first side.
            demo.wait_for("inference-tasks ", timeout_s=60, count=8)
            with depths_seen(amqp_url, list(queues.values())) as depths:
                demo.wait_for("inference-tasks ", timeout_s=60, count=10)
                before, began_s = scraped(url), time.monotonic()
                argv = [*inference_tasks, "top", "--once", "--json"]
                done = subprocess.run(
                    argv, env=mine, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
                )
                told: dict[str, Any] = json.loads(done.stdout)
                with redis.Redis.from_url(redis_url, decode_responses=True) as client:
                    accounts = client.hgetall(f"{named['INFERENCE_STATE__PREFIX']}accounts")
                # The exporter looks every two seconds.
                until(
                    lambda: scraped(url) != before and scraped(url)["inference_exporter_up", "state"] == 1,
                    "a later look",
                )
                after = scraped(url)

    def between(value: float, *metric: str, off_by: float) -> None:
        """By more than this nothing changes between the looks, at the loads of the demo."""
        ends = sorted((before[metric], after[metric]))
        assert ends[0] - off_by <= value <= ends[1] + off_by, (metric, ends, value)

    assert [tier["tier"] for tier in told["tiers"]] == list(TIERS)
    for tier in told["tiers"]:
        name = tier["tier"]
        assert set(tier["ready_by_lane"]) == set(LANES)
        for lane, number in tier["ready_by_lane"].items():
            # A queue changes by hundreds a second: each told what the broker said at some moment around its look.
            ready = [count for at_s, count in depths[queues[name, lane]] if at_s > began_s - 3]
            for one in (number, *(look["inference_queue_messages", name, lane] for look in (before, after))):
                assert min(ready) - 3 <= one <= max(ready) + 3, (name, lane, one, ready)
        between(tier["share"], "inference_tier_share_ratio", name, "served", off_by=0.05)
        between(tier["promised"], "inference_tier_share_promised_ratio", name, off_by=1e-9)
        for quantile, field in (("0.5", "wait_p50_s"), ("0.99", "wait_p99_s"), ("1", "longest_wait_s")):
            between(tier[field], "inference_tier_wait_seconds", name, quantile, off_by=0.05 + tier[field] / 4)
        between(tier["workers"], "inference_tier_workers", name, off_by=0)
        admitted = told["accounts"]["by_tier"][name]["admitted"]
        assert admitted <= int(accounts[f"{name}:admitted"]) <= admitted * 1.2 + 10


def test_the_summary_names_both_sides_and_the_next_command(
    env: Mapping[str, str], tmp_path: Path, temporary: Path
) -> None:
    done = run("--seconds", "2", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "inference-tasks" in done.stdout
    assert "one FIFO queue" in done.stdout
    assert "realtime wait P99" in done.stdout
    assert "inference-tasks dev -A" in done.stdout
    # Without a terminal the live table becomes lines, apart from the answer.
    assert "wait P50/P99" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_an_interrupted_demo_leaves_nothing_behind(
    number: signal.Signals, code: int, env: Mapping[str, str], tmp_path: Path, temporary: Path
) -> None:
    argv = (sys.executable, "-m", "inference_tasks.cli", "demo", "--seconds", "60")
    with LoggedProcess(argv, log=tmp_path / "demo.log", env=env, directory=tmp_path) as demo:
        demo.wait_for("realtime 1", timeout_s=60)
        assert len(processes_of(temporary)) > 2
        demo.send(number)
        assert demo.wait(30) == code
    assert not processes_of(temporary)
    assert not list(temporary.iterdir())


def test_an_error_leaves_nothing_behind(env: Mapping[str, str], tmp_path: Path, temporary: Path) -> None:
    broken = {**env, "INFERENCE_WORKER__HOLD_S": "-1"}
    done = run("--seconds", "2", env=broken, cwd=tmp_path)
    assert done.returncode == 7
    assert "worker.hold_s" in done.stderr
    assert not processes_of(temporary)
    assert not list(temporary.iterdir())


def test_a_configured_broker_that_is_away_is_an_error(env: Mapping[str, str], tmp_path: Path) -> None:
    done = run(env={**env, "INFERENCE_BROKER__URL": "amqp://127.0.0.1:1//"}, cwd=tmp_path)
    assert done.returncode == 5
    assert "the configured one" in done.stderr


def test_without_the_model_it_says_how_to_get_it(env: Mapping[str, str], tmp_path: Path) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    code = "import sys; sys.modules['magika'] = None; from inference_tasks.cli import main; main(['demo'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7
    assert 'pip install "inference-tasks[demo]"' in done.stderr
