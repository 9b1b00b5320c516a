"""`inference-tasks top` on a real terminal beside a real worker, and its JSON beside what Redis and Prometheus say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis as redis_client

from inference_tasks.app import inference_of
from inference_tasks.errors import QueueFullError, TierPausedError
from inference_tasks.state.switches import Action
from tests.support import fake_gpu
from tests.support.brokers import until
from tests.support.processes import LoggedProcess, environment
from tests.support.prometheus import scraped
from tests.support.proxy import FaultProxy
from tests.support.rig import Rig, task
from tests.support.terminal import ENTER_FULL_SCREEN, LEAVE_FULL_SCREEN, Terminal

APP = ("-A", "tests.support.faulty_app:app")
TIERS = ("realtime", "batch", "offline")


@pytest.fixture
def gpu_worker(rig: Rig) -> Iterator[LoggedProcess]:
    """A worker on a made-up GPU, with two slots."""
    fake_gpu.install(rig.directory)
    with rig_process(rig, "worker", *APP, "--gpu", "0", "--pool", "threads", "--slots", "2") as worker:
        worker.wait_for(" ready.")
        yield worker


def rig_process(rig: Rig, *arguments: str) -> LoggedProcess:
    argv = [sys.executable, "-m", "inference_tasks.cli", *arguments]
    env = environment(rig.directory, rig.env(state={"lease_s": 3}))
    return LoggedProcess(argv, log=rig.directory / f"{arguments[0]}.log", env=env, directory=rig.directory)


def once(rig: Rig) -> dict[str, Any]:
    argv = [sys.executable, "-m", "inference_tasks.cli", "top", *APP, "--once", "--json"]
    env = environment(rig.directory, rig.env())
    done = subprocess.run(argv, env=env, cwd=rig.directory, capture_output=True, text=True, check=True, timeout=60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_tiers_workers_and_gpus_are_drawn_and_keys_pause_resume_and_drain(rig: Rig, gpu_worker: LoggedProcess) -> None:
    app, gate = rig.app(), rig.gate()
    store = inference_of(app).store
    task(app, "gated.batch").submit(0, str(gate))
    rig.wait_started(0)
    with Terminal("top", *APP, directory=rig.directory, env=rig.env()) as terminal:
        terminal.until("realtime", "offline", "gated.batch", "1 of 2", "gpu0", "8.0 of 16.0 GiB", "25.0%")
        terminal.until("72.7%", "dead letters: 0", "refused")  # 8 of 11
        assert ENTER_FULL_SCREEN in terminal.output
        (beat,) = store.workers()

        # A slip of the finger does nothing.
        terminal.press("2p")
        terminal.until("pause tier:batch? y: yes")
        terminal.press("x")
        terminal.until("q: quit")
        assert not store.switches()

        terminal.press("py")
        terminal.until("tier:batch is paused", "paused")
        (switch,) = store.switches()
        assert (switch.target, switch.action) == ("tier:batch", Action.PAUSE)
        terminal.press("ry")
        terminal.until("tier:batch is resumed")
        assert not store.switches()
        terminal.press("ry")
        terminal.until("tier:batch was neither paused nor drained")

        # A refusal is seen too.
        terminal.press("2d")
        terminal.until("drain tier:batch? y: yes")
        terminal.press("y")
        terminal.until("tier:batch takes nothing new", "refuses")
        with pytest.raises(TierPausedError):
            task(app, "step.batch").submit(1)
        terminal.until("refused lately: 1 of batch (paused)")
        terminal.press("ry")
        terminal.until("tier:batch is resumed")

        # Below the tiers are the workers.
        terminal.press("\x1b[B\x1b[Bd")
        terminal.until(f"drain worker:{beat.node}? y: yes")
        terminal.press("y")
        terminal.until(f"worker:{beat.node} takes nothing new", "draining")
        log = store.operator_log(10)
        assert [(one.action, one.target) for one in log] == [
            ("drain", f"worker:{beat.node}"),
            ("resume", "tier:batch"),
            ("drain", "tier:batch"),
            ("resume", "tier:batch"),
            ("pause", "tier:batch"),
        ]
        assert {one.because for one in log} == {"in top"}
        assert all("@" in one.by for one in log)

        assert not terminal.is_as_before()
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_as_before()
        assert LEAVE_FULL_SCREEN in terminal.output
        assert "Traceback" not in terminal.output
    gate.open()


def test_a_kill_leaves_the_terminal_as_it_was(rig: Rig) -> None:
    with Terminal("top", *APP, directory=rig.directory, env=rig.env(), width=80, height=24) as terminal:
        terminal.until("no worker runs", "realtime")
        terminal.terminate()
        assert terminal.end() == 143
        assert terminal.is_as_before()
        assert LEAVE_FULL_SCREEN in terminal.output


def test_while_redis_is_away_it_says_so_and_goes_on_when_it_is_back(
    rig: Rig, redis_proxy: FaultProxy, request: pytest.FixtureRequest
) -> None:
    url = str(inference_of(rig.app()).settings.state.url)
    through = re.sub(r":\d+/", f":{redis_proxy.port}/", url)
    with Terminal("top", *APP, directory=rig.directory, env=rig.env(state={"url": through})) as terminal:
        terminal.until("no worker runs")
        redis_proxy.down()
        terminal.press("k")
        terminal.until("state store")
        redis_proxy.resume()
        terminal.press("2p")
        terminal.until("pause tier:batch? y: yes")
        terminal.press("y")
        terminal.until("tier:batch is paused")
        terminal.press("q")
        assert terminal.end() == 0


def test_one_look_in_json_is_what_redis_and_prometheus_say(rig: Rig, gpu_worker: LoggedProcess) -> None:
    app, gate = rig.app(), rig.gate()
    inference = inference_of(app)
    for tier in TIERS:
        for _ in range(3):
            task(app, f"step.{tier}").submit(0)
    rig_done = [task(app, "tried.batch").submit(1, ["permanent"])]
    until(lambda: all(one.status().state == "failed" for one in rig_done), "one has failed")
    until(lambda: inference.store.dead_count() == 1, "it is a dead letter")
    for number in (1, 2):
        task(app, "gated.realtime").submit(number, str(gate))
    rig.wait_started(1, 2)
    for tier, count in zip(TIERS, (1, 2, 3), strict=True):
        for _ in range(count):
            task(app, f"gated.{tier}").submit(9, str(gate))
    inference.store.switch("tier:offline", Action.REFUSE, by="ann", because="a new model")
    with pytest.raises(TierPausedError):
        task(app, "step.offline").submit(7)
    with rig_process(rig, "maintenance", *APP, "--metrics-port", "0") as maintenance:
        told = re.search(r"Metrics on (http://[^/]+)/metrics", maintenance.wait_for("Metrics on http://"))
        assert told is not None
        metrics: dict[tuple[str, ...], float] = {}
        found: dict[str, Any] = {}

        def is_settled() -> bool:
            """Nothing moves any more: both looks, and the heartbeats below them, tell of the same moment."""
            metrics.clear()
            metrics.update(scraped(f"{told[1]}/metrics"))
            found.update(once(rig))
            running = [tier["running"] for tier in found["tiers"]]
            return running == [2, 0, 0] and all(
                metrics.get(("inference_queue_messages", tier["tier"], "running")) == tier["running"]
                for tier in found["tiers"]
            )

        until(is_settled, "both have seen what runs")
        # A little later by the clock, the same otherwise.
        for tier in found["tiers"]:
            name = tier["tier"]
            for place, number in {**tier["ready_by_lane"], "parked": tier["parked"], "dead": tier["dead"]}.items():
                assert metrics["inference_queue_messages", name, place] == number, (name, place)
            for metric, field in (
                ("inference_queue_bound", "bound"),
                ("inference_tier_share_promised_ratio", "promised"),
                ("inference_tier_workers", "workers"),
                ("inference_tier_slots", "slots"),
            ):
                assert metrics[metric, name] == pytest.approx(tier[field]), metric
            for quantile, field in (("0.5", "wait_p50_s"), ("0.99", "wait_p99_s"), ("1", "longest_wait_s")):
                assert metrics["inference_tier_wait_seconds", name, quantile] == pytest.approx(tier[field])
            assert metrics["inference_tier_share_ratio", name, "served"] == pytest.approx(tier["share"], abs=0.02)
            assert 0 < metrics["inference_queue_oldest_seconds", name] <= tier["oldest_s"] + 1
        assert metrics[("inference_dead_letters",)] == found["dead"] == 1
        assert [metrics["inference_tier_refusing", tier] for tier in TIERS] == [0, 0, 1]
        for tier, counts in found["accounts"]["refused"].items():
            for reason, number in counts.items():
                assert metrics["inference_tasks_refused_total", tier, reason] == number
        (beat,) = found["workers"]
        named = re.sub("-[0-9a-f]{6}@", "@", beat["node"])
        for metric, field in (
            ("inference_gpu_memory_used_bytes", "gpu_memory_used_bytes"),
            ("inference_gpu_memory_total_bytes", "gpu_memory_total_bytes"),
            ("inference_gpu_utilization_ratio", "gpu_utilization"),
            ("inference_worker_slots", "slots"),
            ("inference_worker_busy_slots", "busy"),
        ):
            assert metrics[metric, named] == beat[field], metric
        maintenance.terminate()

    assert [tier["ready"] for tier in found["tiers"]] == [1, 2, 3]
    prefix = inference.settings.state.prefix
    with redis_client.Redis.from_url(str(inference.settings.state.url), decode_responses=True) as client:
        for tier in found["tiers"]:
            queue = inference.queue_by_lane[tier["tier"], "fresh"]
            assert client.zcard(f"{prefix}ready:{queue}") == tier["ready_by_lane"]["fresh"]
        assert client.zcard(f"{prefix}dead") == found["dead"]
    (worker,) = found["workers"]
    assert {one["task"] for one in worker["running"]} == {"gated.realtime"}
    assert (worker["gpu_memory_used_bytes"], worker["gpu_memory_total_bytes"]) == (8 * 2**30, 16 * 2**30)
    assert worker["gpu_utilization"] == 0.25
    (dead,) = found["dead_letters"]
    assert (dead["id"], dead["tier"], dead["reason"]) == (str(rig_done[0].id), "batch", "permanent error")
    assert [(one["action"], one["by"]) for one in found["operator_log"]] == [("refuse", "ann")]
    assert [one["target"] for one in found["switches"]] == ["tier:offline"]
    assert found["accounts"]["refused"] == {"offline": {"paused": 1}}
    assert found["refused_lately"] is None
    assert str(gate) not in json.dumps(found)
    gate.open()


def test_what_a_full_queue_refuses_is_counted(rig: Rig) -> None:
    app = rig.app(tiers={"offline": {"bound": 2}})
    report = task(app, "step.offline").submit_many([(number,) for number in range(500)])
    assert report.refused
    with pytest.raises(QueueFullError):
        task(app, "step.offline").submit(1)
    accounts = inference_of(app).store.accounts()
    assert accounts.refused == {"offline": {"full": len(report.refused) + 1}}
    assert accounts.by_tier["offline"]["admitted"] == len(report.accepted)
