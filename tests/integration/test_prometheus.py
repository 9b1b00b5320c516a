"""Rules and dashboard in a real Prometheus; rules by promtool's own tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from inference_tasks.app import inference_of
from inference_tasks.observe import fleet
from inference_tasks.observe.panels import ROWS
from inference_tasks.observe.rules import ALERTS, RECORDINGS
from tests.integration.test_metrics import TIERS, Scrape, address, command, get
from tests.support.brokers import until
from tests.support.prometheus import PrometheusNode, promtool
from tests.support.rig import Rig, task
from tests.support.servers import installed

ROOT = Path(__file__).parents[2]
RULES = ROOT / "config" / "prometheus" / "rules.yml"
RULE_TESTS = ROOT / "tests" / "prometheus" / "rules.test.yml"


def test_the_rules_are_valid_and_say_what_their_tests_say() -> None:
    checked = installed(lambda: promtool("check", "rules", RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in checked.stdout
    tested = promtool("test", "rules", RULE_TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_rule_has_a_test_and_every_alert_one_in_which_it_is_raised() -> None:
    suites = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    asked = " ".join(one["expr"] for suite in suites for one in suite.get("promql_expr_test", ()))
    assert {one.record for one in RECORDINGS} == set(re.findall(r"inference:[a-z0-9_:]+", asked))
    alerts = [one for suite in suites for one in suite.get("alert_rule_test", ())]
    assert {one["alertname"] for one in alerts if one["exp_alerts"]} == {alert.name for alert in ALERTS}
    assert {one["alertname"] for one in alerts if not one["exp_alerts"]} >= {
        alert.name for alert in ALERTS if alert.name not in ("InferenceFailures",)
    }


def test_the_configuration_in_the_compose_file_is_valid(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    config = yaml.safe_load(compose["configs"]["prometheus"]["content"])
    assert [Path(name).name for name in config["rule_files"]] == [RULES.name]
    config["rule_files"] = [str(RULES)]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    checked = installed(lambda: promtool("check", "config", file))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_real_prometheus_answers_every_query_of_the_dashboard_with_what_the_fleet_says(rig: Rig) -> None:
    installed(lambda: promtool("--version"))
    app = rig.app()
    gate = rig.gate()
    fleet_command = ("maintenance", "-A", "tests.support.faulty_app:app", "--metrics-port", "0")
    worker_command = ("worker", "-A", "tests.support.faulty_app:app", "--gpu", "none", "--metrics-port", "0")
    with (
        command(rig, *fleet_command, name="maintenance") as maintenance,
        command(rig, *worker_command, name="worker") as worker,
    ):
        addresses = {"inference-workers": address(worker), "inference-maintenance": address(maintenance)}
        for url in addresses.values():
            linted = promtool("check", "metrics", text=Scrape(url).text)
            assert linted.returncode == 0, linted.stdout + linted.stderr
        targets = {job: url.removeprefix("http://") for job, url in addresses.items()}
        with PrometheusNode(targets, RULES) as prometheus:
            until(
                lambda: len(prometheus.query("inference_tasks_slot_seconds_total")) == 9,
                "the worker has been asked before it has done anything",
                60,
            )
            for number in range(30):
                task(app, f"step.{TIERS[number % 3]}").submit(number)
            until(lambda: len(rig.history.values("start", "number")) == 30, "thirty tasks have started")
            for number, tier in enumerate(TIERS * 2):
                task(app, f"gated.{tier}").submit(100 + number, str(gate))
            until(
                lambda: sum(prometheus.query("inference:queue_ready:messages").values()) == 5,
                "five tasks are seen to wait",
                60,
            )
            until(
                lambda: sum(prometheus.query("inference:tier_share:ratio_rate5m").values()) == pytest.approx(1.0),
                "the shares are recorded",
                60,
            )
            until(
                lambda: prometheus.query("sum(inference_tasks_ended_total)").get(()) == 30, "thirty ends are told", 60
            )
            with inference_of(app).depths() as depths:  # type: ignore[union-attr]
                seen = fleet.read(inference_of(app), depths)
            ready = prometheus.query("inference:queue_ready:messages")
            assert {dict(labels)["tier"]: n for labels, n in ready.items()} == {
                view.tier: view.ready for view in seen.tiers
            }
            promised = prometheus.query("max by (tier) (inference_tier_share_promised_ratio)")
            assert {dict(labels)["tier"]: n for labels, n in promised.items()} == {
                view.tier: pytest.approx(view.promised) for view in seen.tiers
            }
            empty = {
                target.expr
                for row in ROWS
                for panel in row.panels
                for target in panel.targets
                if not prometheus.query(target.expr)
            }
            # There is no GPU; nothing of these has happened, or not between two looks, or not in the last minute.
            assert {re.findall(r"inference[_:][\w:]+", expr)[0] for expr in empty} <= {
                "inference:tier_failed:ratio_rate5m",
                "inference_tasks_refused_total",
                "inference_queue_expected_wait_seconds",
                "inference_tier_wait_seconds",
                "inference_gpu_memory_used_bytes",
                "inference_gpu_utilization_ratio",
                "inference_tasks_buried_total",
                "inference_tasks_claims_total",
                "inference_tasks_crashes_total",
                "inference_tasks_dropped_total",
                "inference_tasks_ended_total",
                "inference_tasks_promoted_total",
                "inference_tasks_retries_total",
                "inference_tasks_run_seconds_bucket",
            }
            rules = prometheus.rules()
            assert len(rules) == len(RECORDINGS) + len(ALERTS)
            assert not [rule for rule in rules if rule["health"] not in ("ok", "unknown")]
            gate.open()
        assert get(f"{addresses['inference-workers']}/healthz")[0] == 200
