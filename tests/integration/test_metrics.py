"""What Prometheus is told: by each worker of its own work, by the maintenance worker of the whole deployment."""

from __future__ import annotations

import os
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_tasks.app import inference_of
from inference_tasks.cli.exit import DEPLOYMENT
from inference_tasks.observe import fleet
from inference_tasks.observe.exporter import FleetExporter, catalogue
from inference_tasks.observe.exposition import Address
from tests.support.aging import grow_old
from tests.support.brokers import until
from tests.support.processes import LoggedProcess
from tests.support.rig import Rig, task
from tests.support.servers import free_ports

TIERS = ("realtime", "batch", "offline")
Sample = tuple[str, frozenset[tuple[str, str]]]


def command(rig: Rig, *arguments: str, name: str, **options: Any) -> LoggedProcess:
    environment = {
        **os.environ,
        **rig.env(**options),
        "PYTHONPATH": os.pathsep.join([str(rig.directory), *(entry for entry in sys.path if entry)]),
        "PYTHONUNBUFFERED": "1",
    }
    argv = [sys.executable, "-m", "inference_tasks.cli", *arguments]
    return LoggedProcess(argv, log=rig.directory / f"{name}.log", env=environment, directory=rig.directory)


def address(process: LoggedProcess) -> str:
    log = process.wait_for("Metrics on http://")
    found = re.search(r"Metrics on (http://[^/]+)/metrics", log)
    assert found is not None
    return found[1]


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode()


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, url: str) -> None:
        status, self.text = get(f"{url}/metrics")
        assert status == 200, self.text
        self.kinds: dict[str, str] = {}
        self.numbers: dict[Sample, float] = {}
        for family in text_string_to_metric_families(self.text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            self.kinds[name] = family.type
            for sample in family.samples:
                self.numbers[sample.name, frozenset(sample.labels.items())] = sample.value

    def value(self, name: str, **labels: str) -> float:
        return self.numbers.get((name, frozenset(labels.items())), 0.0)

    def total(self, name: str, **labels: str) -> float:
        return sum(n for (one, has), n in self.numbers.items() if one == name and labels.items() <= dict(has).items())


def scraped(url: str, is_there: Callable[[Scrape], bool], what: str) -> Scrape:
    found: list[Scrape] = []

    def look() -> bool:
        found[:] = [Scrape(url)]
        return is_there(found[0])

    until(look, what)
    return found[0]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_tells_of_what_it_does(rig: Rig, pool: str) -> None:
    app = rig.app()
    for number, tier in enumerate(TIERS):
        task(app, f"step.{tier}").submit(number)
    arguments = ("worker", "-A", "tests.support.faulty_app:app", "--gpu", "none", "--pool", pool)
    with command(rig, *arguments, "--metrics-port", "0", name="worker") as worker:
        url = address(worker)
        now = scraped(
            url, lambda one: one.total("inference_tasks_ended_total", outcome="success") == 3, "three runs are told"
        )
        assert get(f"{url}/healthz") == (200, "ok\n")
        assert get(f"{url}/else")[0] == 404
        assert worker.terminate() == 0
    for tier in TIERS:
        assert now.value("inference_tasks_started_total", tier=tier, tier_first=tier, lane="fresh") == 1
        assert now.value("inference_tasks_claims_total", tier=tier, verdict="run") == 1
        assert now.value("inference_tasks_wait_seconds_count", tier_first=tier) == 1
        assert now.value("inference_tasks_picks_total", tier=tier, lane="fresh", outcome="message") == 1
        assert now.value("inference_tasks_run_seconds_bucket", task=f"step.{tier}", tier=tier, le="+Inf") == 1
        assert now.value("inference_tasks_floor_windows_total", tier=tier, outcome="violated") == 0
    assert now.total("inference_worker_info", pool=pool) == 1
    assert now.total("inference_worker_state_up") == 1
    known = {metric.name: metric.kind for metric in catalogue()}
    assert now.kinds.items() <= known.items()


def test_retries_failures_and_dead_letters_are_told(rig: Rig) -> None:
    app = rig.app()
    task(app, "tried.batch").submit(1, ["temporary", "done"])
    task(app, "tried.batch").submit(2, ["permanent"])
    task(app, "crash").submit(3)
    arguments = ("worker", "-A", "tests.support.faulty_app:app", "--gpu", "none", "--metrics-port", "0")
    with command(rig, *arguments, name="worker", worker={"max_crashes": 1}) as worker:
        now = scraped(
            address(worker),
            lambda one: (
                one.total("inference_tasks_ended_total", outcome="success") == 1
                and one.total("inference_tasks_buried_total") == 2
            ),
            "all ends are told",
        )
    assert now.value("inference_tasks_retries_total", task="tried.batch", tier="batch") == 1
    assert now.value("inference_tasks_crashes_total", task="crash", tier="batch") == 1
    outcomes = {
        outcome: now.total("inference_tasks_ended_total", task="tried.batch", outcome=outcome)
        for outcome in ("success", "failed", "retried")
    }
    assert outcomes == {"success": 1, "failed": 1, "retried": 1}
    assert now.value("inference_tasks_buried_total", tier="batch", reason="permanent error") == 1
    assert now.value("inference_tasks_buried_total", tier="batch", reason="crash limit") == 1
    # Of each task the first start alone has waited for a place.
    assert now.value("inference_tasks_wait_seconds_count", tier_first="batch") == 3


def test_a_port_in_use_is_said_and_nothing_starts(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("worker", "-A", "tests.support.faulty_app:app", "--gpu", "none", "--metrics-port", str(port))
        with command(rig, *arguments, name="worker") as worker:
            assert worker.wait() == DEPLOYMENT
            assert f"Metrics cannot be served on 127.0.0.1:{port}" in worker.log


def consecutive_ports() -> int:
    """Return a free port with a free one after it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def test_of_several_workers_each_takes_the_next_port(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    app, port = rig.app(), consecutive_ports()
    for number in range(8):
        task(app, "step.batch").submit(number)
    arguments = ("worker", "-A", "tests.support.faulty_app:app", "--gpu", "all", "--pool", "threads")
    with command(rig, *arguments, "--metrics-port", str(port), name="worker") as workers:
        workers.wait_for("Metrics on http://", count=2)
        urls = [f"http://127.0.0.1:{port + place}" for place in range(2)]
        until(
            lambda: sum(Scrape(url).total("inference_tasks_ended_total") for url in urls) == 8,
            "eight tasks are told, by two workers together",
            60,
        )
        assert [Scrape(url).total("inference_worker_info", gpu=f"gpu{place}") for place, url in enumerate(urls)] == [
            1,
            1,
        ]
        assert workers.terminate() == 0


def test_the_maintenance_worker_tells_of_the_whole_deployment_as_the_fleet_is(rig: Rig) -> None:
    app = rig.app()
    gate = rig.gate()
    for number, tier in enumerate(TIERS * 2):
        task(app, f"gated.{tier}").submit(number, str(gate))
    arguments = ("maintenance", "-A", "tests.support.faulty_app:app", "--metrics-port", "0")
    with rig.worker(), command(rig, *arguments, name="maintenance") as maintenance:
        url = address(maintenance)
        now = scraped(
            url, lambda one: one.total("inference_queue_messages", place="running") == 1, "the running task is told"
        )
        assert get(f"{url}/healthz") == (200, "ok\n")
        with inference_of(app).depths() as depths:  # type: ignore[union-attr]
            seen = fleet.read(inference_of(app), depths)
        for view in seen.tiers:
            name = view.tier
            assert now.total("inference_queue_messages", tier=name, place="fresh") == view.ready_by_lane["fresh"]
            assert now.value("inference_queue_messages", tier=name, place="running") == view.running
            assert now.value("inference_queue_bound", tier=name) == view.bound
            assert now.value("inference_queue_deepest", tier=name) >= view.ready > 0
            assert 0 < now.value("inference_queue_oldest_seconds", tier=name) <= (view.oldest_s or 0)
            assert now.value("inference_tier_share_promised_ratio", tier=name) == pytest.approx(view.promised)
            assert now.value("inference_tasks_admitted", tier=name) == 2
            assert now.value("inference_tier_workers", tier=name) == 1
        assert sum(view.running for view in seen.tiers) == 1
        (beat,) = seen.workers
        (running,) = beat.running
        assert (running.task, running.lane) == (f"gated.{running.tier}", "fresh")
        assert 0 < beat.started_at_s <= running.since_s <= beat.seen_at_s + 1
        # What starves is known too: two tiers have had no start at all.
        starved = [now.value("inference_tier_starved_seconds", tier=tier) for tier in TIERS]
        assert sum(one > 0 for one in starved) >= 2
        gate.open()
        later = scraped(
            url,
            lambda one: (
                one.total("inference_tasks_accounted", state="success") == 6
                and one.value("inference_tier_wait_seconds", tier="offline", quantile="1") > 0
                and one.total("inference_tier_share_ratio", by="served") == pytest.approx(1.0)
            ),
            "successes, waits and shares are told",
        )
        assert maintenance.terminate() == 0
    known = {metric.name: metric.kind for metric in catalogue()}
    assert {**now.kinds, **later.kinds}.items() <= known.items()
    assert "inference_tasks_started_total" not in later.kinds, "what workers count is told by workers alone"


def test_refusals_of_all_clients_are_told(rig: Rig) -> None:
    app = rig.app(tiers={"realtime": {"bound": 2, "queue_type": "classic"}})
    sent = task(app, "step.realtime").submit_many([(number,) for number in range(5)])
    assert (len(sent.accepted), len(sent.refused)) == (2, 3)
    arguments = ("maintenance", "-A", "tests.support.faulty_app:app", "--metrics-port", "0")
    with command(rig, *arguments, name="maintenance", tiers={"realtime": {"bound": 2, "queue_type": "classic"}}) as one:
        url = address(one)
        now = scraped(url, lambda seen: seen.total("inference_tasks_refused_total") == 3, "the refusals are told")
    assert now.value("inference_tasks_refused_total", tier="realtime", reason="full") == 3
    assert now.value("inference_queue_deepest", tier="realtime") == now.value("inference_queue_bound", tier="realtime")


def test_promotions_are_told(rig: Rig) -> None:
    app = rig.app()
    task_id = str(task(app, "step.offline").submit(0).id)
    grow_old(app, [task_id], 1801)
    arguments = ("maintenance", "-A", "tests.support.faulty_app:app", "--metrics-port", "0")
    with command(rig, *arguments, name="maintenance", aging={"every_s": 0.5}) as maintenance:
        url = address(maintenance)
        now = scraped(url, lambda one: one.total("inference_tasks_promoted_total") == 1, "the promotion is told")
    assert now.value("inference_tasks_promoted_total", tier_from="offline", tier_to="batch") == 1
    assert now.value("inference_exporter_up", server="broker") == 1


def test_a_server_that_is_away_is_told_and_nothing_else_of_the_fleet(rig: Rig) -> None:
    (nobody,) = free_ports(1)
    options = {"broker": {"url": f"amqp://guest:guest@127.0.0.1:{nobody}/", "connect_timeout_s": 1}}
    exporter = FleetExporter(inference_of(rig.app(**options)), Address("127.0.0.1", 0), every_s=0.1)
    exporter.start()
    try:
        url = f"http://{exporter.server.address}"
        now = scraped(url, lambda one: one.value("inference_exporter_up", server="state") == 1, "Redis is seen")
        assert now.value("inference_exporter_up", server="broker") == 0
        assert not [name for name in now.kinds if name.startswith(("inference_queue", "inference_tier"))]
        assert get(f"{url}/healthz") == (503, "no answer from: broker\n")
    finally:
        exporter.stop()
