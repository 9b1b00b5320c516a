"""The examples for systemd and Kubernetes: what they name exists, and what checks them has nothing to say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from inference_tasks.observe.fleet_metrics import FLEET_METRICS
from inference_tasks.settings import load_settings
from tests.examples.documents import ROOT, parsed, text

yaml: Any = pytest.importorskip("yaml")

UNITS = sorted(path.name for path in (ROOT / "config/systemd").glob("*.service"))
PROGRAM = "/opt/inference-tasks/bin/inference-tasks"


def lines_of(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text(f"config/systemd/{unit}"), re.MULTILINE)


def words_of(unit: str) -> list[str]:
    (line,) = lines_of(unit, "ExecStart")
    filled = line.replace("${INFERENCE_APP}", "vision:app").replace("%i", "0").replace("%d", "/run/credentials")
    return filled.replace(PROGRAM, "inference-tasks").split()


def test_there_is_a_unit_for_each_part() -> None:
    assert {words_of(unit)[1] for unit in UNITS} == {"worker", "maintenance", "gateway", "flower"}
    assert lines_of("inference-tasks-worker@.service", "ExecStart")[0].count("%i") == 2


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_starts_a_command_that_exists_and_waits_long_enough_for_its_end(unit: str) -> None:
    told = parsed(words_of(unit))
    (stop_s,) = lines_of(unit, "TimeoutStopSec")
    kill_after_s = told.get("kill_after_s") or 0.0
    assert isinstance(kill_after_s, float)
    assert float(stop_s) > kill_after_s
    # The main process alone is told: it ends the others in order.
    assert lines_of(unit, "KillMode") == ["mixed"]
    assert lines_of(unit, "RestartPreventExitStatus") == ["2 7"]
    assert lines_of(unit, "StartLimitIntervalSec") == ["0"]


def test_the_example_of_the_environment_holds_settings() -> None:
    pairs = re.findall(r"^(\w+)=(.*)$", text("config/systemd/env.example"), re.MULTILINE)
    environ = {name: value for name, value in pairs if name != "INFERENCE_APP"}
    assert load_settings({}, environ, None).broker.url == environ["INFERENCE_BROKER__URL"]


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("systemd-analyze is not installed")
    # It asks whether the program is there; no running systemd is needed.
    program = tmp_path / "inference-tasks"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    names = []
    for source in (ROOT / "config/systemd").iterdir():
        if source.suffix in (".service", ".target"):
            (tmp_path / source.name).write_text(source.read_text().replace(PROGRAM, str(program)))
            names.append(f"./{source.name.replace('@.', '@0.')}")
    done = subprocess.run(
        [analyze, "verify", *names], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text(f"config/kubernetes/{name}")))


def test_the_deployments_run_our_commands_with_probes_that_are_answered() -> None:
    found = documents("inference-tasks.yaml")
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in found if one["kind"] == "Deployment"}
    assert pods.keys() == {f"inference-{name}" for name in ("worker", "maintenance", "gateway", "flower")}
    for one in found:
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == one["spec"]["template"]["metadata"]["labels"]
    for name, pod in pods.items():
        (container,) = pod["containers"]
        command = container["command"]
        told = parsed(command)
        assert f"inference-{command[1]}" == name
        assert container["envFrom"] == [{"secretRef": {"name": "inference-tasks"}}]
        assert container["securityContext"]["runAsNonRoot"]
        assert not container.get("env")
        (port,) = container["ports"]
        assert str(port["containerPort"]) in [word.rpartition(":")[2] for word in command]
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert probes
        assert all(probe["httpGet"]["port"] == port["name"] for probe in probes)
        if command[1] == "worker":
            assert pod["terminationGracePeriodSeconds"] > float(str(told["kill_after_s"]))
    (image,) = {pod["containers"][0]["image"] for pod in pods.values()}
    assert f"image: {image}\n" in text("docker-compose.yml")


def test_keda_scales_the_workers_on_metrics_that_exist() -> None:
    (scaled,) = documents("keda.yaml")
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] == "inference-worker"
    assert 0 < spec["minReplicaCount"] < spec["maxReplicaCount"]
    known = {metric.name: metric for metric in FLEET_METRICS}
    asked = set()
    for trigger in spec["triggers"]:
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "Value")
        query = trigger["metadata"]["query"]
        ((name, tier),) = re.findall(r'(inference_\w+)\{tier="(\w+)"\}', query)
        assert known[name].labels == ("tier",)
        assert float(trigger["metadata"]["threshold"]) > 0
        asked.add((name, tier))
    for tier in ("realtime", "batch"):
        assert {("inference_queue_oldest_seconds", tier), ("inference_queue_expected_wait_seconds", tier)} <= asked
