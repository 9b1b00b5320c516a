"""The catalogues of events and metrics, and that all that is made from them says what they say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from inference_tasks.cli import main
from inference_tasks.gateway import metrics as gateway
from inference_tasks.observe.dashboard import dashboard, dashboard_document
from inference_tasks.observe.events import EVENTS, emit, subscribe, unsubscribe
from inference_tasks.observe.exporter import catalogue
from inference_tasks.observe.exposition import Address, parse_address
from inference_tasks.observe.fleet import wait_quantile
from inference_tasks.observe.fleet_metrics import worker_label
from inference_tasks.observe.metrics import EVENT_METRICS, Recorder
from inference_tasks.observe.panels import ROWS
from inference_tasks.observe.rules import ALERTS, RECORDINGS

ROOT = Path(__file__).parents[3]
GENERATED = {
    "config/prometheus/rules.yml": "rules",
    "config/grafana/inference-tasks.json": "dashboard",
    "docs/metrics.md": "reference",
}
EXPRESSIONS = [target.expr for row in ROWS for panel in row.panels for target in panel.targets]
EXPRESSIONS += [one.expr for one in RECORDINGS] + [alert.expr for alert in ALERTS]


@pytest.mark.parametrize("path", GENERATED)
def test_what_is_generated_is_in_step(path: str) -> None:
    printed = CliRunner().invoke(main, ["metrics", GENERATED[path]]).stdout
    assert (ROOT / path).read_text(encoding="utf-8") == printed, f"inference-tasks metrics {GENERATED[path]} > {path}"


def test_every_event_metric_counts_what_its_event_tells() -> None:
    events = {event.name: event for event in EVENTS}
    assert len(events) == len(EVENTS)
    for metric in EVENT_METRICS:
        event = events[metric.event]
        assert {*metric.labels, *metric.only} <= set(event.labels), metric.name
        assert not metric.measurement or metric.measurement in event.measurements, metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
    assert {metric.event for metric in EVENT_METRICS} == set(events)


def test_names_follow_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in catalogue()]
    assert not [name for name, count in Counter(names).items() if count > 1]
    for metric in catalogue():
        assert re.fullmatch(r"inference_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not {"id", "task_id", "tenant", "node", "pid", "error"} & set(metric.labels), metric.name
        assert metric.help.endswith(".")


def used(expression: str) -> set[str]:
    found = re.findall(r"\binference_[a-z0-9_]+", expression)
    known = {metric.name for metric in catalogue()}
    return {name if name in known else re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


def test_every_query_of_rules_and_dashboard_asks_for_what_there_is() -> None:
    known = {metric.name for metric in catalogue()}
    metrics = gateway.Metrics(waiting=lambda: 0, is_subscribed=lambda: True, gaps=lambda: 0)
    known |= {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(metrics.text().decode())
    }
    recorded = {one.record for one in RECORDINGS}
    for expression in EXPRESSIONS:
        assert used(expression) <= known, expression
        assert set(re.findall(r"\binference:[a-z0-9_:]+", expression)) <= recorded, expression


def test_every_label_that_a_query_selects_by_exists() -> None:
    labels = {metric.name: {*metric.labels, "le"} for metric in catalogue()}
    for expression in EXPRESSIONS:
        for name, selector in re.findall(r"\b(inference_[a-z0-9_]+)\{([^}]*)\}", expression):
            known = labels.get(name) or labels[re.sub(r"_(bucket|sum|count)$", "", name)]
            assert set(re.findall(r"(\w+)(?==~|!=|!~|=)", selector)) <= known, expression


def test_every_metric_of_the_fleet_and_of_work_is_on_the_dashboard_or_in_a_rule() -> None:
    asked = set().union(*map(used, EXPRESSIONS))
    unseen = {metric.name for metric in catalogue()} - asked
    # For other questions than those of the dashboard.
    assert unseen == {
        "inference_client_refused_total",
        "inference_client_submitted_total",
        "inference_exporter_read_seconds",
        "inference_tasks_accounted",
        "inference_tasks_admitted",
        "inference_tasks_held_too_long_total",
        "inference_tasks_picks_total",
        "inference_tier_failed_ratio",
        "inference_tier_floor_ratio",
        "inference_tier_promoted_starts",
        "inference_tier_slots",
        "inference_tier_started_per_second",
        "inference_tier_weight",
        "inference_worker_info",
        "inference_worker_last_heartbeat_timestamp_seconds",
        "inference_worker_running",
    }


def test_the_dashboard_has_what_grafana_asks_of_one() -> None:
    board = json.loads(dashboard_document())
    assert board == dashboard()
    assert {"uid", "title", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])
        assert panel["fieldConfig"]["defaults"]["unit"]
    assert board["panels"][0]["title"] == "Are the service levels met?"


def lost(ours: object, theirs: object, path: str = "") -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(mine, other, f"{path}/{place}")
    elif ours != theirs:
        yield path


def test_grafanas_own_reader_of_dashboards_loses_nothing_of_it() -> None:
    board = Dashboard.from_json(dashboard())
    assert not list(lost(dashboard(), json.loads(JSONEncoder().encode(board))))
    assert len(board.panels or ()) == len(ROWS) + sum(len(row.panels) for row in ROWS)


def test_the_recorder_counts_what_it_is_told_in_the_text_format() -> None:
    recorder = Recorder()
    subscribe(recorder)
    try:
        for wait_s in (0.004, 0.15, None, 20_000.0):
            emit("task.started", task="t", tier="batch", tier_first="offline", lane="aged", wait_s=wait_s, held_s=0.0)
        emit("task.ended", task='a "b"\n\\', tier="batch", tier_first="offline", outcome="retried", slot_s=0.25)
        emit("task.promoted", tier_from="offline", tier_to="batch", count=7)
        emit("state.seen", reachable=True)
        emit("state.seen", reachable=False)
    finally:
        unsubscribe(recorder)
    emit("task.promoted", tier_from="offline", tier_to="batch", count=7)
    numbers: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in text_string_to_metric_families(generate_latest(recorder).decode()):
        for sample in family.samples:
            numbers[sample.name, tuple(sample.labels.values())] = sample.value
    assert numbers["inference_tasks_started_total", ("aged", "batch", "offline")] == 4
    assert numbers["inference_tasks_wait_seconds_count", ("offline",)] == 3
    assert numbers["inference_tasks_wait_seconds_sum", ("offline",)] == pytest.approx(20_000.154)
    assert numbers["inference_tasks_wait_seconds_bucket", ("0.1", "offline")] == 1
    assert numbers["inference_tasks_wait_seconds_bucket", ("0.2", "offline")] == 2
    assert numbers["inference_tasks_wait_seconds_bucket", ("14400", "offline")] == 2
    assert numbers["inference_tasks_wait_seconds_bucket", ("+Inf", "offline")] == 3
    assert numbers["inference_tasks_retries_total", ('a "b"\n\\', "batch")] == 1
    assert numbers["inference_tasks_promoted_total", ("offline", "batch")] == 7
    assert numbers["inference_worker_state_up", ()] == 0
    # There before the first time, or that time would not be seen as an increase.
    assert numbers["inference_tasks_floor_windows_total", ("violated", "offline")] == 0


def test_metrics_of_one_event_are_made_of_the_same_counts() -> None:
    recorder = Recorder()
    told = {"task": "t", "tier": "realtime", "tier_first": "batch"}
    for outcome, slot_s in (("success", 0.3), ("success", 0.003), ("retried", 1.5), ("crashed", 70.0)):
        recorder("task.ended", {**told, "outcome": outcome, "slot_s": slot_s})
    recorder("task.ended", {**told, "tier_first": "realtime", "outcome": "success", "slot_s": 0.1})
    recorder("unknown", {})
    numbers: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in recorder.collect():
        for sample in family.samples:
            numbers[sample.name, tuple(sample.labels.values())] = sample.value
    assert numbers["inference_tasks_run_seconds_count", ("t", "realtime")] == 5
    assert numbers["inference_tasks_run_seconds_sum", ("t", "realtime")] == pytest.approx(71.903)
    assert numbers["inference_tasks_run_seconds_bucket", ("t", "realtime", "0.5")] == 3
    assert numbers["inference_tasks_slot_seconds_total", ("realtime", "batch")] == pytest.approx(71.803)
    assert numbers["inference_tasks_slot_seconds_total", ("realtime", "realtime")] == pytest.approx(0.1)
    assert numbers["inference_tasks_slot_seconds_total", ("offline", "batch")] == 0
    assert numbers["inference_tasks_ended_total", ("t", "batch", "success")] == 2
    assert numbers["inference_tasks_ended_total", ("t", "realtime", "success")] == 1
    assert numbers["inference_tasks_retries_total", ("t", "realtime")] == 1
    assert numbers["inference_tasks_crashes_total", ("t", "realtime")] == 1


def test_a_receiver_that_fails_stops_nothing() -> None:
    heard: list[str] = []

    def broken(name: str, values: Mapping[str, object]) -> None:
        raise ValueError("no")

    def hear(name: str, values: Mapping[str, object]) -> None:
        heard.append(name)

    subscribe(broken)
    subscribe(hear)
    try:
        emit("state.seen", reachable=True)
    finally:
        unsubscribe(broken)
        unsubscribe(hear)
    assert heard == ["state.seen"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9101", Address("127.0.0.1", 9101)),
        ("0.0.0.0:9101", Address("0.0.0.0", 9101)),
        ("[::1]:0", Address("::1", 0)),
        (":9101", Address("127.0.0.1", 9101)),
    ],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "70000", "-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected PORT"):
        parse_address(text)


def test_each_further_worker_takes_the_next_port() -> None:
    assert [str(Address("0.0.0.0", 9101).after(place)) for place in range(3)] == [
        "0.0.0.0:9101",
        "0.0.0.0:9102",
        "0.0.0.0:9103",
    ]
    assert Address("127.0.0.1", 0).after(2).port == 0


def test_the_name_of_a_worker_is_the_same_after_a_new_start() -> None:
    assert worker_label("gpu0-1a2b3c@host") == worker_label("gpu0-ffffff@host") == "gpu0@host"
    assert worker_label("mine@host") == "mine@host"


def test_quantiles_are_read_from_buckets() -> None:
    assert wait_quantile({}, 0.5) is None
    # Ten waits between 0.1 and 0.2 s.
    assert wait_quantile({5: 10}, 0.5) == pytest.approx(0.15)
    assert wait_quantile({5: 10}, 0.99, longest_s=0.16) == 0.16
    # One of a hundred is longer than all buckets.
    assert wait_quantile({0: 99, 19: 1}, 0.99, longest_s=20_000.0) == pytest.approx(0.005)
    assert wait_quantile({0: 99, 19: 1}, 1.0, longest_s=20_000.0) == 20_000.0
