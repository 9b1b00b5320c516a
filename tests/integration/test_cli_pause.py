"""`pause`, `resume`, `drain` and `switches` on a real Redis, RabbitMQ and worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from inference_tasks.app import inference_of
from inference_tasks.cli import main
from tests.support.rig import Rig, task

Cli = Callable[..., Result]


@pytest.fixture
def cli(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs commands by the settings alone, as an operator does."""
    settings = inference_of(rig.app()).settings
    monkeypatch.setenv("INFERENCE_BROKER__URL", str(settings.broker.url))
    monkeypatch.setenv("INFERENCE_STATE__URL", str(settings.state.url))
    monkeypatch.setenv("INFERENCE_STATE__PREFIX", settings.state.prefix)
    monkeypatch.setenv("INFERENCE_NAMESPACE", settings.namespace)
    return lambda *arguments: CliRunner().invoke(main, arguments, catch_exceptions=False)


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_each_switch_is_told_listed_and_logged(cli: Cli) -> None:
    paused = answer(cli("pause", "P1", "--because", "new model", "--by", "ann", "--json"))
    assert {name: paused[name] for name in ("target", "action", "by", "because")} == {
        "target": "tier:batch", "action": "pause", "by": "ann", "because": "new model"
    }  # fmt: skip
    refused = cli("pause", "offline", "--refuse")
    assert refused.stdout.startswith("tier:offline is paused: nothing of it starts, and submits are refused")
    assert answer(cli("drain", "realtime.fresh", "--json"))["is_drained"] is True
    shown = answer(cli("switches", "--json"))
    assert {one["target"]: one["action"] for one in shown["switches"]} == {
        "tier:batch": "pause", "tier:offline": "refuse", "lane:realtime.fresh": "drain"
    }  # fmt: skip
    assert "tier:batch is switched off (pause) by ann" in cli("tiers").stdout
    assert answer(cli("resume", "batch", "--by", "bob", "--json"))["was"]["by"] == "ann"
    assert "neither paused nor drained" in cli("resume", "batch").stdout
    log = answer(cli("switches", "--json"))["log"]
    assert [(line["action"], line["target"]) for line in log] == [
        ("resume", "tier:batch"),
        ("drain", "lane:realtime.fresh"),
        ("refuse", "tier:offline"),
        ("pause", "tier:batch"),
    ]
    assert (log[0]["by"], "@" in log[1]["by"]) == ("bob", True)
    text = cli("switches").stdout
    assert "off now" in text
    assert "new model" in text


def test_what_there_is_not_is_said_with_the_nearest_that_there_is(cli: Cli) -> None:
    wrong = cli("pause", "batsch")
    assert wrong.exit_code == 2
    assert "Did you mean 'batch'?" in wrong.stderr
    assert answer(cli("switches", "--json")) == {"switches": [], "log": []}
    assert "nothing is paused" in cli("switches").stdout
    # A worker that is not there yet can be named in full.
    assert answer(cli("drain", "worker:gpu-7@host", "--json"))["target"] == "worker:gpu-7@host"
    assert answer(cli("resume", "gpu-7@host", "--json"))["resumed"] is True


def test_a_drain_that_is_waited_for_returns_when_the_last_task_has_ended(rig: Rig, cli: Cli) -> None:
    app, gate = rig.app(), rig.gate()
    with rig.worker(name="one", state={"lease_s": 3}):
        running = task(app, "gated.batch").submit(0, str(gate))
        rig.wait_started(0)
        assert cli("drain", "one@localhost", "--wait", "--timeout", "0.1").exit_code == 124
        assert cli("drain", "batch", "--wait", "--timeout", "0.1").exit_code == 124
        gate.open()
        assert answer(cli("drain", "one", "--wait", "--timeout", "60", "--json"))["is_drained"] is True
        assert running.status().state == "success"
        assert answer(cli("drain", "batch", "--wait", "--timeout", "60", "--json"))["is_drained"] is True
