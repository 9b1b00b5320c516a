"""The Compose file, as far as it can be judged without an engine: its form, its settings, its commands."""

from __future__ import annotations

import re
from typing import Any

import pytest

from inference_tasks.settings import load_settings
from tests.examples.documents import ROOT, problem, text

yaml: Any = pytest.importorskip("yaml")

KNOWN = frozenset({"build", "image", "hostname", "command", "environment", "ports", "volumes", "healthcheck"}) | {
    "depends_on",
    "restart",
    "working_dir",
    "stop_grace_period",
}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(text("docker-compose.yml"))["services"]
    return found


def filled(value: str) -> str:
    """The value with its variables replaced by their defaults."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_there_is_what_the_system_needs_and_every_service_tells_its_health(services: dict[str, Any]) -> None:
    assert services.keys() == {"rabbitmq", "valkey", "worker", "maintenance", "flower"}
    for name, service in services.items():
        assert service.keys() <= KNOWN, name
        check = service["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        assert {"interval", "timeout", "retries"} <= check.keys()
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert other in services


def test_images_are_pinned_and_ports_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    bases = re.findall(r"^FROM (\S+)", "\n".join(_inline(one) for one in services.values()), re.MULTILINE)
    for image in [*(one["image"] for one in services.values()), *bases]:
        assert re.search(r":\d+\.\d+\.\d+(-\w+)*$", image), image
    assert all(port.startswith("127.0.0.1:") for one in services.values() for port in one.get("ports", ()))


def test_settings_and_commands_of_the_services_exist(services: dict[str, Any]) -> None:
    for name in ("worker", "maintenance", "flower"):
        environ = {key: filled(value) for key, value in services[name]["environment"].items()}
        settings = load_settings({}, environ, None)
        assert settings.broker.url == "amqp://inference:development@rabbitmq:5672/"
        assert settings.state.url == "redis://:development@valkey:6379/0"
        assert problem(services[name]["command"]) is None
        folder = services[name]["working_dir"].removeprefix("/app/")
        assert (ROOT / folder / "vision.py").is_file()
    (conf,) = (word for word in services["flower"]["command"] if word.startswith("--conf="))
    assert (ROOT / conf.removeprefix("--conf=/app/")).is_file()
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"]


def _inline(service: dict[str, Any]) -> str:
    return str(service.get("build", {}).get("dockerfile_inline", ""))
