"""Settings come from four places, and all that is wrong with them is said at once."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_tasks.errors import SettingsError
from inference_tasks.settings import Settings, find_file, load_settings, masked


def test_without_any_source_the_defaults_hold() -> None:
    assert load_settings() == Settings()
    assert Settings().state.prefix == "inference:"


def test_an_argument_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "inference.toml"
    file.write_text("[worker]\nslots = 2\nreserve = 1\nhold_s = 0.5\n")
    settings = load_settings(
        {"worker.slots": 4}, {"INFERENCE_WORKER__SLOTS": "3", "INFERENCE_WORKER__RESERVE": "2"}, file
    )
    assert (settings.worker.slots, settings.worker.reserve, settings.worker.hold_s) == (4, 2, 0.5)
    assert settings.origin("worker.slots") == "argument"
    assert settings.origin("worker.reserve") == "INFERENCE_WORKER__RESERVE"
    assert settings.origin("worker.hold_s") == str(file)
    assert settings.origin("worker.pool") == "default"


def test_all_problems_are_reported_together_with_the_nearest_known_key() -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(
            {"worker": {"slotz": 2, "share": "tyme"}, "tiers.P0.bound": -1, "default_tier": "batsch"},
            {"INFERENCE_BROKER__HEARTBEAT_S": "often", "INFERENCE_NAMESPCE": "x"},
        )
    problems = caught.value.problems
    assert len(problems) == 6
    text = str(caught.value)
    for part in (
        "worker.slotz (argument): there is no such setting; did you mean worker.slots?",
        "worker.share (argument): expected one of 'time', 'count', found 'tyme'; did you mean 'time'?",
        "tiers.realtime.bound (argument): expected at least 1, found -1.",
        "did you mean 'batch'?",
        "broker.heartbeat_s (INFERENCE_BROKER__HEARTBEAT_S): expected seconds",
        "did you mean INFERENCE_NAMESPACE?",
    ):
        assert part in text


def test_variables_of_an_orchestrator_are_no_settings() -> None:
    load_settings(environ={"INFERENCE_PORT": "tcp://10.0.0.1:80", "INFERENCE_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("1500ms", 1.5), ("30", 30.0), ("2 min", 120.0), ("1h", 3600.0), (7, 7.0), ("2d", 172800.0)],
)
def test_durations_may_carry_a_unit(written: object, seconds: float) -> None:
    assert load_settings({"state.finished_ttl_s": written}).state.finished_ttl_s == seconds


@pytest.mark.parametrize("written", [True, "true", "TRUE"])
def test_what_is_true_or_false_may_be_written_as_text(written: object) -> None:
    assert load_settings({"flower.show_arguments": written}).flower.show_arguments is True
    with pytest.raises(SettingsError, match="expected true or false, found 'perhaps'"):
        load_settings({"flower.show_arguments": "perhaps"})


def test_sizes_may_carry_a_unit() -> None:
    assert load_settings({"broker.max_body_bytes": "2MiB"}).broker.max_body_bytes == 2 * 1024 * 1024


@pytest.mark.parametrize("written", ["all", "P0,P1,P2", ["offline", "batch", "realtime"]])
def test_tiers_of_a_worker_are_named_in_any_order_and_by_alias(written: object) -> None:
    assert load_settings({"worker.tiers": written}).worker.tiers == ("realtime", "batch", "offline")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"worker.slots": 2, "worker.reserve": 2}, "worker.reserve"),
        ({"worker.pool": "solo", "worker.slots": 2}, "exactly one slot"),
        ({"tiers.batch.overflow": "drop-head"}, "tiers.batch.overflow"),
        ({"tiers.realtime.ages_after_s": 5}, "tiers.realtime.ages_after_s"),
        ({"tiers.batch.floor": 0.6, "tiers.offline.floor": 0.6}, "floor"),
        ({"namespace": "a b"}, "namespace"),
        ({"broker.url": "localhost"}, "broker.url: expected a URL that starts with amqp://"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: dict[str, object], part: str) -> None:
    with pytest.raises(SettingsError, match=part):
        load_settings(overrides)


def test_the_file_is_the_named_one_else_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    assert find_file({}, tmp_path) is None
    (tmp_path / "config" / "inference.toml").touch()
    assert find_file({}, tmp_path) == tmp_path / "config" / "inference.toml"
    (tmp_path / "inference.toml").touch()
    assert find_file({}, tmp_path) == tmp_path / "inference.toml"
    assert find_file({"INFERENCE_CONFIG": "/there.toml"}, tmp_path) == Path("/there.toml")


def test_a_file_that_cannot_be_read_is_a_problem_among_the_others(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({"worker.slots": 0}, {}, tmp_path / "missing.toml")
    assert len(caught.value.problems) == 2
    broken = tmp_path / "broken.toml"
    broken.write_text("worker = [")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings({}, {}, broken)


def test_no_secret_is_shown() -> None:
    settings = load_settings(
        {
            "broker": {"url": "amqp://user:canary@host/v?password=canary;amqp://user:canary@other/v"},
            "state.url": "redis://:canary@host/0",
        }
    )
    assert "canary" not in repr(settings)
    assert "canary" not in repr(settings.as_rows())
    with pytest.raises(SettingsError) as caught:
        load_settings({"broker.url": "ampq://user:canary@host", "state.url": "user:canary@host"})
    assert "canary" not in str(caught.value)


def test_rows_hold_every_setting_once_with_its_origin() -> None:
    rows = {row.path: row for row in load_settings({"worker.slots": 2}).as_rows()}
    assert rows["worker.slots"].value == 2
    assert rows["worker.slots"].origin == "argument"
    assert rows["tiers.offline.floor"].origin == "default"


@given(st.text(alphabet="abc123:/@?=#[]%. ", max_size=40))
def test_masking_never_fails(url: str) -> None:
    assert isinstance(masked(url), str)


@given(st.text(alphabet="ab:/@?#[]% ", max_size=8), st.sampled_from(["amqp://u:", "redis://:", "amqp://u@x:"]))
def test_a_password_is_never_shown_whatever_is_in_it(rest: str, before: str) -> None:
    assert "canary" not in (masked(f"{before}{rest}canary{rest}@host/0") or "")


def test_masking_keeps_what_is_no_secret() -> None:
    assert masked("amqp://user:pw@host:5672/v") == "amqp://user:********@host:5672/v"
    assert masked("redis+socket:///run/redis.sock?virtual_host=0") == "redis+socket:///run/redis.sock?********"
    assert masked(None) is None


@given(
    st.dictionaries(
        st.sampled_from(["worker.slots", "state.lease_s", "worker.tiers", "broker.url", "x"]),
        st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.lists(st.text(max_size=3), max_size=2),
    )
)
def test_whatever_is_given_the_answer_is_settings_or_a_settings_error(overrides: dict[str, object]) -> None:
    with suppress(SettingsError):
        assert load_settings(overrides).worker.slots >= 1


def test_the_queue_type_can_differ_by_tier() -> None:
    settings = load_settings({"broker.queue_type": "classic", "tiers.offline.queue_type": "quorum"})
    topology = settings.topology()
    assert topology.queue("realtime").arguments["x-queue-type"] == "classic"
    assert topology.queue("offline").arguments["x-queue-type"] == "quorum"


def test_queues_carry_their_consumer_timeout_where_the_broker_knows_it() -> None:
    settings = load_settings({"worker.longest_run_s": 60})
    assert settings.topology((3, 12, 0)).queue("batch").arguments["x-consumer-timeout"] == 360_000
    assert "x-consumer-timeout" not in settings.topology((3, 10, 8)).queue("batch").arguments
    assert "x-consumer-timeout" not in settings.topology().queue("batch").arguments


@pytest.mark.parametrize(
    ("url", "management"),
    [
        ("amqp://u:p@h:5673/v", "http://u:p@h:15672"),
        ("amqps://u:p@h/v", "https://u:p@h:15671"),
        ("amqp://h", "http://guest:guest@h:15672"),
        ("redis://h", None),
    ],
)
def test_the_management_address_follows_the_brokers(url: str, management: str | None) -> None:
    assert load_settings({"broker.url": url}).management_url == management
