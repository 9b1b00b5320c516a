"""`probe` on a real broker, Redis and workers: whether a task gets through each tier, and how long it waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from inference_tasks import InferenceApp, QueueFullError, adopt
from inference_tasks.app import inference_of
from inference_tasks.catalogue import own_tasks
from inference_tasks.cli import main
from inference_tasks.observe.probe import probe
from inference_tasks.observe.switching import pause
from inference_tasks.probing import PROBE
from tests.support.brokers import until
from tests.support.dead_letters import settings
from tests.support.rig import POOLS, Rig, task

TIERS = ("realtime", "batch", "offline")


@pytest.fixture
def app(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> InferenceApp:
    app = rig.app()
    for name, value in settings(rig).items():
        monkeypatch.setenv(name, value)
    return app


def run(*arguments: str) -> Result:
    """By the settings alone: no app of the user's is needed."""
    return CliRunner().invoke(main, ["probe", *arguments], catch_exceptions=False)


def said(result: Result) -> Mapping[str, Any]:
    return {one["tier"]: one for one in json.loads(result.stdout)}


@pytest.mark.parametrize("pool", POOLS)
def test_a_probe_goes_through_every_tier_and_tells_its_waits(rig: Rig, app: InferenceApp, pool: str) -> None:
    with rig.worker(*POOLS[pool]):
        result = run("--json", "--timeout", "60")
        assert result.exit_code == 0, result.output
        found = said(result)
        assert list(found) == list(TIERS)
        for one in found.values():
            assert (one["outcome"], one["worker"], one["reason"]) == ("ok", "worker@localhost", "")
            assert 0 <= one["wait_s"] <= one["total_s"] + 0.1
        text = run("--tier", "P0").stdout
        assert "realtime" in text
        assert "batch" not in text
    # It is no task of the user's.
    accounts = inference_of(app).store.accounts().by_tier
    assert {tier: accounts[tier]["success"] for tier in TIERS} == {"realtime": 2, "batch": 1, "offline": 1}


def test_a_tier_that_nobody_serves_is_late_and_says_why_and_the_probe_never_runs(rig: Rig, app: InferenceApp) -> None:
    with rig.worker("--pool", "solo", worker={"tiers": ["realtime", "batch"]}, state={"lease_s": 3}):
        until(lambda: bool(inference_of(app).store.workers()), "the worker is known")
        result = run("--json", "--timeout", "5")
        assert result.exit_code == 124
        found = said(result)
        assert [found[tier]["outcome"] for tier in TIERS] == ["ok", "ok", "timeout"]
        assert "no live worker serves offline" in found["offline"]["reason"]
        assert app.status(found["offline"]["id"]).state == "cancelled"


def test_a_paused_tier_is_late_or_refuses_as_the_operator_wants(rig: Rig, app: InferenceApp) -> None:
    pause(inference_of(app), "offline", by="ann", because="new model")
    late = run("--json", "--tier", "offline", "--timeout", "0.5")
    assert late.exit_code == 124
    assert "offline was paused" in said(late)["offline"]["reason"]
    pause(inference_of(app), "offline", by="ann", refuse=True)
    refused = run("--json", "--tier", "offline")
    assert refused.exit_code == 4
    assert (said(refused)["offline"]["outcome"], said(refused)["offline"]["error"]) == ("refused", "TierPausedError")
    assert run("--tier", "offlin").exit_code == 2


def submit_until_refused(app: InferenceApp) -> None:
    for number in range(20):
        task(app, "step.realtime").submit(number)


def test_a_full_tier_refuses(rig: Rig) -> None:
    app = rig.app(tiers={"realtime": {"bound": 1}})
    with pytest.raises(QueueFullError):
        submit_until_refused(app)
    (found,) = probe(inference_of(app), ["realtime"], timeout_s=1)
    assert (found.outcome, type(found.error).__name__) == ("refused", "QueueFullError")


def test_without_a_broker_it_says_so_by_its_exit_code(app: InferenceApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_BROKER__URL", "amqp://guest:guest@127.0.0.1:1//")
    result = run("--json", "--tier", "realtime", "--timeout", "5")
    assert result.exit_code == 5
    assert said(result)["realtime"]["outcome"] == "refused"


def test_a_plain_celery_app_that_was_adopted_knows_the_probe_too() -> None:
    plain = Celery("plain", broker="amqp://guest:guest@127.0.0.1:1//", set_as_current=False)
    adopt(plain, state={"url": "redis://127.0.0.1:1/0"})
    assert PROBE in plain.tasks
    assert PROBE not in own_tasks(plain)
