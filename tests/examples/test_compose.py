"""The Compose file and the image, as far as they can be judged without an engine: form, settings, commands, checks."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from inference_tasks import InferenceApp
from inference_tasks.app import inference_of
from inference_tasks.cli.dev import PROCESSES, Stack
from inference_tasks.gateway.keys import read_keys
from inference_tasks.settings import load_settings
from tests.examples.documents import ROOT, parsed, text

yaml: Any = pytest.importorskip("yaml")

OURS = ("gateway", "worker", "maintenance", "flower")
OTHERS = ("rabbitmq", "valkey", "prometheus", "grafana")
# What the file format knows, and of what kind; of its schema only what is used here.
SERVICE = {
    "build": str,
    "command": list,
    "configs": list,
    "depends_on": dict,
    "deploy": dict,
    "environment": dict,
    "healthcheck": dict,
    "hostname": str,
    "image": str,
    "ports": list,
    "restart": str,
    "stop_grace_period": str,
    "volumes": list,
}
HEALTHCHECK = {"test", "interval", "timeout", "retries", "start_period"}
# What the images hold; ours is the one of the Dockerfile.
PROGRAMS = {"rabbitmq": "rabbitmq-diagnostics", "valkey": "valkey-cli", "prometheus": "wget", "grafana": "wget"}
PINNED = re.compile(r":v?\d+\.\d+\.\d+(-\w+)*$")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text("docker-compose.yml"))
    return found


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def filled(value: str) -> str:
    """The value with its variables replaced by their defaults."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def content(compose: dict[str, Any], name: str) -> str:
    return filled(compose["configs"][name]["content"])


def test_the_file_has_the_form_of_a_compose_file(compose: dict[str, Any], services: dict[str, Any]) -> None:
    assert {name for name in compose if not name.startswith("x-")} == {"services", "configs", "volumes"}
    assert services.keys() == {*OURS, *OTHERS}
    for name, service in services.items():
        assert service.keys() <= SERVICE.keys(), name
        for key, value in service.items():
            assert isinstance(value, SERVICE[key]), f"{name}.{key}"
        assert all(isinstance(word, str) for word in service.get("command", ())), name
        assert all(isinstance(value, str) for value in service.get("environment", {}).values()), name
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            assert (ROOT / source).exists() if source.startswith("./") else source in compose["volumes"], volume
            assert target.startswith("/")
        for one in service.get("configs", ()):
            assert one.keys() == {"source", "target"}
            assert one["source"] in compose["configs"]
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert other in services


def test_the_schema_of_compose_files_has_nothing_to_say() -> None:
    # The tool brings the schema along; it asks nobody.
    argv = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / "docker-compose.yml")]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_are_pinned_and_ports_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    bases = re.findall(r"^FROM (\S+)", text("Dockerfile"), re.MULTILINE)
    for image in [*(one["image"] for one in services.values()), *bases]:
        assert PINNED.search(image), image
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))


def test_every_password_comes_from_the_environment_or_is_one_for_development(services: dict[str, Any]) -> None:
    secret = re.compile(r"PASS|AUTH$|AUTH_|URL$|SECRET|KEY")
    found = {
        f"{name}.{key}": value
        for name, service in services.items()
        for key, value in service.get("environment", {}).items()
        if secret.search(key) and value.lower() != "true" and key != "GF_AUTH_ANONYMOUS_ORG_ROLE"
    }
    assert len(found) >= 10
    assert not [name for name, value in found.items() if not re.search(r"\$\{\w+:-development\}", value)]
    words = [word for service in services.values() for word in service.get("command", ())]
    assert not [word for word in words if "development" in word and not re.fullmatch(r"\$\{\w+:-development\}", word)]
    everything = text("docker-compose.yml")
    assert not re.search(r"guest|admin:admin|changeme", everything)
    others = [path for path in ("Dockerfile", "config/inference.toml") if "development}" in text(path)]
    assert not others


def test_the_example_of_the_environment_names_every_variable() -> None:
    named = re.findall(r"^(\w+)=$", text(".env.example"), re.MULTILINE)
    assert sorted(named) == sorted(set(re.findall(r"\$\{(\w+):-", text("docker-compose.yml"))))


def test_settings_and_commands_of_our_services_are_right(services: dict[str, Any]) -> None:
    for name in OURS:
        environ = {key: filled(value) for key, value in services[name]["environment"].items()}
        settings = load_settings({}, environ, None)
        assert settings.broker.url == "amqp://inference:development@rabbitmq:5672/"
        assert settings.state.url == "redis://:development@valkey:6379/0"
        assert services[name]["command"][1] == name
        told = parsed(services[name]["command"])
        assert told
        mounted = dict(volume.split(":")[:2] for volume in services[name]["volumes"])
        assert mounted == {"./tests/examples": "/app"}
        assert (ROOT / "tests/examples/vision.py").is_file()
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"]
    assert services["worker"]["deploy"]["replicas"] == 2


def test_the_worker_with_a_gpu_that_is_commented_out_is_right_too(services: dict[str, Any]) -> None:
    lines = text("docker-compose.yml").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  # worker-gpu0:"))
    block = []
    for line in lines[start:]:
        if not line.startswith("  # "):
            break
        block.append(line.replace("  # ", "  ", 1))
    head = "\n".join(lines[: lines.index("services:") + 1])
    gpu = yaml.safe_load(f"{head}\n" + "\n".join(block))["services"]["worker-gpu0"]
    assert gpu.keys() <= SERVICE.keys()
    assert parsed(gpu["command"])["gpu"] == "all"
    assert gpu["healthcheck"] == services["worker"]["healthcheck"]


def test_every_health_check_asks_what_is_there(services: dict[str, Any]) -> None:
    for name, service in services.items():
        check = service["healthcheck"]
        assert {"test", "interval", "timeout", "retries"} <= check.keys() <= HEALTHCHECK
        kind, program, *words = check["test"]
        assert kind == "CMD"
        assert program == PROGRAMS.get(name, "python"), name
        if name in OURS:
            compile(words[1], name, "exec")
            ((port, path),) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", words[1])
            told = [word.rpartition(":")[2] for word in service["command"]]
            assert port in told, name
            expected = {"gateway": "/readyz", "flower": "/healthcheck"}
            assert path == expected.get(name, "/healthz")


def test_the_key_of_the_gateway_is_the_one_that_the_file_names(compose: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(content(compose, "gateway-keys"))
    (key,) = read_keys(file)
    assert "itk_development" in text("docker-compose.yml").partition("\nx-app")[0]
    assert key.sha256 == hashlib.sha256(b"itk_development").hexdigest()
    jobs = yaml.safe_load(content(compose, "prometheus"))["scrape_configs"]
    (gateway,) = [job for job in jobs if job["job_name"] == "inference-gateway"]
    assert hashlib.sha256(gateway["authorization"]["credentials"].encode()).hexdigest() == key.sha256


def test_prometheus_and_grafana_find_what_they_are_to_show(
    compose: dict[str, Any], services: dict[str, Any], tmp_path: Path
) -> None:
    told = content(compose, "prometheus")
    config = yaml.safe_load(told)
    asked = [
        target for job in config["scrape_configs"] for one in job.get("static_configs", ()) for target in one["targets"]
    ]
    dns = [one for job in config["scrape_configs"] for one in job.get("dns_sd_configs", ())]
    asked += [f"{name}:{one['port']}" for one in dns for name in one["names"]]
    for target in asked:
        host, _, port = target.partition(":")
        listens = [word.rpartition(":")[2] for word in services[host].get("command", ())]
        # RabbitMQ's own, which its image switches on.
        assert port in listens or target == "rabbitmq:15692", target
    inside, outside = "/etc/prometheus/inference", ROOT / "config/prometheus"
    for rules in config["rule_files"]:
        assert (outside / rules.removeprefix(f"{inside}/")).is_file(), rules
    (source,) = yaml.safe_load(content(compose, "grafana-data-source"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load(content(compose, "grafana-dashboards"))["providers"]
    mounted = {target: host for host, target in (one.split(":")[:2] for one in services["grafana"]["volumes"])}
    assert list((ROOT / mounted[provider["options"]["path"]]).glob("*.json"))
    if (promtool := shutil.which("promtool")) is not None:
        file = tmp_path / "prometheus.yml"
        file.write_text(told.replace(inside, str(outside)))
        done = subprocess.run(
            [promtool, "check", "config", file], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_dev_runs_the_same_commands_without_docker(services: dict[str, Any]) -> None:
    app = InferenceApp("same", set_as_current=False, broker={"url": "amqp://localhost//"})
    stack = Stack("vision:app", inference_of(app), "none", 2, 5555, 8000, (9100, 9101))
    plans = {plan.name: ["inference-tasks", *plan.argv[3:]] for make in PROCESSES if (plan := make(stack))}
    assert plans.keys() == set(OURS)
    # Who starts it; where it listens, and so what it needs to be safe; and that nothing is missing for Flower.
    differ = {"supervised_by", "host", "address", "keys", "no_broker_tab", "metrics_port"}
    for name in OURS:
        ours, theirs = parsed(plans[name]), parsed(services[name]["command"])
        changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        assert changed <= differ, name
        assert bool(ours.get("metrics_port")) == bool(theirs.get("metrics_port"))


def test_the_image_is_built_from_files_that_exist_and_holds_the_package(tmp_path: Path) -> None:
    dockerfile = text("Dockerfile")
    kept = [line[1:] for line in text(".dockerignore").splitlines() if line.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert sorted(copied) == sorted(kept)
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", dockerfile, re.MULTILINE)
    project = tomllib.loads(text("pyproject.toml"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert "\nUSER app\n" in dockerfile
    for source in copied:
        place = ROOT / source
        (shutil.copytree if place.is_dir() else shutil.copy)(place, tmp_path / source)
    argv = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"inference_tasks/state/scripts/claim.lua", "inference_tasks/gateway/page.html"} <= set(names)
