"""An app of ours, or an adopted one, keeps the user's Celery configuration and refuses what breaks a promise."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from inference_routing.tier import TIER_NAMES
from inference_tasks import DeploymentError, InferenceApp, SettingsError, UnknownOptionError, adopt
from inference_tasks.app import inference_of
from inference_tasks.celery_settings import AMQP_CLASS, CONSUMER_CLASS, RESULT_BACKEND

BROKER = "amqp://guest:canary@broker.example//"
STATE = "redis://:canary@state.example/3"


@pytest.fixture(autouse=True)
def _no_addresses_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "INFERENCE_CONFIG", "INFERENCE_BROKER__URL"):
        monkeypatch.delenv(variable, raising=False)


def an_app(**options: Any) -> InferenceApp:
    return InferenceApp("app-of-a-test", broker=BROKER, state=STATE, set_as_current=False, **options)


def a_celery_app(**conf: object) -> Celery:
    app = Celery("celery-app-of-a-test", set_as_current=False)
    app.conf.update({"broker_url": BROKER, **conf})
    return app


def test_celery_is_configured_for_the_tiers() -> None:
    conf = an_app(namespace="vision").conf
    assert conf.broker_url == BROKER
    assert conf.result_backend == f"{RESULT_BACKEND}+{STATE}"
    assert conf.result_backend_transport_options["global_keyprefix"] == "vision:"
    assert conf.worker_consumer == CONSUMER_CLASS
    assert conf.task_acks_late is True
    assert conf.task_reject_on_worker_lost is True
    assert conf.accept_content == ["json"]
    assert conf.control_queue_exclusive is False
    assert conf.control_queue_durable is True
    assert conf.event_queue_exclusive is False
    assert conf.event_queue_durable is True
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False
    assert conf.worker_enable_prefetch_count_reduction is False
    assert conf.broker_connection_retry_on_startup is True
    assert conf.broker_channel_error_retry is True
    assert conf.broker_heartbeat == 10
    assert conf.result_backend_always_retry is True
    assert conf.worker_proc_alive_timeout == 600
    assert conf.worker_send_task_events is True
    assert conf.task_send_sent_event is True
    # Whether Celery takes over the root logger is for the user to say.
    assert conf.worker_hijack_root_logger is True


def test_the_queues_are_those_of_the_topology_and_nobody_declares_them_by_the_way() -> None:
    app = an_app(namespace="vision", tiers={"realtime": {"bound": 7}})
    queues: list[Any] = app.conf.task_queues
    assert [queue.name for queue in queues] == [
        f"vision.{tier}{lane}" for tier in TIER_NAMES for lane in ("", ".returned", ".aged")
    ]
    assert all(queue.no_declare and queue.routing_key == queue.name for queue in queues)
    assert queues[0].queue_arguments["x-max-length"] == 7
    assert app.conf.task_default_queue == "vision.batch"


def test_nothing_is_read_before_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    app = InferenceApp("late", broker=BROKER, set_as_current=False)
    monkeypatch.setenv("INFERENCE_NAMESPACE", "later")
    assert app.settings.namespace == "later"


def test_settings_are_read_from_the_file_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[broker]\nurl = "amqp://from-the-file//"\n')
    monkeypatch.setenv("INFERENCE_CONFIG", str(file))
    app = InferenceApp("filed", set_as_current=False)
    assert app.settings.broker.url == "amqp://from-the-file//"
    assert app.settings.origin("broker.url") == str(file)


def test_what_the_user_chose_in_celery_stays() -> None:
    app = a_celery_app(broker_heartbeat=33, worker_send_task_events=False, worker_concurrency=5)
    adopt(app)
    assert app.conf.broker_heartbeat == 33
    assert app.conf.worker_send_task_events is False
    assert app.conf.worker_concurrency == 5


@pytest.mark.parametrize(
    ("conf", "part"),
    [
        ({"task_acks_late": False}, "task_acks_late is False; it must be True"),
        ({"accept_content": ["json", "pickle"]}, "accept_content"),
        ({"task_serializer": "pickle"}, "task_serializer"),
        ({"task_queues": [Queue("mine")]}, "task_queues is set"),
        ({"worker_consumer": "mine:Consumer"}, "worker_consumer"),
        ({"task_acks_on_failure_or_timeout": False}, "come back for ever"),
        ({"result_backend": "rpc://"}, "result_backend is rpc://"),
        ({"control_queue_exclusive": True}, "control_queue_exclusive"),
    ],
)
def test_what_would_break_a_promise_is_refused_by_name(conf: dict[str, object], part: str) -> None:
    app = a_celery_app(**conf)
    adopt(app)
    with pytest.raises(SettingsError, match=part):
        app.conf.get("broker_url")


def test_a_refused_configuration_stays_refused() -> None:
    app = a_celery_app(task_acks_late=False)
    inference = adopt(app)
    for _ in range(3):
        with pytest.raises(SettingsError):
            app.conf.get("task_serializer")
        with pytest.raises(SettingsError):
            _ = inference.settings
    app.conf = None
    app = a_celery_app()
    assert adopt(app).settings.broker.url == BROKER


def test_all_problems_of_both_configurations_come_together() -> None:
    app = a_celery_app(task_acks_late=False, task_serializer="pickle", result_backend="db+sqlite://")
    adopt(app)
    with pytest.raises(SettingsError) as caught:
        app.conf.get("broker_url")
    assert len(caught.value.problems) == 3


def test_adopting_twice_changes_nothing() -> None:
    app = a_celery_app()
    first = adopt(app, namespace="mine")
    assert adopt(app) is first
    assert inference_of(app) is first
    assert app.conf.task_default_queue == "mine.batch"


def test_an_app_that_is_in_use_already_is_adopted_at_once() -> None:
    app = a_celery_app()
    assert app.amqp.queues
    adopt(app)
    assert app.conf.task_default_queue == "inference.batch"
    assert f"{type(app.amqp).__module__}:{type(app.amqp).__name__}" == AMQP_CLASS
    assert "inference.offline" in app.amqp.queues

    unfit = a_celery_app(task_acks_late=False)
    assert unfit.conf.task_acks_late is False
    with pytest.raises(SettingsError):
        adopt(unfit)


def test_an_app_with_another_amqp_class_is_refused() -> None:
    with pytest.raises(SettingsError, match="AMQP class"):
        adopt(Celery("other", amqp="celery.app.amqp:AMQP2", set_as_current=False))


def test_celerys_own_result_backend_names_the_state_store() -> None:
    app = a_celery_app(result_backend=STATE)
    settings = adopt(app).settings
    assert settings.state.url == STATE
    assert settings.origin("state.url") == "Celery's result_backend"
    assert app.conf.result_backend == f"{RESULT_BACKEND}+{STATE}"


def test_the_result_backend_of_the_environment_does_not_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_RESULT_BACKEND", STATE)
    app = a_celery_app()
    inference = adopt(app)
    assert type(app.backend).__name__ == "RecordBackend"
    assert inference.settings.state.url == STATE


def test_two_different_brokers_are_refused_without_their_passwords() -> None:
    app = a_celery_app()
    adopt(app, broker={"url": "amqp://guest:canary@other.example//"})
    with pytest.raises(SettingsError, match="two different brokers") as caught:
        app.conf.get("broker_url")
    assert "canary" not in str(caught.value)


def test_without_a_broker_the_two_ways_on_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_tasks.addresses.is_installed", lambda: False)
    app = InferenceApp("brokerless", set_as_current=False)
    with pytest.raises(DeploymentError, match=r"INFERENCE_BROKER__URL.*inference-tasks\[embedded\]"):
        app.conf.get("broker_url")


def test_the_users_routes_come_before_the_tiers() -> None:
    app = a_celery_app(task_routes={"mail.*": {"queue": "mail"}})
    inference = adopt(app)
    assert inference.settings.namespace == "inference"
    assert app.amqp.router.route({}, "mail.send")["queue"].name == "mail"
    assert app.amqp.router.route({}, "other")["queue"].name == "inference.batch"
    assert app.amqp.router.route({"tier": "P2"}, "other")["queue"].name == "inference.offline"


def test_an_app_can_be_rebuilt_in_another_process() -> None:
    app = an_app(namespace="vision", tiers={"realtime": {"bound": 7}}, worker_max_tasks_per_child=3)
    assert app.settings.tiers.realtime.bound == 7
    copy = pickle.loads(pickle.dumps(app))
    assert isinstance(copy, InferenceApp)
    assert copy.settings == app.settings
    assert copy.conf.worker_max_tasks_per_child == 3

    adopted = a_celery_app()
    adopt(adopted, namespace="mine")
    assert inference_of(pickle.loads(pickle.dumps(adopted))).settings.namespace == "mine"


def test_an_unknown_option_of_the_app_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="'broker'"):
        InferenceApp("x", brokr=BROKER)
    with pytest.raises(UnknownOptionError, match="'task_always_eager'"):
        InferenceApp("x", task_alwais_eager=True)


def test_celerys_reports_show_no_password() -> None:
    app = an_app()
    assert app.settings.broker.url == BROKER
    assert "canary" not in app.bugreport()
    assert "canary" not in repr(app.settings)


def test_a_time_limit_beyond_what_the_queues_allow_is_refused() -> None:
    app = an_app(worker={"longest_run_s": 60})

    @app.inference(time_limit_s=61)
    def long() -> None: ...

    with pytest.raises(SettingsError, match="longest_run_s"):
        long.submit()
